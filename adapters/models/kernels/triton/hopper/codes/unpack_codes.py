"""Coded keys and values of one slot, unpacked to memory for a chunk's queries, in Triton.

Numbers become bfloat16, which holds every code exactly. Scales stay apart, because the product of a code and its scale
would have to be rounded: kernels multiply scores and weights with them, as `attention` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.attention_tiles import load_tile, row_of


@triton.jit
def _unpack_tile(
    rows,
    scales,
    row,
    is_seen,
    numbers_ptr,
    factors_ptr,
    to,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    APART: tl.constexpr,
):
    """Unpack the rows from `row` on to those from `to` on. Rows that are not seen become zeros with a scale of zero."""
    tile, scale = load_tile(rows, scales, row, 0, HEAD, HEAD, BLOCK_N, KIND, APART, tl.float32)
    i = to + tl.arange(0, BLOCK_N)
    numbers = tl.where(is_seen[:, None], tile, 0.0)
    at = i.to(tl.int64)[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
    tl.store(numbers_ptr + at, numbers.to(numbers_ptr.dtype.element_ty))
    tl.store(factors_ptr + i, tl.where(is_seen, scale, 0.0))


@triton.jit(do_not_specialize=["tile_limit", "first_head"])
def unpack_codes(
    k_rows,
    v_rows,
    k_scales,
    v_scales,
    tiles_ptr,
    pages_ptr,
    k_numbers,
    v_numbers,
    k_factors,
    v_factors,
    first_head,
    capacity,
    apart,
    tile_limit,
    KV: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIMIT: tl.constexpr,
    PAGE: tl.constexpr,
    K_KIND: tl.constexpr,
    K_APART: tl.constexpr,
    V_KIND: tl.constexpr,
    V_APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unpack BLOCK_N rows of a key head, of keys or of values: those that the step's rows see.

    k_rows, v_rows, scales, kinds: see `attention_tiles.load_tile`. numbers, factors: of a head every `apart` rows, from
    `first_head` on. All rows of the step are of one slot, that of the first tile. LIMIT: a power of two that is not
    less than `tile_limit`.
    """
    if PDL:
        gdc_launch_dependents()
    t = tl.arange(0, LIMIT)
    count = tl.load(tiles_ptr + t * 8 + 1, t < tile_limit, 0)
    first = tl.load(tiles_ptr + t * 8 + 3, t < tile_limit, -1)
    last = tl.max(tl.where((count > 0) & (first >= 0), first + count - 1, -1), 0)
    slot = tl.load(tiles_ptr + 2)
    at = tl.program_id(0) * BLOCK_N
    head = first_head + tl.program_id(1)
    to = tl.program_id(1) * apart + at
    if PDL:
        gdc_wait()
    if at <= last:
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        row = row_of(at, (slot * KV + head) * capacity, pages, head, KV, PAGE)
        is_seen = at + tl.arange(0, BLOCK_N) <= last
        if tl.program_id(2) == 0:
            _unpack_tile(k_rows, k_scales, row, is_seen, k_numbers, k_factors, to, HEAD, BLOCK_N, K_KIND, K_APART)
        else:
            _unpack_tile(v_rows, v_scales, row, is_seen, v_numbers, v_factors, to, HEAD, BLOCK_N, V_KIND, V_APART)
