"""A tensor of a GGUF file, as it was published: unpacked, and what was done to it for llama.cpp undone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.gguf.header import Stored
from adapters.checkpoint.gguf.unpack import FLOATS, LAYOUTS, UNPACK
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, checked, piece_of, rearranged
from adapters.checkpoint.safetensors_folder import Fetch, TensorEntry


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

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """Numbers that are changed are changed on the host: not every device takes a logarithm alike."""
        return (self._source,) if self.undo is None or self.layout is not None else ()

    @property
    def _source(self) -> TensorEntry:
        """The bytes, or what they are where they are not packed."""
        own = self.stored
        dtype = FLOATS.get(own.packing.name)
        shape = (own.stop - own.start,) if dtype is None else own.shape
        return TensorEntry(own.file, dtype or torch.uint8, shape, own.start, own.stop, own.header)

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        """The tensor; it is called `name` if that fails."""
        stored = fetch(self._source, name)
        tensor = stored.to(self.dtype) if self.stored.packing.name in FLOATS else self._unpacked(stored)
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

    def packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:
        """Of a tensor that has a layout: nothing of it is unpacked."""
        rows, columns = self.shape
        each = columns // self.stored.packing.count
        found = self._blocks(fetch(self._source, name))
        matrix = checked(found.mapped(lambda one: one.reshape(rows, each * one.shape[1])), self.file, name)
        return matrix if self.undo is None else rearranged(matrix, self.undo)

    def rounded(self, dtype: torch.dtype) -> GgufTensor:
        """Packed weights become `dtype` piece by piece, so that nobody needs the room of all of them in float32."""
        return self if self.stored.packing.name in FLOATS else evolve(self, dtype=dtype)

    def _pieces(self, data: Tensor) -> Iterator[tuple[int, PackedMatrix]]:
        """From which block on, and what some blocks are: in between they take a multiple of their room."""
        packing = self.stored.packing
        blocks, step = data.view(-1, packing.size), max(1, piece_of(data.device) // packing.count)
        for at in range(0, len(blocks), step):
            yield at, UNPACK[packing.name](blocks[at : at + step])

    def _blocks(self, data: Tensor) -> PackedMatrix:
        """A row of each block."""
        count, pieces = len(data) // self.stored.packing.size, self._pieces(data)
        _, first = next(pieces)
        if len(first.steps) == count:
            return first
        whole = first.mapped(lambda one: one.new_empty(count, one.shape[1]))
        for at, piece in chain([(0, first)], pieces):
            for target, source in zip(whole.tensors, piece.tensors, strict=True):
                if target is not None and source is not None:
                    target[at : at + len(source)] = source
        return whole

    def _unpacked(self, data: Tensor) -> Tensor:
        tensor = torch.empty(self.stored.shape, dtype=self.dtype, device=data.device)
        blocks = tensor.view(-1, self.stored.packing.count)
        for at, piece in self._pieces(data):
            blocks[at : at + len(piece.steps)] = piece.unpacked(torch.float32)
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

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        each = [part.sources for part in self.parts]
        return tuple(chain.from_iterable(each)) if all(each) else ()

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        joined = self.join([part.read(name, fetch).to(self.dtype) for part in self.parts]).contiguous()
        assert joined.shape == self.shape, (name, joined.shape, self.shape)
        return joined

    @property
    def layout(self) -> None:
        """Rows of one are between those of another."""
        return None

    def packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:  # noqa: ARG002
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
