"""Functions in Triton that load queries, keys and values for the attention kernels.

Rows may be paged. They may be coded, which means quantised to 8 bits or fewer: a row then has a code for each number,
and its scale follows as one float32. What rows are is a kind, as `row_kind` in cuda/packed_rows.py says.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_q(
    q_ptr,
    row0,
    count,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    START: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load a tile of queries `[BLOCK_M, HEAD]`: PADDED heads (GROUP real ones) of BLOCK_M / PADDED rows.

    HEAD: numbers that are loaded of each head of WIDTH numbers, from START on. Returns the tile, a mask of the entries
    that are real queries, and the index of each entry in `[bucket, HEADS]`.
    """
    i = tl.arange(0, BLOCK_M)
    row = i // PADDED
    member = i % PADDED
    real = (row < count) & (member < GROUP)
    at = ((row0 + row) * HEADS + kv_head * GROUP + member).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * WIDTH + START + tl.arange(0, HEAD)[None, :], real[:, None], 0.0)
    return q, real, at


@triton.jit
def row_of(at, base, pages_ptr, kv_head, KV: tl.constexpr, PAGE: tl.constexpr):
    """Return the row of the cache that has the key at position `at`. The rows of a tile that begins there follow it.

    base: the first row of the slot, where rows are not paged. PAGE: 0 if rows are not paged.
    """
    row = base + at
    if PAGE > 0:
        row = (tl.load(pages_ptr + at // PAGE) * KV + kv_head) * PAGE + at % PAGE
    return row


@triton.jit
def load_tile(
    rows,
    scales,
    row,
    START: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    APART: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load BLOCK_N rows from `row` on, and the scale of each coded row. rows: a descriptor, or a pointer to rows that
    are APART elements from each other.

    HEAD: numbers that are loaded of each row of WIDTH numbers, from START on. The codes convert to
    every dtype without rounding.
    """
    if KIND == 0:
        tile = rows.load([row, START]).to(dtype)
        scale = tl.zeros((BLOCK_N,), tl.float32)  # never read
    else:
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64) * APART
        n = START + tl.arange(0, HEAD)
        if KIND == 4:
            tile = load_int4(rows, at, n, WIDTH).to(dtype)
            scale = tl.load(scales + (at + WIDTH // 2) // 4)
        elif KIND == 3:
            tile = load_int35(rows, at, n, WIDTH).to(dtype)
            scale = tl.load(scales + (at + (WIDTH // 16 * 7 + 3) // 4 * 4) // 4)
        else:
            tile = tl.load(rows + at[:, None] + n[None, :]).to(dtype)
            scale = tl.full((BLOCK_N,), 1.0, tl.float32)
            if KIND == 1:
                scale = tl.load(scales + (at + WIDTH) // 4)
    return tile, scale


@triton.jit
def load_int4(rows, at, n, WIDTH: tl.constexpr):
    """Load the numbers n, without their scale, of packed rows of 4 bits that begin at the bytes `at`."""
    half: tl.constexpr = WIDTH // 2
    byte = tl.load(rows + at[:, None] + (n % half)[None, :]).to(tl.int32)
    return 2 * ((byte >> (n // half * 4)[None, :]) & 15) - 15


@triton.jit
def load_int35(rows, at, n, WIDTH: tl.constexpr):
    """Load the numbers n, without their scale, of packed rows whose halves have 4 and 3 bits (`PLANES`)."""
    half: tl.constexpr = WIDTH // 2
    second: tl.constexpr = half // 2  # the bytes before the second half's two upper bits
    lowest: tl.constexpr = second + half // 4
    is_first = n < half
    m = tl.maximum(n - half, 0)
    where = tl.where(is_first, n % second, m % (half // 4) + second)
    shift = tl.where(is_first, n // second * 4, m // (half // 4) * 2)
    upper = tl.load(rows + at[:, None] + where[None, :]).to(tl.int32) >> shift[None, :]
    lower = (
        tl.load(rows + at[:, None] + (m % (half // 8) + lowest)[None, :]).to(tl.int32) >> (m // (half // 8))[None, :]
    )
    of_three = 4 * ((upper & 3) * 2 + (lower & 1)) - 14
    return tl.where(is_first[None, :], 2 * (upper & 15) - 15, of_three)


@triton.jit
def load_keys(
    k_desc,
    v_desc,
    rest_desc,
    k_scales,
    v_scales,
    row,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_APART: tl.constexpr,
    V_APART: tl.constexpr,
    dtype: tl.constexpr,
    REST: tl.constexpr,
):
    """Load a tile of keys and of values, and the scales of both.

    REST: where it is not 0, a row is key and value at once. Its first REST numbers are part of the key alone.
    """
    k, k_scale = load_tile(k_desc, k_scales, row, REST, HEAD, REST + HEAD, BLOCK_N, K_KIND, K_APART, dtype)
    if REST > 0:
        k_rest, _ = load_tile(rest_desc, k_scales, row, 0, REST, REST + HEAD, BLOCK_N, K_KIND, K_APART, dtype)
        v = k
        v_scale = k_scale
    else:
        k_rest = k
        v, v_scale = load_tile(v_desc, v_scales, row, 0, HEAD, HEAD, BLOCK_N, V_KIND, V_APART, dtype)
    return k, v, k_rest, k_scale, v_scale
