"""The end of flash decoding on Hopper: the program that writes the last partial of a row merges all of them.

`hopper_attention` uses this in steps of few rows. The arithmetic is that of `attention.merge`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.online_softmax import NOTHING, lowest_key

_NOTHING = gl.constexpr(NOTHING.value)
_lowest_key = gluon.jit(lowest_key.fn)


@gluon.jit
def are_last(left_ptr, here, splits):
    """Add `here` partials to the count and return whether all of them are written; if so, the others' partials are
    visible.
    """
    program_barrier()
    left = gl.atomic_add(left_ptr, here, sem="acq_rel", scope="gpu") + here
    if left == splits:
        gl.store(left_ptr, 0)
    return left == splits


@gluon.jit
def merge_row(
    acc_ptr,
    sums_ptr,
    out_ptr,
    sinks_ptr,
    head0,
    begin,
    end,
    split_limit,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    HEAD: gl.constexpr,
    AT_ONCE: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Merge the splits from `begin` to `end` as `attention.merge` does, for the GROUP heads of a row from `head0` on.

    Other programs wrote partials as well. sinks: of these heads.
    """
    HEADS: gl.constexpr = gl.BlockedLayout([1, HEAD // 32], [1, 32], [num_warps, 1], [1, 0])
    h = gl.arange(0, PADDED, layout=gl.SliceLayout(1, HEADS))
    d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, HEADS))[None, :]
    real = h < GROUP
    head = (head0 + h).to(gl.int64)
    all_acc = gl.zeros([PADDED, HEAD], gl.float32, layout=HEADS)
    all_peak = gl.full([PADDED], _NOTHING, gl.float32, layout=gl.SliceLayout(1, HEADS))
    all_total = gl.zeros([PADDED], gl.float32, layout=gl.SliceLayout(1, HEADS))
    for group in range(begin, end, AT_ONCE):
        partials = ()
        for j in gl.static_range(AT_ONCE):
            used = real & (group + j < end)
            at = head * split_limit + (group + j) % split_limit
            acc = gl.load(acc_ptr + at[:, None] * HEAD + d, mask=used[:, None], other=0.0, cache_modifier=".cg")
            peak = gl.load(sums_ptr + at * 2, mask=used, other=_NOTHING, cache_modifier=".cg")
            total = gl.load(sums_ptr + at * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
            partials = partials + ((acc, peak, total),)  # noqa: RUF005 - Triton knows no other way
        for j in gl.static_range(AT_ONCE):
            acc, peak, total = partials[j]
            new_peak = gl.maximum(all_peak, peak)
            old = gl.exp2(all_peak - new_peak)
            new = gl.exp2(peak - new_peak)
            all_total = gl.fma(total, new, all_total * old)
            spread = gl.zeros([PADDED, HEAD], gl.float32, layout=HEADS) + new[:, None]
            all_acc = gl.fma(acc, spread, all_acc * old[:, None])
            all_peak = new_peak
    if SINKS:  # one more key, whose value is zero
        sink = gl.load(sinks_ptr + h, mask=real, other=0.0) * 1.4426950408889634
        new_peak = gl.maximum(all_peak, sink)
        old = gl.exp2(all_peak - new_peak)
        new = gl.exp2(sink - new_peak)
        all_total = gl.fma(gl.full([PADDED], 1.0, gl.float32, layout=gl.SliceLayout(1, HEADS)), new, all_total * old)
        nothing = gl.zeros([PADDED, HEAD], gl.float32, layout=HEADS)
        all_acc = gl.fma(nothing, nothing + new[:, None], all_acc * old[:, None])
    out = all_acc / gl.where(all_total > 0.0, all_total, 1.0)[:, None]
    gl.store(out_ptr + head[:, None] * HEAD + d, out.to(out_ptr.dtype.element_ty), mask=real[:, None])


@gluon.jit
def merge_rows(
    acc_ptr,
    sums_ptr,
    out_ptr,
    sinks_ptr,
    left_ptr,
    row0,
    count,
    first,
    kv_head,
    here,
    splits,
    split_limit,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    HEAD: gl.constexpr,
    SPLIT: gl.constexpr,
    AT_ONCE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Count `here` partials of `splits` of a tile and key head, and merge all of them if they are the last ones.

    row0, count, first: the tile's first row, its rows, and the first one's position.
    """
    due = are_last(left_ptr + row0 * KV + kv_head, here, splits).to(gl.int32) * count
    for row in range(due):  # a name: Triton would carry out twice what a range is made of
        head0 = (row0 + row) * HEADS + kv_head * GROUP
        begin = _lowest_key(first + row, WINDOW) // SPLIT
        end = (first + row) // SPLIT + 1
        merge_row(
            acc_ptr, sums_ptr, out_ptr, sinks_ptr + kv_head * GROUP, head0, begin, end, split_limit, GROUP, PADDED,
            HEAD, AT_ONCE, SINKS, num_warps,
        )  # fmt: skip


@gluon.jit
def find_padding(tiles_ptr, t, tile_limit):
    """Return whether any of the tiles `t` has padded rows."""
    first = gl.load(tiles_ptr + t * 8 + 3, mask=t < tile_limit, other=0)
    return gl.max((first < 0).to(gl.int32), 0) > 0


@gluon.jit
def clear_padding(
    out_ptr,
    tiles_ptr,
    tile_limit,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    HEAD: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Set padded rows to zero. The last programs have the least to do, so each of them clears one key head."""
    kv_head = gl.num_programs(0) - 1 - gl.program_id(0)
    WIDE: gl.constexpr = gl.BlockedLayout([1, HEAD // 32], [1, 32], [num_warps, 1], [1, 0])
    h = gl.arange(0, PADDED, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, WIDE))[None, :]
    nothing = gl.zeros([PADDED, HEAD], out_ptr.dtype.element_ty, layout=WIDE)
    if PDL:
        gdc_wait()
    for tile in range(gl.where(kv_head < KV, tile_limit, 0)):
        row0 = gl.load(tiles_ptr + tile * 8)
        count = gl.load(tiles_ptr + tile * 8 + 1)
        first = gl.load(tiles_ptr + tile * 8 + 3)
        for row in range(row0, gl.where(first < 0, row0 + count, row0)):
            head = (row * HEADS + kv_head * GROUP + h).to(gl.int64)
            gl.store(out_ptr + head[:, None] * HEAD + d, nothing, mask=(h < GROUP)[:, None])
