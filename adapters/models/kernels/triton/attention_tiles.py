"""What attention in Triton reads: queries of some rows, and tiles of keys and values from wherever, coded or not."""

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
    """A tile of queries `[BLOCK_M, HEAD]`: PADDED heads (GROUP real ones) of BLOCK_M / PADDED rows.

    Also returns which of them are real, and the number of each in `[bucket, HEADS]`.
    """
    i = tl.arange(0, BLOCK_M)
    row, member = i // PADDED, i % PADDED
    real = (row < count) & (member < GROUP)
    at = ((row0 + row) * HEADS + kv_head * GROUP + member).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * HEAD + tl.arange(0, HEAD)[None, :], real[:, None], 0.0)
    return q, real, at


@triton.jit
def row_of(at, base, pages_ptr, kv_head, KV: tl.constexpr, PAGE: tl.constexpr):
    """Where the caches have key `at` of the slot; a tile from there on is in one piece. PAGE: 0 if all of them are."""
    row = base + at
    if PAGE > 0:
        row = (tl.load(pages_ptr + at // PAGE) * KV + kv_head) * PAGE + at % PAGE
    return row


@triton.jit
def load_tile(rows, scales, row, HEAD: tl.constexpr, BLOCK_N: tl.constexpr, CODED: tl.constexpr, dtype: tl.constexpr):
    """BLOCK_N rows from one on, and what each is to be multiplied with: of CODED ones. rows: a descriptor, or where
    coded ones are; a code is exact in every dtype.
    """
    if CODED:
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64) * (HEAD + 4)
        tile = tl.load(rows + at[:, None] + tl.arange(0, HEAD)[None, :]).to(dtype)
        scale = tl.load(scales + (at + HEAD) // 4)
    else:
        tile = rows.load([row, 0]).to(dtype)
        scale = tl.zeros((BLOCK_N,), tl.float32)  # never read
    return tile, scale
