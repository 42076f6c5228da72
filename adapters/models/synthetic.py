"""Random weights of any Qwen3 geometry, made on the device one tensor at a time: for benchmarks and tests."""

from __future__ import annotations

import hashlib

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.models.checkpoint import expected_tensors
from adapters.models.config import Qwen3Config


@frozen
class RandomWeights:
    """Normal weights of standard deviation `scale`, norms near one. A tensor depends on the seed and its name only."""

    config: Qwen3Config
    seed: int = 0
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    scale: float = 0.02

    def read(self, name: str) -> Tensor:
        shape = expected_tensors(self.config)[name]
        key = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(key, "little"))
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        tensor.normal_(0.0, self.scale, generator=generator)
        return tensor.add_(1.0) if len(shape) == 1 else tensor
