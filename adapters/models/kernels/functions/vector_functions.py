"""Elementwise functions on a CPU whose result for a number does not depend on where it stands in a tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VECTOR = 64  # elements: a whole number of vectors on any processor, even in an unrolled loop
_PIECE = 1 << 14  # elements; torch splits larger tensors among threads, whose parts could end anywhere


def apply_in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that every element is computed in a whole vector of the processor.

    Torch computes the rest at the end of a loop by scalar code, which may round differently.
    """
    count = x.numel()
    if count <= _PIECE and not count % VECTOR and x.is_contiguous():
        return function(x)
    flat = x.reshape(-1)
    if count % VECTOR:
        flat = torch.nn.functional.pad(flat, (0, -count % VECTOR))
    found = function(flat) if len(flat) <= _PIECE else torch.cat([function(part) for part in torch.split(flat, _PIECE)])
    return found[:count].view(x.shape)


def silu(x: Tensor) -> Tensor:
    return apply_in_vectors(torch.sigmoid, x).mul_(x)
