"""What the C library holds of memory that nobody uses any more."""

from __future__ import annotations

import ctypes
import os

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3  # mallopt's names for them
ARENAS = 4  # for the event loop, the lane, and threads that come and go
LARGE = 128 << 10  # bytes; glibc's own, where nothing large was freed yet


def settle() -> None:
    """Few arenas for all threads, and large memory in none of them, unless the environment says so. Before any thread.

    glibc gives each thread its own, 8 a core at most, and what is free at the end of one stays there, trimmed or not:
    the same work, done on one thread after another, costs its memory once for each.

    And where large memory was freed, memory of up to that size lies in the arenas from then on: tensors of all lengths
    between what oneDNN has prepared, two pieces of 252 KiB for each shape. Each that is let go leaves a hole, which the
    next one seldom fits into, so the arena grows and ever more of it is touched. Pages of their own go back at once.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    if call is None or "GLIBC_TUNABLES" in os.environ:
        return
    if "MALLOC_ARENA_MAX" not in os.environ:
        call(_ARENA_MAX, ARENAS)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        call(_MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Free pages go back to the system, those between allocations too. Some 20 ms, in which others' wait."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if call is not None:
        call(0)
