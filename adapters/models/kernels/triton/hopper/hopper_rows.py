"""Flash decoding of rows that are alone in their slots, on Hopper (compute capability 9.0): keys are the tall operand.

A row has few heads to a key head, and `wgmma` takes 64 rows of its left side. In `hopper_attention` these are queries,
most of which do not exist. Here they are keys, and then the columns of values. So a split takes a third of the time.

The arithmetic is that of `attention`. The scores of all tiles of a split come first, through shared memory to where
each warp has whole rows of them. Then each tile's weights follow in order, and last their products with values. One
ring holds tiles of keys and of values, in the order in which they are read. See `hopper_attention` for when they are
requested.
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
from adapters.models.kernels.triton.hopper.hopper_attention import (
    _NOTHING,
    _forget,
    _lowest_key,
    _page,
    _row,
    _weigh_scores,
    _whose,
)
from adapters.models.kernels.triton.hopper.hopper_merge import clear_padding, find_padding, merge_rows
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_ring


@gluon.constexpr_function
def _lines(rows, keys, turned, warps=4):
    """Return how threads share scores `[rows, keys]`, or `[keys, rows]`: as a product's, and each warp has all."""
    registers = [[0, 1]] + [[0, 8 << bit] for bit in range((keys // 8 - 1).bit_length())]
    registers += [[8 << bit, 0] for bit in range((rows // 8 - 1).bit_length())]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    across = [[0, 0]] * (warps.bit_length() - 1)
    shape = [rows, keys]
    if turned:
        registers, lanes, across = ([[k, r] for r, k in bases] for bases in (registers, lanes, across))
        shape = [keys, rows]
    return gl.DistributedLinearLayout(registers, lanes, across, [], shape)


@gluon.jit
def _locate(number, split, end, start, last, SPLIT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the first key of tile `number` of a run of splits, whether it is one of values, and whether it exists.

    Each split's tiles of keys come before those of its values. start: the run's first key. end: behind its last split.
    """
    WHOLE: gl.constexpr = 2 * (SPLIT // BLOCK_N)
    later = number - 2 * gl.cdiv(gl.minimum((split + 1) * SPLIT, last + 1) - start, BLOCK_N)
    at_split = gl.where(later < 0, split, split + 1 + gl.maximum(later, 0) // WHOLE)
    within = gl.where(later < 0, number, gl.maximum(later, 0) % WHOLE)
    low = gl.maximum(start, at_split * SPLIT)
    tiles = gl.cdiv(gl.minimum((at_split + 1) * SPLIT, last + 1) - low, BLOCK_N)
    is_value = within >= tiles
    key0 = low + gl.where(is_value, within - tiles, within) * BLOCK_N
    return key0, is_value, (at_split < end) & (within < 2 * tiles)


@gluon.jit
def _request(
    k_desc,
    v_desc,
    ring,
    come,
    read,
    number,
    run,
    from_key,
    to_key,
    split,
    held,
    source,
    KV: gl.constexpr,
    SPLIT: gl.constexpr,
    PAGE: gl.constexpr,
    RING: gl.constexpr,
):
    """Load tile `number` of a run if its keys end behind `from_key` and not behind `to_key`. read: tiles of the runs
    before. run: the first split, the end, the first and the last key. split, held, source: see `_row`.
    """
    first_split, end, start, last = run
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    key0, is_value, exists = _locate(number, first_split, end, start, last, SPLIT, BLOCK_N)
    wanted = exists & (key0 + BLOCK_N > from_key) & (key0 + BLOCK_N <= to_key)
    row = _row(key0, split, held, source, KV, SPLIT, PAGE)
    slot = (read + number) % RING
    mbarrier.expect(come.index(slot), k_desc.block_type.nbytes, pred=wanted)
    bring(k_desc, [row, 0], come.index(slot), ring.index(slot), pred=wanted & (is_value == 0))
    bring(v_desc, [row, 0], come.index(slot), ring.index(slot), pred=wanted & is_value)


@gluon.jit
def _weigh_unit(scores, p, fades, key0, position, peak, total, scale, WINDOW: gl.constexpr):
    """Leave the weights of keys from key0 on in shared memory, and the factor by which earlier results fade."""
    weights, fade, peak, total = _weigh_scores(scores, True, key0, position, peak, total, scale, WINDOW)
    p.store(weights.to(p.dtype))
    fades.store(fade)
    return peak, total


@gluon.jit
def _weigh_tiles(
    s_shared, p_shared, fades, key0, position, peak, total, scale, UNITS: gl.constexpr, WINDOW: gl.constexpr
):
    """Do so for all units of a split, UNITS of each tile, in order. key0: the split's first key.

    Scores that were never written belong to keys that the row does not see.
    """
    TILES: gl.constexpr = s_shared.shape[0]
    BLOCK_N: gl.constexpr = s_shared.shape[1]
    ROWS: gl.constexpr = s_shared.shape[2]
    UNIT: gl.constexpr = BLOCK_N // UNITS
    gl.static_assert(UNITS <= 2)
    for tile in gl.static_range(TILES):
        lines = s_shared.index(tile).load(_lines(ROWS, BLOCK_N, True)).permute((1, 0))
        lines = gl.convert_layout(lines, _lines(ROWS, BLOCK_N, False), assert_trivial=True)
        parts = (lines,)
        if UNITS == 2:
            parts = gl.split(lines.reshape((ROWS, 2, UNIT)).permute((0, 2, 1)))
        for unit in gl.static_range(UNITS):
            scores = gl.convert_layout(parts[unit], _lines(ROWS, UNIT, False), assert_trivial=True)
            own = tile * UNITS + unit
            peak, total = _weigh_unit(
                scores, p_shared.index(own), fades.index(own), key0 + own * UNIT, position, peak, total, scale, WINDOW
            )
    return peak, total


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_rows_ahead(
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
    RING: gl.constexpr,
    UNIT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    LIMIT: gl.constexpr,
    AT_ONCE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `hopper_attention.attend_splits_ahead`, for tiles of one row, and merge its partials.

    UNIT: keys of a tile of `attention`, which may be half of a tile here. RING: tiles in shared memory or on their way
    there, no more than a split has.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    ROWS: gl.constexpr = max(8, PADDED)
    TILES: gl.constexpr = SPLIT // BLOCK_N
    UNITS: gl.constexpr = BLOCK_N // UNIT
    TALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    OF_UNIT: gl.constexpr = _lines(ROWS, UNIT, False)
    ACROSS: gl.constexpr = min(32, HEAD // 8)
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [num_warps, 1], [1, 0])
    gl.static_assert(PAGE % BLOCK_N == 0)
    gl.static_assert(PAGE <= SPLIT)
    gl.static_assert(RING <= 2 * TILES)
    if PDL:
        gdc_launch_dependents()
    ring, come = make_ring(k_desc, RING)
    q_shared = gl.allocate_shared_memory(dtype, [ROWS, HEAD], k_desc.layout)
    s_shared = gl.allocate_shared_memory(gl.float32, [TILES, BLOCK_N, ROWS], gl.SwizzledSharedLayout(8, 1, 8, [0, 1]))
    p_shared = gl.allocate_shared_memory(dtype, [TILES * UNITS, ROWS, UNIT], P_LAYOUT)
    fades = gl.allocate_shared_memory(gl.float32, [TILES * UNITS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    t = gl.arange(0, LIMIT, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    ends = gl.load(tiles_ptr + t * 8 + 4, mask=t < tile_limit, other=2147483647)
    has_padding = find_padding(tiles_ptr, t, tile_limit)
    items = gl.load(tiles_ptr + (tile_limit - 1) * 8 + 4) * KV
    of_program = gl.cdiv(items, gl.num_programs(0))
    item = gl.program_id(0) * of_program
    stop_item = gl.minimum(item + of_program, items)
    program_barrier()  # the barriers of the ring are ready
    read = 0  # tiles, of the runs before
    while item < stop_item:
        row0, _, slot, first, kv_head, splits, low, offset = _whose(tiles_ptr, ends, t, item, KV)
        here = gl.minimum(splits - offset, stop_item - item)
        split = low + offset
        item += here
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        page = _page(pages, split, capacity, SPLIT, PAGE)
        after = _page(pages, split + 1, capacity, SPLIT, PAGE)
        source = ((slot * KV + kv_head) * capacity, pages, capacity, kv_head)
        lowest = _lowest_key(first, WINDOW)
        start = gl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
        run = (split, split + here, start, first)
        old = first - row0  # keys that earlier steps have written
        for number in gl.static_range(RING):
            _request(
                k_desc, v_desc, ring, come, read, number, run, 0, old, split, (page, after), source, KV, SPLIT, PAGE,
                RING,
            )  # fmt: skip
        if PDL:
            gdc_wait()
        h = gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUERIES))[:, None]
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))[None, :]
        head0 = row0 * HEADS + kv_head * GROUP
        q_shared.store(gl.load(q_ptr + (head0 + h).to(gl.int64) * HEAD + d, mask=h < GROUP, other=0.0))
        fence_async_shared()
        for number in gl.static_range(RING):
            _request(
                k_desc, v_desc, ring, come, read, number, run, old, 2147483647, split, (page, after), source, KV,
                SPLIT, PAGE, RING,
            )  # fmt: skip
        position = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, OF_UNIT)) + first
        number = 0
        for at_split in range(split, split + here):
            begin = gl.maximum(start, at_split * SPLIT)
            tiles = gl.cdiv(gl.minimum((at_split + 1) * SPLIT, first + 1) - begin, BLOCK_N)
            before = (begin - at_split * SPLIT) // BLOCK_N
            for tile in range(tiles):
                at = (read + number) % RING
                mbarrier.wait(come.index(at), (read + number) // RING & 1)
                nothing = gl.zeros([BLOCK_N, ROWS], gl.float32, layout=TALL)
                scores = warpgroup_mma(ring.index(at), q_shared.permute((1, 0)), nothing, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
                s_shared.index(before + tile).store(scores)
                _request(
                    k_desc, v_desc, ring, come, read, number + RING, run, 0, 2147483647, at_split, (page, after),
                    source, KV, SPLIT, PAGE, RING,
                )  # fmt: skip
                number += 1
            peak = gl.full([ROWS], _NOTHING, gl.float32, layout=gl.SliceLayout(1, OF_UNIT))
            total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, OF_UNIT))
            peak, total = _weigh_tiles(
                s_shared, p_shared, fades, at_split * SPLIT, position, peak, total, scale, UNITS, WINDOW
            )
            fence_async_shared()
            acc = gl.zeros([HEAD, ROWS], gl.float32, layout=TALL)
            for tile in range(tiles):
                at = (read + number) % RING
                mbarrier.wait(come.index(at), (read + number) // RING & 1)
                values = ring.index(at)
                key0 = begin + tile * BLOCK_N
                if (key0 + BLOCK_N > first + 1) | (key0 < lowest):
                    _forget(values, first - key0, num_warps, lowest - key0)
                for unit in gl.static_range(UNITS):
                    own = (before + tile) * UNITS + unit
                    acc = acc * fades.index(own).load(gl.SliceLayout(0, TALL))[None, :]
                    part = values.slice(unit * UNIT, UNIT, 0) if UNITS > 1 else values
                    acc = warpgroup_mma(part.permute((1, 0)), p_shared.index(own).permute((1, 0)), acc, is_async=True)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                _request(
                    k_desc, v_desc, ring, come, read, number + RING, run, 0, 2147483647, at_split, (page, after),
                    source, KV, SPLIT, PAGE, RING,
                )  # fmt: skip
                number += 1
            page = after
            after = _page(pages, at_split + 2, capacity, SPLIT, PAGE)
            e = gl.arange(0, HEAD, layout=gl.SliceLayout(1, TALL))[:, None]
            o = gl.arange(0, ROWS, layout=gl.SliceLayout(0, TALL))
            place = (head0 + o).to(gl.int64) * split_limit + at_split % split_limit
            gl.store(acc_ptr + place[None, :] * HEAD + e, acc, mask=(o < GROUP)[None, :])
            m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_UNIT))
            sums = sums_ptr + ((head0 + m).to(gl.int64) * split_limit + at_split % split_limit) * 2
            gl.store(sums, peak, mask=m < GROUP)
            gl.store(sums + 1, total, mask=m < GROUP)
        read += number
        merge_rows(
            acc_ptr, sums_ptr, out_ptr, sinks_ptr, left_ptr, row0, 1, first, kv_head, here, splits, split_limit, HEADS,
            KV, GROUP, PADDED, HEAD, SPLIT, AT_ONCE, WINDOW, SINKS, num_warps,
        )  # fmt: skip
    if has_padding:
        clear_padding(out_ptr, tiles_ptr, tile_limit, HEADS, KV, GROUP, PADDED, HEAD, PDL, num_warps)
