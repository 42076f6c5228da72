"""The largest and the smallest logit of each row, and which token has the largest."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096  # logits of one program of a GPU


def extremes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: float32 `[R, V]`, rows in one piece. The likeliest tokens, int64 `[R]`, the lowest id of equal ones; and
    float64 `[R, 3]`: the token, the smallest and the largest logit, both NaN where any is. The host waits for nothing.
    """
    if not logits.is_cuda:
        tokens, smallest, largest = logits.argmax(-1), logits.amin(-1), logits.amax(-1)  # faster than aminmax
        return tokens, torch.stack((tokens.double(), smallest.double(), largest.double()), -1)
    from adapters.models.kernels.triton.argmax_kernel import part_extremes, row_extremes  # noqa: PLC0415 - needs Triton
    from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415

    count, width = logits.shape
    parts = -(-width // BLOCK)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    told = torch.empty(count, 3, dtype=torch.float64, device=logits.device)
    values = torch.empty(count, parts, 2, device=logits.device)
    places = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    cut = logits, values, places, logits.stride(0), width, parts
    launch(part_extremes, (count, parts), *cut, BLOCK=BLOCK, num_warps=4)
    together = 1 << (parts - 1).bit_length()
    launch(row_extremes, (count,), values, places, tokens, told, width, parts, PARTS=together, num_warps=1)
    return tokens, told
