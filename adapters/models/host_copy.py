"""Copies in host memory, by the thread that asks alone: torch would start threads of its own for each one that does."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

# move(to, source, bytes), addresses: it keeps the interpreter, which every operation of torch lets go of, so that what
# takes a microsecond is not waited for as long as somebody else's turn takes.
move = ctypes.PyDLL(None).memmove
move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
move.restype = None
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy(target: Tensor, source: Tensor) -> None:
    """Of one shape and dtype, which numpy need not have."""
    integer = INTEGERS[target.element_size()]
    np.copyto(target.view(integer).numpy(), source.view(integer).numpy())
