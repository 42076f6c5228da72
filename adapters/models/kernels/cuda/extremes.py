"""Launches that find the largest and the smallest logit of each row, and which token has the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.kernels.triton.argmax_kernel import part_extremes, row_extremes
from adapters.models.kernels.triton_launch import launch

BLOCK = 4096  # logits of one program


def find_extremes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the extremes of each row as `SamplingKernels.find_extremes` does, in two launches: parts, then rows."""
    count, width = logits.shape
    parts = -(-width // BLOCK)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    extremes = torch.empty(count, 3, dtype=torch.float64, device=logits.device)
    values = torch.empty(count, parts, 2, device=logits.device)
    indices = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    cut = (logits, values, indices, logits.stride(0), width, parts)
    launch(part_extremes, (count, parts), *cut, BLOCK=BLOCK, num_warps=4)
    padded = 1 << (parts - 1).bit_length()
    launch(row_extremes, (count,), values, indices, tokens, extremes, width, parts, PARTS=padded, num_warps=1)
    return tokens, extremes
