"""Attention of many rows on Hopper (compute capability 9.0), for heads of up to 128: `hopper_chain` in pairs of tiles.

The arithmetic is that of `attention`, tile after tile. What differs is that the keys of two tiles, a pair, are
multiplied at once. Such a product reads its queries half as often from shared memory as two products would, and a pair
has fewer waits than two tiles.

A step begins with the scores of its pair. It computes the weights of the first tile, and begins to add the values.
Meanwhile it computes the weights of the second tile. Then it adds the values of that one, and begins the product of the
queries and the keys of the next pair. The other consumer computes weights while these two run.

A slot of the ring has what a step reads: the values of its pair, and the keys of the next one. So the first slot has
keys only, and the last one values only.

The assembler moves arithmetic across the wait for a product as it likes, but not across a loop. So a wait for a slot,
which is a loop, stands between the weights of the second tile and the end of the product of the first, although the
slot is known to be there. The last pairs, of which rows see a part, have a loop of their own.
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
from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _forget
from adapters.models.kernels.triton.hopper.hopper_chain import fold
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.hopper.hopper_sums import fade_sums, halve, weigh_tile

BLOCK_M = gl.constexpr(64)  # rows of queries of one consumer: heads of one key head, row after row


@gluon.jit
def _fill_slots(
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
    STAGES: gl.constexpr,
):
    """Bring the keys of each pair and the values of the pair before it, as soon as their slot is free."""
    come, free, _turns = bars
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    before = base
    for number in range(gl.where(pairs > 0, pairs + 1, 0)):
        at = number % STAGES
        key0 = number * 2 * BLOCK_N
        row = base + key0
        has_keys = number < pairs
        if PAGE > 0:
            row = (gl.load(pages_ptr + key0 // PAGE, mask=has_keys, other=0) * KV + kv_head) * PAGE + key0 % PAGE
        mbarrier.wait(free.index(at), (number // STAGES & 1) ^ 1)
        # The number of bytes is a constant, so one of three is asked for.
        mbarrier.expect(come.index(at), k_desc.block_type.nbytes, pred=number == 0)
        BOTH: gl.constexpr = k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
        mbarrier.expect(come.index(at), BOTH, pred=(number > 0) & has_keys)
        mbarrier.expect(come.index(at), 2 * v_desc.block_type.nbytes, pred=number == pairs)
        bring(k_desc, [row, 0], come.index(at), k_ring.index(at), pred=has_keys)
        for half in gl.static_range(2):
            bring(v_desc, [before + half * BLOCK_N, 0], come.index(at), v_ring.index(2 * at + half), pred=number > 0)
        before = row


@gluon.jit
def _begin_keys(q, k_ring, come, slot, nothing, STAGES: gl.constexpr):
    """Begin the product of queries and the keys of a slot."""
    at = slot % STAGES
    mbarrier.wait(come.index(at), slot // STAGES & 1)
    return warpgroup_mma(q, k_ring.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_pair(
    pair,
    scores,
    acc,
    sums,
    folded,
    v_ring,
    come,
    turns,
    position,
    last,
    scale,
    SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr,
    OF_SPLIT: gl.constexpr,
    MASKED: gl.constexpr,
    ENDS: gl.constexpr,
    STAGES: gl.constexpr,
    NUMBER: gl.constexpr,
):
    """Add the first tile of a pair, and begin to add the second one.

    MASKED: rows do not see all keys. ENDS: `last` is in this pair.
    """
    BLOCK_N: gl.constexpr = v_ring.shape[1]
    dtype: gl.constexpr = v_ring.dtype
    key0 = 2 * pair * BLOCK_N
    at = (pair + 1) % STAGES
    phase = (pair + 1) // STAGES & 1
    opens = pair % OF_SPLIT == 0
    first, second = halve(scores, SCORES)
    peak = gl.where(opens, _NOTHING, sums[0])
    total = gl.where(opens, 0.0, sums[1])
    weights, fade, peak, total = weigh_tile(first, MASKED, key0, position, peak, total, scale)
    p = gl.convert_layout(weights.to(dtype), WEIGHTS)
    all_acc, all_peak, all_total = folded
    if opens:
        all_acc, all_peak, all_total = fold(all_acc, acc, sums[0], sums[1], all_peak, all_total)
    else:
        acc = fade_sums(acc, fade)
    mbarrier.wait(come.index(at), phase)
    if ENDS:
        _forget(v_ring.index(2 * at), last - key0, 4)
        _forget(v_ring.index(2 * at + 1), last - key0 - BLOCK_N, 4)
    adding = warpgroup_mma(p, v_ring.index(2 * at), acc, use_acc=pair % OF_SPLIT > 0, is_async=True)
    weights, fade, peak, total = weigh_tile(second, MASKED, key0 + BLOCK_N, position, peak, total, scale)
    coming = gl.convert_layout(weights.to(dtype), WEIGHTS)
    mbarrier.wait(come.index(at), phase)  # nothing is moved across it
    acc, p, coming = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p, coming))
    acc = fade_sums(acc, fade)
    if not ENDS:  # the last pair has no product of keys
        mbarrier.wait(turns.index(NUMBER), (pair & 1) ^ (1 - NUMBER))
    adding = warpgroup_mma(coming, v_ring.index(2 * at + 1), acc, is_async=True)
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
    STAGES: gl.constexpr,
    NUMBER: gl.constexpr,
):
    """Add the pairs from `low` to `high`, and multiply the keys of the pair after each.

    scores: of pair `low`. acc: the sums before it. sums: their peak and total. folded: the splits before theirs.
    """
    come, free, turns = bars
    OF_PAIR: gl.constexpr = scores.type.layout
    nothing = gl.zeros(scores.shape, gl.float32, layout=OF_PAIR)
    for pair in range(low, high):
        p, adding, sums, folded = _add_pair(
            pair, scores, acc, sums, folded, v_ring, come, turns, position, last, scale, SCORES, WEIGHTS, OF_SPLIT, MASKED,
            False, STAGES, NUMBER,
        )  # fmt: skip
        at = (pair + 1) % STAGES
        begun = warpgroup_mma(q, k_ring.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores, acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(begun, adding, p))
        mbarrier.arrive(turns.index(1 - NUMBER), count=1)
        mbarrier.arrive(free.index(at), count=1)
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
    STAGES: gl.constexpr,
):
    """Compute consumer NUMBER's part of a tile. tile_rows: as in `hopper_chain`, but pairs of tiles of keys."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = v_ring.shape[1]
    HEAD: gl.constexpr = v_ring.shape[2]
    OF_SPLIT: gl.constexpr = SPLIT // (2 * BLOCK_N)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OF_PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD, HEAD // 8], [4, 1], [1, 0])
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
        come, free, turns = bars
        nothing = gl.zeros([BLOCK_M, 2 * BLOCK_N], gl.float32, layout=OF_PAIR)
        acc = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
        no_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
        no_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        begun = _begin_keys(q, k_ring, come, 0, nothing, STAGES)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
        mbarrier.arrive(free.index(0), count=1)
        sums = (no_peak, no_total)
        folded = (acc, no_peak, no_total)
        end = pairs - 1
        clear = gl.minimum(gl.maximum((begin + 1) // (2 * BLOCK_N), 0), end)  # pairs that no row's end is in
        scores, acc, sums, folded = _walk_pairs(
            0, clear, scores, acc, sums, folded, q, k_ring, v_ring, bars, position, last, scale, SCORES, WEIGHTS,
            OF_SPLIT, False, STAGES, NUMBER,
        )  # fmt: skip
        scores, acc, sums, folded = _walk_pairs(
            clear, end, scores, acc, sums, folded, q, k_ring, v_ring, bars, position, last, scale, SCORES, WEIGHTS,
            OF_SPLIT, True, STAGES, NUMBER,
        )  # fmt: skip
        p, adding, sums, folded = _add_pair(
            end, scores, acc, sums, folded, v_ring, come, turns, position, last, scale, SCORES, WEIGHTS, OF_SPLIT, True, True,
            STAGES, NUMBER,
        )  # fmt: skip
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p))
        all_acc, _peak, all_total = fold(folded[0], acc, sums[0], sums[1], folded[1], folded[2])
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
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `attention.attend_chain`, for plain attention of rows that are not coded.

    A block of k_desc has the keys of a pair, and one of v_desc the values of a tile. A program computes 128 heads, and
    PARTS programs the heads of a tile, as in `hopper_chain`.
    """
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    HEAD: gl.constexpr = v_desc.block_type.shape[1]
    OF_PART: gl.constexpr = 2 * BLOCK_M
    gl.static_assert(PAGE % (2 * BLOCK_N) == 0)
    gl.static_assert(SPLIT % (2 * BLOCK_N) == 0)
    gl.static_assert(num_warps == 4)
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
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 2 * BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [2 * STAGES, BLOCK_N, HEAD], v_desc.layout)
    queries = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_M, HEAD], k_desc.layout)
    bars = (make_barriers(STAGES, 1), make_barriers(STAGES, 2), make_barriers(2, 1))
    if PDL:
        gdc_wait()
    tile_rows = (row0, count, first, begins, last, pairs)
    base = (slot * KV + kv_head) * capacity
    pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _consume_pairs,
                (
                    q_ptr, out_ptr, k_ring, v_ring, queries, bars, tile_rows, kv_head, scale, 0, HEADS, GROUP, SPLIT,
                    STAGES,
                ),
            ),
            (
                _consume_pairs,
                (
                    q_ptr, out_ptr, k_ring, v_ring, queries, bars, tile_rows, kv_head, scale, 1, HEADS, GROUP, SPLIT,
                    STAGES,
                ),
            ),
            (
                _fill_slots,
                (k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, pairs, KV, PAGE, STAGES),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
