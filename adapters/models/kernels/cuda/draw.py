"""Launches that draw tokens on a GPU, weigh picked ones and find the extremes of logits, two each
(`triton/draw_kernel.py`, `triton/argmax_kernel.py`).

A draw is the one that a host makes of the same logits (`cpu/host_draw.py`). Whatever is compared or summed has a single
right answer, and the noise is found by logarithms that have one as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import Constants
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.functions.exact_exp import exp_factors
from adapters.models.kernels.functions.exact_functions import MOST_TAKEN
from adapters.models.kernels.functions.noise import noise_key
from adapters.models.kernels.triton.argmax_kernel import part_extremes, row_extremes
from adapters.models.kernels.triton.draw_kernel import part_draws, part_weights, row_draws, row_leaders
from adapters.models.kernels.triton_launch import launch
from effects.job import Sampling

BLOCK = 1024  # logits of one program
EXTREMES_BLOCK = 4096  # the same where extremes are found
WARPS = 8  # of 32 threads each
TAKEN = 64  # tokens of the top-k that a program looks at together
OPTIONS: Constants = {"BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}


def draw_tokens(
    logits: Tensor,
    extremes: Tensor,
    rows: Sequence[int],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    *,
    tokens: Tensor,
    found: Tensor,
) -> None:
    """Draw a token from each of some rows; the arguments are those of `SamplingKernels.draw_tokens`."""
    width, parts, padded = measure_rows(logits)
    asked = describe_draws(rows, samplings, positions, width).to(logits.device, non_blocking=True)
    keys, sums, winners = (new_numbers(logits, len(rows), parts) for _ in range(3))
    scores = torch.empty(len(rows), parts, dtype=torch.float64, device=logits.device)
    shared = (logits, extremes, asked, exp_factors(str(logits.device)), keys, sums, winners, scores)
    sizes = (logits.stride(0), width, parts)
    taken = new_numbers(logits, len(rows), MOST_TAKEN)
    launch(part_draws, (len(rows), parts), *shared, *sizes, **OPTIONS)
    launch(row_draws, (len(rows),), *shared, taken, tokens, found, *sizes, PARTS=padded, TAKEN=TAKEN, **OPTIONS)


def describe_draws(rows: Sequence[int], samplings: Sequence[Sampling], positions: Sequence[int], width: int) -> Tensor:
    """Return what the kernels read about each of R draws: int64 `[R, 6]` on the host. `asked_of` reads it.

    The first columns are the row of the logits, the key of its noise and top-k. The key has 64 bits, as a signed
    number. Without a limit, top-k is `width`. The other columns are the bits of three float64: temperature, log(min-p)
    and top-p.
    """
    whole = [
        (row, noise_key(sampling.seed, position), min(sampling.top_k or width, width))
        for row, sampling, position in zip(rows, samplings, positions, strict=True)
    ]
    floats = [(one.temperature, math.log(one.min_p) if one.min_p else -math.inf, one.top_p) for one in samplings]
    bits = torch.tensor(floats, dtype=torch.float64).view(torch.int64)
    return torch.cat((torch.tensor(whole, dtype=torch.int64), bits), 1)


def weigh_tokens(logits: Tensor, extremes: Tensor, rows: Sequence[int], tokens: Tensor, count: int) -> Tensor:
    """Return what `SamplingKernels.weigh_tokens` does. extremes: those of `logits`."""
    width, parts, padded = measure_rows(logits)
    out = torch.empty(len(rows), 2 + 2 * count, dtype=torch.float64, device=logits.device)
    at = torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True)
    keys = new_numbers(logits, len(rows), parts)
    sums = new_numbers(logits, len(rows), parts)
    sizes = (logits.stride(0), width, parts)
    weights = (logits, extremes, at, exp_factors(str(logits.device)), keys, sums)
    launch(part_weights, (len(rows), parts), *weights, *sizes, **OPTIONS)
    leaders = (logits, extremes, at, tokens, keys, sums, out)
    launch(row_leaders, (len(rows),), *leaders, *sizes, count, PARTS=padded, **OPTIONS)
    return out


def measure_rows(logits: Tensor) -> tuple[int, int, int]:
    """Return the width of a row, how many parts of BLOCK logits it has, and the power of two that holds these parts."""
    width = logits.shape[-1]
    parts = count_parts(width, BLOCK)
    return width, parts, round_up_to_power(parts)


def new_numbers(like: Tensor, *shape: int) -> Tensor:
    """Return an int64 tensor of its own. A view into another tensor may begin at other multiples of bytes, and Triton
    compiles a kernel anew for those.
    """
    return torch.empty(shape, dtype=torch.int64, device=like.device)


def find_extremes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the extremes of each row as `SamplingKernels.find_extremes` does, in two launches: parts, then rows."""
    count, width = logits.shape
    parts = -(-width // EXTREMES_BLOCK)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    extremes = torch.empty(count, 3, dtype=torch.float64, device=logits.device)
    values = torch.empty(count, parts, 2, device=logits.device)
    indices = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    cut = (logits, values, indices, logits.stride(0), width, parts)
    launch(part_extremes, (count, parts), *cut, BLOCK=EXTREMES_BLOCK, num_warps=4)
    padded = 1 << (parts - 1).bit_length()
    launch(row_extremes, (count,), values, indices, tokens, extremes, width, parts, PARTS=padded, num_warps=1)
    return tokens, extremes
