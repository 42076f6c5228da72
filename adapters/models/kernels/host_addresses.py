"""Addresses of host tensors, for code that copies rows or calls a compiled library without torch in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

HostAddresses: TypeAlias = ctypes.Array[ctypes.c_void_p]


def list_addresses(tensors: Sequence[Tensor]) -> HostAddresses:
    """Return where each tensor's data begins. The addresses do not keep the tensors alive."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
