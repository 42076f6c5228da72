"""Attention of many rows on Hopper without windows and sinks: `hopper_chain` with one slot and one release a step.

The arithmetic is that of `attention`: tiles of keys in order, and splits folded in order. As in `hopper_chain` one warp
brings keys and values, and two consumers compute 64 rows each. What differs is how they wait for each other.

A slot of the ring has what a step reads: the values of tile n and the keys of tile n + 1. So a step waits for one
barrier and frees one slot, in place of two each. To free a slot, the four warps of a consumer must meet. They do so
behind the product of keys of the next step, so that the tensor cores have work meanwhile. Meetings of warps took 9 %
of the time before, on an H200 with 31,744 rows behind 1,024.

A step waits for the next slot, which is a loop, between its weights and the end of its products: the assembler moves
arithmetic across the wait for a product as it likes, but not across a loop.
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
from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _fold, _forget
from adapters.models.kernels.triton.hopper.hopper_consumers import BLOCK_M
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers


@gluon.jit
def fill_slots(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    bars,
    pages_ptr,
    base,
    kv_head,
    tiles,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring the keys of each tile and the values of the tile before it, as soon as their slot is free.

    So the first slot has keys only, and the last one values only. bars: what has come, and what is free.
    """
    come, free = bars
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    before = base
    for number in range(gl.where(tiles > 0, tiles + 1, 0)):
        at = number % STAGES
        key0 = number * BLOCK_N
        row = base + key0
        has_keys = number < tiles
        if PAGE > 0:
            row = (gl.load(pages_ptr + key0 // PAGE, mask=has_keys, other=0) * KV + kv_head) * PAGE + key0 % PAGE
        mbarrier.wait(free.index(at), (number // STAGES & 1) ^ 1)
        # The number of bytes is a constant, so one of two is expected.
        both = (number > 0) & has_keys
        mbarrier.expect(come.index(at), BYTES, pred=(number == 0) | (number == tiles))
        mbarrier.expect(come.index(at), 2 * BYTES, pred=both)
        bring(v_desc, [before, 0], come.index(at), v_ring.index(at), pred=number > 0)
        bring(k_desc, [row, 0], come.index(at), k_ring.index(at), pred=has_keys)
        before = row


@gluon.jit
def _weigh_tile(scores, MASKED: gl.constexpr, key0, position, peak, scale):
    """Return the weights of a tile's keys, the factor by which earlier results fade, the new peak, and the sum of the
    weights. See `hopper_attention._weigh_scores`, which adds this sum at once.
    """
    layout: gl.constexpr = scores.type.layout
    if MASKED:
        key = key0 + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    spread = gl.zeros(scores.shape, gl.float32, layout=layout) + new_peak[:, None]
    scales = gl.full(scores.shape, 1.0, gl.float32, layout=layout) * scale
    weights = gl.exp2(gl.fma(scores, scales, -spread))
    return weights, gl.exp2(peak - new_peak), new_peak, gl.sum(weights, 1)


@gluon.jit
def _scale_columns(numbers, scales, slot):
    """Multiply scores or weights with the scales of coded keys or values, one for each column."""
    return numbers * scales.index(slot).load(gl.SliceLayout(0, numbers.type.layout))[None, :]


@gluon.jit
def _weigh_coded(scores, scales, slot, MASKED: gl.constexpr, key0, position, peak, scale, CODED: gl.constexpr):
    """Do what `_weigh_tile` does. Where rows are coded, scores and weights are multiplied with scales."""
    if CODED:
        scores = _scale_columns(scores, scales[0], slot)
    weights, fade, new_peak, part = _weigh_tile(scores, MASKED, key0, position, peak, scale)
    if CODED:
        weights = _scale_columns(weights, scales[1], slot)
    return weights, fade, new_peak, part


@gluon.jit
def _open_or_fade(number, acc, fade, ended, folded, OF_SPLIT: gl.constexpr):
    """Prepare the sums for the values of tile `number`: fold the split that has ended before it, or fade the sums."""
    all_acc, all_peak, all_total = folded
    if number % OF_SPLIT == 0:
        all_acc, all_peak, all_total = _fold(all_acc, acc, ended[0], ended[1], all_peak, all_total)
    else:
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, (all_acc, all_peak, all_total)


@gluon.jit
def _walk(
    low,
    high,
    p,
    acc,
    weighed,
    before,
    folded,
    q,
    k_ring,
    v_ring,
    scales,
    bars,
    position,
    scale,
    SCORES: gl.constexpr,
    OF_SPLIT: gl.constexpr,
    MASKED: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
):
    """Take the steps from `low` to `high`. Step n adds the values of tile n and computes the weights of tile n + 1.

    p: the weights of tile n. acc: the sums up to tile n - 1. weighed: how much of these is left in tile n, the sum of
    its weights, and the peak up to it. before: peak and total up to tile n - 1. folded: the splits that have ended.
    """
    come, free = bars
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    WEIGHTS: gl.constexpr = p.type.layout
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    for number in range(low, high):
        fade, part, peak = weighed
        slot = (number + 1) % STAGES
        begun = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(free.index(number % STAGES), count=1)  # of the step before
        acc, folded = _open_or_fade(number, acc, fade, before, folded, OF_SPLIT)
        adding = warpgroup_mma(p, v_ring.index(slot), acc, use_acc=number % OF_SPLIT > 0, is_async=True)
        total = gl.fma(gl.where(number % OF_SPLIT == 0, 0.0, before[1]), fade, part)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(begun,))
        before = (peak, total)
        old = gl.where((number + 1) % OF_SPLIT == 0, _NOTHING, peak)
        key0 = (number + 1) * BLOCK_N
        weights, fade, peak, part = _weigh_coded(scores, scales, slot, MASKED, key0, position, old, scale, CODED)
        weighed = (fade, part, peak)
        coming = gl.convert_layout(weights.to(p.dtype), WEIGHTS)
        mbarrier.wait(come.index((number + 2) % STAGES), (number + 2) // STAGES & 1)
        acc, p, coming = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p, coming))
        p = coming
    return p, acc, weighed, before, folded


@gluon.jit
def consume_slots(
    q_ptr,
    out_ptr,
    k_ring,
    v_ring,
    scales,
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
    CODED: gl.constexpr,
):
    """Compute consumer NUMBER's part of a tile. tile_rows: see `hopper_consumers.consume_tiles`."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    HEAD: gl.constexpr = k_ring.shape[2]
    OF_SPLIT: gl.constexpr = SPLIT // BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD, HEAD // 8], [4, 1], [1, 0])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    row0, count, first, begins, last, tiles = tile_rows
    begins += NUMBER * BLOCK_M
    if tiles > 0:
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
        come = bars[0]
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
        acc = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
        no_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
        no_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        mbarrier.wait(come.index(0), 0)
        begun = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
        weights, fade, peak, part = _weigh_coded(scores, scales, 0, True, 0, position, no_peak, scale, CODED)
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        mbarrier.wait(come.index(1), 0)
        weighed = (fade, part, peak)
        before = (no_peak, no_total)
        folded = (acc, no_peak, no_total)
        end = tiles - 1
        clear = gl.minimum(gl.maximum((begin + 1) // BLOCK_N - 1, 0), end)  # the last steps are masked
        p, acc, weighed, before, folded = _walk(
            0, clear, p, acc, weighed, before, folded, q, k_ring, v_ring, scales, bars, position, scale, SCORES,
            OF_SPLIT, False, STAGES, CODED,
        )  # fmt: skip
        p, acc, weighed, before, folded = _walk(
            clear, end, p, acc, weighed, before, folded, q, k_ring, v_ring, scales, bars, position, scale, SCORES,
            OF_SPLIT, True, STAGES, CODED,
        )  # fmt: skip
        fade, part, peak = weighed
        acc, folded = _open_or_fade(end, acc, fade, before, folded, OF_SPLIT)
        values = v_ring.index(tiles % STAGES)
        if not CODED and tiles * BLOCK_N > last + 1:
            _forget(values, last - end * BLOCK_N, 4)
        adding = warpgroup_mma(p, values, acc, use_acc=end % OF_SPLIT > 0, is_async=True)
        total = gl.fma(gl.where(end % OF_SPLIT == 0, 0.0, before[1]), fade, part)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p))
        all_acc, _peak, all_total = _fold(folded[0], acc, peak, total, folded[1], folded[2])
        total = gl.convert_layout(all_total, gl.SliceLayout(1, OUT))
        out = all_acc / gl.where(total > 0.0, total, 1.0)[:, None]
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        e = gl.arange(0, HEAD, layout=gl.SliceLayout(0, OUT))
        own = (begins + o) // GROUP
        to = ((row0 + own) * HEADS + kv_head * GROUP + (begins + o) % GROUP).to(gl.int64) * HEAD
        out = gl.where(first < 0, 0.0, out)  # a padded row, whose first tile may hold anything
        gl.store(out_ptr + to[:, None] + e[None, :], out.to(dtype), mask=(own < count)[:, None])


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_plain_chain(
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

    A program computes 128 heads, and PARTS programs the heads of a tile, as in `hopper_chain`.
    """
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    HEAD: gl.constexpr = v_desc.block_type.shape[1]
    OF_PART: gl.constexpr = 2 * BLOCK_M
    gl.static_assert(PAGE % BLOCK_N == 0)
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
    tiles = gl.where(begins < count * GROUP, gl.maximum(gl.cdiv(last + 1, BLOCK_N), 1), 0)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, HEAD], v_desc.layout)
    queries = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_M, HEAD], k_desc.layout)
    bars = (make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    if PDL:
        gdc_wait()
    tile_rows = (row0, count, first, begins, last, tiles)
    base = (slot * KV + kv_head) * capacity
    pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                consume_slots,
                (
                    q_ptr, out_ptr, k_ring, v_ring, 0, queries, bars, tile_rows, kv_head, scale, 0, HEADS, GROUP, SPLIT,
                    STAGES, False,
                ),
            ),
            (
                consume_slots,
                (
                    q_ptr, out_ptr, k_ring, v_ring, 0, queries, bars, tile_rows, kv_head, scale, 1, HEADS, GROUP, SPLIT,
                    STAGES, False,
                ),
            ),
            (fill_slots, (k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, tiles, KV, PAGE, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
