"""Host memory for rows that are kept or on their way: buffers, cut out of slabs that are used again and again.

Problem. Memory that a GPU copies from must be registered with CUDA, which blocks every other call of CUDA for some
milliseconds a slab. Memory that was never touched must be mapped page by page. Both are slower than the copies.

How it works. A buffer is cut out of a slab that has room. When there is none, a slab is added, up to `max_bytes`; where
that is not allowed either, memory comes from the system and goes back to it. Where memory is pinned, `register_all`
adds all slabs on a thread of its own: EAGER_BYTES at once, and the rest without pauses only while no request is served
(`PaceMemory`, which the core decides).

Waiting. A buffer that dies returns its span, on whichever thread that happens, so its destructor takes no lock: it puts
the span into a deque and an item into the queue of each waiting thread (`notify`). The next thread that allocates as
much as the last returned span has takes that one, which is still in the processor's cache. Otherwise it puts returned
spans back into their slabs. Nothing polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.offload import allocate_pinned
from adapters.process_memory import map_memory
from effects.ids import RequestId
from effects.pacing import PaceMemory

SLAB_BYTES = 64 << 20
EAGER_BYTES = 1 << 30  # registered at once, whether or not a request is served
# A pause between two slabs is this many times what registering one takes, and half a second at most. So 8 GiB are there
# within seconds while the server is idle, and within a minute or two while it serves.
PAUSE = 4
MAX_PAUSE_S = 0.5
ALIGN = 4096


@frozen(eq=False)
class Buffer:
    """A piece of memory. `data` is uint8, and valid while this object is referred to (a view of it is not enough)."""

    data: Tensor
    _give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._give_back is not None:
            self._give_back()


@define(eq=False)
class Slab:
    """One piece of memory that buffers are cut out of."""

    data: Tensor
    free_spans: list[tuple[int, int]]  # ascending; no span touches the next

    def allocate(self, size: int) -> tuple[int, int] | None:
        """Take the first free span of this size; None if there is none."""
        for index, (start, stop) in enumerate(self.free_spans):
            if stop - start >= size:
                self.free_spans[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return start, start + size
        return None

    def release(self, span: tuple[int, int]) -> None:
        """Make a span free again, and join it with its free neighbours."""
        merged = list[tuple[int, int]]()
        for start, stop in sorted([*self.free_spans, span]):
            is_touching = bool(merged) and merged[-1][1] == start
            merged.append((merged.pop()[0] if is_touching else start, stop))
        self.free_spans = merged


@frozen(eq=False)
class BufferSpan:
    """A span that a buffer has, or had. data: the buffer's tensor, of `size` bytes; the span may be longer."""

    slab: Slab
    span: tuple[int, int]
    size: int
    data: Tensor


@define(eq=False)
class SlabMemory:
    """Slabs of at most `max_bytes` in all, and memory of the system beyond that.

    pin: slabs are page-locked, for a GPU. source: makes slabs that are not. slab: bytes of the usual slab.
    """

    max_bytes: int = 0
    pin: bool = False
    source: Callable[[int], Tensor] | None = None
    slab_bytes: int = 0  # of all slabs together
    slab: int = SLAB_BYTES
    _pace: PaceMemory | None = None  # None: the server still starts, and memory is made with all processors
    _slabs: list[Slab] = field(factory=list[Slab])
    _returned: deque[BufferSpan] = field(factory=deque["BufferSpan"])
    _waiters: tuple[SimpleQueue[None], ...] = ()  # replaced and never changed, since destructors read it
    _lock: threading.Lock = field(factory=threading.Lock)
    _grow_lock: threading.Lock = field(factory=threading.Lock)  # held while a slab is made
    _closing: threading.Event = field(factory=threading.Event)
    _fill_lock: threading.Lock = field(factory=threading.Lock)  # held by `register_all`

    def set_pace(self, _: RequestId, pace: PaceMemory) -> None:
        """Follow the core: register memory with pauses or without. The first call says that the server has started."""
        self._pace = pace

    @contextmanager
    def notify(self, queue: SimpleQueue[None]) -> Iterator[None]:
        """Put an item into the queue whenever memory may have come free, as long as the block runs."""
        with self._lock:
            self._waiters = (*self._waiters, queue)
        try:
            yield
        finally:
            with self._lock:
                self._waiters = tuple(waiter for waiter in self._waiters if waiter is not queue)

    def wake_waiters(self) -> None:
        """Let the threads that wait for memory look again."""
        for queue in self._waiters:
            queue.put(None)

    def allocate(self, size: int, *, pinned_only: bool = False, may_grow: bool = True) -> Buffer:
        """Return a buffer. Raises MemoryError.

        pinned_only: where slabs are pinned, take memory of a slab and none of the system, which a GPU copies to at a
        tenth of the speed. may_grow: with `pinned_only`, a slab may be added, which takes several times as long as the
        copies.
        """
        whole = -(-size // ALIGN) * ALIGN
        needs_pinned = pinned_only and self.pin
        found = self._take_free(whole, size)
        if found is None and (may_grow or not needs_pinned):
            found = self._grow(whole, size, is_awaited=not pinned_only)
        if found is not None:
            return found
        if needs_pinned:
            raise MemoryError(
                f"{size} bytes of pinned memory: {self.slab_bytes} of {self.max_bytes} are there, and used"
            )
        return Buffer(allocate_unpinned(size))

    def _grow(self, whole: int, size: int, *, is_awaited: bool) -> Buffer | None:
        """Return a buffer from a new slab, or from one that another thread makes meanwhile. None: no slab may be added.

        is_awaited: a request waits for this memory. Where all slabs are there already, no thread is woken: a thread
        that waits for memory would wake itself by each attempt.
        """
        if self.slab_bytes + whole > self.max_bytes:
            return self._take_free(whole, size)
        news = SimpleQueue[None]()
        with self.notify(news):
            while not self._grow_lock.acquire(blocking=False):
                if (found := self._take_free(whole, size)) is not None:
                    return found
                news.get()
        try:
            return self._take_free(whole, size) or self._take_from_new_slab(whole, size, is_awaited=is_awaited)
        finally:
            self._end_growth()

    def _end_growth(self) -> None:
        self._grow_lock.release()
        self.wake_waiters()

    def map_buffers(self, size: int, pieces: int) -> None:
        """Register and map memory for this many buffers of this size, before a request waits for one.

        Called on a thread of its own.
        """
        buffers = list[Buffer]()  # held together: a buffer that is given back would be taken again
        with suppress(MemoryError):
            for _ in range(pieces):
                buffers.append(self.allocate(size))
                if not self.pin:  # pinned memory is mapped already
                    buffers[-1].data.numpy().fill(0)

    def register_all(self) -> None:
        """Add all slabs, one by one, before a snapshot waits for them. Does nothing where memory is not pinned.

        Called on a thread of its own.
        """
        with self._fill_lock:
            while self.pin and not self._closing.is_set():
                began = time.monotonic()
                if not self._register_slab():
                    return
                if self.slab_bytes >= EAGER_BYTES and (self._pace is None or self._pace.gently):
                    self._closing.wait(min(MAX_PAUSE_S, PAUSE * (time.monotonic() - began)))

    def _register_slab(self) -> bool:
        """Add one slab. Return False when all are there, or when there is no memory for another one."""
        self._grow_lock.acquire()
        try:
            size = min(self.slab, self.max_bytes - self.slab_bytes)
            if not size:
                return False
            try:
                self._add(Slab(self._allocate_slab(size), [(0, size)]), size)
            except MemoryError:  # the slabs that are there have to do
                self.max_bytes = self.slab_bytes
                return False
            return True
        finally:
            self._end_growth()

    def close(self) -> None:
        """Register no more memory. A thread that does so while the interpreter ends would crash the process."""
        self._closing.set()
        with self._fill_lock:
            pass

    def _take_free(self, whole: int, size: int) -> Buffer | None:
        """Return a buffer from a slab that has room, if any has."""
        with self._lock:
            if (same := self._take_last(size)) is not None:
                return self._make_buffer(same)
            while self._returned:
                returned = self._returned.popleft()
                returned.slab.release(returned.span)
            for slab in self._slabs:
                if (found := slab.allocate(whole)) is not None:
                    return self._make_buffer(cut_span(slab, found, size))
        return None

    def _take_last(self, size: int) -> BufferSpan | None:
        """Return the span that was given back last, if its buffer had this size. Called with the lock.

        Most buffers have one size. So no tensor is made: behind 4 MiB of rows the processor's cache holds little of the
        code for that, and an allocation took 16 us (decision 082).
        """
        if not self._returned:
            return None
        last = self._returned.pop()
        if last.size == size:
            return last
        self._returned.append(last)
        return None

    def _take_from_new_slab(self, whole: int, size: int, *, is_awaited: bool) -> Buffer | None:
        """Return a buffer from a slab that is made for it; None if no more may be made."""
        if self.slab_bytes + whole > self.max_bytes:
            return None
        room = max(whole, min(self.slab, self.max_bytes - self.slab_bytes))
        slab = Slab(self._allocate_slab(room, is_awaited=is_awaited), [(0, room)])
        span = slab.allocate(whole)
        assert span is not None, "a slab is as large as what it was made for"
        self._add(slab, room)
        return self._make_buffer(cut_span(slab, span, size))

    def _add(self, slab: Slab, size: int) -> None:
        with self._lock:
            self._slabs.append(slab)
            self.slab_bytes += size

    def _allocate_slab(self, size: int, *, is_awaited: bool = False) -> Tensor:
        """Allocate a slab. is_awaited: a request waits for this memory, so all processors make it."""
        if self.pin:
            return allocate_pinned(size, aside=self._pace is not None and not is_awaited)
        return allocate_unpinned(size) if self.source is None else self.source(size)

    def _make_buffer(self, span: BufferSpan) -> Buffer:
        def give_back() -> None:
            self._returned.append(span)
            self.wake_waiters()

        return Buffer(span.data, give_back)


def cut_span(slab: Slab, span: tuple[int, int], size: int) -> BufferSpan:
    """Return a span of a slab with the tensor of its first `size` bytes."""
    return BufferSpan(slab, span, size, slab.data[span[0] : span[0] + size])


def allocate_unpinned(size: int) -> Tensor:
    """Return memory from the system. Raises MemoryError."""
    return torch.frombuffer(map_memory(size), dtype=torch.uint8)[:size]
