"""What the C library holds of memory that nobody uses any more; memory that comes from the system itself, and what that
is told of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import TypeVar

M = TypeVar("M", bound=mmap.mmap)
_ARENA_MAX = -8  # mallopt's name for it
ARENAS = 4  # for the event loop, the lane, and threads that come and go


def share() -> None:
    """Few arenas for all threads, unless the environment says how many. Before there are threads.

    glibc gives each thread its own, 8 a core at most, and what is free at the end of one stays there, trimmed or not:
    the same work, done on one thread after another, costs its memory once for each.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    if call is not None and "MALLOC_ARENA_MAX" not in os.environ and "GLIBC_TUNABLES" not in os.environ:
        call(_ARENA_MAX, ARENAS)


def trim() -> None:
    """Free pages go back to the system, those between allocations too. Some 20 ms, in which others' wait."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if call is not None:
        call(0)


def mapped(size: int, kind: type[M] = mmap.mmap) -> M:  # type: ignore[assignment] # the bound is its own default
    """Private memory of so many bytes, a page at least, in large pages where the system gives them: to touch it first
    takes a fifth of the time then. Raises MemoryError.
    """
    try:
        memory = kind(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from error
    advise(memory, "MADV_HUGEPAGE")
    return memory


def advise(memory: mmap.mmap, advice: str) -> None:
    """advice: a name of `madvise`'s, such as MADV_HUGEPAGE. A system that does not know it goes on without."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))
