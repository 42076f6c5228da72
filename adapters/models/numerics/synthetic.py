"""Random weights of any geometry, made on the device one tensor at a time: for benchmarks and tests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import TABLES, PackedMatrix, StepLayout
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.family import ModelConfig
from adapters.models.drafts.dflash.checkpoint import list_draft_tensors
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.kernels.functions.seeded import make_generator


@frozen
class RandomWeights:
    """Normal weights of standard deviation `scale`, norms near one. A tensor depends on the seed and its name only.

    layouts: of those that are packed.
    """

    config: ModelConfig
    seed: int = 0
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    scale: float = 0.02
    layouts: Mapping[str, StepLayout] = {}
    _shapes: Shapes = field(init=False, repr=False)  # of experts there are tens of thousands

    @_shapes.default
    def _of_config(self) -> Shapes:
        return self.config.tensors()

    def read(self, name: str) -> Tensor:
        return _normal(self._shapes[name], f"{self.seed}:{name}", self.device, self.dtype, self.scale)

    def find_layout(self, name: str) -> StepLayout | None:
        return self.layouts.get(name)

    def read_packed(self, name: str) -> PackedMatrix:
        return random_matrix(self._shapes[name], self.layouts[name], f"{self.seed}:{name}", self.device, self.scale)


def packed_in(
    probed: Iterable[tuple[ModelConfig, range]], layouts: Mapping[str, StepLayout]
) -> Iterator[tuple[ModelConfig, range, Mapping[str, StepLayout]]]:
    """Yield each probed layer in every way that its tensors may be packed."""
    for config, layers in probed:
        for own in laid_out(config.tensors(layers), layouts):
            yield config, layers, own


def laid_out(names: Iterable[str], layouts: Mapping[str, StepLayout]) -> list[Mapping[str, StepLayout]]:
    """Return layouts for the tensors of one layer, so that each layout of the model's layers occurs at least once.

    names: of the layer's tensors. layouts: of all tensors of the model.
    """
    ways = dict[str, dict[StepLayout, None]]()
    for name, layout in layouts.items():
        ways.setdefault(_within(name), {})[layout] = None
    own = {name: list(ways[_within(name)]) for name in names if _within(name) in ways}
    count = max(map(len, own.values()), default=1)
    return [{name: kinds[turn % len(kinds)] for name, kinds in own.items()} for turn in range(count)]


def _within(name: str) -> str:
    """Return a tensor's name within its layer."""
    return re.sub(r"^model\.layers\.\d+\.", "", name)


@frozen
class RandomDraft:
    """Random weights for a DFlash draft."""

    config: DFlashConfig
    seed: int = 0
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    scale: float = 0.02

    def has_tensor(self, name: str) -> bool:
        return name in list_draft_tensors(self.config)

    def read(self, name: str) -> Tensor:
        shape = list_draft_tensors(self.config)[name]
        return _normal(shape, f"{self.seed}:{name}", self.device, self.dtype, self.scale)

    def digest(self) -> str:
        return f"random {self.seed} {self.scale}"


def random_matrix(
    shape: tuple[int, ...], layout: StepLayout, name: str, device: torch.device | None = None, scale: float = 0.02
) -> PackedMatrix:
    """Return a packed matrix of random values with a standard deviation of about `scale`.

    The steps have the range of real files of that layout, for instance five bits for Q5_K.
    """
    generator = _generator(name, device)
    (rows, columns) = shape
    groups = columns // layout.group
    spans = columns // layout.span

    def draw_integers(low: int, high: int, width: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, (rows, width), generator=generator, device=device, dtype=dtype)

    def draw_scales(middle: float) -> Tensor:
        found = torch.rand(rows, spans, generator=generator, device=device)
        if layout.rounds_rows:  # whole blocks share a scale
            found = found[torch.arange(rows, device=device) // layout.group * layout.group]
        drawn = (found + 0.5) * middle
        if layout.steps == "e2m1":
            drawn = torch.exp2(drawn.log2().round())  # MXFP4's scales are powers of two
        return drawn.to(getattr(torch, layout.scale))

    step = scale / (24 if layout.inner else 1)
    least = draw_integers(6, 10, groups) if layout.least else None
    if layout.steps == "e4m3":
        drawn = torch.empty(rows, columns, device=device).normal_(generator=generator)
        return PackedMatrix(layout, drawn.to(torch.float8_e4m3fn).view(torch.uint8), draw_scales(step))
    if layout.steps in TABLES:
        steps = draw_integers(0, 16, columns, torch.uint8)
        step = step / {"iq4": 70, "e2m1": 5.9}.get(layout.steps, 4.6)
    elif layout.least == "own":
        steps = draw_integers(0, 32, columns)
        step = step / 9
    else:
        steps = draw_integers(-128, 128, columns)
        step = step / 74
    inner = draw_integers(1, 48, groups) if layout.inner else None
    middle = scale / 4.6 if layout.least == "own" else None
    return PackedMatrix(layout, steps, draw_scales(step), inner, least, None if middle is None else draw_scales(middle))


def _generator(name: str, device: torch.device | None) -> torch.Generator:
    key = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return make_generator(int.from_bytes(key, "little"), device or "cpu")


def _normal(shape: tuple[int, ...], name: str, device: torch.device, dtype: torch.dtype, scale: float) -> Tensor:
    generator = _generator(name, device)
    tensor = torch.empty(shape, device=device, dtype=dtype)
    if name.endswith("A_log"):  # of recurrent heads: some forget within a few rows, some remember for thousands
        return tensor.normal_(-4.0, 2.0, generator=generator)
    tensor.normal_(0.0, scale, generator=generator)
    return tensor.add_(1.0) if len(shape) == 1 else tensor
