"""Memory shared by a server and a daemon on the same machine, for payloads that are too large for the socket.

The server makes it as an anonymous file whose size is sealed, so neither end can take memory away from the other.
"""

from __future__ import annotations

import fcntl
import mmap
import os

SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def make_memory() -> int | None:
    """Return the descriptor of new, empty shared memory, which a child may inherit; None if the system has none."""
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return None
    return os.memfd_create("rekindle-shard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def grow_memory(descriptor: int, size: int) -> memoryview:
    """Give the memory its size, seal that, and map it. Called once, by the process that made it."""
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in SEALS))
    return memoryview(mmap.mmap(descriptor, size))


def join_memory(descriptor: int, size: int) -> memoryview:
    """Map memory that the other process has made. Raises ValueError or OSError if its size differs or is not sealed."""
    if os.fstat(descriptor).st_size != size or not size:
        raise ValueError(f"shared memory is not of {size} bytes")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("shared memory could be taken away")
    return memoryview(mmap.mmap(descriptor, size))
