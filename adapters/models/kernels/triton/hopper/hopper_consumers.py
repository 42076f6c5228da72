"""Consumers of chains of attention on Hopper: they compute rows of queries from keys and values in shared memory.

A consumer keeps the tensor cores busy while it computes weights. Step n begins the product of the queries and the keys
of tile n + 1. Meanwhile it folds the split that has ended, or fades the sums of the one that goes on. Then it begins
to add the values of tile n. It computes the weights of tile n + 1 while these are added. Products of the other
consumer fill what is left.

The assembler moves arithmetic across the wait for a product as it likes, but not across a loop. So a step waits for
the values of tile n + 1, which is a loop, between its weights and the end of its products. A branch around the mask
would do harm in the same way. So the last tiles, of which rows see a part, have a loop of their own. The fold of
all splits before is in registers, and queries are in shared memory.

Where rows are coded, scores and weights are multiplied with scales, as `attention` does.
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

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _fold, _forget, _lowest_key, _weigh_scores

BLOCK_M = gl.constexpr(64)  # rows of queries of one consumer: heads of one key head, row after row


@gluon.jit
def _multiply_keys(q, k_ring, k_come, number, nothing, STAGES: gl.constexpr):
    """Begin the product of queries and the keys of tile `number`."""
    at = number % STAGES
    mbarrier.wait(k_come.index(at), number // STAGES & 1)
    return warpgroup_mma(q, k_ring.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _scale_columns(numbers, scales, number, STAGES: gl.constexpr):
    """Multiply scores or weights of tile `number` with the scales of coded keys or values, one for each column."""
    found = scales.index(number % STAGES).load(gl.SliceLayout(0, numbers.type.layout))
    return numbers * found[None, :]


@gluon.jit
def _open_or_fade(number, acc, fade, ended, folded, OF_SPLIT: gl.constexpr):
    """Prepare the sums for the values of tile `number`: fold the split that has ended before it, or fade the sums."""
    all_acc, all_peak, all_total = folded
    if number % OF_SPLIT == 0:
        peak, total = ended
        all_acc, all_peak, all_total = _fold(all_acc, acc, peak, total, all_peak, all_total)
    else:
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, (all_acc, all_peak, all_total)


@gluon.jit
def _walk(
    low,
    high,
    p,
    acc,
    fade,
    sums,
    ended,
    folded,
    q,
    k_ring,
    v_ring,
    scales,
    bars,
    position,
    scale,
    first_tile,
    SCORES: gl.constexpr,
    OF_SPLIT: gl.constexpr,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
    CODED: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Take the steps from `low` to `high`. Step n adds the values of tile n and computes the weights of tile n + 1.
    Tiles are numbered from `first_tile` on, which is tile 0 unless there is a window.

    p: the weights of tile n. acc: the sums up to tile n - 1, and `fade` is how much of them is left in tile n. sums:
    peak and total up to tile n. ended: peak and total of the split before. folded: the splits before that one.
    scales: where rows are coded, the rings of the scales of keys and of values.
    """
    k_come, k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    WEIGHTS: gl.constexpr = p.type.layout
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    for number in range(low, high):
        begun = _multiply_keys(q, k_ring, k_come, number + 1, nothing, K_STAGES)
        tile = first_tile + number
        acc, folded = _open_or_fade(tile, acc, fade, ended, folded, OF_SPLIT)
        values = v_ring.index(number % V_STAGES)
        adding = warpgroup_mma(p, values, acc, use_acc=tile % OF_SPLIT > 0, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(begun,))
        if CODED:
            scores = _scale_columns(scores, scales[0], number + 1, K_STAGES)
        mbarrier.arrive(k_free.index((number + 1) % K_STAGES), count=1)
        ended = sums
        ends = (tile + 1) % OF_SPLIT == 0
        peak = gl.where(ends, _NOTHING, sums[0])
        total = gl.where(ends, 0.0, sums[1])
        key0 = (tile + 1) * BLOCK_N
        weights, fade, peak, total = _weigh_scores(scores, MASKED, key0, position, peak, total, scale, WINDOW)
        sums = (peak, total)
        if CODED:
            mbarrier.wait(v_come.index((number + 1) % V_STAGES), (number + 1) // V_STAGES & 1)
            weights = _scale_columns(weights, scales[1], number + 1, V_STAGES)
        coming = gl.convert_layout(weights.to(p.dtype), WEIGHTS)
        if not CODED:
            mbarrier.wait(v_come.index((number + 1) % V_STAGES), (number + 1) // V_STAGES & 1)
        acc, p, coming = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p, coming))
        mbarrier.arrive(v_free.index(number % V_STAGES), count=1)
        p = coming
    return p, acc, fade, sums, ended, folded


@gluon.jit
def consume_tiles(
    q_ptr,
    out_ptr,
    sinks_ptr,
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
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    CODED: gl.constexpr = False,
    MORE: gl.constexpr = False,
    read=0,
):
    """Compute consumer NUMBER's part of a tile. MORE: it may compute one after the other; `read`: tiles of keys so far.

    tile_rows: the tile's first row, rows, first position, the program's first head, its last position, with a window
    the first tile of keys, and how many it has.
    Heads are those of one key head, row after row, and a part may begin within a row. COLUMNS: warps that share a row
    of the output. Each of them computes all weights of the row, which takes less time than to exchange them, and adds
    them in the order of `attention`.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    HEAD: gl.constexpr = k_ring.shape[2]
    OF_SPLIT: gl.constexpr = SPLIT // BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * COLUMNS, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLUMNS], [16, HEAD // COLUMNS, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD, HEAD // 8], [4 * COLUMNS, 1], [1, 0])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    low = 0
    if WINDOW > 0:
        row0, count, first, begins, last, low, tiles = tile_rows
        lowest = _lowest_key(first + begins // GROUP, WINDOW)
    else:
        row0, count, first, begins, last, tiles = tile_rows
    begins += NUMBER * BLOCK_M
    if tiles > 0:
        i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOADED))
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, LOADED))
        row = (begins + i) // GROUP
        of_head = ((row0 + row) * HEADS + kv_head * GROUP + (begins + i) % GROUP).to(gl.int64)
        q = queries.index(NUMBER)
        if MORE:
            program_barrier()  # the other warps have multiplied with the queries before
        q.store(gl.load(q_ptr + of_head[:, None] * HEAD + d[None, :], mask=(row < count)[:, None], other=0.0))
        fence_async_shared()
        program_barrier()
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        begin = first + begins // GROUP
        position = gl.minimum(first + (begins + m) // GROUP, last)
        k_come, k_free, v_come, v_free = bars
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
        acc = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
        no_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
        no_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        begun = _multiply_keys(q, k_ring, k_come, read, nothing, K_STAGES)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
        if CODED:
            scores = _scale_columns(scores, scales[0], 0, K_STAGES)
        mbarrier.arrive(k_free.index(read % K_STAGES), count=1)
        key0 = low * BLOCK_N
        weights, fade, peak, total = _weigh_scores(scores, True, key0, position, no_peak, no_total, scale, WINDOW)
        mbarrier.wait(v_come.index(read % V_STAGES), read // V_STAGES & 1)
        if CODED:
            weights = _scale_columns(weights, scales[1], 0, V_STAGES)
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        sums = (peak, total)
        ended = (no_peak, no_total)
        folded = (acc, no_peak, no_total)
        end = tiles - 1
        clear = gl.minimum(gl.maximum((begin + 1) // BLOCK_N - 1 - low, 0), end)  # the last steps are masked
        opening = 0
        if WINDOW > 0:  # so are the first ones, of whose keys some rows do not see all
            if not CODED and lowest > key0:
                _forget(v_ring.index(read % V_STAGES), BLOCK_N, 4 * COLUMNS, lowest - key0)
            edge = _lowest_key(gl.minimum(first + (begins + BLOCK_M - 1) // GROUP, last), WINDOW)
            opening = gl.minimum(gl.maximum(gl.cdiv(edge, BLOCK_N) - 1 - low, 0), clear)
            p, acc, fade, sums, ended, folded = _walk(
                read, read + opening, p, acc, fade, sums, ended, folded, q, k_ring, v_ring, scales, bars, position,
                scale, low - read, SCORES, OF_SPLIT, WINDOW, True, CODED, K_STAGES, V_STAGES,
            )  # fmt: skip
        p, acc, fade, sums, ended, folded = _walk(
            read + opening, read + clear, p, acc, fade, sums, ended, folded, q, k_ring, v_ring, scales, bars, position,
            scale, low - read, SCORES, OF_SPLIT, WINDOW, False, CODED, K_STAGES, V_STAGES,
        )  # fmt: skip
        p, acc, fade, sums, ended, folded = _walk(
            read + clear, read + end, p, acc, fade, sums, ended, folded, q, k_ring, v_ring, scales, bars, position,
            scale, low - read, SCORES, OF_SPLIT, WINDOW, True, CODED, K_STAGES, V_STAGES,
        )  # fmt: skip
        acc, folded = _open_or_fade(low + end, acc, fade, ended, folded, OF_SPLIT)
        values = v_ring.index((read + end) % V_STAGES)
        if not CODED and (low + tiles) * BLOCK_N > last + 1:
            least = lowest - (low + end) * BLOCK_N if WINDOW > 0 else 0
            _forget(values, last - (low + end) * BLOCK_N, 4 * COLUMNS, least)
        adding = warpgroup_mma(p, values, acc, use_acc=(low + end) % OF_SPLIT > 0, is_async=True)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(adding, p))
        if MORE:
            mbarrier.arrive(v_free.index((read + end) % V_STAGES), count=1)
        all_acc, all_peak, all_total = _fold(folded[0], acc, sums[0], sums[1], folded[1], folded[2])
        if SINKS:  # one more key, whose value is zero
            sink = gl.load(sinks_ptr + kv_head * GROUP + (begins + m) % GROUP) * 1.4426950408889634
            once = gl.full([BLOCK_M], 1.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
            no_values = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
            all_acc, all_peak, all_total = _fold(all_acc, no_values, sink, once, all_peak, all_total)
        total = gl.convert_layout(all_total, gl.SliceLayout(1, OUT))
        out = all_acc / gl.where(total > 0.0, total, 1.0)[:, None]
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        e = gl.arange(0, HEAD, layout=gl.SliceLayout(0, OUT))
        own = (begins + o) // GROUP
        to = ((row0 + own) * HEADS + kv_head * GROUP + (begins + o) % GROUP).to(gl.int64) * HEAD
        out = gl.where(first < 0, 0.0, out)  # a padded row, whose first tile may hold anything
        gl.store(out_ptr + to[:, None] + e[None, :], out.to(dtype), mask=(own < count)[:, None])
