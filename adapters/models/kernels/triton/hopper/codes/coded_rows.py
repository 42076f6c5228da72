"""Flash decoding of rows that are alone in their slots, on Hopper, over coded keys and values.

The arithmetic and the operands of products are those of `hopper_rows`. Bulk copies cannot turn codes into numbers. So
asynchronous copies bring the codes of a split to shared memory, those of old keys before the kernels before have ended.
Then all warps turn half of the keys, or half of the values, into bfloat16, which holds every code exactly, and the
tensor cores multiply that half. Codes of the next split come meanwhile.

Scores and weights are multiplied with the scales, as `attention` does, because there are fewer of them than codes. The
scale of a row that the program does not see is zero. Its codes may be anything, because every code is a finite number.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _lowest_key, _weigh_scores, _whose
from adapters.models.kernels.triton.hopper.hopper_merge import clear_padding, find_padding, merge_rows
from adapters.models.kernels.triton.hopper.hopper_numbers import INT4, unpack_words
from adapters.models.kernels.triton.hopper.hopper_rows import _lines

PARTS = gl.constexpr(2)  # of a split, that are turned into numbers and multiplied one after the other


@gluon.jit
def _ask_for_split(words_ptr, row, low, high, codes, scales, APART: gl.constexpr, num_warps: gl.constexpr):
    """Begin to copy a split's codes, and its scales, which stand behind them, of rows from number `low` to `high`.

    row: of the split's first key. codes: `[tiles, rows, words]`. Scales of other rows become zeros. APART: words from a
    row to the next.
    """
    TILES: gl.constexpr = codes.shape[0]
    UNIT: gl.constexpr = codes.shape[1]
    WORDS: gl.constexpr = codes.shape[2]
    WIDE: gl.constexpr = min(32, WORDS)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [num_warps, 1], [1, 0])
    i = gl.arange(0, UNIT, layout=gl.SliceLayout(1, COPIED))
    j = gl.arange(0, WORDS, layout=gl.SliceLayout(0, COPIED))
    first = words_ptr + row.to(gl.int64) * APART
    for tile in gl.static_range(TILES):
        at = tile * UNIT + i
        is_seen = (at >= low) & (at < high)
        async_copy.async_copy_global_to_shared(
            codes.index(tile), first + (at[:, None] * APART + j[None, :]), mask=is_seen[:, None]
        )
    s = gl.arange(0, TILES * UNIT, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    async_copy.async_copy_global_to_shared(scales, first + (s * APART + WORDS), mask=(s >= low) & (s < high))
    async_copy.commit_group()


@gluon.jit
def _put_numbers(codes, halves, PART: gl.constexpr, KIND: gl.constexpr, num_warps: gl.constexpr):
    """Turn part PART of a split's codes into numbers. halves: memory of a part, `[.., rows, head / 2]`, where two
    bfloat16 are one number, as one tile or as several.
    """
    WORDS: gl.constexpr = codes.shape[2]
    UNIT: gl.constexpr = codes.shape[1]
    EACH: gl.constexpr = codes.shape[0] // PARTS
    ROWS: gl.constexpr = halves.shape[1]
    HALF: gl.constexpr = min(32, WORDS // 2)
    READ: gl.constexpr = gl.BlockedLayout([1, 2], [32 // HALF, HALF], [num_warps, 1], [1, 0])
    for tile in gl.static_range(EACH):
        numbers = unpack_words(codes.index(PART * EACH + tile).load(READ), KIND)
        halves.index(tile * UNIT // ROWS).slice(tile * UNIT % ROWS, UNIT).store(numbers)
    fence_async_shared()
    program_barrier()


@gluon.jit
def _first_row(split, pages_ptr, base, capacity, kv_head, KV: gl.constexpr, SPLIT: gl.constexpr, PAGE: gl.constexpr):
    """Return the row of the cache that has a split's first key. The rows of its other keys follow."""
    row = base + split * SPLIT
    if PAGE > 0:
        page = gl.load(pages_ptr + split, mask=split < capacity // PAGE, other=0)
        row = (page * KV + kv_head) * PAGE
    return row


@gluon.jit
def _weigh_unit(
    scores, p_shared, fades, scales, OWN: gl.constexpr, key0, position, peak, total, scale, WINDOW: gl.constexpr
):
    """Do what `_weigh_split` does for tile OWN of a split. key0: the split's first key."""
    UNIT: gl.constexpr = scores.shape[1]
    KEYS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    k_scales, v_scales = scales
    own = k_scales.slice(OWN * UNIT, UNIT).load(KEYS).to(gl.float32, bitcast=True)
    scores = scores * own[None, :]
    weights, fade, peak, total = _weigh_scores(scores, True, key0 + OWN * UNIT, position, peak, total, scale, WINDOW)
    own = v_scales.slice(OWN * UNIT, UNIT).load(KEYS).to(gl.float32, bitcast=True)
    weights = weights * own[None, :]
    p_shared.index(OWN).store(weights.to(p_shared.dtype))
    fades.index(OWN).store(fade)
    return peak, total


@gluon.jit
def _weigh_split(
    s_shared,
    p_shared,
    fades,
    scales,
    key0,
    position,
    scale,
    UNIT: gl.constexpr,
    WINDOW: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Leave the weights of a split's keys in shared memory, times the scales of values, and by tiles the factors by
    which earlier results fade. Return the split's peak and total. UNIT: keys of a tile of `attention`.
    """
    BLOCK_N: gl.constexpr = s_shared.shape[1]
    ROWS: gl.constexpr = s_shared.shape[2]
    OF_UNIT: gl.constexpr = _lines(ROWS, UNIT, False, num_warps)
    gl.static_assert(BLOCK_N == 2 * UNIT)
    peak = gl.full([ROWS], _NOTHING, gl.float32, layout=gl.SliceLayout(1, OF_UNIT))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, OF_UNIT))
    for part in gl.static_range(PARTS):
        lines = s_shared.index(part).load(_lines(ROWS, BLOCK_N, True, num_warps)).permute((1, 0))
        lines = gl.convert_layout(lines, _lines(ROWS, BLOCK_N, False, num_warps), assert_trivial=True)
        both = gl.split(lines.reshape((ROWS, 2, UNIT)).permute((0, 2, 1)))
        for unit in gl.static_range(2):
            scores = gl.convert_layout(both[unit], OF_UNIT, assert_trivial=True)
            peak, total = _weigh_unit(
                scores, p_shared, fades, scales, part * 2 + unit, key0, position, peak, total, scale, WINDOW
            )
    fence_async_shared()
    return peak, total


@gluon.jit
def _multiply_keys(
    codes, halves, numbers, q_shared, s_shared, PART: gl.constexpr, KIND: gl.constexpr, num_warps: gl.constexpr
):
    """Leave the scores of a part's keys in shared memory. PART 0 has been turned into numbers already."""
    ROWS: gl.constexpr = q_shared.shape[0]
    TALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    if PART > 0:
        _put_numbers(codes, halves, PART, KIND, num_warps)
    BLOCK_N: gl.constexpr = numbers.shape[1]
    nothing = gl.zeros([BLOCK_N, ROWS], gl.float32, layout=TALL)
    scores = warpgroup_mma(numbers.index(0), q_shared.permute((1, 0)), nothing, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    s_shared.index(PART).store(scores)
    program_barrier()  # no product reads these keys any more


@gluon.jit
def _multiply_values(
    acc,
    codes,
    halves,
    units,
    p_shared,
    fades,
    begin,
    end,
    PART: gl.constexpr,
    KIND: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Add a part's values times their weights. begin, end: the split's tiles that the row sees lie between."""
    TALL: gl.constexpr = acc.type.layout
    EACH: gl.constexpr = units.shape[0]
    _put_numbers(codes, halves, PART, KIND, num_warps)
    for unit in range(gl.maximum(begin, PART * EACH), gl.minimum(end, PART * EACH + EACH)):
        acc = acc * fades.index(unit).load(gl.SliceLayout(0, TALL))[None, :]
        values = units.index(unit - PART * EACH)
        acc = warpgroup_mma(values.permute((1, 0)), p_shared.index(unit).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    program_barrier()  # no product reads these values any more
    return acc


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_coded_rows(
    q_ptr,
    k_words,
    v_words,
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
    HEAD: gl.constexpr,
    UNIT: gl.constexpr,
    KINDS: gl.constexpr,
    APART: gl.constexpr,
    LAYOUTS: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    LIMIT: gl.constexpr,
    AT_ONCE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `hopper_rows.attend_rows_ahead` over rows of codes.

    k_words, v_words: keys and values as int32, APART from a row to the next. KINDS: what their codes are. UNIT: keys of
    a tile of `attention`, of which a split has four. LAYOUTS: of half of a split in shared memory, of a tile of values,
    of queries, of the weights of a tile, and of half of a split in words. The last agrees with the first two about
    every byte.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = SPLIT // PARTS
    ROWS: gl.constexpr = max(8, PADDED)
    UNITS: gl.constexpr = SPLIT // UNIT
    TALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    OF_UNIT: gl.constexpr = _lines(ROWS, UNIT, False, num_warps)
    ACROSS: gl.constexpr = min(32, HEAD // 8)
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [num_warps, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    EACH: gl.constexpr = UNITS // PARTS
    K_WORDS: gl.constexpr = HEAD // 8 if KINDS[0] == INT4 else HEAD // 4
    V_WORDS: gl.constexpr = HEAD // 8 if KINDS[1] == INT4 else HEAD // 4
    gl.static_assert(PAGE % SPLIT == 0)
    gl.static_assert(PAGE <= SPLIT)
    if PDL:
        gdc_launch_dependents()
    numbers = gl.allocate_shared_memory(dtype, [1, BLOCK_N, HEAD], LAYOUTS[0])
    halves = numbers._reinterpret(gl.int32, [1, BLOCK_N, HEAD // 2], LAYOUTS[4])  # noqa: SLF001 - there is no other name
    units = numbers._reinterpret(dtype, [EACH, UNIT, HEAD], LAYOUTS[1])  # noqa: SLF001
    unit_halves = numbers._reinterpret(gl.int32, [EACH, UNIT, HEAD // 2], LAYOUTS[4])  # noqa: SLF001
    k_codes = gl.allocate_shared_memory(gl.int32, [UNITS, UNIT, K_WORDS], LINES)
    v_codes = gl.allocate_shared_memory(gl.int32, [UNITS, UNIT, V_WORDS], LINES)
    k_scales = gl.allocate_shared_memory(gl.int32, [SPLIT], PLAIN)
    v_scales = gl.allocate_shared_memory(gl.int32, [SPLIT], PLAIN)
    q_shared = gl.allocate_shared_memory(dtype, [ROWS, HEAD], LAYOUTS[2])
    s_shared = gl.allocate_shared_memory(gl.float32, [PARTS, BLOCK_N, ROWS], gl.SwizzledSharedLayout(8, 1, 8, [0, 1]))
    p_shared = gl.allocate_shared_memory(dtype, [UNITS, ROWS, UNIT], LAYOUTS[3])
    fades = gl.allocate_shared_memory(gl.float32, [UNITS, ROWS], PLAIN)
    t = gl.arange(0, LIMIT, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    ends = gl.load(tiles_ptr + t * 8 + 4, mask=t < tile_limit, other=2147483647)
    has_padding = find_padding(tiles_ptr, t, tile_limit)
    items = gl.load(tiles_ptr + (tile_limit - 1) * 8 + 4) * KV
    of_program = gl.cdiv(items, gl.num_programs(0))
    item = gl.program_id(0) * of_program
    stop_item = gl.minimum(item + of_program, items)
    while item < stop_item:
        row0, _, slot, first, kv_head, splits, low, offset = _whose(tiles_ptr, ends, t, item, KV)
        here = gl.minimum(splits - offset, stop_item - item)
        split = low + offset
        item += here
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        base = (slot * KV + kv_head) * capacity
        lowest = _lowest_key(first, WINDOW)
        row = _first_row(split, pages, base, capacity, kv_head, KV, SPLIT, PAGE)
        key0 = split * SPLIT
        stop = gl.minimum(first + 1 - key0, SPLIT)
        is_old = key0 + stop <= first - row0  # keys that earlier steps have written
        if is_old:
            _ask_for_split(k_words, row, lowest - key0, stop, k_codes, k_scales, APART, num_warps)
            _ask_for_split(v_words, row, lowest - key0, stop, v_codes, v_scales, APART, num_warps)
            async_copy.wait_group(1)
            program_barrier()
            _put_numbers(k_codes, halves, 0, KINDS[0], num_warps)
        if PDL:
            gdc_wait()
        if not is_old:
            _ask_for_split(k_words, row, lowest - key0, stop, k_codes, k_scales, APART, num_warps)
            _ask_for_split(v_words, row, lowest - key0, stop, v_codes, v_scales, APART, num_warps)
            async_copy.wait_group(1)
            program_barrier()
            _put_numbers(k_codes, halves, 0, KINDS[0], num_warps)
        h = gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUERIES))[:, None]
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))[None, :]
        head0 = row0 * HEADS + kv_head * GROUP
        q_shared.store(gl.load(q_ptr + (head0 + h).to(gl.int64) * HEAD + d, mask=h < GROUP, other=0.0))
        fence_async_shared()
        program_barrier()
        position = gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, OF_UNIT)) + first
        for at_split in range(split, split + here):
            key0 = at_split * SPLIT
            row = _first_row(at_split + 1, pages, base, capacity, kv_head, KV, SPLIT, PAGE)
            stop = gl.where(at_split + 1 < split + here, first + 1 - key0 - SPLIT, 0)
            for part in gl.static_range(PARTS):
                _multiply_keys(k_codes, halves, numbers, q_shared, s_shared, part, KINDS[0], num_warps)
            async_copy.wait_group(0)
            program_barrier()  # scales and values are there
            peak, total = _weigh_split(
                s_shared, p_shared, fades, (k_scales, v_scales), key0, position, scale, UNIT, WINDOW, num_warps
            )
            begin = gl.maximum(lowest - key0, 0) // UNIT
            end = gl.minimum(gl.cdiv(first + 1 - key0, UNIT), UNITS)
            acc = gl.zeros([HEAD, ROWS], gl.float32, layout=TALL)
            acc = _multiply_values(
                acc, v_codes, unit_halves, units, p_shared, fades, begin, end, 0, KINDS[1], num_warps
            )
            _ask_for_split(k_words, row, 0, stop, k_codes, k_scales, APART, num_warps)
            acc = _multiply_values(
                acc, v_codes, unit_halves, units, p_shared, fades, begin, end, 1, KINDS[1], num_warps
            )
            _ask_for_split(v_words, row, 0, stop, v_codes, v_scales, APART, num_warps)
            e = gl.arange(0, HEAD, layout=gl.SliceLayout(1, TALL))[:, None]
            o = gl.arange(0, ROWS, layout=gl.SliceLayout(0, TALL))
            place = (head0 + o).to(gl.int64) * split_limit + at_split % split_limit
            gl.store(acc_ptr + place[None, :] * HEAD + e, acc, mask=(o < GROUP)[None, :])
            m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_UNIT))
            sums = sums_ptr + ((head0 + m).to(gl.int64) * split_limit + at_split % split_limit) * 2
            gl.store(sums, peak, mask=m < GROUP)
            gl.store(sums + 1, total, mask=m < GROUP)
            async_copy.wait_group(1)
            program_barrier()
            _put_numbers(k_codes, halves, 0, KINDS[0], num_warps)
        async_copy.wait_group(0)
        merge_rows(
            acc_ptr, sums_ptr, out_ptr, sinks_ptr, left_ptr, row0, 1, first, kv_head, here, splits, split_limit, HEADS,
            KV, GROUP, PADDED, HEAD, SPLIT, AT_ONCE, WINDOW, SINKS, num_warps,
        )  # fmt: skip
    if has_padding:
        clear_padding(out_ptr, tiles_ptr, tile_limit, HEADS, KV, GROUP, PADDED, HEAD, PDL, num_warps)
