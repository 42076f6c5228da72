"""Tells a device that found no memory from everything else that goes wrong."""

from __future__ import annotations

import torch

from effects.ids import DeviceFailed


def ran_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def out_of_memory(error: Exception) -> DeviceFailed:
    return DeviceFailed("out_of_memory", str(error).partition("\n")[0] or "out of memory")
