"""Products of 9 to 64 rows with packed weights on Hopper (compute capability 9.0), a program for each piece.

The sums are those of `packed.packed_narrow`: the same pieces of the same numbers, each one chain over ascending k in
steps of 16, added in order. There a program has all pieces of few rows of the weight, so it reads all of x for them.
Here it has one piece of 64 rows, the tall operand, and reads only that piece's columns of x. It writes its sums to
memory. The last program of these 64 rows adds up the sums of all pieces, in order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_merge import are_last
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.hopper.many_rows.left_side import HEIGHT, unpack_left
from adapters.models.kernels.triton.packed import lanes_of, load_block, locate_piece, restore, store_narrow


@gluon.jit
def _request_x(x_desc, ring, come, m0, first, step, each):
    """Request the columns of a block of this piece, if there is such a block."""
    at = step % ring.shape[0]
    BLOCK: gl.constexpr = ring.shape[2]
    mbarrier.expect(come.index(at), x_desc.block_type.nbytes, pred=step < each)
    bring(x_desc, [m0, (first + step) * BLOCK], come.index(at), ring.index(at), pred=step < each)


@gluon.jit
def _multiply_round(
    acc,
    held,
    step,
    matrix,
    coordinates,
    x_desc,
    ring,
    come,
    m0,
    first,
    blocks,
    each,
    FORM: gl.constexpr,
    MMA: gl.constexpr,
    MORE: gl.constexpr,
):
    """Multiply the blocks that are held, from block `step` of this piece on. MORE: load as many that come after them.

    Return the sums and what is held then.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    AHEAD: gl.constexpr = len(held)
    STAGES: gl.constexpr = ring.shape[0]
    coming = ()
    for ahead in gl.static_range(AHEAD):
        w = unpack_left(held[ahead], coordinates, x_desc.dtype, FORM, LEFT)
        if MORE:
            block = gl.minimum(first + (step + ahead + AHEAD), blocks - 1)
            coming = coming + (load_block(matrix, coordinates, block, blocks, FORM),)  # noqa: RUF005
        at = (step + ahead) % STAGES
        mbarrier.wait(come.index(at), (step + ahead) // STAGES & 1)
        acc = warpgroup_mma(w, ring.index(at).permute((1, 0)), acc, is_async=True)
        if ahead > 0:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            _request_x(x_desc, ring, come, m0, first, step + ahead - 1 + STAGES, each)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    _request_x(x_desc, ring, come, m0, first, step + AHEAD - 1 + STAGES, each)
    return acc, coming


@gluon.jit
def _add_sums(
    sums_ptr,
    out_ptr,
    place,
    n0,
    m0,
    rows,
    columns,
    stride,
    PIECES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
):
    """Add up the sums of all pieces and store the products. place: of the first piece's sums."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    SIZE: gl.constexpr = HEIGHT * BLOCK_M
    n = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, PAIRS))[:, None]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, PAIRS))[None, :]
    at = sums_ptr + place * SIZE + (m * HEIGHT + n)
    pieces = ()
    for number in gl.static_range(PIECES):
        pieces = pieces + (gl.load(at + number * SIZE, cache_modifier=".cg"),)  # noqa: RUF005
    total = pieces[0]
    for number in gl.static_range(1, PIECES):
        total = total + pieces[number]
    store_narrow(restore(total, dtype, FORM).to(dtype), out_ptr, n0, m0, rows, columns, stride, dtype, GATED)


@gluon.jit(do_not_specialize=["rows", "blocks", "each"])
def packed_parts(
    words_ptr,
    levels_ptr,
    x_desc,
    out_ptr,
    sums_ptr,
    left_ptr,
    rows,
    columns,
    blocks,
    each,
    stride,
    PIECES: gl.constexpr,
    AHEAD: gl.constexpr,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. blocks: of a row of w. each: blocks of a piece, a multiple of
    AHEAD. stride: from one row of out to the next.

    x_desc: `[rows, depth]`, in boxes of a program's rows of x and of a block's columns. sums: float32, for each program
    64 numbers for each row of x. left: int32, zeros, for each tile the pieces that are done; zeros again afterwards.
    AHEAD: blocks of packed words that a program has in registers or on their way there. STAGES: blocks of x in shared
    memory.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LANES: gl.constexpr = lanes_of(1, 4, HEIGHT)
    tile = gl.program_id(0) // PIECES
    piece = gl.program_id(0) % PIECES
    n0 = tile * HEIGHT
    m0 = gl.program_id(1) * BLOCK_M
    first = piece * each
    matrix = (words_ptr, levels_ptr)
    coordinates = locate_piece(n0, columns, HEIGHT, LANES)
    held = ()
    for ahead in gl.static_range(AHEAD):
        held = held + (load_block(matrix, coordinates, gl.minimum(first + ahead, blocks - 1), blocks, FORM),)  # noqa: RUF005
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, FORM.block], x_desc.layout)
    come = make_barriers(STAGES, 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in gl.static_range(STAGES):
        _request_x(x_desc, ring, come, m0, first, at, each)
    acc = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    for step in range(0, each - AHEAD, AHEAD):
        acc, held = _multiply_round(
            acc, held, step, matrix, coordinates, x_desc, ring, come, m0, first, blocks, each, FORM, MMA, True
        )
    acc, _ = _multiply_round(
        acc, held, each - AHEAD, matrix, coordinates, x_desc, ring, come, m0, first, blocks, each, FORM, MMA, False
    )
    if PIECES == 1:
        PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
        out = gl.convert_layout(restore(acc, dtype, FORM).to(dtype), PAIRS)
        store_narrow(out, out_ptr, n0, m0, rows, columns, stride, dtype, GATED)
    else:
        place = gl.program_id(1) * (gl.num_programs(0) // PIECES) + tile
        n = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, MMA))[:, None]
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))[None, :]
        gl.store(sums_ptr + (place * PIECES + piece) * (HEIGHT * BLOCK_M) + (m * HEIGHT + n), acc)
        if are_last(left_ptr + place, 1, PIECES):
            _add_sums(
                sums_ptr, out_ptr, place * PIECES, n0, m0, rows, columns, stride, PIECES, BLOCK_M, FORM, GATED
            )  # fmt: skip
