"""Products of many rows with packed weights on Hopper (compute capability 9.0), unpacked beside the products.

The sums are those of `hopper_pieces` and `linear` with unpacked weights: the same pieces of the same numbers, each one
chain over ascending k in steps of 16. A program has 128 rows of the weight, the tall operand. Four warps unpack its
blocks into a ring of shared memory and bring rows of x into another one. Two consumers of four warps each multiply 64
rows of the weight. So no weight is unpacked to memory, and the tensor cores do not wait for unpacking.
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
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.packed import lanes_of, load_block, locate_piece, restore, store_narrow
from adapters.models.kernels.triton.packed_numbers import weights_of

HEIGHT = gl.constexpr(64)  # rows of the weight of one consumer


@gluon.jit
def _put_half(packed, coordinates, slot, dtype: gl.constexpr, FORM: gl.constexpr):
    """Unpack a block of one consumer's rows into its slot."""
    slot.store(weights_of(packed, coordinates, dtype, FORM, True).reshape((HEIGHT, FORM.block)))


@gluon.jit
def _fill(
    words_ptr,
    levels_ptr,
    x_desc,
    x_ring,
    w_ring,
    bars,
    n0,
    m0,
    columns,
    blocks,
    FORM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the rings with all blocks of columns in order, each as soon as its slot is free."""
    come, free = bars
    dtype: gl.constexpr = x_desc.dtype
    LANES: gl.constexpr = lanes_of(1, 4, HEIGHT)
    matrix = (words_ptr, levels_ptr)
    above = locate_piece(n0, columns, HEIGHT, LANES)
    below = locate_piece(n0 + HEIGHT, columns, HEIGHT, LANES)
    first = load_block(matrix, above, 0, blocks, FORM)
    second = load_block(matrix, below, 0, blocks, FORM)
    for step in range(blocks):
        at = step % STAGES
        mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(at), x_desc.block_type.nbytes)
        bring(x_desc, [m0, step * FORM.block], come.index(at), x_ring.index(at))
        following = gl.minimum(step + 1, blocks - 1)
        _put_half(first, above, w_ring.index(2 * at), dtype, FORM)
        first = load_block(matrix, above, following, blocks, FORM)
        _put_half(second, below, w_ring.index(2 * at + 1), dtype, FORM)
        second = load_block(matrix, below, following, blocks, FORM)
        fence_async_shared()
        program_barrier()
        mbarrier.arrive(come.index(at), count=1)


@gluon.jit
def _multiply_blocks(low, high, x_ring, w_ring, bars, NUMBER: gl.constexpr, MMA: gl.constexpr, STAGES: gl.constexpr):
    """Multiply the blocks from `low` to `high`, from zero."""
    come, free = bars
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    acc = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    for step in range(low, high):
        at = step % STAGES
        mbarrier.wait(come.index(at), step // STAGES & 1)
        w = w_ring.index(2 * at + NUMBER)
        adding = warpgroup_mma(w, x_ring.index(at).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(adding,))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > low)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(free.index((high + STAGES - 1) % STAGES), count=1, pred=high > low)
    return acc


@gluon.jit
def _consume(
    out_ptr,
    x_ring,
    w_ring,
    bars,
    n0,
    m0,
    rows,
    columns,
    blocks,
    each,
    stride,
    NUMBER: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    IN_PIECES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute consumer NUMBER's rows of the weight. each: blocks of a piece."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    if IN_PIECES:
        total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
        for first in range(0, blocks, each):
            high = gl.minimum(first + each, blocks)
            total = total + _multiply_blocks(first, high, x_ring, w_ring, bars, NUMBER, MMA, STAGES)
    else:
        total = _multiply_blocks(0, blocks, x_ring, w_ring, bars, NUMBER, MMA, STAGES)
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    out = gl.convert_layout(restore(total, dtype, FORM).to(dtype), PAIRS)  # gates round their inputs like this as well
    store_narrow(out, out_ptr, n0 + NUMBER * HEIGHT, m0, rows, columns, stride, dtype, GATED)


@gluon.jit(do_not_specialize=["rows", "blocks", "each"])
def packed_beside(
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
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. blocks: of a row of w. each: blocks of a piece. stride: from
    one row of out to the next.

    A program has the rows of x of one box of x_desc, and 128 rows of w. GROUP: tiles of rows that follow each other.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, 2 * HEIGHT)
    program = gl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * (2 * HEIGHT)
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, FORM.block], x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HEIGHT, FORM.block], W_LAYOUT)
    come = make_barriers(STAGES, 2)
    free = make_barriers(STAGES, 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_ptr, x_ring, w_ring, (come, free), n0, m0, rows, columns, blocks, each, stride, 0, FORM, GATED,
                    IN_PIECES, STAGES,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, x_ring, w_ring, (come, free), n0, m0, rows, columns, blocks, each, stride, 1, FORM, GATED,
                    IN_PIECES, STAGES,
                ),
            ),
            (
                _fill,
                (
                    words_ptr, levels_ptr, x_desc, x_ring, w_ring, (come, free), n0, m0, columns, blocks, FORM, STAGES,
                ),
            ),
        ],
        [4, 4],
        [192, 112],
    )  # fmt: skip
