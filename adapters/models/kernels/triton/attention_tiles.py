"""Loads of attention in Triton: queries of some rows, and tiles of keys and values, paged or not, coded or not."""

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

    HEAD: numbers that are loaded of each head of WIDTH numbers, from START on. Also returns which of them are real, and
    the number of each in `[bucket, HEADS]`.
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
    """Return the cache row of key `at` of the slot; a tile from there on lies in one piece. PAGE: 0 if rows are not
    paged.
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
    CODED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load BLOCK_N rows from `row` on, and the scale of each CODED row. rows: a descriptor, or a pointer to coded
    rows.

    HEAD: numbers that are loaded of each row of WIDTH numbers, from START on. A code is exact in every dtype.
    """
    if CODED:
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64) * (WIDTH + 4)
        tile = tl.load(rows + at[:, None] + START + tl.arange(0, HEAD)[None, :]).to(dtype)
        scale = tl.load(scales + (at + WIDTH) // 4)
    else:
        tile = rows.load([row, START]).to(dtype)
        scale = tl.zeros((BLOCK_N,), tl.float32)  # never read
    return tile, scale


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
    CODED: tl.constexpr,
    dtype: tl.constexpr,
    REST: tl.constexpr,
):
    """Load a tile of keys and of values, and the scales of both.

    REST: where it is not 0, a row is key and value at once. Its first REST numbers are part of the key alone.
    """
    k, k_scale = load_tile(k_desc, k_scales, row, REST, HEAD, REST + HEAD, BLOCK_N, CODED, dtype)
    if REST > 0:
        k_rest, _ = load_tile(rest_desc, k_scales, row, 0, REST, REST + HEAD, BLOCK_N, CODED, dtype)
        v = k
        v_scale = k_scale
    else:
        k_rest = k
        v, v_scale = load_tile(v_desc, v_scales, row, 0, HEAD, HEAD, BLOCK_N, CODED, dtype)
    return k, v, k_rest, k_scale, v_scale
