"""Products of one row with packed weights on Hopper, whose words wait in registers.

The sums are those of `packed.packed_narrow`: the same pieces, each one chain over ascending k. What differs is how x
comes. The whole row is requested at once, as soon as the kernels before have ended, and lies in shared memory. A warp
of `packed_narrow` requests a block of x while it multiplies the block before, so it waits for the cache block after
block. `hopper_packed_row` does the same for words that wait in shared memory. Numbers of four bits take so few words
that registers hold enough of them, and each warp then goes on without waiting for the others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_packed_row import find_largest_power, make_scales
from adapters.models.kernels.triton.packed import (
    add_pieces,
    lanes_of,
    load_block,
    load_words,
    locate_piece,
    restore,
    store_narrow,
)
from adapters.models.kernels.triton.packed_numbers import numbers_of_words, order_columns, weights_of


@gluon.jit
def copy_row(x_ptr, STEPS: gl.constexpr, PIECES: gl.constexpr, BLOCK: gl.constexpr, num_warps: gl.constexpr):
    """Copy a row to shared memory `[steps, pieces, block]`, past registers, and wait for it."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    AT_ONCE: gl.constexpr = find_largest_power(STEPS)
    PARTS: gl.constexpr = STEPS // AT_ONCE
    LANES: gl.constexpr = BLOCK // 8
    DOWN: gl.constexpr = min(32 // LANES, PIECES)
    ACROSS: gl.constexpr = min(num_warps, PIECES // DOWN)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [32 // LANES // DOWN, DOWN, LANES], [num_warps // ACROSS, ACROSS, 1], [2, 1, 0]
    )
    BANKS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0])
    step = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    piece = gl.arange(0, PIECES, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    at = x_ptr + step * BLOCK + piece * (STEPS * BLOCK) + k
    row = gl.allocate_shared_memory(dtype, [PARTS, AT_ONCE, PIECES, BLOCK], BANKS)
    for part in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(row.index(part), at + part * AT_ONCE * BLOCK)
    async_copy.commit_group()
    async_copy.wait_group(0)
    program_barrier()
    # What `index` returns keeps its layout.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    return row._reinterpret(dtype, [STEPS, PIECES, BLOCK], PLAIN)  # noqa: SLF001


@gluon.jit
def _load(matrix, coordinates, block, blocks, FORM: gl.constexpr):
    """Load a block of some rows in packed form, without its levels where scales are made of them before."""
    if FORM.has_scale_of_word:
        found = load_words(matrix[0], coordinates, block, blocks)
    else:
        found = load_block(matrix, coordinates, block, blocks, FORM)
    return found


@gluon.jit
def _multiply_block(acc, row, scales, step, packed, coordinates, dtype: gl.constexpr, FORM: gl.constexpr):
    """Add the product of a block's numbers with the columns of x that belong to it."""
    MMA: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    columns_of_x = row.index(step).load(gl.SliceLayout(2, RIGHT))
    right = columns_of_x[:, :, None].broadcast_to([acc.shape[0], FORM.block, acc.shape[2]])
    if FORM.has_scale_of_word:
        both = scales.index(step).load(gl.SliceLayout(2, packed.type.layout))[:, :, None, :]
        w = order_columns(numbers_of_words(packed, both, dtype), FORM)
    else:
        w = weights_of(packed, coordinates, dtype, FORM, True)
    return mma_v2(gl.convert_layout(w, LEFT, assert_trivial=True), right, acc)


@gluon.jit(do_not_specialize=["blocks"])
def packed_row_registers(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    columns,
    blocks,
    EACH: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[columns] = x @ w.T for one row. blocks: of a row of w. EACH: blocks of a piece, whole AHEAD.

    A program owns BLOCK_N rows of w, and each of its warps one piece of the columns of some of them. A warp has the
    packed words of AHEAD blocks in registers or on their way there, the first of them before it waits for the kernels
    before.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    n0 = gl.program_id(0) * BLOCK_N
    matrix = (words_ptr, levels_ptr)
    coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
    first = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None] * EACH
    held = ()
    for ahead in gl.static_range(AHEAD):
        held = held + (_load(matrix, coordinates, first + ahead, blocks, FORM),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
    scales = 0  # never read where levels come with words
    if FORM.has_scale_of_word:
        made = make_scales(levels_ptr, n0, columns, EACH, PIECES, BLOCK_N, FORM, num_warps)
        LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        scales = made._reinterpret(gl.int32, [EACH, PIECES, BLOCK_N, 4], LINES)  # noqa: SLF001
    if PDL:
        gdc_wait()
    row = copy_row(x_ptr, EACH, PIECES, FORM.block, num_warps)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    for step in range(0, EACH - AHEAD, AHEAD):
        coming = ()
        for ahead in gl.static_range(AHEAD):
            acc = _multiply_block(acc, row, scales, step + ahead, held[ahead], coordinates, dtype, FORM)
            block = first + (step + AHEAD + ahead)
            coming = coming + (_load(matrix, coordinates, block, blocks, FORM),)  # noqa: RUF005
        held = coming
    for ahead in gl.static_range(AHEAD):
        acc = _multiply_block(acc, row, scales, EACH - AHEAD + ahead, held[ahead], coordinates, dtype, FORM)
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, 0, 1, columns, 0, dtype, GATED)
