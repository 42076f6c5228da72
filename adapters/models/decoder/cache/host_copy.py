"""Copies in host memory on the calling thread only. Torch would use several threads for each copy."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# move(target, source, bytes) with addresses. Unlike torch's operations it keeps the interpreter lock: a copy of a
# microsecond must not wait until another thread gives the lock back.
move = ctypes.PyDLL(None).memmove
move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
move.restype = None
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.signedinteger[Any]]]"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor to another one of the same shape and dtype. Numpy does not need to know the dtype."""
    np.copyto(bits(target), bits(source))


def bits(tensor: Tensor) -> Integers:
    """Return the elements of a tensor as integers of the same size, without a copy."""
    return tensor.view(INTEGERS[tensor.element_size()]).numpy()
