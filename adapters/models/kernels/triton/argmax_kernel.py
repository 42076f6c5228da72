"""The largest and smallest logit of each row, where the largest is, and whether all are numbers, in Triton.

Comparisons give the same result in every order, so a row may be cut into any parts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_extremes(logits_ptr, values_ptr, indices_ptr, stride, width, parts, BLOCK: tl.constexpr):
    """Find the extremes of BLOCK logits of one row.

    values: float32 `[R, parts, 2]`, the smallest and the largest, both NaN where one of the logits is. indices: int32
    `[R, parts]`, where the largest is, the first of equal ones.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(logits_ptr + row * stride + at, inside, float("-inf"))
    odd = tl.max((x != x).to(tl.int32), 0)  # noqa: PLR0124 - as NaN is
    largest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    smallest = tl.min(tl.where(inside, x, float("inf")), 0)
    to = row * parts + part
    tl.store(values_ptr + 2 * to, tl.where(odd != 0, float("nan"), smallest))
    tl.store(values_ptr + 2 * to + 1, tl.where(odd != 0, float("nan"), largest))
    tl.store(indices_ptr + to, part * BLOCK + index)


@triton.jit
def row_extremes(values_ptr, indices_ptr, tokens_ptr, extremes_ptr, width, parts, PARTS: tl.constexpr):
    """Join all parts of a row.

    tokens: int64 `[R]`, the likeliest token. extremes: float64 `[R, 3]`: token, smallest and largest logit.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    at = row * parts + part
    smallest = tl.load(values_ptr + 2 * at, inside, float("inf"))
    largest = tl.load(values_ptr + 2 * at + 1, inside, float("-inf"))
    index = tl.load(indices_ptr + at, inside, 2147483647)
    odd = tl.max((largest != largest).to(tl.int32), 0) != 0  # noqa: PLR0124
    most = tl.max(largest, 0)
    token = tl.min(tl.where(largest == most, index, 2147483647), 0)
    token = tl.minimum(token, width - 1)  # some token, if nothing can be compared
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(extremes_ptr + 3 * row, token.to(tl.float64))
    tl.store(extremes_ptr + 3 * row + 1, tl.where(odd, float("nan"), tl.min(smallest, 0)).to(tl.float64))
    tl.store(extremes_ptr + 3 * row + 2, tl.where(odd, float("nan"), most).to(tl.float64))
