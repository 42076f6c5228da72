"""Attention of a draft's blocks in Triton: each block over its own context and itself, in both directions or
causally.

The keys that a block sees fall into splits `[s * SPLIT, (s + 1) * SPLIT)` at absolute positions. Each split is a work
item that leaves a partial, and `merge` weighs the partials. Everything about a block comes from device memory, row by
row, so one graph serves every set of blocks of a bucket. Every program finds the rows that open a tile anew, because
a bucket is short.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.attention_tiles import load_q
from adapters.models.kernels.triton.online_softmax import NOTHING


@triton.jit
def _lowest(first, start, WINDOW: tl.constexpr):
    """Return the first key that the row at `start` sees."""
    if WINDOW > 0:
        first = tl.maximum(first, start - WINDOW + 1)
    return first


@triton.jit
def attend_splits(
    q_ptr,
    k_desc,
    v_desc,
    rest_desc,
    slots_ptr,
    positions_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    acc_ptr,
    sums_ptr,
    bucket,
    capacity,
    split_limit,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    REST: tl.constexpr,
    SHARE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process the key splits of all (tile of a block's rows, key head) pairs, dealt out evenly to the programs.

    Each leaves acc float32 `[bucket, HEADS, split_limit, HEAD]`, and its peak and total in sums float32 `[bucket,
    HEADS, split_limit, 2]`. A tile has TILE = BLOCK_M / PADDED rows of one block and is named by the row that opens
    it. REST: where it is not 0, a row is key and value at once, and its first REST numbers are part of the key alone.
    SHARE programs have some query heads of a key head each, and KV counts all these parts.
    """
    if PDL:
        gdc_launch_dependents()
    r = tl.arange(0, ROWS)
    inside = r < bucket
    position = tl.load(positions_ptr + r, inside, -1).to(tl.int32)
    start = tl.load(starts_ptr + r, inside, 0).to(tl.int32)
    stop = tl.load(stops_ptr + r, inside, 0).to(tl.int32)
    lowest = _lowest(tl.load(firsts_ptr + r, inside, 0).to(tl.int32), start, WINDOW)
    opens = (position >= 0) & ((position - start) % TILE == 0)
    ends = tl.cumsum(tl.where(opens, (stop - 1) // SPLIT - lowest // SPLIT + 1, 0), 0)
    items = tl.max(ends, 0) * KV
    run = tl.cdiv(items, tl.num_programs(0))
    item = tl.program_id(0) * run
    stop_item = tl.minimum(item + run, items)
    while item < stop_item:
        row0 = tl.sum((ends <= item // KV).to(tl.int32), 0)
        before = tl.max(tl.where(r < row0, ends, 0), 0)
        slot = tl.load(slots_ptr + row0).to(tl.int32)
        position0 = tl.load(positions_ptr + row0).to(tl.int32)
        start0 = tl.load(starts_ptr + row0).to(tl.int32)
        stop0 = tl.load(stops_ptr + row0).to(tl.int32)
        first0 = tl.load(firsts_ptr + row0).to(tl.int32)
        lowest0 = _lowest(first0, start0, WINDOW)
        splits = (stop0 - 1) // SPLIT - lowest0 // SPLIT + 1
        kv_head = (item - before * KV) // splits
        split = lowest0 // SPLIT + (item - before * KV) % splits
        item += 1
        if PDL:
            gdc_wait()
        count = tl.minimum(TILE, stop0 - position0)
        q, real, at = load_q(q_ptr, row0, count, kv_head, HEADS, GROUP, PADDED, BLOCK_M, REST, HEAD, REST + HEAD)
        q_rest = q
        if REST > 0:
            q_rest, _, __ = load_q(q_ptr, row0, count, kv_head, HEADS, GROUP, PADDED, BLOCK_M, 0, REST, REST + HEAD)
        here = tl.minimum(position0 + tl.arange(0, BLOCK_M) // PADDED, stop0 - 1)
        last = tl.zeros_like(here) + stop0 - 1
        if CAUSAL:
            last = here
        early = tl.zeros_like(here) + first0
        if WINDOW > 0:
            early = tl.maximum(early, here - WINDOW + 1)
        base = (slot * (KV // SHARE) + kv_head // SHARE) * capacity
        acc = tl.zeros((BLOCK_M, HEAD), tl.float32)
        peak = tl.full((BLOCK_M,), NOTHING, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        low = tl.maximum(split * SPLIT, lowest0 // BLOCK_N * BLOCK_N)
        high = tl.minimum((split + 1) * SPLIT, stop0)
        for tile in tl.range(low, high, BLOCK_N, num_stages=STAGES):
            k = k_desc.load([base + tile, REST])
            v = k
            if REST == 0:
                v = v_desc.load([base + tile, 0])
            key = tile + tl.arange(0, BLOCK_N)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            if REST > 0:
                k_rest = rest_desc.load([base + tile, 0])
                scores = tl.dot(q_rest, k_rest.T, scores, input_precision=PRECISION)
            seen = (key[None, :] <= last[:, None]) & (key[None, :] >= early[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            # Rows outside the block may hold anything, NaN included.
            v = tl.where(((key >= first0) & (key < stop0))[:, None], v, 0.0)
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_peak[:, None])
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            peak = new_peak
        to = at * split_limit + split
        tl.store(acc_ptr + to[:, None] * HEAD + tl.arange(0, HEAD)[None, :], acc, real[:, None])
        tl.store(sums_ptr + to * 2, peak, real)
        tl.store(sums_ptr + to * 2 + 1, total, real)


@triton.jit
def merge(
    acc_ptr,
    sums_ptr,
    starts_ptr,
    stops_ptr,
    firsts_ptr,
    out_ptr,
    split_limit,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    LIMIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weigh the partials of one row's head and divide; a padded row becomes zeros."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    stop = tl.load(stops_ptr + row).to(tl.int32)
    lowest = _lowest(tl.load(firsts_ptr + row).to(tl.int32), tl.load(starts_ptr + row).to(tl.int32), WINDOW)
    s = tl.arange(0, LIMIT)
    d = tl.arange(0, HEAD)
    used = (s >= lowest // SPLIT) & (s * SPLIT < stop)
    if PDL:
        gdc_wait()
    at = head * split_limit + s
    peaks = tl.load(sums_ptr + at * 2, used, NOTHING)
    totals = tl.load(sums_ptr + at * 2 + 1, used, 0.0)
    acc = tl.load(acc_ptr + at[:, None] * HEAD + d[None, :], used[:, None], 0.0)
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(totals * weights, 0)
    out = tl.sum(acc * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + head * HEAD + d, out.to(out_ptr.dtype.element_ty))
