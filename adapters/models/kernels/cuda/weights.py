"""Weights as products on a CUDA device read them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.packed import find_only_part
from adapters.models.kernels.interfaces.experts_interface import GatedWeights
from adapters.models.kernels.offload import list_tensors


@frozen
class CudaWeight:
    """A weight `[N, K]` as products read it. gated: a number of `GATES`, where gate and up rows alternate; or 0.
    piece: columns of which a sum is one chain; 0: all.
    """

    weight: Tensor
    gated: int = 0
    piece: int = 0


def can_be_grouped(weights: GatedWeights) -> bool:
    """Return whether products of many such experts can be one launch."""
    return all(map(_is_one_matrix, (weights.gate_up, weights.down)))


def describe_form(weights: GatedWeights) -> tuple[Hashable, ...]:
    """Return the form of an expert's weights. Those of one form can be stacked."""
    parts = [find_only_part(weight) for weight in (weights.gate_up, weights.down)]
    shapes = [(one.dtype, one.shape) for one in list_tensors(weights)]
    return (*(None if part is None else part.block_form for part in parts), *shapes)


def _is_one_matrix(weight: Any) -> bool:
    return isinstance(weight, CudaWeight) or find_only_part(weight) is not None
