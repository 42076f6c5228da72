"""Flash decoding on Hopper (compute capability 9.0): `attention.attend_splits`, with keys and values that come ahead.

The arithmetic is that of `attention`: a split's tiles one after the other, from a fresh start, in the same layouts.
What differs is when rows are asked for. Those that were there before this step wait for no kernel, so a program fills
its rings with them first and then waits for the queries; rows of this step follow.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.attention import NOTHING
from adapters.models.kernels.triton.hopper import bring

_NOTHING = gl.constexpr(NOTHING.value)


@gluon.jit
def _ask(desc, ring, come, number, row, STAGES: gl.constexpr, pred):
    """Tile `number` of those that this program reads goes to its place in the ring."""
    at = number % STAGES
    mbarrier.expect(come.index(at), desc.block_type.nbytes, pred=pred)
    bring(desc, [row, 0], come.index(at), ring.index(at), pred=pred)


@gluon.jit
def _row(at, base, page, after, split, kv_head, KV: gl.constexpr, PAGE: gl.constexpr):
    """Where the caches have key `at`, of `split` or of the one after it."""
    row = base + at
    if PAGE > 0:
        row = (gl.where(at // PAGE == split, page, after) * KV + kv_head) * PAGE + at % PAGE
    return row


@gluon.jit
def _page(pages_ptr, split, capacity, PAGE: gl.constexpr):
    page = split
    if PAGE > 0:
        page = gl.load(pages_ptr + split, mask=split < capacity // PAGE, other=0)
    return page


@gluon.jit
def _ask_first(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    k_come,
    v_come,
    read,
    low,
    high,
    places,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Of the tiles that fit into the rings, those from `low` to `high`. places: the run's first key, and as `_row`."""
    start, base, page, after, split, kv_head = places
    for ahead in gl.static_range(K_STAGES):
        row = _row(start + ahead * k_desc.block_type.shape[0], base, page, after, split, kv_head, KV, PAGE)
        wanted = (ahead >= low) & (ahead < high)
        _ask(k_desc, k_ring, k_come, read + ahead, row, K_STAGES, wanted)
        if ahead < V_STAGES:
            _ask(v_desc, v_ring, v_come, read + ahead, row, V_STAGES, wanted)


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_splits_ahead(
    q_ptr,
    k_desc,
    v_desc,
    tiles_ptr,
    acc_ptr,
    sums_ptr,
    pages_ptr,
    capacity,
    tile_limit,
    split_limit,
    scale,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    SPLIT: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    LIMIT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """As `attention.attend_splits`, of rows as they are (not coded), with tiles of 64 rows. PAGE: SPLIT, or 0.

    A slot's rows of this step follow each other in the batch, so what is `row0` positions before a tile's first is old.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 64
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    OF_SPLIT: gl.constexpr = SPLIT // BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD, HEAD // 8], [num_warps, 1], [1, 0])
    gl.static_assert(PAGE * (PAGE - SPLIT) == 0)
    gl.static_assert(V_STAGES <= K_STAGES)
    gl.static_assert(K_STAGES <= OF_SPLIT)
    if PDL:
        gdc_launch_dependents()
    k_ring = gl.allocate_shared_memory(dtype, [K_STAGES, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [V_STAGES, BLOCK_N, HEAD], v_desc.layout)
    k_come = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_come = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(K_STAGES):
        mbarrier.init(k_come.index(at), count=1)
    for at in gl.static_range(V_STAGES):
        mbarrier.init(v_come.index(at), count=1)
    t = gl.arange(0, LIMIT, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    ends = gl.load(tiles_ptr + t * 8 + 4, mask=t < tile_limit, other=2147483647)
    items = gl.load(tiles_ptr + (tile_limit - 1) * 8 + 4) * KV
    run = gl.cdiv(items, gl.num_programs(0))
    item = gl.program_id(0) * run
    stop_item = gl.minimum(item + run, items)
    read = 0  # tiles, so far
    while item < stop_item:
        tile = gl.sum((ends <= item // KV).to(gl.int32), 0)
        before = gl.max(gl.where(t < tile, ends, 0), 0)
        row0 = gl.load(tiles_ptr + tile * 8)
        count = gl.load(tiles_ptr + tile * 8 + 1)
        slot = gl.load(tiles_ptr + tile * 8 + 2)
        first = gl.load(tiles_ptr + tile * 8 + 3)
        last = first + count - 1
        splits = last // SPLIT + 1
        kv_head = (item - before * KV) // splits
        split = (item - before * KV) % splits
        here = gl.minimum(splits - split, stop_item - item)
        item += here
        base = (slot * KV + kv_head) * capacity
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        page = _page(pages, split, capacity, PAGE)
        after = _page(pages, split + 1, capacity, PAGE)
        start = split * SPLIT
        tiles = gl.cdiv(gl.minimum((split + here) * SPLIT, last + 1) - start, BLOCK_N)
        old = gl.minimum((first - row0 - start) // BLOCK_N, tiles)  # rounded towards zero: never more than there are
        places = (start, base, page, after, split, kv_head)
        _ask_first(k_desc, v_desc, k_ring, v_ring, k_come, v_come, read, 0, old, places, KV, PAGE, K_STAGES, V_STAGES)
        if PDL:
            gdc_wait()
        i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES))
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))
        real = (i // PADDED < count) & (i % PADDED < GROUP)
        of_head = ((row0 + i // PADDED) * HEADS + kv_head * GROUP + i % PADDED).to(gl.int64)
        q = gl.load(q_ptr + of_head[:, None] * HEAD + d[None, :], mask=real[:, None], other=0.0)
        if old < gl.minimum(tiles, K_STAGES):
            _ask_first(
                k_desc, v_desc, k_ring, v_ring, k_come, v_come, read, old, tiles, places, KV, PAGE, K_STAGES, V_STAGES
            )
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        position = gl.minimum(first + m // PADDED, last)
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        kept = (o // PADDED < count) & (o % PADDED < GROUP)
        to = ((row0 + o // PADDED) * HEADS + kv_head * GROUP + o % PADDED).to(gl.int64) * split_limit
        number = 0
        for at_split in range(split, split + here):
            acc = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
            peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
            for _ in range(gl.minimum(tiles - number, OF_SPLIT)):
                key0 = start + number * BLOCK_N
                k_at, v_at = (read + number) % K_STAGES, (read + number) % V_STAGES
                masked = key0 + BLOCK_N > first + 1
                mbarrier.wait(k_come.index(k_at), (read + number) // K_STAGES & 1)
                nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
                scores = warpgroup_mma(q, k_ring.index(k_at).permute((1, 0)), nothing, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
                coming = number + K_STAGES
                row = _row(start + coming * BLOCK_N, base, page, after, at_split, kv_head, KV, PAGE)
                _ask(k_desc, k_ring, k_come, read + coming, row, K_STAGES, coming < tiles)
                if masked:
                    key = key0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
                    scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
                new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
                spread = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES) + new_peak[:, None]
                scales = gl.full([BLOCK_M, BLOCK_N], 1.0, gl.float32, layout=SCORES) * scale
                weights = gl.exp2(gl.fma(scores, scales, -spread))
                fade = gl.exp2(peak - new_peak)
                total = gl.fma(total, fade, gl.sum(weights, 1))
                peak = new_peak
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
                mbarrier.wait(v_come.index(v_at), (read + number) // V_STAGES & 1)
                if masked:  # rows that nobody has written may hold anything
                    key = key0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ROWS))
                    v = v_ring.index(v_at).load(ROWS)
                    v_ring.index(v_at).store(gl.where((key <= last)[:, None], v, 0.0))
                    fence_async_shared()
                p = gl.convert_layout(weights.to(dtype), WEIGHTS)
                acc = warpgroup_mma(p, v_ring.index(v_at), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                coming = number + V_STAGES
                row = _row(start + coming * BLOCK_N, base, page, after, at_split, kv_head, KV, PAGE)
                _ask(v_desc, v_ring, v_come, read + coming, row, V_STAGES, coming < tiles)
                number += 1
            page = after
            after = _page(pages, at_split + 2, capacity, PAGE)
            e = gl.arange(0, HEAD, layout=gl.SliceLayout(0, OUT))
            gl.store(acc_ptr + (to + at_split)[:, None] * HEAD + e[None, :], acc, mask=kept[:, None])
            sums = sums_ptr + (to + at_split) * 2
            gl.store(sums, gl.convert_layout(peak, gl.SliceLayout(1, OUT)), mask=kept)
            gl.store(sums + 1, gl.convert_layout(total, gl.SliceLayout(1, OUT)), mask=kept)
        read += tiles
