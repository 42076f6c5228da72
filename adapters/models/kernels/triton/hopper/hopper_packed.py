"""Products of few rows with packed weights on Hopper (compute capability 9.0), whose words come ahead in bulk copies.

The sums are those of `packed.packed_narrow`: the same pieces, each one chain over ascending k in steps of 16, of the
same numbers. What differs is how data comes. One thread of a program fills rings of shared memory with words, their
levels and rows of x. Weights depend on no kernel of this step. So the first of them are requested while the kernels
before still run, and no register waits for them: a program has few registers, and a processor has several programs.

Numbers of four bits are 2 ** -EXPONENT of what they stand for, so that unpacking takes fewer instructions. Sums are
multiplied by 2 ** EXPONENT, which changes no bit of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.packed import add_pieces, restore, store_narrow
from adapters.models.kernels.triton.packed_levels import share_of
from adapters.models.kernels.triton.packed_numbers import numbers_of, numbers_of_words


@gluon.constexpr_function
def lines_of_words(pieces, warps, rows, blocks):
    """Return how threads share words `[rows / 8, pieces, 4 blocks, 32]`, as the left side of a product needs them."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, 0]]
    lanes = [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0]]
    across = []
    height = 2  # times eight rows
    while height < 2 * (warps // pieces):
        across.append([height, 0, 0, 0])
        height *= 2
    while height < rows // 8:
        registers.append([height, 0, 0, 0])
        height *= 2
    registers += [[0, 0, 4 << bit, 0] for bit in range((blocks - 1).bit_length())]
    across += [[0, 1 << bit, 0, 0] for bit in range((pieces - 1).bit_length())]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [rows // 8, pieces, 4 * blocks, 32])


@gluon.constexpr_function
def lines_of_levels(pieces, warps, rows, records, planes):
    """Return how threads share levels `[rows / 8, pieces, records, planes, 8]`: all lanes of a row have the same."""
    registers = [[0, 0, 0, 1 << bit, 0] for bit in range((planes - 1).bit_length())]
    registers.append([1, 0, 0, 0, 0])
    lanes = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4]]
    across = []
    height = 2
    while height < 2 * (warps // pieces):
        across.append([height, 0, 0, 0, 0])
        height *= 2
    while height < rows // 8:
        registers.append([height, 0, 0, 0, 0])
        height *= 2
    registers += [[0, 0, 1 << bit, 0, 0] for bit in range((records - 1).bit_length())]
    across += [[0, 1 << bit, 0, 0, 0] for bit in range((pieces - 1).bit_length())]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [rows // 8, pieces, records, planes, 8])


@gluon.jit
def _take_words(lines):
    """Return words `[pieces, rows, blocks, lanes, words]` of lines of eight rows."""
    HIGH: gl.constexpr = lines.shape[0]
    PIECES: gl.constexpr = lines.shape[1]
    BLOCKS: gl.constexpr = lines.shape[2] // 4
    words = lines.reshape((HIGH, PIECES, BLOCKS, 8, 4, 4)).permute((1, 0, 3, 2, 4, 5))
    return words.reshape((PIECES, HIGH * 8, BLOCKS, 4, 4))


@gluon.jit
def _take_planes(lines):
    """Return every plane of levels as `[pieces, rows, records]`."""
    HIGH: gl.constexpr = lines.shape[0]
    PIECES: gl.constexpr = lines.shape[1]
    RECORDS: gl.constexpr = lines.shape[2]
    COUNT: gl.constexpr = lines.shape[3]
    found = (lines.permute((1, 0, 4, 2, 3)).reshape((PIECES, HIGH * 8, RECORDS, COUNT)),)
    if COUNT == 1:
        planes = (found[0].reshape((PIECES, HIGH * 8, RECORDS)),)
    elif COUNT == 2:
        planes = gl.split(found[0])
    elif COUNT == 4:
        even, odd = gl.split(found[0].reshape((PIECES, HIGH * 8, RECORDS, 2, 2)))
        zero, two = gl.split(even)
        one, three = gl.split(odd)
        planes = (zero, one, two, three)
    else:
        even, odd = gl.split(found[0].reshape((PIECES, HIGH * 8, RECORDS, 4, 2)))
        zero, two, four, six = _take_four(even)
        one, three, five, seven = _take_four(odd)
        planes = (zero, one, two, three, four, five, six, seven)
    return planes


@gluon.jit
def _take_four(found):
    even, odd = gl.split(found.reshape((found.shape[0], found.shape[1], found.shape[2], 2, 2)))
    zero, two = gl.split(even)
    one, three = gl.split(odd)
    return zero, one, two, three


@gluon.jit
def _word_of_half(planes, HALF: gl.constexpr, WORD: gl.constexpr, SHARE: gl.constexpr, SECOND: gl.constexpr):
    """Return a word that holds levels of a block, as `packed` loads it. HALF: of 128 columns, which half it is."""
    START: gl.constexpr = (
        SHARE.first
        + (SHARE.size if SECOND and SHARE.is_twofold else 0)
        + (SHARE.size * HALF if SHARE.is_half and SHARE.size >= 32 else 0)
    )
    word = planes[START // 32 + WORD]
    if SHARE.is_half and SHARE.size < 32 and HALF == 1:
        word = word >> SHARE.size
    return word


@gluon.jit
def _word_of_level(planes, like, WORD: gl.constexpr, SHARE: gl.constexpr, SECOND: gl.constexpr, FORM: gl.constexpr):
    """Return a word that holds levels of each block, `[pieces, rows, blocks, 1, 1]`, to go with words `like`."""
    OWN: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, like.type.layout))
    word = _word_of_half(planes, 0, WORD, SHARE, SECOND)
    if FORM.block == 64:
        both = gl.join(word, _word_of_half(planes, 1, WORD, SHARE, SECOND))
        word = both.reshape((both.shape[0], both.shape[1], both.shape[2] * 2))
    return gl.convert_layout(word, OWN, assert_trivial=True)[:, :, :, None, None]


@gluon.jit
def _level(planes, like, NAME: gl.constexpr, SECOND: gl.constexpr, FORM: gl.constexpr):
    SHARE: gl.constexpr = share_of(FORM, NAME)
    low = _word_of_level(planes, like, 0, SHARE, SECOND, FORM)
    high = low
    if SHARE.size == 64:
        high = _word_of_level(planes, like, 1, SHARE, SECOND, FORM)
    return low, high


@gluon.jit
def _levels(planes, like, SECOND: gl.constexpr, FORM: gl.constexpr):
    """Return the levels of blocks, as `packed` loads them."""
    scale = _level(planes, like, "scale", SECOND, FORM)
    inner = scale
    least = scale
    own = scale  # never read where there are none
    if FORM.inner:
        inner = _level(planes, like, "inner", SECOND, FORM)
    if FORM.least != "":
        least = _level(planes, like, "least", SECOND, FORM)
    if FORM.least == "own":
        own = _level(planes, like, "own", SECOND, FORM)
    return scale, inner, least, own


@gluon.jit
def take_weights(lines, levels, row, dtype: gl.constexpr, FORM: gl.constexpr, SHARES: gl.constexpr = False):
    """Return the weights of a step, `[pieces, rows, columns]`, in registers as the left side of a product has them.
    SHARES: see `numbers_of`.
    """
    words = _take_words(lines)
    planes = _take_planes(levels)
    first = _levels(planes, words, False, FORM)
    second = first
    if FORM.group * 4 < FORM.block:
        second = _levels(planes, words, True, FORM)
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, words.type.layout))))
    c = gl.arange(0, 4, layout=WORD)[None, None, None, None, :]
    found = numbers_of(words, (first, second), c, row, dtype, FORM, True, SHARES)
    return order_step_columns(found, FORM)


@gluon.jit
def take_weights_with(lines, scales, dtype: gl.constexpr, FORM: gl.constexpr):
    """Return what `take_weights` does, of scales `[blocks, pieces, rows, 4]` as `hopper_packed_row` makes them."""
    words = _take_words(lines)
    OWN: gl.constexpr = gl.SliceLayout(3, words.type.layout)
    both = gl.convert_layout(scales.permute((1, 2, 0, 3)), OWN, assert_trivial=True)
    return order_step_columns(numbers_of_words(words, both[:, :, :, None, :], dtype), FORM)


@gluon.jit
def order_step_columns(found, FORM: gl.constexpr):
    """Return numbers `[pieces, rows, blocks, lanes, words, ...]` as `[pieces, rows, columns]`."""
    is_long: gl.constexpr = FORM.block == 128
    found = found.permute((0, 1, 2, 4, 7, 6, 3, 5)) if is_long else found.permute((0, 1, 2, 4, 6, 3, 5))
    return found.reshape((found.shape[0], found.shape[1], found.shape[2] * FORM.block))


@gluon.jit
def request_words(desc, ring, come, slot, row, step, pred, more: gl.constexpr = 0):
    """Load a step's words to their slot of the ring. more: bytes that come with them."""
    mbarrier.expect(come.index(slot), desc.block_type.nbytes + more, pred=pred)
    at = step * desc.block_type.shape[2]
    bring(desc, [row, 0, at, 0], come.index(slot), ring.index(slot), pred=pred)


@gluon.jit
def request_weights(descriptors, rings, come, slot, row, step, pred):
    """Load a step's words and levels to their slot of the rings."""
    words_desc, levels_desc = descriptors
    w_ring, l_ring = rings
    request_words(words_desc, w_ring, come, slot, row, step, pred, levels_desc.block_type.nbytes)
    at = step * levels_desc.block_type.shape[2]
    bring(levels_desc, [row, 0, at, 0, 0], come.index(slot), l_ring.index(slot), pred=pred)


@gluon.jit
def _request_x(desc, ring, come, slot, row, step, pred):
    mbarrier.expect(come.index(slot), desc.block_type.nbytes, pred=pred)
    bring(desc, [row, 0, step * desc.block_type.shape[2]], come.index(slot), ring.index(slot), pred=pred)


@gluon.jit(do_not_specialize=["rows", "steps"])
def packed_ahead(
    words_desc,
    levels_desc,
    x_desc,
    out_ptr,
    rows,
    columns,
    steps,
    stride,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. steps: of a piece. stride: from one row of out to the next.

    words_desc: `[columns / 8, pieces, 4 blocks of a piece, 32]`. levels_desc: `[columns / 8, pieces, records of a
    piece, planes, 8]`. x_desc: `[rows, pieces, columns of a piece]`. Their boxes say how many rows of w and of x a
    program has, and how many columns of every piece a step has. Memory holds W_STAGES steps of w and X_STAGES of x.
    """
    dtype: gl.constexpr = x_desc.dtype
    PIECES: gl.constexpr = words_desc.block_type.shape[1]
    BLOCKS: gl.constexpr = words_desc.block_type.shape[2] // 4
    BLOCK_N: gl.constexpr = words_desc.block_type.shape[0] * 8
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = lines_of_words(PIECES, num_warps, BLOCK_N, BLOCKS)
    RECORDS: gl.constexpr = levels_desc.block_type.shape[2]
    LEVELS: gl.constexpr = lines_of_levels(PIECES, num_warps, BLOCK_N, RECORDS, levels_desc.block_type.shape[3])
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    w_ring = gl.allocate_shared_memory(gl.int32, [W_STAGES] + words_desc.block_type.shape, words_desc.layout)  # noqa: RUF005
    l_ring = gl.allocate_shared_memory(gl.int32, [W_STAGES] + levels_desc.block_type.shape, levels_desc.layout)  # noqa: RUF005
    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    w_come = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    x_come = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(W_STAGES):
        mbarrier.init(w_come.index(at), count=1)
    for at in gl.static_range(X_STAGES):
        mbarrier.init(x_come.index(at), count=1)
    program_barrier()
    descriptors = (words_desc, levels_desc)
    rings = (w_ring, l_ring)
    for at in gl.static_range(W_STAGES):
        request_weights(descriptors, rings, w_come, at, n0 // 8, at, at < steps)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in gl.static_range(X_STAGES):
        _request_x(x_desc, x_ring, x_come, at, m0, at, at < steps)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    w_slot = 0
    w_turn = 0
    x_slot = 0
    x_turn = 0
    for step in range(steps):
        mbarrier.wait(w_come.index(w_slot), w_turn)
        mbarrier.wait(x_come.index(x_slot), x_turn)
        lines = w_ring.index(w_slot).load(WORDS)
        levels = l_ring.index(w_slot).load(LEVELS)
        right = x_ring.index(x_slot).permute((1, 2, 0)).load(RIGHT)
        program_barrier()  # all warps have this step in registers: its memory is free
        request_weights(descriptors, rings, w_come, w_slot, n0 // 8, step + W_STAGES, step + W_STAGES < steps)
        _request_x(x_desc, x_ring, x_come, x_slot, m0, step + X_STAGES, step + X_STAGES < steps)
        w = gl.convert_layout(take_weights(lines, levels, n0, dtype, FORM), LEFT, assert_trivial=True)
        acc = mma_v2(w, right, acc)
        w_turn = gl.where(w_slot == W_STAGES - 1, w_turn ^ 1, w_turn)
        w_slot = gl.where(w_slot == W_STAGES - 1, 0, w_slot + 1)
        x_turn = gl.where(x_slot == X_STAGES - 1, x_turn ^ 1, x_turn)
        x_slot = gl.where(x_slot == X_STAGES - 1, 0, x_slot + 1)
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, m0, rows, columns, stride, dtype, GATED)
