"""Weights that are rounded as they are read, to integers of 8 or 4 bits: where nobody has made a packed folder.

Every 128 numbers of a row have a scale in bfloat16, and with 4 bits a zero point, too. Of 8 bits, the scale takes the
greatest of them to 127. Of 4, the range from the least to the greatest is tried whole and narrowed, as `WIDTHS` say,
and what has the least squared error is taken: cutting off an extreme costs less than a coarser step for all others.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn.functional import pad

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, group_of
from adapters.checkpoint.safetensors_folder import Fetch, StoredTensor, TensorEntry

GROUP = 128
WIDTHS = (1.0, 0.9, 0.8)
_PIECE = 1 << 18  # numbers rounded at once: some ten tensors of them stay in a cache
_LEAST = 1e-30  # in the place of a scale of zeros
LAYOUTS = {
    8: StepLayout("int8", GROUP, scale="bfloat16"),
    4: StepLayout("uint4", GROUP, scale="bfloat16", least="scale"),
}


@frozen
class RoundedTensor:
    """losses: by name, the sum of squares of what rounding changed, and of what was there. dtype: what is read."""

    entry: StoredTensor
    bits: int
    losses: dict[str, tuple[float, float]] = field(eq=False, repr=False)
    dtype: torch.dtype = torch.float32

    @property
    def files(self) -> Mapping[Path, int]:
        return self.entry.files

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def form(self) -> str:
        return f"int{self.bits} made at load, groups of {GROUP}"

    @property
    def nbytes(self) -> int:
        groups = self.shape[0] * -(-self.shape[1] // GROUP)
        return math.prod(self.shape) * self.bits // 8 + groups * 2 + (groups // 2 if self.bits == 4 else 0)

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """Which step is nearest may depend on who adds up."""
        return ()

    def read(self, name: str, fetch: Fetch | None = None) -> Tensor:  # noqa: ARG002
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for start, piece in self._pieces(name):
            tensor[start : start + piece.shape[0]].copy_(piece.unpacked(torch.float32)[:, : self.shape[1]])
        return tensor

    @property
    def layout(self) -> StepLayout | None:
        """As it can be multiplied with: groups, or the halves of them, that columns are whole ones of."""
        size = group_of(GROUP, self.shape[1])
        return evolve(LAYOUTS[self.bits], group=size) if size else None

    def packed(self, name: str, fetch: Fetch | None = None) -> PackedMatrix:  # noqa: ARG002
        """Of one that has a layout."""
        layout, columns = self.layout, self.shape[1]
        assert layout is not None
        each, parts = GROUP // layout.group, [piece for _, piece in self._pieces(name)]
        kinds = zip(*(part.tensors for part in parts), strict=True)
        tensors = [None if own[0] is None else torch.cat(own) for own in kinds]
        steps, *levels = tensors
        assert steps is not None
        finer = [
            None if one is None else one.repeat_interleave(each, 1)[:, : columns // layout.group] for one in levels
        ]
        return PackedMatrix(layout, steps[:, :columns].contiguous(), *finer)  # type: ignore[arg-type]

    def _pieces(self, name: str) -> Iterator[tuple[int, PackedMatrix]]:
        """Some rows after the other, with zeros behind them up to a whole group. What it costs is taken down."""
        weight, step = self.entry.read(name), max(1, _PIECE // self.shape[1])
        changed = there = 0.0
        for start in range(0, self.shape[0], step):
            piece = weight[start : start + step].float()
            found = nearest(piece, self.bits)
            changed += float((found.unpacked(torch.float32)[:, : self.shape[1]] - piece).square_().sum())
            there += float(piece.square().sum())
            yield start, found
        self.losses[name] = changed, there

    def rounded(self, dtype: torch.dtype) -> RoundedTensor:
        return evolve(self, dtype=dtype)


def rounded_all(tensors: Mapping[str, StoredTensor], bits: int, chosen: Container[str]) -> dict[str, StoredTensor]:
    """chosen: matrices that are to be rounded."""
    losses = dict[str, tuple[float, float]]()
    return {name: RoundedTensor(entry, bits, losses) if name in chosen else entry for name, entry in tensors.items()}


def error_of(tensors: Mapping[str, StoredTensor]) -> float | None:
    """Of all that have been read: the root of the mean square of what changed, relative to that of the weights."""
    losses = next((entry.losses for entry in tensors.values() if isinstance(entry, RoundedTensor)), {})
    there = sum(there for _, there in losses.values())
    return math.sqrt(sum(changed for changed, _ in losses.values()) / there) if there else None


def nearest(rows: Tensor, bits: int) -> PackedMatrix:
    """What the numbers of float32 rows become, in whole groups: zeros, a step in every range, fill the last."""
    padded = pad(rows, (0, -rows.shape[1] % GROUP))
    groups = padded.view(-1, GROUP)
    steps, scale, zero = symmetric(groups) if bits == 8 else affine(groups)
    levels = (scale.bfloat16(), None, zero)
    return PackedMatrix(LAYOUTS[bits], *(None if one is None else one.view(len(rows), -1) for one in (steps, *levels)))  # type: ignore[arg-type]


def symmetric(groups: Tensor) -> tuple[Tensor, Tensor, None]:
    scale = as_stored(groups.abs().amax(1, keepdim=True) / 127)
    return (groups / scale).round_().clamp_(-127, 127).to(torch.int8), scale, None


def affine(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(1, keepdim=True).clamp_(max=0), groups.amax(1, keepdim=True).clamp_(min=0)
    best = [torch.empty_like(groups), torch.empty_like(low), torch.empty_like(low)]
    least = torch.full_like(low, torch.inf)
    for width in WIDTHS:
        scale = as_stored((high - low) * (width / 15))
        zero = (low * -width / scale).round_().clamp_(0, 15)
        steps = (groups / scale).add_(zero).round_().clamp_(0, 15)
        error = ((steps - zero).mul_(scale) - groups).square_().sum(1, keepdim=True)
        better = error < least
        best = [torch.where(better, one, before) for one, before in zip((steps, scale, zero), best, strict=True)]
        least = torch.where(better, error, least)
    return best[0].to(torch.uint8), best[1], best[2].to(torch.int8)


def as_stored(scale: Tensor) -> Tensor:
    """Steps are counted in the scale as it is stored, so rounding it is part of what is measured."""
    return scale.clamp_(min=_LEAST).bfloat16().float()
