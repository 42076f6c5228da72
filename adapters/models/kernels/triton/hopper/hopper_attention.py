"""Flash decoding on Hopper (compute capability 9.0): `attention.attend_splits` that loads keys and values ahead.

The arithmetic is that of `attention`: a split's tiles one after the other, from a fresh start, in the same layouts.
What differs is when rows are loaded. Rows of earlier steps depend on no kernel of this step. So a program fills its
rings with them first, then waits for the queries, and loads rows of this step last. That is right as long as a step
begins with kernels that are launched without PDL: none of them begins before everything before the step has ended.
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

from adapters.models.kernels.triton.hopper.hopper_merge import clear_padding, find_padding, merge_rows
from adapters.models.kernels.triton.hopper.hopper_ring import make_ring, request_tile
from adapters.models.kernels.triton.online_softmax import NOTHING, lowest_key

_NOTHING = gl.constexpr(NOTHING.value)
_lowest_key = gluon.jit(lowest_key.fn)


@gluon.jit
def _row(at, split, held, source, KV: gl.constexpr, SPLIT: gl.constexpr, PAGE: gl.constexpr):
    """Return the cache row of key `at`, which belongs to `split` or to the one after it.

    held: the pages of both, where a page has SPLIT rows. Smaller pages are looked up for each tile. source: see
    `_ask_first`.
    """
    page, after = held
    base, pages_ptr, capacity, kv_head = source
    row = base + at
    if PAGE == SPLIT:
        row = (gl.where(at // PAGE == split, page, after) * KV + kv_head) * PAGE + at % PAGE
    elif PAGE > 0:
        own = gl.load(pages_ptr + at // PAGE, mask=at < capacity, other=0)
        row = (own * KV + kv_head) * PAGE + at % PAGE
    return row


@gluon.jit
def _page(pages_ptr, split, capacity, SPLIT: gl.constexpr, PAGE: gl.constexpr):
    page = split
    if PAGE == SPLIT:
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
    start,
    split,
    held,
    source,
    KV: gl.constexpr,
    SPLIT: gl.constexpr,
    PAGE: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    column=0,
):
    """Load the tiles from `low` to `high` that fit into the rings. start: the run's first key, in `split`. column: of
    values, the first one of the program.

    source: the slot's first row where rows are not paged, its pages, its capacity, and the key head.
    """
    for ahead in gl.static_range(K_STAGES):
        row = _row(start + ahead * k_desc.block_type.shape[0], split, held, source, KV, SPLIT, PAGE)
        wanted = (ahead >= low) & (ahead < high)
        request_tile(k_desc, k_ring, k_come, read + ahead, row, K_STAGES, wanted)
        if ahead < V_STAGES:
            request_tile(v_desc, v_ring, v_come, read + ahead, row, V_STAGES, wanted, column)


@gluon.jit
def _add_keys(weights):
    """Return the sum of each row's weights, in the order of `attention`.

    There tiles of 32 keys are cut between warps, eight keys each, and the sums of warps are added crosswise.
    """
    if weights.shape[1] > 32:
        total = gl.sum(weights, 1)
    else:
        eights = gl.sum(weights.reshape((weights.shape[0], 2, 2, 8)), 3)
        total = gl.convert_layout(gl.sum(gl.sum(eights, 1), 1), gl.SliceLayout(1, weights.type.layout))
    return total


@gluon.jit
def _weigh_scores(scores, masked, key0, position, peak, total, scale, WINDOW: gl.constexpr = 0):
    """Return the weights of a tile's keys from `key0` on, the factor by which earlier results fade, and new peak and
    total. WINDOW: see `AttentionRule`.
    """
    layout: gl.constexpr = scores.type.layout
    if masked:
        key = key0 + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    spread = gl.zeros(scores.shape, gl.float32, layout=layout) + new_peak[:, None]
    scales = gl.full(scores.shape, 1.0, gl.float32, layout=layout) * scale
    weights = gl.exp2(gl.fma(scores, scales, -spread))
    fade = gl.exp2(peak - new_peak)
    return weights, fade, new_peak, gl.fma(total, fade, _add_keys(weights))


@gluon.jit
def _forget(values, most, num_warps: gl.constexpr, least=0):
    """Set a tile's rows before number `least` and behind number `most` to zero.

    They are behind a window, or they have not been written. So they may hold anything.
    """
    HEAD: gl.constexpr = values.shape[1]
    ACROSS: gl.constexpr = min(32, HEAD // 8)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [num_warps, 1], [1, 0])
    row = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, ROWS))
    values.store(gl.where(((row >= least) & (row <= most))[:, None], values.load(ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def _fold(all_acc, acc, peak, total, all_peak, all_total):
    """Add a split to the fold of those before, as `online_softmax.fold_split` does."""
    layout: gl.constexpr = acc.type.layout
    new_peak = gl.maximum(all_peak, peak)
    old = gl.exp2(all_peak - new_peak)
    new = gl.exp2(peak - new_peak)
    all_total = gl.fma(total, new, all_total * old)
    spread = gl.zeros(acc.shape, gl.float32, layout=layout) + gl.convert_layout(new, gl.SliceLayout(1, layout))[:, None]
    faded = all_acc * gl.convert_layout(old, gl.SliceLayout(1, layout))[:, None]
    return gl.fma(acc, spread, faded), new_peak, all_total


@gluon.jit
def _whose(tiles_ptr, ends, t, item, KV: gl.constexpr):
    """Return the tile of rows that an item is of: its first row, rows, slot, first position; the key head, or part of
    one, out of KV; how many splits the tile has, the number of its first one, and which of these splits the item is.
    """
    tile = gl.sum((ends <= item // KV).to(gl.int32), 0)
    before = gl.max(gl.where(t < tile, ends, 0), 0)
    splits = gl.sum(gl.where(t == tile, ends, 0), 0) - before
    item -= before * KV
    row0 = gl.load(tiles_ptr + tile * 8)
    count = gl.load(tiles_ptr + tile * 8 + 1)
    slot = gl.load(tiles_ptr + tile * 8 + 2)
    first = gl.load(tiles_ptr + tile * 8 + 3)
    low = gl.load(tiles_ptr + tile * 8 + 5)
    return row0, count, slot, first, item // splits, splits, low, item % splits


@gluon.constexpr_function
def _layout_of_queries(scores, are_shared, num_warps):
    """Return the layout that queries are loaded in: that of the scores' left side, or rows for shared memory."""
    rows = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    return rows if are_shared else gl.DotOperandLayout(0, scores, 2)


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_splits_ahead(  # noqa: C901 - branches of constants
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
    left_ptr,
    out_ptr,
    sinks_ptr,
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
    AT_ONCE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `attention.attend_splits`, for rows that are not coded, in tiles of 64 rows.

    A slot's rows of this step are consecutive in the batch. So the keys up to `row0` positions before a tile's first
    row were written by earlier steps. A tile of several slots (`step_tiles.plan_shared_tiles`) has only splits that all
    of its rows see whole, so none of its keys is masked.
    AT_ONCE: how many partials are merged together. The program that writes the last partial of a tile and key head
    merges them; 0: no program does.
    With eight warps, two share a row of the output: see `hopper_chain`. WINDOW: tiles were planned for it.
    Registers do not hold queries and the output of heads of 512. So queries are in shared memory, and v_desc has half
    of a head's columns: two programs compute the same scores, and half of the output each.
    left: int32, KV numbers for each row of the bucket: how many partials have been written. It is zero before and
    after the launch.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 64
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    SIZE: gl.constexpr = v_desc.block_type.shape[1]
    PARTS: gl.constexpr = HEAD // SIZE
    OF_SPLIT: gl.constexpr = SPLIT // BLOCK_N
    COLUMNS: gl.constexpr = num_warps // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLUMNS], [16, SIZE // COLUMNS, 16])
    QUERIES: gl.constexpr = _layout_of_queries(SCORES, PARTS > 1, num_warps)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    gl.static_assert(PAGE % BLOCK_N == 0)
    gl.static_assert(PAGE <= SPLIT)
    gl.static_assert(V_STAGES <= K_STAGES)
    gl.static_assert(K_STAGES <= OF_SPLIT)
    if PDL:
        gdc_launch_dependents()
    k_ring, k_come = make_ring(k_desc, K_STAGES)
    v_ring, v_come = make_ring(v_desc, V_STAGES)
    if PARTS > 1:
        q_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD], k_desc.layout)
    t = gl.arange(0, LIMIT, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    ends = gl.load(tiles_ptr + t * 8 + 4, mask=t < tile_limit, other=2147483647)
    items = gl.load(tiles_ptr + (tile_limit - 1) * 8 + 4) * (KV * PARTS)
    has_padding = False
    if AT_ONCE > 0:
        has_padding = find_padding(tiles_ptr, t, tile_limit)  # long before anything waits for it
    run = gl.cdiv(items, gl.num_programs(0))
    item = gl.program_id(0) * run
    stop_item = gl.minimum(item + run, items)
    read = 0  # tiles, so far
    while item < stop_item:
        row0, count, slot, first, part, splits, low, offset = _whose(tiles_ptr, ends, t, item, KV * PARTS)
        kv_head = part // PARTS
        column = part % PARTS * SIZE
        last = first + count - 1
        here = gl.minimum(splits - offset, stop_item - item)
        split = low + offset
        item += here
        base = (slot * KV + kv_head) * capacity
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        page = _page(pages, split, capacity, SPLIT, PAGE)
        after = _page(pages, split + 1, capacity, SPLIT, PAGE)
        start = gl.maximum(split * SPLIT, _lowest_key(first, WINDOW) // BLOCK_N * BLOCK_N)
        tiles = gl.cdiv(gl.minimum((split + here) * SPLIT, last + 1) - start, BLOCK_N)
        old = gl.minimum((first - row0 - start) // BLOCK_N, tiles)  # rounded towards zero: never more than there are
        source = (base, pages, capacity, kv_head)
        _ask_first(
            k_desc, v_desc, k_ring, v_ring, k_come, v_come, read, 0, old, start, split, (page, after), source, KV,
            SPLIT, PAGE, K_STAGES, V_STAGES, column,
        )  # fmt: skip
        if PDL:
            gdc_wait()
        i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES))
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))
        real = (i // PADDED < count) & (i % PADDED < GROUP)
        of_head = ((row0 + i // PADDED) * HEADS + kv_head * GROUP + i % PADDED).to(gl.int64)
        q = gl.load(q_ptr + of_head[:, None] * HEAD + d[None, :], mask=real[:, None], other=0.0)
        if PARTS > 1:
            q_shared.store(q)
            fence_async_shared()
            q = q_shared
        if old < gl.minimum(tiles, K_STAGES):
            _ask_first(
                k_desc, v_desc, k_ring, v_ring, k_come, v_come, read, old, tiles, start, split, (page, after), source,
                KV, SPLIT, PAGE, K_STAGES, V_STAGES, column,
            )  # fmt: skip
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        position = gl.minimum(first + m // PADDED, last)
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        kept = (o // PADDED < count) & (o % PADDED < GROUP)
        to = ((row0 + o // PADDED) * HEADS + kv_head * GROUP + o % PADDED).to(gl.int64) * split_limit
        number = 0
        for at_split in range(split, split + here):
            acc = gl.zeros([BLOCK_M, SIZE], gl.float32, layout=OUT)
            peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
            left_here = gl.minimum(tiles, ((at_split + 1) * SPLIT - start) // BLOCK_N) - number
            for _ in range(left_here):
                key0 = start + number * BLOCK_N
                k_at = (read + number) % K_STAGES
                v_at = (read + number) % V_STAGES
                masked = (key0 + BLOCK_N > first + 1) | (key0 < _lowest_key(last, WINDOW))
                mbarrier.wait(k_come.index(k_at), (read + number) // K_STAGES & 1)
                nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
                scores = warpgroup_mma(q, k_ring.index(k_at).permute((1, 0)), nothing, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
                coming = number + K_STAGES
                row = _row(start + coming * BLOCK_N, at_split, (page, after), source, KV, SPLIT, PAGE)
                request_tile(k_desc, k_ring, k_come, read + coming, row, K_STAGES, coming < tiles)
                weights, fade, peak, total = _weigh_scores(scores, masked, key0, position, peak, total, scale, WINDOW)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
                mbarrier.wait(v_come.index(v_at), (read + number) // V_STAGES & 1)
                if masked:
                    _forget(v_ring.index(v_at), last - key0, num_warps, _lowest_key(first, WINDOW) - key0)
                p = gl.convert_layout(weights.to(dtype), WEIGHTS)
                acc = warpgroup_mma(p, v_ring.index(v_at), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                coming = number + V_STAGES
                row = _row(start + coming * BLOCK_N, at_split, (page, after), source, KV, SPLIT, PAGE)
                request_tile(v_desc, v_ring, v_come, read + coming, row, V_STAGES, coming < tiles, column)
                number += 1
            page = after
            after = _page(pages, at_split + 2, capacity, SPLIT, PAGE)
            e = column + gl.arange(0, SIZE, layout=gl.SliceLayout(0, OUT))
            place = to + at_split % split_limit
            gl.store(acc_ptr + place[:, None] * HEAD + e[None, :], acc, mask=kept[:, None])
            sums = sums_ptr + place * 2
            gl.store(sums, gl.convert_layout(peak, gl.SliceLayout(1, OUT)), mask=kept)
            gl.store(sums + 1, gl.convert_layout(total, gl.SliceLayout(1, OUT)), mask=kept)
        read += tiles
        if AT_ONCE > 0:
            merge_rows(
                acc_ptr, sums_ptr, out_ptr, sinks_ptr, left_ptr, row0, count, first, kv_head, here, splits * PARTS,
                split_limit, HEADS, KV, GROUP, PADDED, HEAD, SPLIT, AT_ONCE, WINDOW, SINKS, num_warps,
            )  # fmt: skip
    if AT_ONCE > 0 and has_padding:
        clear_padding(out_ptr, tiles_ptr, tile_limit, HEADS, KV, GROUP, PADDED, HEAD, PDL, num_warps)
