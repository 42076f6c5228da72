"""Memory of a server that its daemons can read: `Lender` at the server, `Borrower` at the daemon.

Rows that lie in it are not sent. The server names their offsets, and the daemon copies them once, to where they go.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.cache.host_copy import Integers
from adapters.remote.protocol import shared_memory
from adapters.remote.protocol.messages import Lent, LentRun, Unacceptable
from adapters.sequence_layout import ELEMENT_BYTES, RowSpec, dtype_name, torch_dtype

Mapped: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"


@define(eq=False)
class Lender:
    """The memory that a server lends to its daemons. It only grows."""

    descriptor: int
    _size: int = 0
    # Each span: its first address, the one behind it, and its offset.
    _spans: list[tuple[int, int, int]] = field(factory=list["tuple[int, int, int]"])
    _lock: threading.Lock = field(factory=threading.Lock)

    @classmethod
    def open(cls) -> Lender | None:
        """Make the memory, empty at first. Return None if the system has no such memory."""
        if (descriptor := shared_memory.make_memory()) is None:
            return None
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(descriptor)

    def take(self, size: int) -> Tensor:
        """Add `size` bytes and return them as a uint8 tensor. Raises MemoryError."""
        whole = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            begin = self._size
            try:
                os.ftruncate(self.descriptor, begin + whole)
                self._size += whole
                found = torch.frombuffer(mmap.mmap(self.descriptor, whole, offset=begin), dtype=torch.uint8)
            except OSError as error:
                raise MemoryError(f"{size} bytes of shared memory: {error.strerror}") from error
            self._spans.append((found.data_ptr(), found.data_ptr() + whole, begin))
        return found[:size]

    def locate(self, tensors: Mapping[str, Tensor]) -> tuple[Lent, ...]:
        """Return where these tensors lie. Return nothing if one of them does not lie in this memory."""
        found = list[Lent]()
        for alike in rows_of(tensors):
            names = tuple(name for name, _ in alike)
            (first, *others) = [tensor for _, tensor in alike]
            if (offset := self._find_offset(first.data_ptr())) is None:
                return ()
            apart = (others[0].data_ptr() - first.data_ptr()) // first.itemsize if others else 0
            dtype = dtype_name(first.dtype)
            shape = tuple(first.shape)
            found.append(Lent(names, dtype, shape, offset, apart, first.stride()))  # type: ignore[arg-type]
        return tuple(found)

    def run(self, spec: RowSpec, start: int, rows: Tensor) -> LentRun | None:
        """Return where rows `[names, heads, rows, width]` of a run lie.

        Return None if they do not lie in this memory, or not as a run of `spec` does.
        """
        names, heads, count, width = rows.shape
        of_head = rows.stride(1)
        if rows.stride() != (heads * of_head, of_head, width, 1) or of_head % width:
            return None
        if (names, heads, width, dtype_name(rows.dtype)) != (len(spec.names), spec.heads, spec.width, spec.dtype):
            return None
        offset = self._find_offset(rows.data_ptr())
        return None if offset is None else LentRun(start, count, offset, of_head // width)

    def _find_offset(self, address: int) -> int | None:
        return next((at + address - begin for begin, end, at in self._spans if begin <= address < end), None)

    def __del__(self) -> None:
        os.close(self.descriptor)  # the mappings stay as long as a tensor refers to them


def rows_of(tensors: Mapping[str, Tensor]) -> list[list[tuple[str, Tensor]]]:
    """Group neighbouring tensors of one shape that lie at equal distances in one storage, as the rows of a run do."""
    found = list[list[tuple[str, Tensor]]]()
    for name, tensor in tensors.items():
        if found and continues_group([member for _, member in found[-1]], tensor):
            found[-1].append((name, tensor))
        else:
            found.append([(name, tensor)])
    return found


def continues_group(group: list[Tensor], tensor: Tensor) -> bool:
    """Does the tensor lie behind the group as each of its members lies behind the one before it?"""
    last = group[-1]
    apart = tensor.data_ptr() - last.data_ptr()
    alike = (last.dtype, last.shape, last.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    together = last.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and apart >= 0
    return alike and together and (len(group) == 1 or apart == last.data_ptr() - group[-2].data_ptr())


@define(eq=False)
class Borrower:
    """The lent memory as a daemon sees it. It is only read there."""

    descriptor: int
    _mapped: Mapped | None = None

    def tensors(self, lent: tuple[Lent, ...]) -> dict[str, Tensor]:
        """Return the lent tensors by name, without a copy. Raises Unacceptable for offsets outside the memory."""
        for lent_part in lent:
            if len(lent_part.shape) != len(lent_part.strides) or lent_part.offset % ELEMENT_BYTES[lent_part.dtype]:
                raise Unacceptable(f"{lent_part.names[0]} is lent as no tensor can lie")
        memory = self._bytes(max(lent_part.end for lent_part in lent))
        return {
            name: view
            for lent_part in lent
            for name, view in zip(lent_part.names, _view_lent(lent_part, memory), strict=True)
        }

    def run(self, spec: RowSpec, lent: LentRun) -> Integers:
        """Return lent rows as integers of their element size: `[names, heads, rows, width]` of `spec`, without a copy.

        Raises Unacceptable for offsets outside the memory.
        """
        size = ELEMENT_BYTES[spec.dtype]
        names = len(spec.names)
        heads = spec.heads
        row = spec.width * size
        of_head = spec.width * size * lent.room
        if lent.count > lent.room or lent.offset % size:
            raise Unacceptable(f"{lent.count} rows are lent as no run of {lent.room} can lie")
        memory = self._bytes(lent.offset + (names * heads - 1) * of_head + lent.count * row)
        shape = (names, heads, lent.count, spec.width)
        strides = (heads * of_head, of_head, row, size)
        return np.ndarray(shape, f"i{size}", memory, lent.offset, strides)  # type: ignore[arg-type]

    def _bytes(self, size: int) -> Mapped:
        """Return the whole memory, which must have at least `size` bytes. Raises Unacceptable."""
        if self._mapped is None or len(self._mapped) < size:
            try:
                self._mapped = self._all(size)
            except (OSError, ValueError) as error:
                raise Unacceptable(f"what is lent is not there: {error}") from error
        return self._mapped

    def _all(self, size: int) -> Mapped:
        if not fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("shared memory could be taken away")
        whole = os.fstat(self.descriptor).st_size
        if whole < size:
            raise ValueError(f"{size} bytes of shared memory, which has {whole}")
        mapped = mmap.mmap(self.descriptor, whole, prot=mmap.PROT_READ)
        address = np.frombuffer(mapped, np.uint8).ctypes.data  # torch warns of what may not be written
        found = (ctypes.c_ubyte * whole).from_address(address)
        found.owner = mapped  # type: ignore[attr-defined]
        return found


def _view_lent(lent: Lent, memory: Mapped) -> Tensor:
    """Return the tensors of one `Lent` as one view, `[names, ...]`."""
    dtype = torch_dtype(lent.dtype)
    offset = lent.offset
    shape = (len(lent.names), *lent.shape)
    if not all(shape):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, offset=offset, count=(lent.end - offset) // dtype.itemsize)
    return flat.as_strided(shape, (lent.apart, *lent.strides))


@frozen(eq=False)
class LentTensors:
    """Lent tensors of a request. They must be read before the request is answered."""

    lent: tuple[Lent, ...]
    borrower: Borrower

    def views(self) -> dict[str, Tensor]:
        return self.borrower.tensors(self.lent)
