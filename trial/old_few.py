from __future__ import annotations
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from adapters.models.kernels.triton.packed import add_pieces, lanes_of, load_block, load_x, locate_piece, split_pairs
from adapters.models.kernels.triton.packed_numbers import weights_of
from adapters.models.kernels.triton.packed_groups import _matrix_of, store_pairs as _store

@gluon.jit(do_not_specialize=["blocks", "each", "rounds"])
def multiply_few(
    words_ptr,
    scale_ptr,
    inner_ptr,
    least_ptr,
    own_ptr,
    x_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    words_apart,
    scale_apart,
    inner_apart,
    least_apart,
    own_apart,
    columns,
    depth,
    blocks,
    each,
    rounds,
    SHARE: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    EVEN: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[pair] = x[pair // SHARE] @ w[slot].T for tiles of up to eight pairs.

    blocks: of a row of w. each: blocks of a piece, a multiple of AHEAD. A program has one tile of pairs, and `rounds`
    times BLOCK_N rows of the expert's weight, one BLOCK_N after the other. Each warp has the packed words of AHEAD
    blocks in registers or on their way there, also those of the next round.

    EARLY: tiles were made before the kernel before this one started. Only then are weights requested while that kernel
    still runs.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALVES: gl.constexpr = gl.DotOperandLayout(1, MMA, 1)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    across = gl.cdiv(columns, BLOCK_N * rounds)
    tile = gl.program_id(0) // across
    n0 = gl.program_id(0) % across * (BLOCK_N * rounds)
    if PDL and not EARLY:
        gdc_wait()
    if tile < gl.load(total_ptr):
        slot = gl.load(tiles_ptr + tile * 4)
        pairs_ptr += gl.load(tiles_ptr + tile * 4 + 1)
        count = gl.load(tiles_ptr + tile * 4 + 2)
        pointers = (words_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr)
        matrix = _matrix_of(pointers, (words_apart, scale_apart, inner_apart, least_apart, own_apart), slot)
        first = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None] * each
        coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
        held = ()
        for ahead in gl.static_range(AHEAD):
            block = gl.minimum(first + ahead, blocks - 1)
            held = held + (load_block(matrix, coordinates, block, blocks, FORM),)  # noqa: RUF005
        if PDL:
            gdc_launch_dependents()
            if EARLY:
                gdc_wait()
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))[None, None, :]
        k = gl.arange(0, BLOCK // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
        before = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None]
        before = before * (each * (BLOCK // 2))
        row = gl.load(pairs_ptr + gl.minimum(m, count - 1)) // SHARE
        at = (row * (depth // 2) + before, before, k)
        for turn in range(gl.minimum(rounds, gl.cdiv(columns - n0, BLOCK_N))):
            acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
            for step in range(0, each, AHEAD):
                coming = ()
                for ahead in gl.static_range(AHEAD):
                    x = load_x(x_ptr, at, step + ahead, each, depth, EVEN, BLOCK)  # arrives while w is unpacked
                    w = gl.convert_layout(weights_of(held[ahead], coordinates, dtype, FORM), LEFT, assert_trivial=True)
                    after = step + (ahead + AHEAD)
                    wraps = after >= each  # the block belongs to the next round, whose rows may not exist
                    coordinates = locate_piece(n0 + gl.where(wraps, turn + 1, turn) * BLOCK_N, columns, BLOCK_N, LANES)
                    block = gl.minimum(first + gl.where(wraps, after - each, after), blocks - 1)
                    coming = coming + (load_block(matrix, coordinates, block, blocks, FORM),)  # noqa: RUF005
                    acc = mma_v2(w, split_pairs(x, dtype, RIGHT), acc)
                held = coming
            _store(add_pieces(acc, num_warps), out_ptr, pairs_ptr, n0 + turn * BLOCK_N, count, columns, GATED)


