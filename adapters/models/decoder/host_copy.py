"""Copies in host memory, by the thread that asks alone: torch would start threads of its own for each one that does."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# move(to, source, bytes), addresses: it keeps the interpreter, which every operation of torch lets go of, so that what
# takes a microsecond is not waited for as long as somebody else's turn takes.
move = ctypes.PyDLL(None).memmove
move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
move.restype = None
Integers: TypeAlias = "np.ndarray[Any, np.dtype[np.signedinteger[Any]]]"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy(target: Tensor, source: Tensor) -> None:
    """Of one shape and dtype, which numpy need not have."""
    np.copyto(bits(target), bits(source))


def bits(tensor: Tensor) -> Integers:
    """Of each element, where they are."""
    return tensor.view(INTEGERS[tensor.element_size()]).numpy()
