"""Attention of many rows on Hopper for heads of 256: two consumers of 64 rows, and half of the fold in shared memory.

The arithmetic is that of `attention`: tiles of keys in order, and splits folded in order. As in `hopper_chain` one warp
brings keys and values, and two consumers compute 64 rows each from them.

A consumer keeps two sums of 64 rows of 256 numbers: that of the split it is at, and the fold of all splits before. Both
do not fit into the registers of four warps. So one half of the fold is in shared memory, and is touched where a split
ends. Two consumers read each tile of keys and values for 128 rows. `hopper_chain` has one of eight warps. There
the second-level cache has to deliver twice the bytes for as many rows, and both warp groups compute all scores.

There is no room for two tiles of scores, so a consumer waits for its products. The products of the other one fill that
time. Keys and values take turns in one ring.
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
from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _fold, _forget, _weigh_scores
from adapters.models.kernels.triton.hopper.hopper_consumers import BLOCK_M
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers


@gluon.jit
def fill_ring(
    k_desc,
    v_desc,
    ring,
    bars,
    pages_ptr,
    base,
    kv_head,
    tiles,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring the keys and then the values of each tile, as soon as a slot is free. bars: what has come, what is free."""
    come, free = bars
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    for number in range(tiles):
        key0 = number * BLOCK_N
        row = base + key0
        if PAGE > 0:
            row = (gl.load(pages_ptr + key0 // PAGE) * KV + kv_head) * PAGE + key0 % PAGE
        at = 2 * number % STAGES
        mbarrier.wait(free.index(at), (2 * number // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(at), k_desc.block_type.nbytes)
        bring(k_desc, [row, 0], come.index(at), ring.index(at))
        after = (2 * number + 1) % STAGES
        mbarrier.wait(free.index(after), ((2 * number + 1) // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(after), v_desc.block_type.nbytes)
        bring(v_desc, [row, 0], come.index(after), ring.index(after))


@gluon.jit
def _fold_quarters(acc, peak, total, folded, parked):
    """Add the sums of a split, in quarters, to the fold of those before it. `parked` has two quarters of the fold."""
    first, second, all_peak, all_total = folded
    layout: gl.constexpr = first.type.layout
    found, _peak, _total = _fold(parked[0].load(layout), acc[2], peak, total, all_peak, all_total)
    parked[0].store(found)
    found, _peak, _total = _fold(parked[1].load(layout), acc[3], peak, total, all_peak, all_total)
    parked[1].store(found)
    first, _peak, _total = _fold(first, acc[0], peak, total, all_peak, all_total)
    second, all_peak, all_total = _fold(second, acc[1], peak, total, all_peak, all_total)
    return first, second, all_peak, all_total


@gluon.jit
def _walk(
    begin,
    end,
    acc,
    sums,
    folded,
    q,
    ring,
    parked,
    bars,
    position,
    last,
    scale,
    SCORES: gl.constexpr,
    OF_SPLIT: gl.constexpr,
    MASKED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take the steps from `begin` to `end`. Step n adds the values of tile n.

    acc: the quarters of the sums of the split up to tile n - 1. sums: its peak and total. folded: the splits that have
    ended. MASKED: some rows do not see all keys of these tiles, which may be the last ones.
    """
    come, free = bars
    BLOCK_N: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = ring.shape[2] // 4
    OUT: gl.constexpr = acc[0].type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    for number in range(begin, end):
        at = 2 * number % STAGES
        mbarrier.wait(come.index(at), 2 * number // STAGES & 1)
        begun = warpgroup_mma(q, ring.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
        opens = number % OF_SPLIT == 0
        peak = gl.where(opens, _NOTHING, sums[0])
        total = gl.where(opens, 0.0, sums[1])
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
        mbarrier.arrive(free.index(at), count=1)
        key0 = number * BLOCK_N
        weights, fade, peak, total = _weigh_scores(scores, MASKED, key0, position, peak, total, scale)
        sums = (peak, total)
        p = gl.convert_layout(weights.to(q.dtype), WEIGHTS)
        faded = gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        a0 = acc[0] * faded  # the sums of a split that has ended are not used any more
        a1 = acc[1] * faded
        a2 = acc[2] * faded
        a3 = acc[3] * faded
        after = (2 * number + 1) % STAGES
        mbarrier.wait(come.index(after), (2 * number + 1) // STAGES & 1)
        values = ring.index(after)
        if MASKED:  # noqa: SIM102 - a constant
            if key0 + BLOCK_N > last + 1:
                _forget(values, last - key0, 4)
        goes_on = number % OF_SPLIT > 0
        a0 = warpgroup_mma(p, values.slice(0, WIDTH, 1), a0, use_acc=goes_on, is_async=True)
        a1 = warpgroup_mma(p, values.slice(WIDTH, WIDTH, 1), a1, use_acc=goes_on, is_async=True)
        a2 = warpgroup_mma(p, values.slice(2 * WIDTH, WIDTH, 1), a2, use_acc=goes_on, is_async=True)
        a3 = warpgroup_mma(p, values.slice(3 * WIDTH, WIDTH, 1), a3, use_acc=goes_on, is_async=True)
        a0, a1, a2, a3, p = warpgroup_mma_wait(num_outstanding=0, deps=(a0, a1, a2, a3, p))
        acc = (a0, a1, a2, a3)
        mbarrier.arrive(free.index(after), count=1)
        if (number + 1) % OF_SPLIT == 0:
            folded = _fold_quarters(acc, peak, total, folded, parked)
    return acc, sums, folded


@gluon.jit
def _consume_ring(
    q_ptr,
    out_ptr,
    ring,
    parking,
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
    """Compute consumer NUMBER's part of a tile. tile_rows: see `hopper_consumers.consume_tiles`."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = ring.shape[1]
    HEAD: gl.constexpr = ring.shape[2]
    WIDTH: gl.constexpr = HEAD // 4
    OF_SPLIT: gl.constexpr = SPLIT // BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD, HEAD // 8], [4, 1], [1, 0])
    row0, count, first, begins, last, tiles = tile_rows
    begins += NUMBER * BLOCK_M
    if tiles > 0:
        i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOADED))
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, LOADED))
        row = (begins + i) // GROUP
        of_head = ((row0 + row) * HEADS + kv_head * GROUP + (begins + i) % GROUP).to(gl.int64)
        q = queries.index(NUMBER)
        q.store(gl.load(q_ptr + of_head[:, None] * HEAD + d[None, :], mask=(row < count)[:, None], other=0.0))
        parked = (parking.index(2 * NUMBER), parking.index(2 * NUMBER + 1))
        none = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout=OUT)
        parked[0].store(none)
        parked[1].store(none)
        fence_async_shared()
        program_barrier()
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        begin = first + begins // GROUP
        position = gl.minimum(first + (begins + m) // GROUP, last)
        no_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
        no_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        sums = (no_peak, no_total)
        folded = (none, none, no_peak, no_total)
        acc = (none, none, none, none)
        clear = gl.minimum(gl.maximum((begin + 1) // BLOCK_N, 0), tiles)  # the last steps are masked
        acc, sums, folded = _walk(
            0, clear, acc, sums, folded, q, ring, parked, bars, position, last, scale, SCORES, OF_SPLIT, False, STAGES
        )
        acc, sums, folded = _walk(
            clear, tiles, acc, sums, folded, q, ring, parked, bars, position, last, scale, SCORES, OF_SPLIT, True,
            STAGES,
        )  # fmt: skip
        if tiles % OF_SPLIT > 0:
            folded = _fold_quarters(acc, sums[0], sums[1], folded, parked)
        total = gl.convert_layout(folded[3], gl.SliceLayout(1, OUT))
        share = gl.where(total > 0.0, total, 1.0)[:, None]
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        e = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
        own = (begins + o) // GROUP
        to = ((row0 + own) * HEADS + kv_head * GROUP + (begins + o) % GROUP).to(gl.int64) * HEAD
        at = out_ptr + to[:, None] + e[None, :]
        inside = (own < count)[:, None]
        is_row = first >= 0  # a padded row's first tile may hold anything
        gl.store(at, gl.where(is_row, folded[0] / share, 0.0).to(dtype), mask=inside)
        gl.store(at + WIDTH, gl.where(is_row, folded[1] / share, 0.0).to(dtype), mask=inside)
        gl.store(at + 2 * WIDTH, gl.where(is_row, parked[0].load(OUT) / share, 0.0).to(dtype), mask=inside)
        gl.store(at + 3 * WIDTH, gl.where(is_row, parked[1].load(OUT) / share, 0.0).to(dtype), mask=inside)


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_halved_chain(
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
    # Eight rows of a thread's neighbours lie in different banks.
    PARKED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
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
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD], k_desc.layout)
    queries = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_M, HEAD], k_desc.layout)
    parking = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M, HEAD // 4], PARKED)
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
                _consume_ring,
                (
                    q_ptr, out_ptr, ring, parking, queries, bars, tile_rows, kv_head, scale, 0, HEADS, GROUP, SPLIT,
                    STAGES,
                ),
            ),
            (
                _consume_ring,
                (
                    q_ptr, out_ptr, ring, parking, queries, bars, tile_rows, kv_head, scale, 1, HEADS, GROUP, SPLIT,
                    STAGES,
                ),
            ),
            (fill_ring, (k_desc, v_desc, ring, bars, pages, base, kv_head, tiles, KV, PAGE, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
