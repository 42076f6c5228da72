"""Products of many rows with packed weights on Hopper (compute capability 9.0), unpacked in registers.

The sums are those of `hopper_pieces` and `linear` with unpacked weights: the same pieces of the same numbers, each one
chain over ascending k in steps of 16. A weight is the tall operand and comes from registers. Each of two consumers has
64 of its rows. It unpacks a block while the tensor cores multiply the block before. One warp brings rows of x, which
both consumers read. No weight is unpacked to memory. Where each word has a scale, two more warps make the scales.

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
def fill_ring(x_desc, ring, come, free, m0, steps, STAGES: gl.constexpr):
    """Bring all blocks of columns of x in order, each as soon as its slot of the ring is free."""
    BLOCK: gl.constexpr = x_desc.block_type.shape[1]
    for step in range(steps):
        at = step % STAGES
        mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(at), x_desc.block_type.nbytes)
        bring(x_desc, [m0, step * BLOCK], come.index(at), ring.index(at))


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
    NUMBER: gl.constexpr,
    dtype: gl.constexpr,
    FORM: gl.constexpr,
    MMA: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    MADE: gl.constexpr,
):
    """Multiply the blocks from `low` to `high`, from zero, PARTS at a time. w: the first of them. held: the packed one
    after it. Returned are the sums, and both of the next blocks.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BLOCK_M: gl.constexpr = ring.shape[1]
    acc = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    for first in range(low, high, PARTS):
        for part in gl.static_range(PARTS):
            step = first + part
            at = step % STAGES
            mbarrier.wait(come.index(at), step // STAGES & 1)
            acc = warpgroup_mma(w, ring.index(at).permute((1, 0)), acc, is_async=True)
            if part > 0:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                mbarrier.arrive(free.index((step - 1) % STAGES), count=1)
            w = unpack_block(held, coordinates, shared, step + 1, NUMBER, dtype, FORM, LEFT, MADE)
            held = load_packed(matrix, coordinates, step + 2, blocks, FORM, MADE)
        acc, w = warpgroup_mma_wait(num_outstanding=0, deps=(acc, w))
        mbarrier.arrive(free.index((first + (PARTS - 1)) % STAGES), count=1)
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
    n0,
    m0,
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
):
    """Compute consumer NUMBER's rows of the weight. steps: blocks that are multiplied. each: blocks of a piece."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LANES: gl.constexpr = lanes_of(1, 4, HEIGHT)
    own = n0 + NUMBER * HEIGHT
    matrix = (words_ptr, levels_ptr)
    coordinates = locate_piece(own, columns, HEIGHT, LANES)
    held = load_packed(matrix, coordinates, 0, blocks, FORM, MADE)
    w = unpack_block(held, coordinates, shared, 0, NUMBER, dtype, FORM, LEFT, MADE)
    held = load_packed(matrix, coordinates, 1, blocks, FORM, MADE)
    if IN_PIECES:
        total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
        for first in range(0, steps, each):
            acc, w, held = multiply_blocks(
                first, gl.minimum(first + each, steps), w, held, matrix, coordinates, ring, come, free, shared, blocks,
                NUMBER, dtype, FORM, MMA, STAGES, PARTS, MADE,
            )  # fmt: skip
            total = total + acc
    else:
        total, w, held = multiply_blocks(
            0, steps, w, held, matrix, coordinates, ring, come, free, shared, blocks, NUMBER, dtype, FORM, MMA, STAGES,
            PARTS, MADE,
        )  # fmt: skip
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    out = gl.convert_layout(restore(total, dtype, FORM).to(dtype), PAIRS)  # gates round their inputs like this as well
    store_narrow(out, out_ptr, own, m0, rows, columns, stride, dtype, GATED)


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

    A program has the rows of x of one box of x_desc, and 128 rows of w. GROUP: tiles of rows that follow each other.
    PARTS: blocks between two waits for all products, of which `each` is a multiple.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, 2 * HEIGHT)
    program = gl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * (2 * HEIGHT)
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
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, n0, m0, rows, columns, blocks, steps,
                        each, stride, 0, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE,
                    ),
                ),
                (
                    _consume,
                    (
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, n0, m0, rows, columns, blocks, steps,
                        each, stride, 1, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE,
                    ),
                ),
                (
                    make_scales,
                    (levels_ptr, shared[0], shared[1], shared[2], n0, columns, blocks, steps, FORM),
                ),
                (fill_ring, (x_desc, ring, come, free, m0, steps, STAGES)),
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
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, n0, m0, rows, columns, blocks, steps,
                        each, stride, 0, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE,
                    ),
                ),
                (
                    _consume,
                    (
                        words_ptr, levels_ptr, out_ptr, ring, come, free, shared, n0, m0, rows, columns, blocks, steps,
                        each, stride, 1, FORM, GATED, IN_PIECES, STAGES, PARTS, MADE,
                    ),
                ),
                (fill_ring, (x_desc, ring, come, free, m0, steps, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
