"""Rounds weights to integers of 8 or 4 bits as they are read, for models without a published packed folder.

Each group of 128 numbers in a row has a scale in bfloat16. With 4 bits it has a zero point, too. With 8 bits, the scale
maps the greatest absolute value to 127. With 4 bits, the range from the least to the greatest number is tried whole and
narrowed (`WIDTHS`), and the one with the least squared error is taken. Cutting off an extreme value may cost less than
coarser steps for all others.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn.functional import pad

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, find_group_size
from adapters.checkpoint.safetensors_folder import Fetch, StoredTensor, TensorEntry

GROUP = 128
WIDTHS = (1.0, 0.9, 0.8)
_PIECE = 1 << 18  # numbers that are rounded at once: some ten tensors of this size stay in a cache
_LEAST = 1e-30  # the scale of a group of zeros
LAYOUTS = {
    8: StepLayout("int8", GROUP, scale="bfloat16"),
    4: StepLayout("uint4", GROUP, scale="bfloat16", least="scale"),
}


@frozen
class RoundedTensor:
    """A tensor that is rounded when it is read.

    losses: the rounding error of each tensor, by its name: the sum of the squared errors, and the sum of the squared
    weights. All rounded tensors of a checkpoint share this dict. Reading a tensor writes its entry, although the object
    itself is frozen.
    dtype: that of the tensor that `read` returns.
    """

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
    def packing_name(self) -> str:
        return f"int{self.bits} made at load, groups of {GROUP}"

    @property
    def nbytes(self) -> int:
        """The bytes that a packed file would need: steps, scales of 2 bytes, and zero points of half a byte.

        Zero points are between 0 and 15. In memory each of them takes a byte (`read_packed`).
        """
        groups = self.shape[0] * -(-self.shape[1] // GROUP)
        return math.prod(self.shape) * self.bits // 8 + groups * 2 + (groups // 2 if self.bits == 4 else 0)

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """Empty: rounding is done on the host, since devices differ in the order of sums."""
        return ()

    def read(self, name: str, fetch: Fetch | None = None) -> Tensor:  # noqa: ARG002
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for start, piece in self._round_pieces(name):
            tensor[start : start + piece.shape[0]].copy_(piece.unpack(torch.float32)[:, : self.shape[1]])
        return tensor

    @property
    def layout(self) -> StepLayout | None:
        """The layout of `read_packed`. None: the columns are not whole groups of any size in `GROUPS`.

        Rounding always uses groups of GROUP columns and fills the last one with zeros. A packed matrix has no such
        zeros. So where the columns are not whole groups, the layout has smaller groups, and several of them repeat one
        scale. That way `read` and `read_packed` give the same weights.
        """
        size = find_group_size(GROUP, self.shape[1])
        return evolve(LAYOUTS[self.bits], group=size) if size else None

    def read_packed(self, name: str, fetch: Fetch | None = None) -> PackedMatrix:  # noqa: ARG002
        """Return the packed tensor. It must have a layout."""
        layout = self.layout
        columns = self.shape[1]
        assert layout is not None
        repeats = GROUP // layout.group  # groups of the layout in one group of the rounding
        pieces = [piece for _, piece in self._round_pieces(name)]
        # For each field of PackedMatrix (the steps, the scale, ...), the tensors of all pieces, one below the other.
        fields = zip(*(piece.tensors for piece in pieces), strict=True)
        steps, *group_levels = [None if parts[0] is None else torch.cat(parts) for parts in fields]
        assert steps is not None
        repeated = [
            None if level is None else level.repeat_interleave(repeats, 1)[:, : columns // layout.group]
            for level in group_levels
        ]
        return PackedMatrix(layout, steps[:, :columns].contiguous(), *repeated)  # type: ignore[arg-type]

    def _round_pieces(self, name: str) -> Iterator[tuple[int, PackedMatrix]]:
        """Yield rounded rows with the number of the first one. Rows end with zeros up to a whole group.

        After the last rows, the rounding error of the whole tensor is written to `losses`.
        """
        weight = self.entry.read(name)
        step = max(1, _PIECE // self.shape[1])
        squared_errors = squared_weights = 0.0
        for start in range(0, self.shape[0], step):
            piece = weight[start : start + step].float()
            rounded = round_rows(piece, self.bits)
            squared_errors += float((rounded.unpack(torch.float32)[:, : self.shape[1]] - piece).square_().sum())
            squared_weights += float(piece.square().sum())
            yield start, rounded
        self.losses[name] = squared_errors, squared_weights

    def with_dtype(self, dtype: torch.dtype) -> RoundedTensor:
        return evolve(self, dtype=dtype)


def round_matrices(tensors: Mapping[str, StoredTensor], bits: int, chosen: Container[str]) -> dict[str, StoredTensor]:
    """Return the tensors with the chosen matrices rounded."""
    losses = dict[str, tuple[float, float]]()
    return {name: RoundedTensor(entry, bits, losses) if name in chosen else entry for name, entry in tensors.items()}


def measure_error(tensors: Mapping[str, StoredTensor]) -> float | None:
    """Return the relative error of all rounded tensors that were read: RMS of the errors by RMS of the weights."""
    losses = next((entry.losses for entry in tensors.values() if isinstance(entry, RoundedTensor)), {})
    squared_errors = sum(errors for errors, _ in losses.values())
    squared_weights = sum(weights for _, weights in losses.values())
    return math.sqrt(squared_errors / squared_weights) if squared_weights else None


def round_rows(rows: Tensor, bits: int) -> PackedMatrix:
    """Round float32 rows. The last group is filled with zeros, which every range can represent."""
    padded = pad(rows, (0, -rows.shape[1] % GROUP))
    groups = padded.view(-1, GROUP)
    steps, scale, zero = round_symmetric(groups) if bits == 8 else round_affine(groups)
    levels = (scale.bfloat16(), None, zero)
    tensors = [None if tensor is None else tensor.view(len(rows), -1) for tensor in (steps, *levels)]
    return PackedMatrix(LAYOUTS[bits], *tensors)  # type: ignore[arg-type]


def round_symmetric(groups: Tensor) -> tuple[Tensor, Tensor, None]:
    scale = to_stored_scale(groups.abs().amax(1, keepdim=True) / 127)
    return (groups / scale).round_().clamp_(-127, 127).to(torch.int8), scale, None


def round_affine(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups to 4 bits. Return steps, scale and zero point of the range with the least squared error."""
    low = groups.amin(1, keepdim=True).clamp_(max=0)
    high = groups.amax(1, keepdim=True).clamp_(min=0)
    best = [torch.empty_like(groups), torch.empty_like(low), torch.empty_like(low)]
    least = torch.full_like(low, torch.inf)
    for width in WIDTHS:
        scale = to_stored_scale((high - low) * (width / 15))
        zero = (low * -width / scale).round_().clamp_(0, 15)
        steps = (groups / scale).add_(zero).round_().clamp_(0, 15)
        error = ((steps - zero).mul_(scale) - groups).square_().sum(1, keepdim=True)
        better = error < least
        best = [torch.where(better, tried, before) for tried, before in zip((steps, scale, zero), best, strict=True)]
        least = torch.where(better, error, least)
    return best[0].to(torch.uint8), best[1], best[2].to(torch.int8)


def to_stored_scale(scale: Tensor) -> Tensor:
    """Return the scale rounded as it is stored. Steps are computed with it, so the error includes its rounding."""
    return scale.clamp_(min=_LEAST).bfloat16().float()
