"""Products of many rows with packed weights on Hopper (compute capability 9.0), unpacked to shared memory.

The sums are those of `hopper_pieces` and `linear` with unpacked weights: the same pieces of the same numbers, each one
chain over ascending k in steps of 16. A weight is the tall operand, and each of two consumers multiplies 64 of its
rows. Four more warps unpack its words to a ring in shared memory and request the rows of x that belong to them. So
unpacking takes instructions that are free, while the tensor cores work. No weight is unpacked to memory.

Words come by bulk copies. A fence between stores and the tensor cores waits for all plain loads as well.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_packed import (
    lines_of_levels,
    lines_of_words,
    request_weights,
    take_weights,
)
from adapters.models.kernels.triton.hopper.hopper_pieces import HEIGHT, multiply_steps
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers
from adapters.models.kernels.triton.packed import restore, store_narrow

WARPS = gl.constexpr(4)  # that unpack
STEP = gl.constexpr(64)  # columns of a slot of the rings


@gluon.jit
def _bring_rows(x_desc, ring, come, free, m0, step, STAGES: gl.constexpr):
    """Wait until the slot of a step is free, and request its columns of x."""
    at = step % STAGES
    mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
    mbarrier.expect(come.index(at), x_desc.block_type.nbytes)
    bring(x_desc, [m0, step * STEP], come.index(at), ring.index(at))


@gluon.jit
def _unpack_rounds(
    descriptors,
    packed_rings,
    arrived,
    x_desc,
    w_ring,
    x_ring,
    come,
    free,
    n0,
    m0,
    rounds,
    FORM: gl.constexpr,
):
    """Unpack both consumers' rows of the weight, two steps a round, and request the columns of x that belong to them.

    descriptors, packed_rings, arrived: of words and of levels, a round in each slot.
    """
    words_desc, levels_desc = descriptors
    words, levels = packed_rings
    STAGES: gl.constexpr = w_ring.shape[0]
    AHEAD: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = 2 * HEIGHT
    WORDS: gl.constexpr = lines_of_words(1, WARPS, ROWS, words_desc.block_type.shape[2] // 4)
    LEVELS: gl.constexpr = lines_of_levels(1, WARPS, ROWS, 1, levels_desc.block_type.shape[3])
    for ahead in gl.static_range(AHEAD):
        request_weights(descriptors, packed_rings, arrived, ahead, n0 // 8, ahead, ahead < rounds)
    for number in range(rounds):
        slot = number % AHEAD
        mbarrier.wait(arrived.index(slot), number // AHEAD & 1)
        lines = words.index(slot).load(WORDS)
        held = levels.index(slot).load(LEVELS)
        program_barrier()  # all warps have this round in registers: its memory is free
        request_weights(descriptors, packed_rings, arrived, slot, n0 // 8, number + AHEAD, number + AHEAD < rounds)
        w = take_weights(lines, held, n0, x_desc.dtype, FORM, FORM.has_scale_of_word)
        low, high = gl.split(w.reshape((ROWS, 2, STEP)).permute((0, 2, 1)))
        _bring_rows(x_desc, x_ring, come, free, m0, 2 * number, STAGES)
        _bring_rows(x_desc, x_ring, come, free, m0, 2 * number + 1, STAGES)
        w_ring.index(2 * number % STAGES).store(low)
        w_ring.index((2 * number + 1) % STAGES).store(high)
        fence_async_shared()
        program_barrier()
        mbarrier.arrive(come.index(2 * number % STAGES), count=1)
        mbarrier.arrive(come.index((2 * number + 1) % STAGES), count=1)


@gluon.jit
def _consume(
    out_ptr,
    w_ring,
    x_ring,
    come,
    free,
    n0,
    m0,
    rows,
    columns,
    steps,
    each,
    stride,
    NUMBER: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    IN_PIECES: gl.constexpr,
):
    """Compute consumer NUMBER's rows of the weight. each: steps of a piece."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    own = n0 + NUMBER * HEIGHT
    if IN_PIECES:
        total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
        for first in range(0, steps, each):
            high = gl.minimum(first + each, steps)
            total = total + multiply_steps(first, high, w_ring, x_ring, come, free, NUMBER, MMA)
    else:
        total = multiply_steps(0, steps, w_ring, x_ring, come, free, NUMBER, MMA)
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    out = gl.convert_layout(restore(total, dtype, FORM).to(dtype), PAIRS)  # gates round their inputs like this as well
    store_narrow(out, out_ptr, own, m0, rows, columns, stride, dtype, GATED)


@gluon.jit(do_not_specialize=["rows", "rounds", "each"])
def packed_shared(
    words_desc,
    levels_desc,
    x_desc,
    out_ptr,
    rows,
    columns,
    rounds,
    each,
    stride,
    W_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    GROUP: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    IN_PIECES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. rounds: of 128 columns of w. each: steps of 64 columns of a
    piece. stride: from one row of out to the next.

    A program has the rows of x of one box of x_desc, and 128 rows of w. words_desc, levels_desc: as `packed_ahead` has
    them, of all columns as one piece, boxes of a round. W_LAYOUT: of a step of unpacked weights in shared memory.
    AHEAD: rounds whose words memory holds. GROUP: tiles of rows that follow each other.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, 2 * HEIGHT)
    program = gl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * (2 * HEIGHT)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, STEP], x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * HEIGHT, STEP], W_LAYOUT)
    words = gl.allocate_shared_memory(gl.int32, [AHEAD] + words_desc.block_type.shape, words_desc.layout)  # noqa: RUF005
    levels = gl.allocate_shared_memory(gl.int32, [AHEAD] + levels_desc.block_type.shape, levels_desc.layout)  # noqa: RUF005
    arrived = make_barriers(AHEAD, 1)
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
                    out_ptr, w_ring, x_ring, come, free, n0, m0, rows, columns, 2 * rounds, each, stride, 0, FORM,
                    GATED, IN_PIECES,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, w_ring, x_ring, come, free, n0, m0, rows, columns, 2 * rounds, each, stride, 1, FORM,
                    GATED, IN_PIECES,
                ),
            ),
            (
                _unpack_rounds,
                (
                    (words_desc, levels_desc), (words, levels), arrived, x_desc, w_ring, x_ring, come, free, n0, m0,
                    rounds, FORM,
                ),
            ),
        ],
        [4, WARPS],
        [168, 168],
    )  # fmt: skip
