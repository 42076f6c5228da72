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

from adapters.heap import mapped
from adapters.models.parking import pinned

SLAB = 64 << 20
# Each slab that is registered holds up whoever asks CUDA for anything, by some milliseconds: so much of them is there
# at once, and the rest while nobody is served; otherwise with pauses between two of so many times what one takes, half
# a second at most: 8 GiB are there in seconds, or in a minute or two.
SOON = 1 << 30
PAUSE, PAUSE_S = 4, 0.5
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
    _registering: threading.Lock = field(factory=threading.Lock)
    _closing: threading.Event = field(factory=threading.Event)
    _filling: threading.Lock = field(factory=threading.Lock)  # held by whoever fills it

    def take(self, size: int, *, held: bool = False, more: bool = True) -> Buffer:
        """held: out of what is held, if it is pinned, since other memory is copied to at a tenth of the speed. more: or
        will be, since that is made now if need be. Raises MemoryError.
        """
        whole = -(-size // ALIGN) * ALIGN
        with self._lock:
            while self._returned:  # a buffer may die anywhere, so it only says so
                slab, span = self._returned.popleft()
                slab.give_back(span)
            for slab in self._slabs:
                if (span_ := slab.take(whole)) is not None:
                    return self._buffer(slab, span_, size)
            if self.held + whole > self.most or (held and self.pin and not more):
                if held and self.pin:
                    raise MemoryError(f"{size} bytes of pinned memory: {self.held} of {self.most} are there, and used")
                return Buffer(unpinned(size))
            grown = max(whole, min(self.slab, self.most - self.held))
            self.held += grown
        try:
            slab = Slab(self._made(grown, waited=not held), [(0, grown)])
        except MemoryError:
            with self._lock:
                self.held -= grown
            raise
        with self._lock:
            self._slabs.append(slab)
            span_ = slab.take(whole)
            assert span_ is not None, "a slab is as large as what it was made for"
            return self._buffer(slab, span_, size)

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
                with self._lock:
                    size = min(self.slab, self.most - self.held)
                    self.held += size
                if not size:
                    return
                began = time.monotonic()
                try:
                    slab = Slab(self._made(size), [(0, size)])
                except MemoryError:  # what is there has to do
                    self.most = self.held = self.held - size
                    return
                with self._lock:
                    self._slabs.append(slab)
                if self.held >= SOON and (self.busy is None or self.busy()):
                    self._closing.wait(min(PAUSE_S, PAUSE * (time.monotonic() - began)))

    def close(self) -> None:
        """No more is registered: a thread that did so while an interpreter ends would take it down."""
        self._closing.set()
        with self._filling:
            pass

    def _made(self, size: int, *, waited: bool = False) -> Tensor:
        """One that is pinned at a time: the system keeps whoever maps memory waiting meanwhile, and that one the
        interpreter. waited: does anybody's answer wait for it?
        """
        if not self.pin:
            return unpinned(size) if self.source is None else self.source(size)
        with self._registering:
            return pinned(size, aside=self.busy is not None and not waited)

    def _buffer(self, slab: Slab, span: tuple[int, int], size: int) -> Buffer:
        returned = self._returned
        return Buffer(slab.data[span[0] : span[0] + size], lambda: returned.append((slab, span)))


def unpinned(size: int) -> Tensor:
    """Raises MemoryError."""
    return torch.frombuffer(mapped(size), dtype=torch.uint8)[:size]
