"""Causal attention in Triton over key tiles at absolute positions, with one arithmetic for every row count.

The keys of a row fall into splits `[s * SPLIT, (s + 1) * SPLIT)` and these into tiles of BLOCK_N keys. Within a split
the softmax runs online, tile after tile, from a fresh start. The results of splits are then folded together in order
of s. With few rows each split is a work item of its own and `merge` folds (flash decoding). With many rows one
program walks through all splits and folds in its registers. Both do the same operations in the same order on each
row, written with explicit `fma` so that a compiler cannot contract them differently. Keys past a row's own position
contribute exact zeros. Lengths come from device memory, so one graph serves every context length.

The query heads of one key head may be too many for a tile. Then SHARE programs have some of them each, and KV counts
all of these parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.attention_tiles import load_keys, load_q, row_of
from adapters.models.kernels.triton.online_softmax import NOTHING, absorb_tile, fold_split, join_sink, lowest_key


@triton.jit
def _close_split(at, acc, peak, total, all_acc, all_peak, all_total, to, real, acc_ptr, sums_ptr, FOLD: tl.constexpr):
    """Complete a split: fold it into the splits before, or leave it in memory at place `at` of its rows."""
    if FOLD:
        all_acc, all_peak, all_total = fold_split(acc, peak, total, all_acc, all_peak, all_total)
    else:
        d = tl.arange(0, acc.shape[1])
        tl.store(acc_ptr + (to + at)[:, None] * acc.shape[1] + d[None, :], acc, real[:, None])
        tl.store(sums_ptr + (to + at) * 2, peak, real)
        tl.store(sums_ptr + (to + at) * 2 + 1, total, real)
    return all_acc, all_peak, all_total


@triton.jit
def _walk(
    q,
    q_rest,
    k_desc,
    v_desc,
    k_scales,
    v_scales,
    rest_desc,
    base,
    pages_ptr,
    kv_head,
    start,
    stop,
    first,
    last,
    position,
    scale,
    to,
    split_limit,
    real,
    acc_ptr,
    sums_ptr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FOLD: tl.constexpr,
    KV: tl.constexpr,
    PAGE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_APART: tl.constexpr,
    V_APART: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,
):
    """Process the keys `[start, stop)` of a tile of rows, from the start of a split on; return the fold (if FOLD).

    Tiles that every row sees whole come first, without masks and with copies in flight. The few tiles at the end
    follow. With a window all tiles are masked. Tiles that a row does not see add exact zeros to it.
    """
    no_acc = tl.zeros(q.shape, tl.float32)
    nothing = tl.full((q.shape[0],), NOTHING, tl.float32)
    no_total = tl.zeros((q.shape[0],), tl.float32)
    acc = no_acc
    peak = nothing
    total = no_total
    all_acc = no_acc
    all_peak = nothing
    all_total = no_total
    clear = start if WINDOW > 0 else tl.minimum((first + 1) // BLOCK_N * BLOCK_N, stop)
    AHEAD: tl.constexpr = STAGES if WINDOW > 0 else 1
    CODED: tl.constexpr = K_KIND > 0
    for at in tl.range(start, clear, BLOCK_N, num_stages=STAGES):
        row = row_of(at, base, pages_ptr, kv_head, KV, PAGE)
        k, v, k_rest, k_scale, v_scale = load_keys(
            k_desc, v_desc, rest_desc, k_scales, v_scales, row, q.shape[1], BLOCK_N, K_KIND, V_KIND, K_APART, V_APART,
            q.dtype, REST,
        )  # fmt: skip
        key = at + tl.arange(0, BLOCK_N)
        acc, peak, total = absorb_tile(
            q, k, v, k_scale, v_scale, last, key, position, acc, peak, total, scale, False, PRECISION, CODED, 0, CAP,
            q_rest, k_rest, REST,
        )  # fmt: skip
        if (at + BLOCK_N) % SPLIT == 0:
            all_acc, all_peak, all_total = _close_split(
                at // SPLIT % split_limit, acc, peak, total, all_acc, all_peak, all_total, to, real, acc_ptr,
                sums_ptr, FOLD,
            )  # fmt: skip
            acc = no_acc
            peak = nothing
            total = no_total
    for at in tl.range(tl.maximum(clear, start), stop, BLOCK_N, num_stages=AHEAD):
        row = row_of(at, base, pages_ptr, kv_head, KV, PAGE)
        k, v, k_rest, k_scale, v_scale = load_keys(
            k_desc, v_desc, rest_desc, k_scales, v_scales, row, q.shape[1], BLOCK_N, K_KIND, V_KIND, K_APART, V_APART,
            q.dtype, REST,
        )  # fmt: skip
        key = at + tl.arange(0, BLOCK_N)
        acc, peak, total = absorb_tile(
            q, k, v, k_scale, v_scale, last, key, position, acc, peak, total, scale, True, PRECISION, CODED, WINDOW,
            CAP, q_rest, k_rest, REST,
        )  # fmt: skip
        if (at + BLOCK_N) % SPLIT == 0:
            all_acc, all_peak, all_total = _close_split(
                at // SPLIT % split_limit, acc, peak, total, all_acc, all_peak, all_total, to, real, acc_ptr,
                sums_ptr, FOLD,
            )  # fmt: skip
            acc = no_acc
            peak = nothing
            total = no_total
    if tl.cdiv(stop, BLOCK_N) * BLOCK_N % SPLIT != 0:
        all_acc, all_peak, all_total = _close_split(
            (stop - 1) // SPLIT % split_limit, acc, peak, total, all_acc, all_peak, all_total, to, real, acc_ptr,
            sums_ptr, FOLD,
        )  # fmt: skip
    return all_acc, all_peak, all_total


@triton.jit(do_not_specialize=["tile_limit"])
def attend_chain(
    q_ptr,
    k_desc,
    v_desc,
    k_scales,
    v_scales,
    rest_desc,
    tiles_ptr,
    out_ptr,
    pages_ptr,
    sinks_ptr,
    capacity,
    tile_limit,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    PAGE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_APART: tl.constexpr,
    V_APART: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,
    SHARE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Process one tile of rows, the query heads of one key head, and all splits in order. The longest tiles start
    first.
    """
    if PDL:
        gdc_launch_dependents()
    tile = tile_limit - 1 - tl.program_id(0) // KV
    kv_head = tl.program_id(0) % KV
    row0 = tl.load(tiles_ptr + tile * 8)
    count = tl.load(tiles_ptr + tile * 8 + 1)
    slot = tl.load(tiles_ptr + tile * 8 + 2)
    first = tl.load(tiles_ptr + tile * 8 + 3)
    if PDL:
        gdc_wait()
    if count > 0:
        q, real, at = load_q(q_ptr, row0, count, kv_head, HEADS, GROUP, PADDED, BLOCK_M, REST, HEAD, REST + HEAD)
        q_rest = q
        if REST > 0:
            q_rest, _, __ = load_q(q_ptr, row0, count, kv_head, HEADS, GROUP, PADDED, BLOCK_M, 0, REST, REST + HEAD)
        last = tl.where(first < 0, -1, first + count - 1)
        position = tl.minimum(first + tl.arange(0, BLOCK_M) // PADDED, last)
        key_head = kv_head // SHARE
        base = (slot * (KV // SHARE) + key_head) * capacity
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        start = lowest_key(first, WINDOW) // BLOCK_N * BLOCK_N
        acc, peak, total = _walk(
            q, q_rest, k_desc, v_desc, k_scales, v_scales, rest_desc, base, pages, key_head, start, last + 1, first,
            last, position, scale, at, 1, real, out_ptr, out_ptr, BLOCK_N, SPLIT, STAGES, PRECISION, True, KV // SHARE,
            PAGE, K_KIND, V_KIND, K_APART, V_APART, WINDOW, CAP, REST,
        )  # fmt: skip
        if SINKS:
            own = kv_head * GROUP + tl.arange(0, BLOCK_M) % PADDED
            sink = tl.load(sinks_ptr + own, real, 0.0) * 1.4426950408889634
            acc, peak, total = join_sink(sink, acc, peak, total)
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = at[:, None] * HEAD + tl.arange(0, HEAD)[None, :]
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), real[:, None])


@triton.jit(do_not_specialize=["tile_limit"])
def attend_splits(
    q_ptr,
    k_desc,
    v_desc,
    k_scales,
    v_scales,
    rest_desc,
    tiles_ptr,
    acc_ptr,
    sums_ptr,
    pages_ptr,
    capacity,
    tile_limit,
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
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    PAGE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    K_APART: tl.constexpr,
    V_APART: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    REST: tl.constexpr,
    SHARE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Process the key splits of all (tile of rows, key head) pairs, dealt out evenly to the programs.

    Each split leaves a partial: acc float32 `[bucket, HEADS, split_limit, HEAD]`, and its peak and total in sums
    float32 `[bucket, HEADS, split_limit, 2]`. How the splits are dealt out changes nothing, because each starts
    afresh. split_limit: the most splits that a tile has. Split s of a row is at place s % split_limit. WINDOW: tiles
    were planned for it.
    """
    if PDL:
        gdc_launch_dependents()
    t = tl.arange(0, LIMIT)
    ends = tl.load(tiles_ptr + t * 8 + 4, t < tile_limit, 2147483647)
    items = tl.load(tiles_ptr + (tile_limit - 1) * 8 + 4) * KV
    run = tl.cdiv(items, tl.num_programs(0))
    item = tl.program_id(0) * run
    stop_item = tl.minimum(item + run, items)
    while item < stop_item:
        tile = tl.sum((ends <= item // KV).to(tl.int32), 0)
        before = tl.max(tl.where(t < tile, ends, 0), 0)
        row0 = tl.load(tiles_ptr + tile * 8)
        count = tl.load(tiles_ptr + tile * 8 + 1)
        slot = tl.load(tiles_ptr + tile * 8 + 2)
        first = tl.load(tiles_ptr + tile * 8 + 3)
        last = first + count - 1
        lowest = lowest_key(first, WINDOW)
        splits = last // SPLIT + 1 - lowest // SPLIT
        kv_head = (item - before * KV) // splits
        split = (item - before * KV) % splits
        here = tl.minimum(splits - split, stop_item - item)
        split += lowest // SPLIT
        item += here
        if PDL:
            gdc_wait()
        q, real, at = load_q(q_ptr, row0, count, kv_head, HEADS, GROUP, PADDED, BLOCK_M, REST, HEAD, REST + HEAD)
        q_rest = q
        if REST > 0:
            q_rest, _, __ = load_q(q_ptr, row0, count, kv_head, HEADS, GROUP, PADDED, BLOCK_M, 0, REST, REST + HEAD)
        position = tl.minimum(first + tl.arange(0, BLOCK_M) // PADDED, last)
        key_head = kv_head // SHARE
        base = (slot * (KV // SHARE) + key_head) * capacity
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        stop = tl.minimum((split + here) * SPLIT, last + 1)
        start = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
        _walk(
            q, q_rest, k_desc, v_desc, k_scales, v_scales, rest_desc, base, pages, key_head, start, stop, first, last,
            position, scale, at * split_limit, split_limit, real, acc_ptr, sums_ptr, BLOCK_N, SPLIT, STAGES, PRECISION,
            False, KV // SHARE, PAGE, K_KIND, V_KIND, K_APART, V_APART, WINDOW, CAP, REST,
        )  # fmt: skip


@triton.jit
def merge(
    acc_ptr,
    sums_ptr,
    positions_ptr,
    out_ptr,
    sinks_ptr,
    split_limit,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fold the splits of one row's head in order and divide; a padded row becomes zeros."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    d = tl.arange(0, HEAD)[None, :]
    position = tl.load(positions_ptr + row).to(tl.int32)
    splits = (position + SPLIT) // SPLIT
    if PDL:
        gdc_wait()
    all_acc = tl.zeros((1, HEAD), tl.float32)
    all_peak = tl.full((1,), NOTHING, tl.float32)
    all_total = tl.zeros((1,), tl.float32)
    for group in range(lowest_key(position, WINDOW) // SPLIT, splits, AT_ONCE):
        # Past the last split the partial is "nothing", which folds in as exact zeros; this many loads can run at once.
        partials = ()
        for j in tl.static_range(AT_ONCE):
            s = group + j + tl.arange(0, 1)
            at = head * split_limit + s % split_limit
            acc = tl.load(acc_ptr + at[:, None] * HEAD + d, (s < splits)[:, None], 0.0)
            peak = tl.load(sums_ptr + at * 2, s < splits, NOTHING)
            total = tl.load(sums_ptr + at * 2 + 1, s < splits, 0.0)
            partials = partials + ((acc, peak, total),)  # noqa: RUF005 - Triton knows no other way
        for j in tl.static_range(AT_ONCE):
            acc, peak, total = partials[j]
            all_acc, all_peak, all_total = fold_split(acc, peak, total, all_acc, all_peak, all_total)
    if SINKS:
        sink = tl.load(sinks_ptr + tl.program_id(1) + tl.arange(0, 1)) * 1.4426950408889634
        all_acc, all_peak, all_total = join_sink(sink, all_acc, all_peak, all_total)
    out = all_acc / tl.where(all_total > 0.0, all_total, 1.0)[:, None]
    tl.store(out_ptr + head * HEAD + d, out.to(out_ptr.dtype.element_ty))
