"""The numbers that CUDA's kernels multiply for a packed matrix, as a model of their arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix

PAIRED = {"uint4": 0, "int4": 8}  # steps that are computed two at a time in bfloat16, and what is subtracted from them


def unpack_for_cuda(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the numbers `[N, K]` in the dtype of the computation.

    In bfloat16, the scale and the least number of a group of steps of four bits are rounded first. A multiply-add is
    then rounded once, from what float64 holds exactly.
    """
    if dtype != torch.bfloat16 or matrix.layout.steps not in PAIRED:
        return matrix.unpack(dtype)
    scale, least = matrix.group_levels()
    scale = scale.to(dtype).double()
    subtracted = PAIRED[matrix.layout.steps] * scale if least is None else least.to(dtype).double()
    groups = matrix.steps.double().view(len(scale), -1, matrix.layout.group)
    exact = groups * scale.unsqueeze(2) - subtracted.unsqueeze(2)
    return exact.float().to(dtype).flatten(1)
