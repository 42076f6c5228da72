"""Tokens drawn on a GPU, and what is told of picked ones, in two launches each (`models/kernels/triton/draw_kernel.py`).

A draw is the one that a host makes of the same logits (`host_draw.py`): whatever is compared or summed has one right
answer, and noise is found by logarithms that have one, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.device.sampling.exact_exp import factors
from adapters.device.sampling.noise import key_of
from adapters.models.kernels.exact_functions import MANY
from effects.job import Sampling

BLOCK, WARPS = 1024, 8  # logits of one program, and its threads by 32
TAKEN = 64  # of the top-k that are looked at at once
HOW: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}


def draw_into(
    logits: Tensor,
    told: Tensor,
    rows: Sequence[int],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    *,
    tokens: Tensor,
    found: Tensor,
) -> None:
    """Of some rows of adjusted logits, float32 `[R, V]`: their tokens, int64 `[R]`, and with them the first column of
    `found`, float64 `[R, 3]`, become those that are drawn. told: the logits' own extremes, as `found` has those that
    it was made of. The host waits for nothing.
    """
    from adapters.models.kernels.triton.draw_kernel import part_draws, row_draws  # noqa: PLC0415 - needs Triton
    from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415

    width, parts, together = shape(logits)
    asked = asked_for(rows, samplings, positions, width).to(logits.device, non_blocking=True)
    keys, sums, winners = (numbers(logits, len(rows), parts) for _ in range(3))
    scores = torch.empty(len(rows), parts, dtype=torch.float64, device=logits.device)
    known = logits, told, asked, factors(str(logits.device)), keys, sums, winners, scores
    size, taken = (logits.stride(0), width, parts), numbers(logits, len(rows), MANY)
    launch(part_draws, (len(rows), parts), *known, *size, **HOW)
    launch(row_draws, (len(rows),), *known, taken, tokens, found, *size, PARTS=together, TAKEN=TAKEN, **HOW)


def asked_for(rows: Sequence[int], samplings: Sequence[Sampling], positions: Sequence[int], width: int) -> Tensor:
    """int64 `[R, 6]` on the host, as the kernels' `asked_of` has it."""
    whole = [
        (row, key_of(sampling.seed, position), min(sampling.top_k or width, width))
        for row, sampling, position in zip(rows, samplings, positions, strict=True)
    ]
    floats = [(one.temperature, math.log(one.min_p) if one.min_p else -math.inf, one.top_p) for one in samplings]
    bits = torch.tensor(floats, dtype=torch.float64).view(torch.int64)
    return torch.cat((torch.tensor(whole, dtype=torch.int64), bits), 1)


def told_of(logits: Tensor, told: Tensor, rows: Sequence[int], tokens: Tensor, most: int) -> Tensor:
    """Float64 `[len(rows), 2 + 2 most]`, as `sampling._logprobs` has it, of some rows of float32 `[R, V]` and the
    tokens that were picked there, int64 `[R]`. told: the logits' extremes. The host waits for nothing.
    """
    from adapters.models.kernels.triton.draw_kernel import part_weights, row_leaders  # noqa: PLC0415 - needs Triton
    from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415

    width, parts, together = shape(logits)
    out = torch.empty(len(rows), 2 + 2 * most, dtype=torch.float64, device=logits.device)
    at = torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True)
    keys, sums = numbers(logits, len(rows), parts), numbers(logits, len(rows), parts)
    size = logits.stride(0), width, parts
    launch(part_weights, (len(rows), parts), logits, told, at, factors(str(logits.device)), keys, sums, *size, **HOW)
    launch(row_leaders, (len(rows),), logits, told, at, tokens, keys, sums, out, *size, most, PARTS=together, **HOW)
    return out


def shape(logits: Tensor) -> tuple[int, int, int]:
    """Its width, how many parts that are, and the power of two that has room for them."""
    width = logits.shape[-1]
    parts = -(-width // BLOCK)
    return width, parts, 1 << (parts - 1).bit_length()


def numbers(like: Tensor, *shape: int) -> Tensor:
    """int64, in a piece of its own: kernels are compiled anew for what begins at other multiples of bytes."""
    return torch.empty(shape, dtype=torch.int64, device=like.device)
