"""Tells whether an exception means that a device, or the host, found no memory."""

from __future__ import annotations

import torch

from effects.ids import DeviceFailed


def is_out_of_memory(error: Exception) -> bool:
    """Does the exception mean that memory was missing? torch raises a plain RuntimeError for host memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def out_of_memory_failure(error: Exception) -> DeviceFailed:
    """Return the failure of a request that found no memory, with the first line of the message."""
    return DeviceFailed("out_of_memory", str(error).partition("\n")[0] or "out of memory")
