"""Host memory for what is kept and what is on its way: cut out of slabs that are used again and again.

Memory that a GPU copies from must be registered, and memory that was never touched must be mapped page by page: both
are slower than the copies themselves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.offload import allocate_pinned
from adapters.process_memory import map_memory

SLAB_BYTES = 64 << 20
# Each slab that is registered holds up whoever asks CUDA for anything, by some milliseconds: so much of them is there
# at once, and the rest while nobody is served; otherwise with pauses between two of so many times what one takes, half
# a second at most: 8 GiB are there in seconds, or in a minute or two.
EAGER_BYTES = 1 << 30
PAUSE, PAUSE_S = 4, 0.5
POLL_S = 0.002
ALIGN = 4096


@frozen(eq=False)
class Buffer:
    """`data` is uint8. It is valid as long as this object is referred to (a view of `data` is not enough)."""

    data: Tensor
    _give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._give_back is not None:
            self._give_back()


@define(eq=False)
class Slab:
    data: Tensor
    free_spans: list[tuple[int, int]]  # spans, ascending, none touching the next

    def allocate(self, size: int) -> tuple[int, int] | None:
        for index, (start, stop) in enumerate(self.free_spans):
            if stop - start >= size:
                self.free_spans[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def release(self, span: tuple[int, int]) -> None:
        merged = list[tuple[int, int]]()
        for start, stop in sorted([*self.free_spans, span]):
            touching = bool(merged) and merged[-1][1] == start
            merged.append((merged.pop()[0] if touching else start, stop))
        self.free_spans = merged


@define(eq=False)
class SlabMemory:
    """Slabs of at most `most` bytes in all; what finds no place there comes from the system, and goes back to it.

    pin: page-locked, for a GPU. source: of slabs that are not. slab: bytes of the usual one. busy: is anybody served,
    who would be held up? None while a start makes what it needs, with all processors; later one will do.
    """

    max_bytes: int = 0
    pin: bool = False
    source: Callable[[int], Tensor] | None = None
    slab_bytes: int = 0  # bytes of slabs
    slab: int = SLAB_BYTES
    is_busy: Callable[[], bool] | None = None
    _slabs: list[Slab] = field(factory=list[Slab])
    _returned: deque[tuple[Slab, tuple[int, int]]] = field(factory=deque)
    _lock: threading.Lock = field(factory=threading.Lock)
    _grow_lock: threading.Lock = field(factory=threading.Lock)
    _closing: threading.Event = field(factory=threading.Event)
    _fill_lock: threading.Lock = field(factory=threading.Lock)  # held by whoever fills it

    def allocate(self, size: int, *, held: bool = False, more: bool = True) -> Buffer:
        """held: out of what is held, if it is pinned, since other memory is copied to at a tenth of the speed. more: or
        will be, since that is made now if need be. Raises MemoryError.
        """
        whole, only_held = -(-size // ALIGN) * ALIGN, held and self.pin
        if (found := self._take_free(whole, size)) is not None:
            return found
        if more or not only_held:
            while not self._grow_lock.acquire(timeout=POLL_S):  # whoever has it may make what will do
                if (found := self._take_free(whole, size)) is not None:
                    return found
            try:
                found = self._take_free(whole, size) or self._take_from_new_slab(whole, size, waited=not held)
            finally:
                self._grow_lock.release()
            if found is not None:
                return found
        if only_held:
            raise MemoryError(
                f"{size} bytes of pinned memory: {self.slab_bytes} of {self.max_bytes} are there, and used"
            )
        return Buffer(allocate_unpinned(size))

    def map_buffers(self, size: int, pieces: int) -> None:
        """So many of that size are registered, and mapped, before anybody waits for one. For a thread of its own."""
        buffers = list[Buffer]()  # all at once: what is given back would be taken again
        with suppress(MemoryError):
            for _ in range(pieces):
                buffers.append(self.allocate(size))
                if not self.pin:  # what is registered is mapped
                    buffers[-1].data.numpy().fill(0)

    def register_all(self) -> None:
        """All of it, slab by slab, before a snapshot waits for it; where memory is pinned. For a thread of its own."""
        with self._fill_lock:
            while self.pin and not self._closing.is_set():
                began = time.monotonic()
                with self._grow_lock:
                    size = min(self.slab, self.max_bytes - self.slab_bytes)
                    if not size:
                        return
                    try:
                        self._add(Slab(self._allocate_slab(size), [(0, size)]), size)
                    except MemoryError:  # what is there has to do
                        self.max_bytes = self.slab_bytes
                        return
                if self.slab_bytes >= EAGER_BYTES and (self.is_busy is None or self.is_busy()):
                    self._closing.wait(min(PAUSE_S, PAUSE * (time.monotonic() - began)))

    def close(self) -> None:
        """No more is registered: a thread that did so while an interpreter ends would take it down."""
        self._closing.set()
        with self._fill_lock:
            pass

    def _take_free(self, whole: int, size: int) -> Buffer | None:
        """Out of what is there."""
        with self._lock:
            while self._returned:  # a buffer may die anywhere, so it only says so
                slab, span = self._returned.popleft()
                slab.release(span)
            for slab in self._slabs:
                if (found := slab.allocate(whole)) is not None:
                    return self._make_buffer(slab, found, size)
        return None

    def _take_from_new_slab(self, whole: int, size: int, *, waited: bool) -> Buffer | None:
        """Out of a slab that is made for it, if one more may be."""
        if self.slab_bytes + whole > self.max_bytes:
            return None
        room = max(whole, min(self.slab, self.max_bytes - self.slab_bytes))
        slab = Slab(self._allocate_slab(room, waited=waited), [(0, room)])
        span = slab.allocate(whole)
        assert span is not None, "a slab is as large as what it was made for"
        self._add(slab, room)
        return self._make_buffer(slab, span, size)

    def _add(self, slab: Slab, size: int) -> None:
        with self._lock:
            self._slabs.append(slab)
            self.slab_bytes += size

    def _allocate_slab(self, size: int, *, waited: bool = False) -> Tensor:
        """waited: does anybody's answer wait for it?"""
        if self.pin:
            return allocate_pinned(size, aside=self.is_busy is not None and not waited)
        return allocate_unpinned(size) if self.source is None else self.source(size)

    def _make_buffer(self, slab: Slab, span: tuple[int, int], size: int) -> Buffer:
        returned = self._returned
        return Buffer(slab.data[span[0] : span[0] + size], lambda: returned.append((slab, span)))


def allocate_unpinned(size: int) -> Tensor:
    """Raises MemoryError."""
    return torch.frombuffer(map_memory(size), dtype=torch.uint8)[:size]
