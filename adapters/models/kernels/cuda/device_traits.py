"""The traits of a CUDA device that kernels and tiles are chosen by."""

from __future__ import annotations

import torch
import triton
from attrs import frozen

from adapters.models.kernels.cuda.tiles import H200_SHARED
from adapters.models.kernels.cuda_capability import NO_CAPABILITY, CudaCapability, read_capability


@frozen
class DeviceTraits:
    """processors: multiprocessors of the device. shared: bytes of shared memory that a program may have."""

    capability: CudaCapability
    processors: int
    shared: int


INTERPRETER = DeviceTraits(NO_CAPABILITY, 4, H200_SHARED)


def read_traits(device: torch.device) -> DeviceTraits:
    """Return the traits of a CUDA device, INTERPRETER for others."""
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceTraits(
        read_capability(device),
        torch.cuda.get_device_properties(device).multi_processor_count,
        triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"],
    )
