"""The plan of chunks of a step of recurrent layers on a CUDA device, and memory for their factors."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class ChunkPlan:
    """The chunks of a step. chunks: int32 `[limit, 8]`. runs: int32 `[segments + 1, 2]`, the last one for padded
    rows. walks: int32 `[segments + 1, 8]`, the last one for their number.
    """

    chunks: Tensor
    runs: Tensor
    walks: Tensor


@frozen(eq=False)
class FactorScratch:
    """Memory for the factors of one layer at a time, kept for good because recorded graphs hold its address."""

    mix: Tensor
    fold: Tensor
    lines: Tensor
