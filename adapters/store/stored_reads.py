"""Reads runs from stored files, several of them in one call of the library. Used by the tiers whose files are here.

A thread that reads one run returns to the interpreter, which other threads and the event loop need as well. So a call
reads as many as it is given (`read_files`), and only then Python looks at what has become of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

from adapters.store.files.file_format import Layout
from adapters.store.files.stored_file import PlannedRead, plan_file, read_files
from adapters.store.run_read import RunRead
from adapters.store.slab_memory import Buffer, SlabMemory

# Reads at once that move as many bytes as memory gives: 12 GB/s (8 cores of a Xeon with AMX). Threads that help them
# only wait for the interpreter, however many cores there are: 32 threads read 6 GB/s.
FILLING_READS = 4
# What has become of a run: its rows; no memory for them; or nothing yet, since its file cannot be read in such a call.
ReadSoFar: TypeAlias = Buffer | MemoryError | None


def fill_memory(reads: int, processors: int) -> bool:
    """Say whether so many reads of stored files at once need no other threads."""
    return reads >= FILLING_READS or 2 * reads > processors


def read_stored(
    reads: Sequence[RunRead],
    paths: Sequence[str],
    layout: Layout,
    memory: SlabMemory,
    folder: int = -1,
    *,
    only_cached: bool = False,
) -> list[ReadSoFar]:
    """Read runs from files of these paths. Called on a thread. folder, only_cached: as `read_files` has them."""
    found: list[ReadSoFar] = [None] * len(reads)
    planned = dict[int, PlannedRead]()
    buffers = dict[int, Buffer]()
    for at, (read, path) in enumerate(zip(reads, paths, strict=True)):
        entry = read.entry
        plan = plan_file(entry.size, entry.run, layout)
        if plan is None:
            continue
        try:
            buffers[at] = memory.allocate(plan.rows.content)
        except MemoryError as error:
            found[at] = error
            continue
        planned[at] = PlannedRead(plan, os.fsencode(path), buffers[at].data.data_ptr())
    if planned:
        states = read_files([*planned.values()], folder, only_cached=only_cached)
        for at, state in zip(planned, states, strict=True):
            if state == "read":
                found[at] = buffers[at]
    return found
