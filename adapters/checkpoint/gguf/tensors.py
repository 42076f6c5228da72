"""A tensor of a GGUF file, as it was published: unpacked, and what was done to it for llama.cpp undone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.gguf.header import Stored
from adapters.checkpoint.gguf.unpack import FLOATS, LAYOUTS, UNPACK
from adapters.checkpoint.packed import PackedMatrix, StepLayout, checked, rearranged
from adapters.checkpoint.weights import check_finite, read_bytes

_PIECE = 1 << 18  # numbers unpacked at once: what is in between stays in a core's cache, twice as quick as of 1 << 21


@frozen
class OfColumns:
    """What brings columns back to their places: `unit` of them stay together. Any other function moves rows."""

    change: Callable[[Tensor], Tensor]
    unit: int

    def __call__(self, weight: Tensor) -> Tensor:
        return self.change(weight)


@frozen
class GgufTensor:
    """dtype: what is read. shape: of what is read. undo: from what is stored; None: that is it."""

    stored: Stored
    dtype: torch.dtype
    shape: tuple[int, ...]
    undo: Callable[[Tensor], Tensor] | None = None

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def files(self) -> Mapping[Path, int]:
        return {self.stored.file: self.stored.header}

    @property
    def form(self) -> str:
        return "" if self.stored.packing.name in FLOATS else self.stored.packing.name

    @property
    def nbytes(self) -> int:
        return self.stored.stop - self.stored.start

    def read(self, name: str) -> Tensor:
        """The tensor on the host; it is called `name` if that fails."""
        tensor = self._whole(name) if self.stored.packing.name in FLOATS else self._unpacked(name)
        check_finite(tensor, self.file, name)
        if self.undo is None:
            return tensor
        undone = self.undo(tensor).contiguous()
        assert undone.shape == self.shape, (name, undone.shape, self.shape)
        check_finite(undone, self.file, name)
        return undone

    @property
    def layout(self) -> StepLayout | None:
        """As it can be multiplied with: a matrix of whole groups, whatever is undone moving them whole."""
        layout = LAYOUTS.get(self.stored.packing.name)
        if layout is None or len(self.shape) != 2 or self.stored.shape != self.shape or not layout.fits(self.shape[1]):
            return None
        cut = isinstance(self.undo, OfColumns) and self.undo.unit % layout.span
        return None if cut else layout

    def packed(self, name: str) -> PackedMatrix:
        """Of a tensor that has a layout: nothing of it is unpacked."""
        packing, (rows, columns) = self.stored.packing, self.shape
        data = read_bytes(self.file, self.stored.start, self.stored.stop, name)
        found = UNPACK[packing.name](torch.frombuffer(data, dtype=torch.uint8).view(-1, packing.size))
        each = columns // packing.count
        matrix = checked(found.mapped(lambda one: one.reshape(rows, each * one.shape[1])), self.file, name)
        return matrix if self.undo is None else rearranged(matrix, self.undo)

    def rounded(self, dtype: torch.dtype) -> GgufTensor:
        """Packed weights become `dtype` piece by piece, so that nobody needs the room of all of them in float32."""
        return self if self.stored.packing.name in FLOATS else evolve(self, dtype=dtype)

    def _whole(self, name: str) -> Tensor:
        data = read_bytes(self.file, self.stored.start, self.stored.stop, name)
        return torch.frombuffer(data, dtype=FLOATS[self.stored.packing.name]).view(self.stored.shape).to(self.dtype)

    def _unpacked(self, name: str) -> Tensor:
        packing, unpack = self.stored.packing, UNPACK[self.stored.packing.name]
        tensor = torch.empty(self.stored.shape, dtype=self.dtype)
        blocks = tensor.view(-1, packing.count)
        step = max(1, _PIECE // packing.count)
        for at in range(0, len(blocks), step):
            piece = blocks[at : at + step]
            start = self.stored.start + at * packing.size
            data = read_bytes(self.file, start, start + len(piece) * packing.size, name)
            found = unpack(torch.frombuffer(data, dtype=torch.uint8).view(len(piece), packing.size))
            piece.copy_(found.unpacked(torch.float32))
        return tensor


@frozen
class JoinedTensor:
    """A published tensor that the file has in several. join: those, read, as the one that they were."""

    parts: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    join: Callable[[Sequence[Tensor]], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        kinds = {part.dtype for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    @property
    def files(self) -> Mapping[Path, int]:
        return {file: header for part in self.parts for file, header in part.files.items()}

    @property
    def form(self) -> str:
        return " and ".join(dict.fromkeys(part.form for part in self.parts if part.form))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def read(self, name: str) -> Tensor:
        joined = self.join([part.read(name).to(self.dtype) for part in self.parts]).contiguous()
        assert joined.shape == self.shape, (name, joined.shape, self.shape)
        return joined

    @property
    def layout(self) -> None:
        """Rows of one are between those of another."""
        return None

    def packed(self, name: str) -> PackedMatrix:
        raise AssertionError(f"{name} cannot be multiplied with as it is packed")

    def rounded(self, dtype: torch.dtype) -> JoinedTensor:
        return evolve(self, parts=tuple(part.rounded(dtype) for part in self.parts))


def entry(
    stored: Stored, undo: Callable[[Tensor], Tensor] | None = None, shape: tuple[int, ...] | None = None
) -> GgufTensor:
    """shape: of what `undo` gives, where that is another one. Whatever is undone is undone in float32."""
    dtype = FLOATS.get(stored.packing.name, torch.float32)
    shape = stored.shape if shape is None else shape
    assert math.prod(shape) == math.prod(stored.shape)
    return GgufTensor(stored, dtype if undo is None else torch.float32, shape, undo)
