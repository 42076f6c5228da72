"""The abilities of a CUDA device by its compute capability. Every choice that depends on that is made here."""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class CudaCapability:
    """The compute capability of a device, for instance 8.0 (Ampere), 8.9 (Ada) or 9.0 (Hopper)."""

    major: int
    minor: int

    @property
    def has_hopper_kernels(self) -> bool:
        """True if the kernels in `triton/hopper*.py` run: they need `wgmma`, which only Hopper has. Every other device
        takes kernels of the same sums, which are compiled from sm_80 on.
        """
        return self.major == 9

    @property
    def takes_plain_pointers(self) -> bool:
        """True if products read weights by pointers, because the device has no bulk copies by descriptors."""
        return 0 < self.major < 9

    @property
    def overlaps_launches(self) -> bool:
        """True if a kernel may start while the one before it drains (programmatic dependent launch)."""
        return self.major >= 9

    @property
    def converts_e4m3(self) -> bool:
        """True if there are instructions for numbers in E4M3. Without them, weights in E4M3 are unpacked by operations
        on whole numbers, and rows cannot be kept in E4M3.
        """
        return (self.major, self.minor) >= (8, 9)


NO_CAPABILITY = CudaCapability(0, 0)
"""Triton's interpreter, which computes on a processor."""


def read_capability(device: torch.device) -> CudaCapability:
    """Return the compute capability of a CUDA device, NO_CAPABILITY for others."""
    return CudaCapability(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else NO_CAPABILITY
