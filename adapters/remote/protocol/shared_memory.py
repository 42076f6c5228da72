"""Memory that a server and a daemon on the same machine both have, so that what is large crosses without being sent."""

from __future__ import annotations

import fcntl
import mmap
import os

SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def make_memory() -> int | None:
    """A descriptor of such memory, empty so far, which a child may inherit; None where the system has none."""
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return None
    return os.memfd_create("rekindle-shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def grow_memory(descriptor: int, size: int) -> memoryview:
    """Of that size from now on, for good: whoever maps it cannot have it taken away. By whoever made it."""
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in SEALS))
    return memoryview(mmap.mmap(descriptor, size))


def join_memory(descriptor: int, size: int) -> memoryview:
    """By the other one. Raises ValueError, OSError where it is not of that size for good."""
    if os.fstat(descriptor).st_size != size or not size:
        raise ValueError(f"shared memory is not of {size} bytes")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("shared memory could be taken away")
    return memoryview(mmap.mmap(descriptor, size))
