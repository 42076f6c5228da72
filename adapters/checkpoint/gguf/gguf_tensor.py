"""Tensors of a GGUF file in their published form: unpacked, and without the changes of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.finite_check import check_finite
from adapters.checkpoint.gguf.few_bit_types import HOST_TYPES, unpack_few_bits
from adapters.checkpoint.gguf.header import GgufTensorInfo
from adapters.checkpoint.gguf.unpack_blocks import LAYOUTS, NUMBERS, UNPACK
from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout, check_levels, choose_piece_size, rearrange
from adapters.checkpoint.safetensors_folder import Fetch, TensorEntry


@frozen
class ColumnOrder:
    """Puts columns back in their published order. `unit` columns stay together.

    Any other function that undoes a change moves rows.
    """

    change: Callable[[Tensor], Tensor]
    unit: int

    def __call__(self, weight: Tensor) -> Tensor:
        return self.change(weight)


@frozen
class GgufTensor:
    """A published tensor that is one tensor of the file.

    dtype, shape: those of the tensor that `read` returns.
    undo: undoes the change of the converter. None: the tensor was not changed.
    """

    stored: GgufTensorInfo
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
    def packing_name(self) -> str:
        return "" if self.stored.packing.name in NUMBERS else self.stored.packing.name

    @property
    def nbytes(self) -> int:
        return self.stored.stop - self.stored.start

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """The stored bytes. Empty if the host must read them.

        That is so if numbers must be changed, as devices differ in logarithms, and if the library unpacks them.
        """
        on_host = self.stored.packing.name in HOST_TYPES or (self.undo is not None and self.layout is None)
        return () if on_host else (self._source,)

    @property
    def _source(self) -> TensorEntry:
        """The stored tensor: bytes if it is packed, or else its numbers."""
        own = self.stored
        dtype = NUMBERS.get(own.packing.name)
        shape = (own.stop - own.start,) if dtype is None else own.shape
        return TensorEntry(own.file, dtype or torch.uint8, shape, own.start, own.stop, own.header)

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        """Return the tensor. name: for error messages."""
        stored = fetch(self._source, name)
        tensor = stored.to(self.dtype) if self.stored.packing.name in NUMBERS else self._unpack(stored)
        check_finite(tensor, self.file, name)
        if self.undo is None:
            return tensor
        undone = self.undo(tensor).contiguous()
        assert undone.shape == self.shape, (name, undone.shape, self.shape)
        check_finite(undone, self.file, name)
        return undone

    @property
    def layout(self) -> StepLayout | None:
        """The packed layout, if the tensor is a matrix of whole groups, and `undo` moves only whole groups."""
        layout = LAYOUTS.get(self.stored.packing.name)
        if layout is None or len(self.shape) != 2 or self.stored.shape != self.shape or not layout.fits(self.shape[1]):
            return None
        cut = isinstance(self.undo, ColumnOrder) and self.undo.unit % layout.span
        return None if cut else layout

    def read_packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:
        """Return a tensor that has a layout, packed. Nothing is unpacked."""
        rows, columns = self.shape
        block_count = columns // self.stored.packing.count
        found = self._join_blocks(fetch(self._source, name))
        matrix = check_levels(
            found.map_tensors(lambda tensor: tensor.reshape(rows, block_count * tensor.shape[1])), self.file, name
        )
        return matrix if self.undo is None else rearrange(matrix, self.undo)

    def with_dtype(self, dtype: torch.dtype) -> GgufTensor:
        """Return this tensor with another dtype. Weights are unpacked to it in pieces, to save memory for float32."""
        return self if self.stored.packing.name in NUMBERS else evolve(self, dtype=dtype)

    def _iterate_blocks(self, data: Tensor) -> Iterator[tuple[int, PackedMatrix]]:
        """Yield some blocks at a time, unpacked to steps and scales, with the number of the first one.

        Unpacking needs a multiple of the blocks' memory, so not all blocks are unpacked at once.
        """
        packing = self.stored.packing
        blocks = data.view(-1, packing.size)
        step = max(1, choose_piece_size(data.device) // packing.count)
        for at in range(0, len(blocks), step):
            yield at, UNPACK[packing.name](blocks[at : at + step])

    def _join_blocks(self, data: Tensor) -> PackedMatrix:
        """Return a matrix with one row for each block."""
        count = len(data) // self.stored.packing.size
        pieces = self._iterate_blocks(data)
        _, first = next(pieces)
        if len(first.steps) == count:
            return first
        whole = first.map_tensors(lambda tensor: tensor.new_empty(count, tensor.shape[1]))
        for at, piece in chain([(0, first)], pieces):
            for target, source in zip(whole.tensors, piece.tensors, strict=True):
                if target is not None and source is not None:
                    target[at : at + len(source)] = source
        return whole

    def _unpack(self, data: Tensor) -> Tensor:
        tensor = torch.empty(self.stored.shape, dtype=self.dtype, device=data.device)
        packing = self.stored.packing
        blocks = tensor.view(-1, packing.count)
        if packing.name in HOST_TYPES:
            stored = data.view(-1, packing.size)
            step = max(1, choose_piece_size(data.device) // packing.count)
            for at in range(0, len(stored), step):
                blocks[at : at + step] = unpack_few_bits(packing.name, stored[at : at + step])
            return tensor
        for at, piece in self._iterate_blocks(data):
            blocks[at : at + len(piece.steps)] = piece.unpack(torch.float32)
        return tensor


@frozen
class JoinedTensor:
    """A published tensor that is several tensors in the file. join: makes the published tensor of them."""

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
    def packing_name(self) -> str:
        return " and ".join(dict.fromkeys(part.packing_name for part in self.parts if part.packing_name))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        sources_of_parts = [part.sources for part in self.parts]
        return tuple(chain.from_iterable(sources_of_parts)) if all(sources_of_parts) else ()

    def read(self, name: str, fetch: Fetch = TensorEntry.read) -> Tensor:
        joined = self.join([part.read(name, fetch).to(self.dtype) for part in self.parts]).contiguous()
        assert joined.shape == self.shape, (name, joined.shape, self.shape)
        return joined

    @property
    def layout(self) -> None:
        """None, since the rows of the parts are interleaved."""
        return None

    def read_packed(self, name: str, fetch: Fetch = TensorEntry.read) -> PackedMatrix:  # noqa: ARG002
        raise AssertionError(f"{name} cannot be multiplied with as it is packed")

    def with_dtype(self, dtype: torch.dtype) -> JoinedTensor:
        return evolve(self, parts=tuple(part.with_dtype(dtype) for part in self.parts))


def make_tensor(
    stored: GgufTensorInfo, undo: Callable[[Tensor], Tensor] | None = None, shape: tuple[int, ...] | None = None
) -> GgufTensor:
    """Return a published tensor. Changes are undone in float32. shape: that of `undo`'s result, if it differs."""
    dtype = NUMBERS.get(stored.packing.name, torch.float32)
    shape = stored.shape if shape is None else shape
    assert math.prod(shape) == math.prod(stored.shape)
    return GgufTensor(stored, dtype if undo is None else torch.float32, shape, undo)
