"""A run that a tier is asked to read, and what has become of it. Tiers are asked for several at once (`tier.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import define

from adapters.store.block_index import Entry
from adapters.store.slab_memory import Buffer

# Runs that a thread reads before it returns to the event loop. What both do between two reads needs the interpreter
# (decision 075).
BATCH_BYTES = 16 << 20
ReadCallback: TypeAlias = Callable[[Buffer], object]


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


def choose_batch_length(waiting: int, tasks: int, run_bytes: int, batch_bytes: int) -> int:
    """Return how many of the waiting runs, at least 1, one of several tasks should read together.

    Few near the end, so that all tasks end at the same time. run_bytes: of one run. batch_bytes: as tiers have it.
    """
    return max(1, min(batch_bytes // run_bytes, waiting // tasks))


def give_buffer(read: RunRead, buffer: Buffer) -> None:
    """End a read on the thread that has done it."""
    read.buffer = buffer
    read.then(buffer)


def give_error(read: RunRead, error: Exception) -> None:
    """End a read without a buffer. The error keeps no frames, whose variables would keep memory that was read into."""
    error.__context__ = error.__cause__ = None
    read.error = error.with_traceback(None)


def get_buffer(read: RunRead) -> Buffer:
    """Return the buffer of a read that is over, or raise its error."""
    if read.error is not None:
        raise read.error
    assert read.buffer is not None, "a read has one or the other"
    return read.buffer
