"""Products of one row with packed weights, unpacked in registers.

The sums are those of `packed.packed_narrow`. What differs is how x comes. The whole row lies in shared memory, and all
of it is requested at once. A warp of `packed_narrow` requests a block of x while it multiplies the block before, so it
waits as long as the cache takes, block after block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.packed import (
    add_pieces,
    lanes_of,
    load_block,
    locate_piece,
    restore,
    store_narrow,
)
from adapters.models.kernels.triton.packed_numbers import weights_of


@gluon.jit
def _fetch_row(
    x_ptr, each, depth, COUNT: gl.constexpr, PIECES: gl.constexpr, BLOCK: gl.constexpr, num_warps: gl.constexpr
):
    """Copy the blocks of every piece of x to shared memory `[COUNT, pieces, block]`; zeros behind them."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    LANES: gl.constexpr = BLOCK // 8
    DOWN: gl.constexpr = min(32 // LANES, PIECES)
    ACROSS: gl.constexpr = min(num_warps, PIECES // DOWN)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [32 // LANES // DOWN, DOWN, LANES], [num_warps // ACROSS, ACROSS, 1], [2, 1, 0]
    )
    step = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    piece = gl.arange(0, PIECES, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :] + step * BLOCK
    before = piece * (each * BLOCK)
    cube = gl.allocate_shared_memory(dtype, [COUNT, PIECES, BLOCK], gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0]))
    async_copy.async_copy_global_to_shared(cube, x_ptr + before + k, mask=(before + k < depth) & (k < each * BLOCK))
    async_copy.commit_group()
    async_copy.wait_group(0)
    program_barrier()
    # What `index` returns keeps its layout.
    return cube._reinterpret(dtype, [COUNT, PIECES, BLOCK], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))  # noqa: SLF001


@gluon.jit
def _take_row(row, step, BLOCK_M: gl.constexpr, RIGHT: gl.constexpr):
    """Return a block of the row as the right side of a product, whose columns are all the same."""
    found = row.index(step).load(gl.SliceLayout(2, RIGHT))
    return found[:, :, None].broadcast_to([found.shape[0], found.shape[1], BLOCK_M])


@gluon.jit(do_not_specialize=["blocks", "each"])
def packed_single(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    columns,
    depth,
    blocks,
    each,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    COUNT: gl.constexpr,
    ROOM: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[columns] = x @ w.T for one row. blocks: of a row of w. each: blocks of a piece.

    A program owns BLOCK_N rows of w, and each of its warps one piece of the columns of some of them. A warp has the
    packed words of AHEAD blocks in registers or on their way there. COUNT: `each`, rounded up to whole AHEAD. ROOM: a
    power of two that is not less.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    n0 = gl.program_id(0) * BLOCK_N
    matrix = (words_ptr, levels_ptr)
    coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    first = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None] * each
    held = ()
    for ahead in gl.static_range(AHEAD):
        held = held + (load_block(matrix, coordinates, gl.minimum(first + ahead, blocks - 1), blocks, FORM),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = _fetch_row(x_ptr, each, depth, ROOM, PIECES, FORM.block, num_warps)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    for step in range(0, COUNT - AHEAD, AHEAD):
        coming = ()
        for ahead in gl.static_range(AHEAD):
            right = _take_row(row, step + ahead, BLOCK_M, RIGHT)
            w = gl.convert_layout(weights_of(held[ahead], coordinates, dtype, FORM, True), LEFT, assert_trivial=True)
            block = gl.minimum(first + (step + ahead + AHEAD), blocks - 1)
            coming = coming + (load_block(matrix, coordinates, block, blocks, FORM),)  # noqa: RUF005
            acc = mma_v2(w, right, acc)
        held = coming
    for ahead in gl.static_range(AHEAD):
        right = _take_row(row, COUNT - AHEAD + ahead, BLOCK_M, RIGHT)
        w = gl.convert_layout(weights_of(held[ahead], coordinates, dtype, FORM, True), LEFT, assert_trivial=True)
        acc = mma_v2(w, right, acc)
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, 0, 1, columns, 0, dtype, GATED)
