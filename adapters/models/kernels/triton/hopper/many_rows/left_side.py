"""Blocks of packed weights as the left side of products of many rows, and the warps that make scales for them.

Where each word has a scale and a minimum, computing these takes as many instructions as unpacking the numbers. If each
lane did it for itself, it would also need registers and shuffles. So two warps of a program make the scales of all of
its rows ahead of their use, in shared memory (decision 073).
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_packed import order_step_columns
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.packed import load_block, load_levels, load_words
from adapters.models.kernels.triton.packed_levels import BlockForm, find_power
from adapters.models.kernels.triton.packed_numbers import numbers_of, numbers_of_words, scales_of_words, weights_of

HEIGHT = gl.constexpr(64)  # rows of the weight of one consumer
MAKERS = gl.constexpr(2)  # warps that make scales
STAGES = gl.constexpr(4)  # blocks whose scales are in shared memory


@gluon.constexpr_function
def are_scales_made(form: BlockForm, dtype: Any) -> bool:
    """Return whether separate warps make the scales."""
    return form.has_scale_of_word and dtype == gl.bfloat16


@gluon.jit
def open_scales(MADE: gl.constexpr):
    """Allocate memory for scales of blocks, and two kinds of barriers: scales are made, and both consumers have read
    them. MADE: see `are_scales_made`; if it is false, nothing is allocated.
    """
    shared = (0, 0, 0)
    if MADE:
        LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 2 * HEIGHT, 1, 4], LINES)
        shared = (scales, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    return shared


@gluon.jit
def make_scales(levels_ptr, scales, made, taken, n0, columns, blocks, steps, done, FORM: gl.constexpr):
    """Compute the scales of both consumers' rows, block after block, and those of one block behind the last.

    done: blocks whose scales were made before, of earlier tiles.
    """
    MAKE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 32, 1, 1], [1, MAKERS, 1, 1], [3, 2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, MAKE)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, MAKE)))
    n = gl.minimum(n0 + gl.arange(0, 2 * HEIGHT, layout=ROW)[None, :, None, None], columns - 1)
    c = gl.arange(0, 4, layout=WORD)[None, None, None, :]
    records = gl.cdiv(blocks * FORM.block, 128)
    power = find_power(n)
    held = load_levels(levels_ptr, n, 0, records, False, FORM)
    for step in range(steps + 1):
        at = (done + step) % STAGES
        found = scales_of_words(held, c, power, FORM)
        held = load_levels(levels_ptr, n, gl.minimum(step + 1, blocks - 1), records, False, FORM)
        mbarrier.wait(taken.index(at), ((done + step) // STAGES & 1) ^ 1)
        scales.index(at).store(found)
        program_barrier()
        mbarrier.arrive(made.index(at), count=1)


@gluon.jit
def load_packed(matrix, coordinates, block, blocks, FORM: gl.constexpr, MADE: gl.constexpr):
    """Load a block in packed form. Behind the last block it loads that one again. MADE: only words, no levels."""
    block = gl.minimum(block, blocks - 1)
    if MADE:
        held = (load_words(matrix[0], coordinates, block, blocks), 0)
    else:
        held = load_block(matrix, coordinates, block, blocks, FORM)
    return held


@gluon.jit
def unpack_block(
    packed,
    coordinates,
    shared,
    step,
    NUMBER: gl.constexpr,
    dtype: gl.constexpr,
    FORM: gl.constexpr,
    LEFT: gl.constexpr,
    MADE: gl.constexpr,
):
    """Return a block of consumer NUMBER as the left side of a product. shared: see `open_scales`. step: the number of
    the block among all for which scales are made.
    """
    if MADE:
        scales, made, taken = shared
        words = packed[0].reshape((1, HEIGHT, 1, 4, 4))
        at = step % STAGES
        mbarrier.wait(made.index(at), step // STAGES & 1)
        both = scales.index(at).slice(NUMBER * HEIGHT, HEIGHT, 1).load(gl.SliceLayout(3, words.type.layout))
        mbarrier.arrive(taken.index(at), count=1)
        numbers = order_step_columns(numbers_of_words(words, both[:, :, :, None, :], dtype), FORM)
        found = gl.convert_layout(numbers.reshape((HEIGHT, FORM.block)), LEFT, assert_trivial=True)
    else:
        found = unpack_left(packed, coordinates, dtype, FORM, LEFT)
    return found


@gluon.jit
def _add_axis(level, like):
    """Return both words of a level as those of one block of several, to go with words `like`."""
    OWN: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, like.type.layout))
    low, high = level
    low = gl.convert_layout(low.reshape(like.shape[:3]), OWN, assert_trivial=True)[:, :, :, None, None]
    high = gl.convert_layout(high.reshape(like.shape[:3]), OWN, assert_trivial=True)[:, :, :, None, None]
    return low, high


@gluon.jit
def _share_scales(packed, coordinates, dtype: gl.constexpr, FORM: gl.constexpr):
    """Return what `weights_of` does. Each lane of a row makes the scale of one of its four words."""
    words, halves = packed
    first, _ = halves
    n, _, _ = coordinates
    words = words.reshape((1, HEIGHT, 1, 4, 4))
    scale, inner, least, own = first
    levels = (_add_axis(scale, words), _add_axis(inner, words), _add_axis(least, words), _add_axis(own, words))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, words.type.layout))))
    c = gl.arange(0, 4, layout=WORD)[None, None, None, None, :]
    row, _ = _add_axis((n, n), words)
    found = numbers_of(words, (levels, levels), c, row, dtype, FORM, True, True)
    return order_step_columns(found, FORM)


@gluon.jit
def unpack_left(packed, coordinates, dtype: gl.constexpr, FORM: gl.constexpr, LEFT: gl.constexpr):
    """Return a block of the weight as the left side of a product."""
    if FORM.has_scale_of_word and dtype == gl.bfloat16:
        found = _share_scales(packed, coordinates, dtype, FORM).reshape((HEIGHT, FORM.block))
    else:
        found = weights_of(packed, coordinates, dtype, FORM, True).reshape((HEIGHT, FORM.block))
    return gl.convert_layout(found, LEFT, assert_trivial=True)
