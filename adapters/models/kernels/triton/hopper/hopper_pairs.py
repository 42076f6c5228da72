"""Attention of many rows on Hopper (compute capability 9.0), for heads of up to 128: `hopper_chain` in pairs of tiles.

The arithmetic is that of `attention`, tile after tile. What differs is that keys of two tiles are multiplied at once.
Such a product reads its queries half as often from shared memory, and a pair has half the waits of two tiles.

A step begins with the scores of its pair. It computes the weights of the first tile, and begins to add its values. It
computes the weights of the second tile meanwhile. Then it adds the values of the second tile, and begins the product
of the queries and the next pair. Weights of the other consumer are computed while these two run.

The assembler moves arithmetic across the wait for a product as it likes, but not across a loop. So the wait for values,
which is a loop, stands between weights and the end of products. The last pairs, of which rows see a part, have a loop
of their own.
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

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _forget, _weigh_scores
from adapters.models.kernels.triton.hopper.hopper_chain import _fold
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers

BLOCK_M = gl.constexpr(64)  # rows of queries of one consumer: heads of one key head, row after row


@gluon.jit
def _fill_pairs(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    bars,
    pages_ptr,
    base,
    kv_head,
    pairs,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Bring all pairs of keys and the two tiles of values of each, as soon as there is room for them."""
    k_come, k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    for pair in range(pairs):
        at = pair * 2 * BLOCK_N
        row = base + at
        if PAGE > 0:
            row = (gl.load(pages_ptr + at // PAGE) * KV + kv_head) * PAGE + at % PAGE
        k_at = pair % K_STAGES
        mbarrier.wait(k_free.index(k_at), (pair // K_STAGES & 1) ^ 1)
        mbarrier.expect(k_come.index(k_at), k_desc.block_type.nbytes)
        bring(k_desc, [row, 0], k_come.index(k_at), k_ring.index(k_at))
        for half in gl.static_range(2):
            number = 2 * pair + half
            v_at = number % V_STAGES
            mbarrier.wait(v_free.index(v_at), (number // V_STAGES & 1) ^ 1)
            mbarrier.expect(v_come.index(v_at), v_desc.block_type.nbytes)
            bring(v_desc, [row + half * BLOCK_N, 0], v_come.index(v_at), v_ring.index(v_at))


@gluon.jit
def _multiply_pair(q, k_ring, k_come, pair, nothing, STAGES: gl.constexpr):
    """Begin the product of queries and the keys of a pair of tiles."""
    at = pair % STAGES
    mbarrier.wait(k_come.index(at), pair // STAGES & 1)
    return warpgroup_mma(q, k_ring.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _halve(scores, LAYOUT: gl.constexpr):
    """Return the scores of the first tile of a pair, and of the second."""
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1] // 2
    first, second = gl.split(scores.reshape([M, 2, N]).permute((0, 2, 1)))
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)


@gluon.jit
def _fade(acc, fade):
    layout: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(fade, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _see_values(v_ring, v_come, number, last, ENDS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Wait for a tile of values. ENDS: its rows behind `last` become zeros. WARPS: of a consumer."""
    BLOCK_N: gl.constexpr = v_ring.shape[1]
    at = number % STAGES
    mbarrier.wait(v_come.index(at), number // STAGES & 1)
    if ENDS:
        if (number + 1) * BLOCK_N > last + 1:
            _forget(v_ring.index(at), last - number * BLOCK_N, WARPS)


@gluon.jit
def _add_pair(
    pair,
    scores,
    acc,
    sums,
    folded,
    v_ring,
    bars,
    position,
    last,
    scale,
    SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
    OF_SPLIT: gl.constexpr,
    MASKED: gl.constexpr,
    ENDS: gl.constexpr,
    V_STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Add the first tile of a pair, and begin to add the second one.

    MASKED: rows do not see all keys. ENDS: `last` is in this pair.
    """
    _k_come, _k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = v_ring.shape[1]
    dtype: gl.constexpr = v_ring.dtype
    number = 2 * pair
    opens = pair % OF_SPLIT == 0
    first, second = _halve(scores, SCORES)
    peak = gl.where(opens, _NOTHING, sums[0])
    total = gl.where(opens, 0.0, sums[1])
    weights, fade, peak, total = _weigh_scores(first, MASKED, number * BLOCK_N, position, peak, total, scale)
    p = gl.convert_layout(weights.to(dtype), WEIGHTS)
    all_acc, all_peak, all_total = folded
    if opens:
        all_acc, all_peak, all_total = _fold(all_acc, acc, sums[0], sums[1], all_peak, all_total)
    else:
        acc = _fade(acc, fade)
    _see_values(v_ring, v_come, number, last, ENDS, V_STAGES, WARPS)
    at = number % V_STAGES
    adding = warpgroup_mma(p, v_ring.index(at), acc, use_acc=pair % OF_SPLIT > 0, is_async=True)
    weights, fade, peak, total = _weigh_scores(second, MASKED, (number + 1) * BLOCK_N, position, peak, total, scale)
    coming = gl.convert_layout(weights.to(dtype), WEIGHTS)
    _see_values(v_ring, v_come, number + 1, last, ENDS, V_STAGES, WARPS)
    acc, p, coming = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p, coming))
    mbarrier.arrive(v_free.index(at), count=1)
    acc = _fade(acc, fade)
    adding = warpgroup_mma(coming, v_ring.index((number + 1) % V_STAGES), acc, is_async=True)
    return coming, adding, (peak, total), (all_acc, all_peak, all_total)


@gluon.jit
def _walk_pairs(
    low,
    high,
    scores,
    acc,
    sums,
    folded,
    q,
    k_ring,
    v_ring,
    bars,
    position,
    last,
    scale,
    SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
    OF_SPLIT: gl.constexpr,
    MASKED: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Add the pairs from `low` to `high`, and multiply the keys of the pair after each.

    scores: of pair `low`. acc: the sums before it. sums: their peak and total. folded: the splits before theirs.
    """
    k_come, k_free, _v_come, v_free = bars
    OF_PAIR: gl.constexpr = scores.type.layout
    nothing = gl.zeros(scores.shape, gl.float32, layout=OF_PAIR)
    for pair in range(low, high):
        p, adding, sums, folded = _add_pair(
            pair, scores, acc, sums, folded, v_ring, bars, position, last, scale, SCORES, WEIGHTS, OF_SPLIT, MASKED,
            False, V_STAGES, WARPS,
        )  # fmt: skip
        begun = _multiply_pair(q, k_ring, k_come, pair + 1, nothing, K_STAGES)
        scores, acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(begun, adding, p))
        mbarrier.arrive(v_free.index((2 * pair + 1) % V_STAGES), count=1)
        mbarrier.arrive(k_free.index((pair + 1) % K_STAGES), count=1)
    return scores, acc, sums, folded


@gluon.jit
def _consume_pairs(
    q_ptr,
    out_ptr,
    k_ring,
    v_ring,
    queries,
    bars,
    tile_rows,
    kv_head,
    scale,
    NUMBER: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Compute consumer NUMBER's part of a tile. tile_rows: as in `hopper_chain`, but pairs of tiles of keys.

    COLUMNS: as there.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = v_ring.shape[1]
    HEAD: gl.constexpr = v_ring.shape[2]
    OF_SPLIT: gl.constexpr = SPLIT // (2 * BLOCK_N)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * COLUMNS, 1], [16, BLOCK_N, 16])
    OF_PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * COLUMNS, 1], [16, 2 * BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLUMNS], [16, HEAD // COLUMNS, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD, HEAD // 8], [4 * COLUMNS, 1], [1, 0])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    row0, count, first, begins, last, pairs = tile_rows
    begins += NUMBER * BLOCK_M
    if pairs > 0:
        i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOADED))
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, LOADED))
        row = (begins + i) // GROUP
        of_head = ((row0 + row) * HEADS + kv_head * GROUP + (begins + i) % GROUP).to(gl.int64)
        q = queries.index(NUMBER)
        q.store(gl.load(q_ptr + of_head[:, None] * HEAD + d[None, :], mask=(row < count)[:, None], other=0.0))
        fence_async_shared()
        program_barrier()
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        begin = first + begins // GROUP
        position = gl.minimum(first + (begins + m) // GROUP, last)
        k_come, k_free, _v_come, _v_free = bars
        nothing = gl.zeros([BLOCK_M, 2 * BLOCK_N], gl.float32, layout=OF_PAIR)
        acc = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
        no_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
        no_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        begun = _multiply_pair(q, k_ring, k_come, 0, nothing, K_STAGES)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
        mbarrier.arrive(k_free.index(0), count=1)
        sums = (no_peak, no_total)
        folded = (acc, no_peak, no_total)
        end = pairs - 1
        clear = gl.minimum(gl.maximum((begin + 1) // (2 * BLOCK_N), 0), end)  # pairs that no row's end is in
        scores, acc, sums, folded = _walk_pairs(
            0, clear, scores, acc, sums, folded, q, k_ring, v_ring, bars, position, last, scale, SCORES, WEIGHTS,
            OF_SPLIT, False, K_STAGES, V_STAGES, 4 * COLUMNS,
        )  # fmt: skip
        scores, acc, sums, folded = _walk_pairs(
            clear, end, scores, acc, sums, folded, q, k_ring, v_ring, bars, position, last, scale, SCORES, WEIGHTS,
            OF_SPLIT, True, K_STAGES, V_STAGES, 4 * COLUMNS,
        )  # fmt: skip
        p, adding, sums, folded = _add_pair(
            end, scores, acc, sums, folded, v_ring, bars, position, last, scale, SCORES, WEIGHTS, OF_SPLIT, True,
            True, V_STAGES, 4 * COLUMNS,
        )  # fmt: skip
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p))
        all_acc, _peak, all_total = _fold(folded[0], acc, sums[0], sums[1], folded[1], folded[2])
        total = gl.convert_layout(all_total, gl.SliceLayout(1, OUT))
        out = all_acc / gl.where(total > 0.0, total, 1.0)[:, None]
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        e = gl.arange(0, HEAD, layout=gl.SliceLayout(0, OUT))
        own = (begins + o) // GROUP
        to = ((row0 + own) * HEADS + kv_head * GROUP + (begins + o) % GROUP).to(gl.int64) * HEAD
        out = gl.where(first < 0, 0.0, out)  # a padded row, whose first tile may hold anything
        gl.store(out_ptr + to[:, None] + e[None, :], out.to(dtype), mask=(own < count)[:, None])


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_pairs_ahead(
    q_ptr,
    k_desc,
    v_desc,
    tiles_ptr,
    out_ptr,
    pages_ptr,
    capacity,
    tile_limit,
    scale,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `attention.attend_chain`, for plain attention of rows that are not coded.

    A program computes CONSUMERS * 64 heads, and PARTS programs the heads of a tile, as in `hopper_chain`. A block of k_desc has
    the keys of two tiles, and one of v_desc the values of one.
    """
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    HEAD: gl.constexpr = v_desc.block_type.shape[1]
    OF_PART: gl.constexpr = CONSUMERS * BLOCK_M
    COLUMNS: gl.constexpr = num_warps // 4
    gl.static_assert(PAGE % (2 * BLOCK_N) == 0)
    gl.static_assert(SPLIT % (2 * BLOCK_N) == 0)
    gl.static_assert(CONSUMERS == 1 or num_warps == 4)
    if PDL:
        gdc_launch_dependents()
    tile = tile_limit - 1 - gl.program_id(0) // (KV * PARTS)
    begins = (PARTS - 1 - gl.program_id(0) // KV % PARTS) * OF_PART
    kv_head = gl.program_id(0) % KV
    row0 = gl.load(tiles_ptr + tile * 8)
    count = gl.load(tiles_ptr + tile * 8 + 1)
    slot = gl.load(tiles_ptr + tile * 8 + 2)
    first = gl.load(tiles_ptr + tile * 8 + 3)
    last = first + gl.minimum(count, (begins + OF_PART + GROUP - 1) // GROUP) - 1
    pairs = gl.where(begins < count * GROUP, gl.maximum(gl.cdiv(last + 1, 2 * BLOCK_N), 1), 0)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, 2 * BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, BLOCK_N, HEAD], v_desc.layout)
    queries = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, BLOCK_M, HEAD], k_desc.layout)
    bars = (
        make_barriers(K_STAGES, 1),
        make_barriers(K_STAGES, CONSUMERS),
        make_barriers(V_STAGES, 1),
        make_barriers(V_STAGES, CONSUMERS),
    )
    if PDL:
        gdc_wait()
    tile_rows = (row0, count, first, begins, last, pairs)
    base = (slot * KV + kv_head) * capacity
    pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume_pairs,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, queries, bars, tile_rows, kv_head, scale, 0, HEADS, GROUP, SPLIT,
                        K_STAGES, V_STAGES, COLUMNS,
                    ),
                ),
                (
                    _consume_pairs,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, queries, bars, tile_rows, kv_head, scale, 1, HEADS, GROUP, SPLIT,
                        K_STAGES, V_STAGES, COLUMNS,
                    ),
                ),
                (
                    _fill_pairs,
                    (
                        k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, pairs, KV, PAGE, K_STAGES, V_STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume_pairs,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, queries, bars, tile_rows, kv_head, scale, 0, HEADS, GROUP, SPLIT,
                        K_STAGES, V_STAGES, COLUMNS,
                    ),
                ),
                (
                    _fill_pairs,
                    (
                        k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, pairs, KV, PAGE, K_STAGES, V_STAGES,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
