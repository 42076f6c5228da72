"""Weights as products on a CUDA device read them."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.experts_interface import GatedWeights


@frozen
class CudaWeight:
    """A weight `[N, K]` as products read it; gated ones hold gate rows and up rows in turn."""

    weight: Tensor
    gated: bool = False


def can_be_grouped(weights: GatedWeights) -> bool:
    """Return whether products of many such experts can be one launch."""
    return isinstance(weights.gate_up, CudaWeight) and isinstance(weights.down, CudaWeight)
