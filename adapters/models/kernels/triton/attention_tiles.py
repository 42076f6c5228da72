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
    HEAD: tl.constexpr,
):
    """Load a tile of queries `[BLOCK_M, HEAD]`: PADDED heads (GROUP real ones) of BLOCK_M / PADDED rows.

    Also returns which of them are real, and the number of each in `[bucket, HEADS]`.
    """
    i = tl.arange(0, BLOCK_M)
    row = i // PADDED
    member = i % PADDED
    real = (row < count) & (member < GROUP)
    at = ((row0 + row) * HEADS + kv_head * GROUP + member).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * HEAD + tl.arange(0, HEAD)[None, :], real[:, None], 0.0)
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
def load_tile(rows, scales, row, HEAD: tl.constexpr, BLOCK_N: tl.constexpr, CODED: tl.constexpr, dtype: tl.constexpr):
    """Load BLOCK_N rows from `row` on, and the scale of each CODED row. rows: a descriptor, or a pointer to coded
    rows.

    A code is exact in every dtype.
    """
    if CODED:
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64) * (HEAD + 4)
        tile = tl.load(rows + at[:, None] + tl.arange(0, HEAD)[None, :]).to(dtype)
        scale = tl.load(scales + (at + HEAD) // 4)
    else:
        tile = rows.load([row, 0]).to(dtype)
        scale = tl.zeros((BLOCK_N,), tl.float32)  # never read
    return tile, scale
