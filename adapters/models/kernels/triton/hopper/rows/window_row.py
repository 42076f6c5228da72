"""Attention of one row with a window on Hopper: one program has all keys that a key head sees.

The arithmetic is that of `hopper_attention` and `hopper_merge`: tiles join a split, and splits join each other. There
each split is a program, and partials go through memory. For a window of a few tiles, that takes longer than reading its
keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_attention import (
    _NOTHING,
    _fold,
    _forget,
    _lowest_key,
    _weigh_scores,
)
from adapters.models.kernels.triton.hopper.hopper_ring import make_ring, request_tile


@gluon.jit
def _find_row(at, slot, kv_head, pages_ptr, capacity, KV: gl.constexpr, PAGE: gl.constexpr):
    """Return the cache row of key `at` of a slot."""
    if PAGE > 0:
        page = gl.load(pages_ptr + slot * (capacity // PAGE) + at // PAGE, mask=at < capacity, other=0)
        row = (page * KV + kv_head) * PAGE + at % PAGE
    else:
        row = (slot * KV + kv_head) * capacity + at
    return row


@gluon.jit
def attend_window(
    q_ptr,
    k_desc,
    v_desc,
    slots_ptr,
    positions_ptr,
    pages_ptr,
    out_ptr,
    sinks_ptr,
    capacity,
    scale,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    TILES: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend with the row of a step, by a program for each key head. A row at a negative position becomes zeros.

    TILES: the most that a window touches. All of them fit into shared memory. Those before the newest one were written
    by earlier steps, so they are requested while the kernels before still run.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 64
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    if PDL:
        gdc_launch_dependents()
    k_ring, k_come = make_ring(k_desc, TILES)
    v_ring, v_come = make_ring(v_desc, TILES)
    kv_head = gl.program_id(0)
    position = gl.load(positions_ptr).to(gl.int32)
    slot = gl.load(slots_ptr).to(gl.int32)
    low = _lowest_key(gl.maximum(position, 0), WINDOW) // BLOCK_N
    newest = gl.maximum(position, 0) // BLOCK_N - low
    tiles = gl.where(position < 0, 0, newest + 1)
    h = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
    real = h < GROUP
    if SINKS:
        sink = gl.load(sinks_ptr + kv_head * GROUP + h, mask=real, other=0.0) * 1.4426950408889634
    for number in gl.static_range(TILES - 1):
        row = _find_row((low + number) * BLOCK_N, slot, kv_head, pages_ptr, capacity, KV, PAGE)
        request_tile(k_desc, k_ring, k_come, number, row, TILES, number < tiles - 1)
        request_tile(v_desc, v_ring, v_come, number, row, TILES, number < tiles - 1)
    row = _find_row((low + newest) * BLOCK_N, slot, kv_head, pages_ptr, capacity, KV, PAGE)
    if PDL:
        gdc_wait()
    request_tile(k_desc, k_ring, k_come, newest, row, TILES, tiles > 0)
    request_tile(v_desc, v_ring, v_come, newest, row, TILES, tiles > 0)
    i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES))
    d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))
    own = (kv_head * GROUP + i) * HEAD
    q = gl.load(q_ptr + own[:, None] + d[None, :], mask=(i < GROUP)[:, None], other=0.0)
    of_row = gl.zeros([BLOCK_M], gl.int32, layout=gl.SliceLayout(1, SCORES)) + position
    no_values = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
    no_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
    no_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
    all_acc = no_values
    all_peak = no_peak
    all_total = no_total
    acc = no_values
    peak = no_peak
    total = no_total
    lowest = _lowest_key(position, WINDOW)
    for number in range(tiles):
        key0 = (low + number) * BLOCK_N
        masked = (key0 + BLOCK_N > position + 1) | (key0 < lowest)
        mbarrier.wait(k_come.index(number), 0)
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
        scores = warpgroup_mma(q, k_ring.index(number).permute((1, 0)), nothing, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        weights, fade, peak, total = _weigh_scores(scores, masked, key0, of_row, peak, total, scale, WINDOW)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        mbarrier.wait(v_come.index(number), 0)
        if masked:
            _forget(v_ring.index(number), position - key0, num_warps, lowest - key0)
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        acc = warpgroup_mma(p, v_ring.index(number), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if (number == newest) | ((key0 + BLOCK_N) % SPLIT == 0):
            all_acc, all_peak, all_total = _fold(all_acc, acc, peak, total, all_peak, all_total)
            acc = no_values
            peak = no_peak
            total = no_total
    peaks = gl.convert_layout(all_peak, gl.SliceLayout(1, OUT))
    totals = gl.convert_layout(all_total, gl.SliceLayout(1, OUT))
    if SINKS:  # one more key, whose value is zero
        new_peak = gl.maximum(peaks, sink)
        old = gl.exp2(peaks - new_peak)
        new = gl.exp2(sink - new_peak)
        once = gl.full([BLOCK_M], 1.0, gl.float32, layout=gl.SliceLayout(1, OUT))
        totals = gl.fma(once, new, totals * old)
        all_acc = gl.fma(no_values, no_values + new[:, None], all_acc * old[:, None])
    found = all_acc / gl.where(totals > 0.0, totals, 1.0)[:, None]
    e = gl.arange(0, HEAD, layout=gl.SliceLayout(0, OUT))
    to = (kv_head * GROUP + h) * HEAD
    gl.store(out_ptr + to[:, None] + e[None, :], found.to(dtype), mask=real[:, None])
