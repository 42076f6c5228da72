"""A run that a tier is asked to read, and what has become of it. Tiers are asked for several at once (`tier.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from attrs import define

from adapters.store.block_index import Entry
from adapters.store.slab_memory import Buffer

# Rows that a thread reads before it returns to Python. What it does there needs the interpreter, which other threads
# and the event loop need as well (decision 075).
BATCH_BYTES = 8 << 20
ReadCallback: TypeAlias = Callable[[Buffer], object]
# Returns the runs to read next. If there are none, nothing is left, or the caller has to do something first. The thread
# that has read what it returned before calls it, so that this thread need not wait for an event loop.
ReadSource: TypeAlias = Callable[[], "Sequence[RunRead]"]
ReadResult: TypeAlias = tuple[Entry, Exception | None]
T = TypeVar("T")


def ignore(_: Buffer) -> None:
    """Do nothing with what was read."""


@define(eq=False)
class RunRead:
    """A run to read.

    then: called with the buffer on the thread that has read it. buffer: the tensors, end to end. error: if there is no
    buffer: Damaged, OSError or MemoryError.
    """

    entry: Entry
    then: ReadCallback = ignore
    buffer: Buffer | None = None
    error: Exception | None = None


def take_batch(queue: deque[T], tasks: int, batch_bytes: int, describe: Callable[[T], tuple[object, int]]) -> list[T]:
    """Take the runs that one of several tasks reads together next: neighbours that come from one tier.

    It is one run at least, and otherwise at most the task's share of what waits, so that all tasks end at the same
    time. describe: returns the tier and the bytes of a run. batch_bytes: the most that they may be together.
    """
    share = len(queue) // tasks
    batch = [queue.popleft()]
    tier, total = describe(batch[0])
    while queue and len(batch) < share:
        next_tier, size = describe(queue[0])
        total += size
        if next_tier != tier or total > batch_bytes:
            break
        batch.append(queue.popleft())
    return batch


def take_once(read: RunRead) -> ReadSource:
    """Return a source of one run."""
    left = [read]
    return lambda: [left.pop()] if left else []


def give_buffer(read: RunRead, buffer: Buffer) -> None:
    """End a read on the thread that has done it."""
    read.buffer = buffer
    read.then(buffer)


def give_error(read: RunRead, error: Exception) -> None:
    """End a read without a buffer. The error keeps no frames, whose variables would keep memory that was read into."""
    error.__context__ = error.__cause__ = None
    read.error = error.with_traceback(None)


def list_results(reads: Sequence[RunRead]) -> list[ReadResult]:
    """Return the entries of reads that are over, with their errors."""
    return [(read.entry, read.error) for read in reads]


def get_buffer(read: RunRead) -> Buffer:
    """Return the buffer of a read that is over, or raise its error."""
    if read.error is not None:
        raise read.error
    assert read.buffer is not None, "a read has one or the other"
    return read.buffer
