"""Products of many rows with packed weights on Hopper (compute capability 9.0), unpacked in registers.

The sums are those of `hopper_pieces` and `linear` with unpacked weights: the same pieces of the same numbers, each one
chain over ascending k in steps of 16. A weight is the tall operand and comes from registers. Each of two consumers has
64 of its rows. It unpacks a block while the tensor cores multiply the block before. One warp brings rows of x, which
both consumers read. No weight is unpacked to memory. Where each word has a scale, two more warps make the scales. There
are as many programs as processors, and each computes one tile after the other. So rows and words of the next tile are
on their way while one is stored.

The compiler may move the unpacking of a block behind the next wait for the tensor cores, and then nothing overlaps. So
that wait comes after the product of the block, which needs the block's numbers. No product is in flight where a loop
begins again, because the compiler would then wait for each instruction of the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.hopper.many_rows.left_side import (
    HEIGHT,
    MAKERS,
    are_scales_made,
    load_packed,
    make_scales,
    open_scales,
    unpack_block,
)
from adapters.models.kernels.triton.packed import lanes_of, locate_piece, restore, store_narrow


@gluon.jit
def _place(index, tiles, BLOCK_M: gl.constexpr, GROUP: gl.constexpr):
    """Return the first row of x and the first row of the weight of a tile. tiles: in both directions. Behind the last
    tile it is that one again.
    """
    row_tiles, column_tiles = tiles
    index = gl.minimum(index, row_tiles * column_tiles - 1)
    group = index // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (index % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (index % (GROUP * column_tiles)) // height * (2 * HEIGHT)
    return m0, n0


@gluon.jit
def fill_ring(x_desc, ring, come, free, m0, steps, done, STAGES: gl.constexpr):
    """Bring all blocks of columns of x in order, each as soon as its slot of the ring is free. done: blocks that were
    brought before.
    """
    BLOCK: gl.constexpr = x_desc.block_type.shape[1]
    for step in range(steps):
        at = (done + step) % STAGES
        mbarrier.wait(free.index(at), ((done + step) // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(at), x_desc.block_type.nbytes)
        bring(x_desc, [m0, step * BLOCK], come.index(at), ring.index(at))


@gluon.jit
def _fill_all(x_desc, ring, come, free, tiles, steps, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Bring the rows of x of all tiles of this program."""
    done = 0
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        m0, _ = _place(index, tiles, x_desc.block_type.shape[0], GROUP)
        fill_ring(x_desc, ring, come, free, m0, steps, done, STAGES)
        done += steps


@gluon.jit
def _make_all_scales(
    levels_ptr,
    scales,
    made,
    taken,
    tiles,
    columns,
    blocks,
    steps,
    BLOCK_M: gl.constexpr,
    FORM: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute the scales of all tiles of this program."""
    done = 0
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        _, n0 = _place(index, tiles, BLOCK_M, GROUP)
        make_scales(levels_ptr, scales, made, taken, n0, columns, blocks, steps, done, FORM)
        done += steps + 1


@gluon.jit
def multiply_blocks(
    low,
    high,
    w,
    held,
    matrix,
    coordinates,
    ring,
    come,
    free,
    shared,
    blocks,
    done,
    scaled,
    NUMBER: gl.constexpr,
    dtype: gl.constexpr,
    FORM: gl.constexpr,
    MMA: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    MADE: gl.constexpr,
):
    """Multiply the blocks from `low` to `high`, from zero, PARTS at a time. w: the first of them. held: the packed one
    after it. done, scaled: blocks of x and of scales before block 0 of this tile. Returned are the sums, and both of
    the next blocks.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BLOCK_M: gl.constexpr = ring.shape[1]
    acc = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    for first in range(low, high, PARTS):
        for part in gl.static_range(PARTS):
            step = first + part
            at = (done + step) % STAGES
            mbarrier.wait(come.index(at), (done + step) // STAGES & 1)
            acc = warpgroup_mma(w, ring.index(at).permute((1, 0)), acc, is_async=True)
            if part > 0:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                mbarrier.arrive(free.index((done + step - 1) % STAGES), count=1)
            w = unpack_block(held, coordinates, shared, scaled + step + 1, NUMBER, dtype, FORM, LEFT, MADE)
            held = load_packed(matrix, coordinates, step + 2, blocks, FORM, MADE)
        acc, w = warpgroup_mma_wait(num_outstanding=0, deps=(acc, w))
        mbarrier.arrive(free.index((done + first + (PARTS - 1)) % STAGES), count=1)
    return acc, w, held


@gluon.jit
def _consume(
    words_ptr,
    levels_ptr,
    out_ptr,
    ring,
    come,
    free,
    shared,
    tiles,
    rows,
    columns,
    blocks,
    steps,
    each,
    stride,
    NUMBER: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    IN_PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    MADE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Compute consumer NUMBER's rows of the weight, of all tiles. steps: blocks that are multiplied. each: blocks of a
    piece.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LANES: gl.constexpr = lanes_of(1, 4, HEIGHT)
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    matrix = (words_ptr, levels_ptr)
    done = 0
    scaled = 0
    _, n0 = _place(gl.program_id(0), tiles, BLOCK_M, GROUP)
    held = load_packed(matrix, locate_piece(n0 + NUMBER * HEIGHT, columns, HEIGHT, LANES), 0, blocks, FORM, MADE)
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        m0, n0 = _place(index, tiles, BLOCK_M, GROUP)
        own = n0 + NUMBER * HEIGHT
        coordinates = locate_piece(own, columns, HEIGHT, LANES)
        w = unpack_block(held, coordinates, shared, scaled, NUMBER, dtype, FORM, LEFT, MADE)
        held = load_packed(matrix, coordinates, 1, blocks, FORM, MADE)
        if IN_PIECES:
            total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
            for first in range(0, steps, each):
                acc, w, held = multiply_blocks(
                    first, gl.minimum(first + each, steps), w, held, matrix, coordinates, ring, come, free, shared,
                    blocks, done, scaled, NUMBER, dtype, FORM, MMA, STAGES, PARTS, MADE,
                )  # fmt: skip
                total = total + acc
        else:
            total, w, held = multiply_blocks(
                0, steps, w, held, matrix, coordinates, ring, come, free, shared, blocks, done, scaled, NUMBER, dtype,
                FORM, MMA, STAGES, PARTS, MADE,
            )  # fmt: skip
        # The first block of the next tile is on its way while this tile is stored.
        _, after = _place(index + gl.num_programs(0), tiles, BLOCK_M, GROUP)
        held = load_packed(matrix, locate_piece(after + NUMBER * HEIGHT, columns, HEIGHT, LANES), 0, blocks, FORM, MADE)
        out = gl.convert_layout(restore(total, dtype, FORM).to(dtype), PAIRS)  # gates round their inputs like this
        store_narrow(out, out_ptr, own, m0, rows, columns, stride, dtype, GATED)
        done += steps
        scaled += steps + 1


@gluon.jit(do_not_specialize=["rows", "blocks", "each"])
def packed_wide(
    words_ptr,
    levels_ptr,
    x_desc,
    out_ptr,
    rows,
    columns,
    blocks,
    each,
    stride,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    IN_PIECES: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. blocks: of a row of w. each: blocks of a piece. stride: from
    one row of out to the next.

    A tile has the rows of x of one box of x_desc, and 128 rows of w. GROUP: tiles of rows that follow each other.
    PARTS: blocks between two waits for all products, of which `each` is a multiple.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    tiles = (gl.cdiv(rows, BLOCK_M), gl.cdiv(columns, 2 * HEIGHT))
    steps = gl.cdiv(blocks, PARTS) * PARTS  # x is zero behind the last block
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, FORM.block], x_desc.layout)
    come = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, 2)
    MADE: gl.constexpr = are_scales_made(FORM, x_desc.dtype)
    shared = open_scales(MADE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    if MADE:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, tiles, rows, columns, blocks, steps,
                        each, stride, 0, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE, GROUP,
                    ),
                ),
                (
                    _consume,
                    (
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, tiles, rows, columns, blocks, steps,
                        each, stride, 1, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE, GROUP,
                    ),
                ),
                (
                    _make_all_scales,
                    (
                        levels_ptr, shared[0], shared[1], shared[2], tiles, columns, blocks, steps, BLOCK_M, FORM,
                        GROUP,
                    ),
                ),
                (_fill_all, (x_desc, ring, come, free, tiles, steps, STAGES, GROUP)),
            ],
            [4, MAKERS, 1],
            [232, 40, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, tiles, rows, columns, blocks, steps,
                        each, stride, 0, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE, GROUP,
                    ),
                ),
                (
                    _consume,
                    (
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, tiles, rows, columns, blocks, steps,
                        each, stride, 1, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE, GROUP,
                    ),
                ),
                (_fill_all, (x_desc, ring, come, free, tiles, steps, STAGES, GROUP)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
