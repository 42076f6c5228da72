"""Random weights of any geometry, made on the device one tensor at a time: for benchmarks and tests."""

from __future__ import annotations

import hashlib

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.checkpoint.weights import Shapes
from adapters.models.dflash.checkpoint import draft_tensors
from adapters.models.dflash.config import DFlashConfig
from adapters.models.family import ModelConfig


@frozen
class RandomWeights:
    """Normal weights of standard deviation `scale`, norms near one. A tensor depends on the seed and its name only."""

    config: ModelConfig
    seed: int = 0
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    scale: float = 0.02
    _shapes: Shapes = field(init=False, repr=False)  # of experts there are tens of thousands

    @_shapes.default
    def _of_config(self) -> Shapes:
        return self.config.tensors()

    def read(self, name: str) -> Tensor:
        return _normal(self._shapes[name], f"{self.seed}:{name}", self.device, self.dtype, self.scale)


@frozen
class RandomDraft:
    """The same for a DFlash draft."""

    config: DFlashConfig
    seed: int = 0
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    scale: float = 0.02

    def has(self, name: str) -> bool:
        return name in draft_tensors(self.config)

    def read(self, name: str) -> Tensor:
        shape = draft_tensors(self.config)[name]
        return _normal(shape, f"{self.seed}:{name}", self.device, self.dtype, self.scale)

    def digest(self) -> str:
        return f"random {self.seed} {self.scale}"


def _normal(shape: tuple[int, ...], name: str, device: torch.device, dtype: torch.dtype, scale: float) -> Tensor:
    key = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little"))
    tensor = torch.empty(shape, device=device, dtype=dtype)
    if name.endswith("A_log"):  # of recurrent heads: some forget within a few rows, some remember for thousands
        return tensor.normal_(-4.0, 2.0, generator=generator)
    tensor.normal_(0.0, scale, generator=generator)
    return tensor.add_(1.0) if len(shape) == 1 else tensor
