"""Decodes one run of a shared store: in one call where its file can be read so, else frame by frame."""

from __future__ import annotations

from concurrent.futures import Executor

from attrs import frozen

from adapters.store.files.expected import Expected
from adapters.store.files.read_run import RunContent, fill_target
from adapters.store.files.stored_file import StoredFile
from adapters.store.slab_memory import Buffer, SlabMemory

# Reads at once that move as many bytes as memory gives: 12 GB/s (8 cores of a Xeon with AMX). Threads that help them
# only wait for the interpreter, however many cores there are: 32 threads read 6 GB/s.
FILLING_READS = 4


def fill_memory(reads: int, processors: int) -> bool:
    """Say whether so many reads of stored files at once need no other threads."""
    return reads >= FILLING_READS or 2 * reads > processors


@frozen(eq=False)
class RunDecoder:
    """The parts that a thread needs to decode a run.

    plan: of its file, if one call may read it. helpers: threads that help otherwise; None for none.
    """

    expected: Expected
    plan: StoredFile | None
    helpers: Executor | None
    memory: SlabMemory

    def decode(self, content: RunContent) -> Buffer:
        """Return the run's tensors in a buffer. Raises Damaged, OSError or MemoryError."""
        run = self.expected.run
        buffer = self.memory.allocate(self.expected.layout.compute_size(run.kind, run.length))
        if self.plan is None or not self.plan.read(content.path, buffer.data.data_ptr()):
            fill_target(content, self.expected, self.helpers, buffer.data.numpy().data)
        return buffer
