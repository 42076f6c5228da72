"""Products of one row with packed weights on Hopper, whose words and columns of x are requested all at once.

The sums are those of `packed.packed_narrow` and of `hopper_packed.packed_ahead`. What differs is when data comes. A
product of one row takes a few microseconds, so every wait for memory counts. The row of x is requested whole, as soon
as the kernels before have ended. Before that, a program has requested as many words as shared memory holds, which
often are all that it needs. Then no warp waits for another until the pieces are added.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier, start_next
from adapters.models.kernels.triton.hopper.hopper_packed import (
    lines_of_levels,
    lines_of_words,
    request_weights,
    request_words,
    take_weights,
    take_weights_with,
)
from adapters.models.kernels.triton.packed import add_pieces, load_levels, restore, store_narrow
from adapters.models.kernels.triton.packed_levels import find_power
from adapters.models.kernels.triton.packed_numbers import scales_of_words


@gluon.constexpr_function
def find_largest_power(number):
    """Return the largest power of two that divides a number."""
    return number & -number


@gluon.constexpr_function
def lines_of_scales(pieces, warps, rows, blocks):
    """Return how threads share scales `[blocks, pieces, rows, 4 words]`: all lanes of a row have the same. They have
    those of the words that `hopper_packed.lines_of_words` gives them.
    """
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 8, 0]]
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    across = []
    height = 16
    while height < 16 * (warps // pieces):
        across.append([0, 0, height, 0])
        height *= 2
    while height < rows:
        registers.append([0, 0, height, 0])
        height *= 2
    registers += [[1 << bit, 0, 0, 0] for bit in range((blocks - 1).bit_length())]
    across += [[0, 1 << bit, 0, 0] for bit in range((pieces - 1).bit_length())]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [blocks, pieces, rows, 4])


@gluon.jit
def make_scales(
    levels_ptr,
    n0,
    columns,
    EACH: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    FORM: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute the scales of BLOCK_N rows from row n0 on, and return the shared memory `[blocks, pieces, rows, 4]` that
    has them, as `scales_of_words` makes them. EACH: blocks of a piece.
    """
    AT_ONCE: gl.constexpr = find_largest_power(EACH)
    ACROSS: gl.constexpr = min(PIECES, 4)  # pieces that a warp works at
    DOWN: gl.constexpr = min(num_warps, BLOCK_N // 8)
    BESIDE: gl.constexpr = min(num_warps // DOWN, PIECES // ACROSS)
    MAKE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [4 // ACROSS, ACROSS, 8, 1], [num_warps // DOWN // BESIDE, BESIDE, DOWN, 1], [3, 2, 1, 0]
    )
    STEP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, MAKE)))
    PIECE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, MAKE)))
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, MAKE)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, MAKE)))
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    n = gl.minimum(n0 + gl.arange(0, BLOCK_N, layout=ROW)[None, None, :, None], columns - 1)
    c = gl.arange(0, 4, layout=WORD)[None, None, None, :]
    step = gl.arange(0, AT_ONCE, layout=STEP)[:, None, None, None]
    first = gl.arange(0, PIECES, layout=PIECE)[None, :, None, None] * EACH
    scales = gl.allocate_shared_memory(gl.int32, [EACH // AT_ONCE, AT_ONCE, PIECES, BLOCK_N, 4], LINES)
    for part in gl.static_range(EACH // AT_ONCE):
        levels = load_levels(levels_ptr, n, first + (step + part * AT_ONCE), PIECES * EACH, False, FORM)
        scales.index(part).store(scales_of_words(levels, c, find_power(n), FORM))
    return scales


@gluon.jit
def _fetch_row(
    x_ptr,
    STEPS: gl.constexpr,
    PIECES: gl.constexpr,
    COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Copy a row to shared memory `[steps, pieces, columns]`. It is requested whole before any number is stored."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    EACH: gl.constexpr = max(2, min(8, PIECES * COLUMNS // (32 * num_warps)))
    DOWN: gl.constexpr = min(PIECES, num_warps)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, EACH], [1, 1, 32], [1, DOWN, num_warps // DOWN], [2, 1, 0])
    AT_ONCE: gl.constexpr = find_largest_power(STEPS)
    step = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    piece = gl.arange(0, PIECES, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    k = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    at = x_ptr + step * COLUMNS + piece * (STEPS * COLUMNS) + k
    found = ()
    for first in gl.static_range(0, STEPS, AT_ONCE):
        found = found + (gl.load(at + first * COLUMNS),)  # noqa: RUF005 - Triton knows no other way
    row = gl.allocate_shared_memory(
        dtype, [STEPS // AT_ONCE, AT_ONCE, PIECES, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    for part in gl.static_range(STEPS // AT_ONCE):
        row.index(part).store(found[part])
    # What `index` returns keeps its layout.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return row._reinterpret(dtype, [STEPS, PIECES, COLUMNS], PLAIN)  # noqa: SLF001


@gluon.jit
def _request(descriptors, rings, come, slot, row, step, MADE: gl.constexpr):
    """Load a step's words, and its levels unless scales are made of them apart."""
    if MADE:
        request_words(descriptors[0], rings[0], come, slot, row, step, True)
    else:
        request_weights(descriptors, rings, come, slot, row, step, True)


@gluon.jit
def _load_levels(ring, scales, slot, step, LEVELS: gl.constexpr, SCALES: gl.constexpr, MADE: gl.constexpr):
    """Return the levels of a step, or the scales that were made of them."""
    return scales.index(step).load(SCALES) if MADE else ring.index(slot).load(LEVELS)


@gluon.jit
def _take_weights(lines, levels, row, dtype: gl.constexpr, FORM: gl.constexpr, MADE: gl.constexpr):
    """Return the weights of a step, as `take_weights` does. levels: see `_load_levels`."""
    if MADE:
        found = take_weights_with(lines, levels, dtype, FORM)
    else:
        found = take_weights(lines, levels, row, dtype, FORM, FORM.has_scale_of_word)
    return found


@gluon.jit
def packed_row(
    words_desc,
    levels_desc,
    levels_ptr,
    x_ptr,
    out_ptr,
    columns,
    STEPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    MADE: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    LATE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[columns] = x @ w.T for one row. STEPS: of a piece. COLUMNS: of every piece in a step. STAGES: steps
    whose words memory holds. LATE: the next kernel may start only when all programs have waited for those before, so
    that it may run at the same time; see `hopper_products.linear_ahead`.

    words_desc, levels_desc: as `packed_ahead` has them. Their boxes say how many rows of w a program has. MADE: scales
    are made of levels_ptr before the row comes, of a form that `has_scale_of_word`. Otherwise levels come with words.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 8
    PIECES: gl.constexpr = words_desc.block_type.shape[1]
    BLOCKS: gl.constexpr = words_desc.block_type.shape[2] // 4
    BLOCK_N: gl.constexpr = words_desc.block_type.shape[0] * 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = lines_of_words(PIECES, num_warps, BLOCK_N, BLOCKS)
    RECORDS: gl.constexpr = levels_desc.block_type.shape[2]
    LEVELS: gl.constexpr = lines_of_levels(PIECES, num_warps, BLOCK_N, RECORDS, levels_desc.block_type.shape[3])
    SCALES: gl.constexpr = lines_of_scales(PIECES, num_warps, BLOCK_N, BLOCKS)
    n0 = gl.program_id(0) * BLOCK_N
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES] + words_desc.block_type.shape, words_desc.layout)  # noqa: RUF005
    rings = (w_ring, w_ring)
    if not MADE:
        l_ring = gl.allocate_shared_memory(gl.int32, [STAGES] + levels_desc.block_type.shape, levels_desc.layout)  # noqa: RUF005
        rings = (w_ring, l_ring)
    descriptors = (words_desc, levels_desc)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    program_barrier()
    for at in gl.static_range(STAGES):
        _request(descriptors, rings, come, at, n0 // 8, at, MADE)
    start_next(PDL and not LATE)
    scales = 0  # never read where levels come with words
    if MADE:
        made = make_scales(levels_ptr, n0, columns, STEPS * BLOCKS, PIECES, BLOCK_N, FORM, num_warps)
        LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        scales = made._reinterpret(gl.int32, [STEPS, BLOCKS, PIECES, BLOCK_N, 4], LINES)  # noqa: SLF001
    if PDL:
        gdc_wait()
    start_next(PDL and LATE)
    row = _fetch_row(x_ptr, STEPS, PIECES, COLUMNS, num_warps)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    slot = 0
    turn = 0
    for step in range(STEPS):
        mbarrier.wait(come.index(slot), turn)
        lines = w_ring.index(slot).load(WORDS)
        levels = _load_levels(rings[1], scales, slot, step, LEVELS, SCALES, MADE)
        if step + STAGES < STEPS:
            program_barrier()  # all warps have this step in registers: its memory is free
            _request(descriptors, rings, come, slot, n0 // 8, step + STAGES, MADE)
        columns_of_x = row.index(step).load(gl.SliceLayout(2, RIGHT))
        right = columns_of_x[:, :, None].broadcast_to([PIECES, COLUMNS, BLOCK_M])
        w = gl.convert_layout(_take_weights(lines, levels, n0, dtype, FORM, MADE), LEFT, assert_trivial=True)
        acc = mma_v2(w, right, acc)
        turn = gl.where(slot == STAGES - 1, turn ^ 1, turn)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, 0, 1, columns, 0, dtype, GATED)
