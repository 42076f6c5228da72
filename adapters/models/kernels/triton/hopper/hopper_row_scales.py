"""Scales of products of one row on Hopper, computed before the row comes.

In Q4_K each word of eight steps has a scale and a minimum, which take a quarter of all instructions of a product. They
follow from the weight alone. So a program computes all of them while the kernels before still run, when processors
have little to do, and leaves them in shared memory. Lanes that need the same scale read it together.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adapters.models.kernels.triton.packed import load_levels
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
