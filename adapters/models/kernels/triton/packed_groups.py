"""Products of experts whose weights stay packed: each pair of a row and an expert with that expert's packed weight.

A tile has some pairs of one expert, as `experts.deal` leaves them. Sums are those of `packed`: columns are cut into
pieces at fixed places, a piece is one chain over ascending k in steps of 16, and pieces are added in order. So neither
the number of an expert's pairs nor the kernel that multiplies them can change an element's bits.

* `multiply_few` is for up to eight pairs in a tile. The pieces of a sum are side by side, in one warp each.
* `multiply_many` is for more pairs. A warp has all pieces of its sums, one after the other, so that rows of x that
  come to shared memory are used by all warps. On Hopper `hopper_groups` does so for up to 128 pairs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.packed import (
    add_pieces,
    apply_gate,
    fetch_x,
    lanes_of,
    load_block,
    locate_piece,
    next_x,
    restore,
)
from adapters.models.kernels.triton.packed_numbers import weights_of


@gluon.jit
def matrix_of(words_ptr, levels_ptr, words_apart, levels_apart, slot):
    """Return the pointers to the weight of one expert. words_apart, levels_apart: from one expert to the next."""
    at = slot.to(gl.int64)
    return words_ptr + at * words_apart, levels_ptr + at * levels_apart


@gluon.jit
def read_tile(pairs_ptr, tiles_ptr, tile, EXPERTS: gl.constexpr):
    """Return where the weights of a tile are, its pairs, and how many.

    EXPERTS: there is one row, which chose each expert for one pair, and `pairs` are the numbers of these experts. So
    the pair of a tile is the tile's number. A padded row chose none, and reads the last one. 0: tiles were made.
    """
    if EXPERTS > 0:
        slot = gl.minimum(gl.load(pairs_ptr + tile), EXPERTS - 1)
        own_pairs = tile
        count = 1
    else:
        slot = gl.load(tiles_ptr + tile * 4)
        own_pairs = pairs_ptr + gl.load(tiles_ptr + tile * 4 + 1)
        count = gl.load(tiles_ptr + tile * 4 + 2)
    return slot, own_pairs, count


@gluon.jit
def number_pairs(own_pairs, m, count, EXPERTS: gl.constexpr):
    """Return the numbers of pairs `m` of a tile; behind the last one, its number again. own_pairs: of `read_tile`."""
    return m * 0 + own_pairs if EXPERTS > 0 else gl.load(own_pairs + gl.minimum(m, count - 1))


@gluon.jit
def store_pairs(total, out_ptr, own_pairs, n0, count, columns, GATED: gl.constexpr, EXPERTS: gl.constexpr):
    """Store the sums `[rows of w, pairs]` of `count` pairs, each at its number. n0: the first row of w. own_pairs,
    EXPERTS: see `read_tile`.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(total.reshape((total.shape[0] // 2, 2, total.shape[1])).permute((0, 2, 1)))
        out = apply_gate(gate, up, dtype, GATED)
        n0 = n0 // 2
        columns = columns // 2
    else:
        out = total.to(dtype)
    n = n0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    m = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    pair = number_pairs(own_pairs, m, count, EXPERTS).to(gl.int64)
    gl.store(out_ptr + pair * columns + n, out, mask=(m < count) & (n < columns))


@gluon.jit
def _request(
    matrix,
    unit,
    place,
    step,
    columns,
    LAST: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    FORM: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Load block number `step` of every piece, of the rows of a unit.

    place: the rows of a unit, lanes, words and pieces. LAST: the greatest number that `step` may be. EACH: blocks of a
    piece. BLOCKS: of a row; the last pieces may have fewer. WHOLE: all units have all of their rows, so that addresses
    differ by constants.
    """
    i, t, c, piece = place
    PIECES: gl.constexpr = piece.shape[0]
    ROWS: gl.constexpr = i.shape[1]
    words, levels = matrix
    block = piece * EACH + step
    if (PIECES - 1) * EACH + LAST >= BLOCKS:
        block = gl.minimum(block, BLOCKS - 1)
    if WHOLE:
        sides = unit.to(gl.int64) * (ROWS // 8)
        words += sides * (BLOCKS * 128)
        levels += sides * (gl.cdiv(BLOCKS * FORM.block, 128) * FORM.planes * 8)
        n = i
    else:
        n = gl.minimum(unit * ROWS + i, columns - 1)
    return load_block((words, levels), (n, t, c), block, BLOCKS, FORM)


@gluon.jit
def keep_order(number):
    """Keep the assembler from moving what is requested before this behind it: a barrier of a warp, which takes no time.

    Without it, words are requested after the arithmetic of their unit, because that takes fewer registers.
    """
    gl.inline_asm_elementwise(
        "{ bar.warp.sync 0xffffffff; mov.b32 $0, $1; }", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def multiply_few(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    words_apart,
    levels_apart,
    columns,
    depth,
    SHARE: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    FORM: gl.constexpr,
    WHOLE: gl.constexpr,
    GATED: gl.constexpr,
    TILES: gl.constexpr,
    EXPERTS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[pair] = x[pair // SHARE] @ w[slot].T for tiles of up to eight pairs.

    BLOCKS: of a row of w. EACH: blocks of a piece, a multiple of AHEAD. BLOCK_N rows of a tile's weight are a unit.
    Only the device knows how many tiles there are, so every program takes an equal share of all units, in order. It has
    the rows of its tile in shared memory. Each warp has the packed words of AHEAD blocks in registers or on their way
    there, also those of the next unit. WHOLE: see `_request`. TILES: how many there are; 0: only the device knows.
    EXPERTS: see `read_tile`.

    EARLY: tiles were made before the kernel before this one started. Only then are weights requested while that kernel
    still runs.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // BLOCK, BLOCK // 8], [PIECES, num_warps // PIECES, 1], [2, 1, 0]
    )
    BANKS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ring = gl.allocate_shared_memory(dtype, [EACH, PIECES, BLOCK_M, BLOCK], BANKS)
    i, t, c = locate_piece(0, BLOCK_N, BLOCK_N, LANES)
    place = (i, t, c, gl.arange(0, PIECES, layout=PIECE)[:, None, None, None])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    before = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None] * (EACH * BLOCK)
    LAST: gl.constexpr = 0 if EACH == AHEAD else EACH - AHEAD
    across = gl.cdiv(columns, BLOCK_N)
    if PDL and not EARLY:
        gdc_wait()
    units = (TILES if TILES > 0 else gl.load(total_ptr)) * across
    begin = gl.program_id(0) * units // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * units // gl.num_programs(0)
    for tile in range(begin // across, gl.cdiv(end, across)):
        slot, own_pairs, count = read_tile(pairs_ptr, tiles_ptr, tile, EXPERTS)
        matrix = matrix_of(words_ptr, levels_ptr, words_apart, levels_apart, slot)
        start = gl.maximum(begin - tile * across, 0)
        stop = gl.minimum(end - tile * across, across)
        held = ()
        for ahead in gl.static_range(AHEAD):
            held = held + (_request(matrix, start, place, ahead, columns, ahead, BLOCKS, EACH, FORM, WHOLE),)  # noqa: RUF005
        if PDL:
            gdc_launch_dependents()
            if EARLY:
                gdc_wait()
        row = number_pairs(own_pairs, m, count, EXPERTS) // SHARE
        program_barrier()  # all warps have read the rows of the tile before
        for stage in gl.static_range(EACH):
            fetch_x(x_ptr, ring, (row, m < count, before, k), stage, EACH, depth, BLOCK)
        async_copy.wait_group(0)
        program_barrier()
        for unit in range(start, stop):
            acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
            # Behind the last unit its own words are requested again, which are still in the cache.
            following = gl.minimum(unit + 1, stop - 1)
            for step in range(0, EACH, AHEAD):
                wraps = step + AHEAD >= EACH  # what is requested belongs to the next unit
                of_unit = gl.where(wraps, following, unit)
                after = gl.where(wraps, step + AHEAD - EACH, step + AHEAD)
                coming = ()
                for ahead in gl.static_range(AHEAD):
                    w = weights_of(held[ahead], (i + unit * BLOCK_N, t, c), dtype, FORM, True)
                    w = gl.convert_layout(w, LEFT, assert_trivial=True)
                    coming = coming + (  # noqa: RUF005
                        _request(
                            matrix, of_unit, place, after + ahead, columns, LAST + ahead, BLOCKS, EACH, FORM, WHOLE
                        ),
                    )
                    keep_order(unit)
                    acc = mma_v2(w, ring.index(step + ahead).permute((0, 2, 1)).load(RIGHT), acc)
                held = coming
            total = restore(add_pieces(acc, num_warps), dtype, FORM)
            store_pairs(total, out_ptr, own_pairs, unit * BLOCK_N, count, columns, GATED, EXPERTS)
    if PDL:
        gdc_wait()  # a kernel behind this one that waits for it must not start before the one in front has ended


@gluon.jit(do_not_specialize=["blocks", "each"])
def multiply_many(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    words_apart,
    levels_apart,
    columns,
    depth,
    blocks,
    each,
    SHARE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[pair] = x[pair // SHARE] @ w[slot].T for tiles of BLOCK_M pairs.

    A program has one tile of pairs and BLOCK_N rows of the expert's weight. Blocks of x are in a ring of shared memory.
    blocks, each, EARLY: as in `multiply_few`.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    STAGES: gl.constexpr = 3
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(1, num_warps, BLOCK_N)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // BLOCK, BLOCK // 8], [1, num_warps, 1], [2, 1, 0])
    BANKS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    across = gl.cdiv(columns, BLOCK_N)
    tile = gl.program_id(0) // across
    n0 = gl.program_id(0) % across * BLOCK_N
    if PDL and not EARLY:
        gdc_wait()
    if tile < gl.load(total_ptr):
        slot = gl.load(tiles_ptr + tile * 4)
        pairs_ptr += gl.load(tiles_ptr + tile * 4 + 1)
        count = gl.load(tiles_ptr + tile * 4 + 2)
        matrix = matrix_of(words_ptr, levels_ptr, words_apart, levels_apart, slot)
        coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
        held = load_block(matrix, coordinates, 0, blocks, FORM)
        if PDL:
            gdc_launch_dependents()
            if EARLY:
                gdc_wait()
        ring = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, BLOCK], BANKS)
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
        k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
        before = gl.arange(0, 1, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]  # no columns
        row = gl.load(pairs_ptr + gl.minimum(m, count - 1)) // SHARE
        at = (row, m < count, before, k)
        for stage in gl.static_range(STAGES - 1):
            fetch_x(x_ptr, ring, at, stage, blocks, depth, BLOCK)
        total = gl.zeros([1, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
        for start in range(0, blocks, each):
            acc = gl.zeros([1, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
            for step in range(start, gl.minimum(start + each, blocks)):
                coming = load_block(matrix, coordinates, gl.minimum(step + 1, blocks - 1), blocks, FORM)
                right, _ = next_x(step, x_ptr, ring, at, step, blocks, depth, False, BLOCK, RIGHT)
                w = gl.convert_layout(weights_of(held, coordinates, dtype, FORM, True), LEFT, assert_trivial=True)
                acc = mma_v2(w, right, acc)
                held = coming
            total = total + acc
        async_copy.wait_group(0)
        found = restore(add_pieces(total, num_warps), dtype, FORM)
        store_pairs(found, out_ptr, pairs_ptr, n0, count, columns, GATED, 0)
