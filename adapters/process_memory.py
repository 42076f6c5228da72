"""Memory of this process: limits on what the C library keeps, and memory mapped directly from the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from typing import TypeVar

M = TypeVar("M", bound=mmap.mmap)
_ARENA_MAX = -8  # M_ARENA_MAX of mallopt
MADV_POPULATE_WRITE = 23  # Linux 5.14; the same on all architectures but Alpha and PA-RISC
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
ARENAS = 4  # for the event loop, the device thread, and short-lived threads


def limit_arenas() -> None:
    """Let all threads share few arenas, unless the environment sets a number. Call this before threads are started.

    glibc gives each thread its own arena, up to 8 per core. The free memory at the end of an arena stays there, trimmed
    or not. So the same work, done on one thread after another, would take its memory once per thread.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    if call is not None and "MALLOC_ARENA_MAX" not in os.environ and "GLIBC_TUNABLES" not in os.environ:
        call(_ARENA_MAX, ARENAS)


def trim_heap() -> None:
    """Return free pages to the system, also those between allocations.

    This takes some 20 ms, during which allocations of other threads wait.
    """
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if call is not None:
        call(0)


def map_memory(size: int, kind: type[M] = mmap.mmap) -> M:  # type: ignore[assignment] # the bound is its own default
    """Map `size` bytes of private memory, at least one page. Raises MemoryError.

    Large pages are used where the system has them. Touching the memory first then takes a fifth of the time.
    """
    try:
        memory = kind(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from error
    advise(memory, "MADV_HUGEPAGE")
    return memory


def map_pages(address: int, size: int) -> None:
    """Map the pages of a range of private memory that is about to be written, in one system call.

    Pages that are mapped keep their contents. Touching 27 MB of new memory page by page takes 13 ms of processor time
    (two cores of an AMD EPYC in a virtual machine), and 8 ms this way. Systems without this call map pages when they
    are touched.
    """
    if _madvise is not None:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), MADV_POPULATE_WRITE)


def advise(memory: mmap.mmap, advice: str) -> None:
    """Give the system advice on memory, which it may ignore. advice: a name of `madvise`, such as MADV_HUGEPAGE."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))
