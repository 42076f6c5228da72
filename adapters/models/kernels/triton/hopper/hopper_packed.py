"""Products of few rows with packed weights on Hopper (compute capability 9.0), whose words come ahead in bulk copies.

The sums are those of `packed.packed_narrow`: the same pieces, each one chain over ascending k in steps of 16, by the
same instructions. What differs is how data comes. A program's words go to a ring of shared memory, which one thread
fills by bulk copies. They depend on no kernel of this step, so the first of them are requested while the kernels before
still run, and no register waits for them. Rows of x come to a ring of their own. Levels come straight to registers, as
many blocks ahead as LEVELS says.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.packed import add_pieces, lanes_of, load_levels, locate_piece, store_narrow
from adapters.models.kernels.triton.packed_numbers import EXPONENT, weights_of


@gluon.constexpr_function
def lines_of(pieces, warps, rows):
    """Return `lanes_of` for words in the order of memory: `[rows / 8, pieces, 4, 32]`."""
    down = warps // pieces
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, 0]]
    lanes = [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0]]
    height = 16
    across = []
    while height < 16 * down:
        across.append([height // 8, 0, 0, 0])
        height *= 2
    while height < rows:
        registers.append([height // 8, 0, 0, 0])
        height *= 2
    piece = 1
    while piece < pieces:
        across.append([0, piece, 0, 0])
        piece *= 2
    return gl.DistributedLinearLayout(registers, lanes, across, [], [rows // 8, pieces, 4, 32])


@gluon.jit
def _request(desc, ring, come, slot, before, after, step, height, pred, EACH: gl.constexpr):
    """Load EACH blocks from number `step` on to their slots of the ring. height: of a block in the coordinate that
    counts blocks.
    """
    mbarrier.expect(come.index(slot), desc.block_type.nbytes * EACH, pred=pred)
    for at in gl.static_range(EACH):
        where = before + [(step + at) * height] + after
        bring(desc, where, come.index(slot), ring.index(slot * EACH + at), pred=pred)


@gluon.jit
def _take_words(ring, slot, PIECES: gl.constexpr, LINES: gl.constexpr, LANES: gl.constexpr):
    """Load the words of a block from shared memory to the registers that need them."""
    lines = ring.index(slot).load(LINES)
    HIGH: gl.constexpr = lines.shape[0]
    words = lines.reshape((HIGH, PIECES, 8, 4, 4)).permute((1, 0, 2, 3, 4)).reshape((PIECES, HIGH * 8, 4, 4))
    return gl.convert_layout(words, LANES, assert_trivial=True)


@gluon.jit(do_not_specialize=["rows", "each"])
def packed_ahead(
    words_desc,
    x_desc,
    scale_ptr,
    inner_ptr,
    least_ptr,
    own_ptr,
    out_ptr,
    rows,
    columns,
    blocks,
    each,
    stride,
    EACH: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    LEVELS: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. blocks: of a row of w, `each` in every piece. stride: from one
    row of out to the next.

    words_desc: `[columns / 8, pieces, 4 each, 32]` in boxes of `[n, pieces, 4, 32]`. x_desc: `[rows, pieces, columns of
    a piece]` in boxes of `[m, pieces, block]`. A step has EACH blocks of every piece. Memory has room for W_STAGES steps
    of words and X_STAGES of x.
    """
    dtype: gl.constexpr = x_desc.dtype
    PIECES: gl.constexpr = words_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = words_desc.block_type.shape[0] * 8
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK: gl.constexpr = FORM.block
    LINEAR: gl.constexpr = FORM.is_linear and dtype == gl.bfloat16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    LINES: gl.constexpr = lines_of(PIECES, num_warps, BLOCK_N)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    w_ring = gl.allocate_shared_memory(gl.int32, [W_STAGES * EACH, BLOCK_N // 8, PIECES, 4, 32], words_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES * EACH, BLOCK_M, PIECES, BLOCK], x_desc.layout)
    w_come = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    x_come = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(W_STAGES):
        mbarrier.init(w_come.index(at), count=1)
    for at in gl.static_range(X_STAGES):
        mbarrier.init(x_come.index(at), count=1)
    gl.thread_barrier()
    steps = gl.cdiv(each, EACH)
    for at in gl.static_range(W_STAGES):
        _request(words_desc, w_ring, w_come, at, [n0 // 8, 0], [0], at * EACH, 4, at < steps, EACH)
    matrix = (scale_ptr, scale_ptr, inner_ptr, least_ptr, own_ptr)
    coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
    n = coordinates[0]
    first = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None] * each
    held = ()
    for ahead in gl.static_range(LEVELS * EACH):
        held = held + (load_levels(matrix, n, gl.minimum(first + ahead, blocks - 1), blocks, FORM),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in gl.static_range(X_STAGES):
        _request(x_desc, x_ring, x_come, at, [m0, 0], [], at * EACH, BLOCK, at < steps, EACH)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    w_slot = 0
    w_turn = 0
    x_slot = 0
    x_turn = 0
    for step in range(steps):
        mbarrier.wait(w_come.index(w_slot), w_turn)
        mbarrier.wait(x_come.index(x_slot), x_turn)
        words = ()
        right = ()
        for at in gl.static_range(EACH):
            words = words + (_take_words(w_ring, w_slot * EACH + at, PIECES, LINES, LANES),)  # noqa: RUF005
            right = right + (x_ring.index(x_slot * EACH + at).permute((1, 2, 0)).load(RIGHT),)  # noqa: RUF005
        gl.thread_barrier()  # all warps have these blocks in registers: their memory is free
        w_next = step + W_STAGES
        x_next = step + X_STAGES
        _request(words_desc, w_ring, w_come, w_slot, [n0 // 8, 0], [0], w_next * EACH, 4, w_next < steps, EACH)
        _request(x_desc, x_ring, x_come, x_slot, [m0, 0], [], x_next * EACH, BLOCK, x_next < steps, EACH)
        coming = ()
        for at in gl.static_range(EACH):
            block = gl.minimum(first + ((step + LEVELS) * EACH + at), blocks - 1)
            coming = coming + (load_levels(matrix, n, block, blocks, FORM),)  # noqa: RUF005
        for at in gl.static_range(EACH):
            packed = (words[at], held[at][0], held[at][1])
            w = weights_of(packed, coordinates, dtype, FORM, LINEAR)
            acc = mma_v2(gl.convert_layout(w, LEFT, assert_trivial=True), right[at], acc)
        later = ()
        for at in gl.static_range((LEVELS - 1) * EACH):
            later = later + (held[EACH + at],)  # noqa: RUF005
        held = later + coming
        w_turn = gl.where(w_slot == W_STAGES - 1, w_turn ^ 1, w_turn)
        w_slot = gl.where(w_slot == W_STAGES - 1, 0, w_slot + 1)
        x_turn = gl.where(x_slot == X_STAGES - 1, x_turn ^ 1, x_turn)
        x_slot = gl.where(x_slot == X_STAGES - 1, 0, x_slot + 1)
    total = add_pieces(acc, num_warps)
    if LINEAR:
        total = total * (2.0**EXPONENT)
    store_narrow(total, out_ptr, n0, m0, rows, columns, stride, dtype, GATED)
