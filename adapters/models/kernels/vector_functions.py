"""Elementwise functions on a CPU, so that where a number stands in a tensor never changes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_VECTOR = 64  # elements; a whole number of vectors of any processor, however far a loop is unrolled
_PIECE = 1 << 14  # below what torch would share among threads, whose parts could end anywhere


def by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function, every element of which is computed in a whole vector of the processor: what is left
    over at the end of a loop may be computed otherwise."""
    count = x.numel()
    if count <= _PIECE and not count % _VECTOR and x.is_contiguous():
        return function(x)
    flat = x.reshape(-1)
    if count % _VECTOR:
        flat = torch.nn.functional.pad(flat, (0, -count % _VECTOR))
    found = function(flat) if len(flat) <= _PIECE else torch.cat([function(part) for part in torch.split(flat, _PIECE)])
    return found[:count].view(x.shape)


def silu(x: Tensor) -> Tensor:
    return by_vectors(torch.sigmoid, x).mul_(x)
