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

SLAB = 64 << 20
# Each slab that is registered holds up whoever asks CUDA for anything, by some milliseconds: so much of them is there
# at once, and the rest while nobody is served; otherwise with pauses between two of so many times what one takes, half
# a second at most: 8 GiB are there in seconds, or in a minute or two.
SOON = 1 << 30
PAUSE, PAUSE_S = 4, 0.5
LOOK_S = 0.002
ALIGN = 4096


@frozen(eq=False)
class Buffer:
    """`data` is uint8, and there for as long as somebody refers to this object (a view of it is not enough)."""

    data: Tensor
    _give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._give_back is not None:
            self._give_back()


@define(eq=False)
class Slab:
    data: Tensor
    free: list[tuple[int, int]]  # spans, ascending, none touching the next

    def take(self, size: int) -> tuple[int, int] | None:
        for index, (start, stop) in enumerate(self.free):
            if stop - start >= size:
                self.free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def give_back(self, span: tuple[int, int]) -> None:
        merged = list[tuple[int, int]]()
        for start, stop in sorted([*self.free, span]):
            touching = bool(merged) and merged[-1][1] == start
            merged.append((merged.pop()[0] if touching else start, stop))
        self.free = merged


@define(eq=False)
class Memory:
    """Slabs of at most `most` bytes in all; what finds no place there comes from the system, and goes back to it.

    pin: page-locked, for a GPU. source: of slabs that are not. slab: bytes of the usual one. busy: is anybody served,
    who would be held up? None while a start makes what it needs, with all processors; later one will do.
    """

    most: int = 0
    pin: bool = False
    source: Callable[[int], Tensor] | None = None
    held: int = 0  # bytes of slabs
    slab: int = SLAB
    busy: Callable[[], bool] | None = None
    _slabs: list[Slab] = field(factory=list[Slab])
    _returned: deque[tuple[Slab, tuple[int, int]]] = field(factory=deque)
    _lock: threading.Lock = field(factory=threading.Lock)
    _growing: threading.Lock = field(factory=threading.Lock)
    _closing: threading.Event = field(factory=threading.Event)
    _filling: threading.Lock = field(factory=threading.Lock)  # held by whoever fills it

    def take(self, size: int, *, held: bool = False, more: bool = True) -> Buffer:
        """held: out of what is held, if it is pinned, since other memory is copied to at a tenth of the speed. more: or
        will be, since that is made now if need be. Raises MemoryError.
        """
        whole, only_held = -(-size // ALIGN) * ALIGN, held and self.pin
        if (found := self._found(whole, size)) is not None:
            return found
        if more or not only_held:
            while not self._growing.acquire(timeout=LOOK_S):  # whoever has it may make what will do
                if (found := self._found(whole, size)) is not None:
                    return found
            try:
                found = self._found(whole, size) or self._grown(whole, size, waited=not held)
            finally:
                self._growing.release()
            if found is not None:
                return found
        if only_held:
            raise MemoryError(f"{size} bytes of pinned memory: {self.held} of {self.most} are there, and used")
        return Buffer(unpinned(size))

    def prepare(self, size: int, pieces: int) -> None:
        """So many of that size are registered, and mapped, before anybody waits for one. For a thread of its own."""
        buffers = list[Buffer]()  # all at once: what is given back would be taken again
        with suppress(MemoryError):
            for _ in range(pieces):
                buffers.append(self.take(size))
                if not self.pin:  # what is registered is mapped
                    buffers[-1].data.numpy().fill(0)

    def fill(self) -> None:
        """All of it, slab by slab, before a snapshot waits for it; where memory is pinned. For a thread of its own."""
        with self._filling:
            while self.pin and not self._closing.is_set():
                began = time.monotonic()
                with self._growing:
                    size = min(self.slab, self.most - self.held)
                    if not size:
                        return
                    try:
                        self._add(Slab(self._made(size), [(0, size)]), size)
                    except MemoryError:  # what is there has to do
                        self.most = self.held
                        return
                if self.held >= SOON and (self.busy is None or self.busy()):
                    self._closing.wait(min(PAUSE_S, PAUSE * (time.monotonic() - began)))

    def close(self) -> None:
        """No more is registered: a thread that did so while an interpreter ends would take it down."""
        self._closing.set()
        with self._filling:
            pass

    def _found(self, whole: int, size: int) -> Buffer | None:
        """Out of what is there."""
        with self._lock:
            while self._returned:  # a buffer may die anywhere, so it only says so
                slab, span = self._returned.popleft()
                slab.give_back(span)
            for slab in self._slabs:
                if (found := slab.take(whole)) is not None:
                    return self._buffer(slab, found, size)
        return None

    def _grown(self, whole: int, size: int, *, waited: bool) -> Buffer | None:
        """Out of a slab that is made for it, if one more may be."""
        if self.held + whole > self.most:
            return None
        room = max(whole, min(self.slab, self.most - self.held))
        slab = Slab(self._made(room, waited=waited), [(0, room)])
        span = slab.take(whole)
        assert span is not None, "a slab is as large as what it was made for"
        self._add(slab, room)
        return self._buffer(slab, span, size)

    def _add(self, slab: Slab, size: int) -> None:
        with self._lock:
            self._slabs.append(slab)
            self.held += size

    def _made(self, size: int, *, waited: bool = False) -> Tensor:
        """waited: does anybody's answer wait for it?"""
        if self.pin:
            return allocate_pinned(size, aside=self.busy is not None and not waited)
        return unpinned(size) if self.source is None else self.source(size)

    def _buffer(self, slab: Slab, span: tuple[int, int], size: int) -> Buffer:
        returned = self._returned
        return Buffer(slab.data[span[0] : span[0] + size], lambda: returned.append((slab, span)))


def unpinned(size: int) -> Tensor:
    """Raises MemoryError."""
    return torch.frombuffer(map_memory(size), dtype=torch.uint8)[:size]
