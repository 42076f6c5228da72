"""Products of one row's experts on Hopper (compute capability 9.0), whose words wait in registers.

The sums are those of `packed_groups.multiply_few`. There each piece of a sum has a warp of its own, and programs take
16 rows of a weight after the other. Here a warp has several pieces of 16 rows, one after the other, and all of their
words are requested at once. So fewer instructions are needed, and no program waits for words twice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_row_registers import copy_row
from adapters.models.kernels.triton.packed import apply_gate, lanes_of, locate_piece, restore
from adapters.models.kernels.triton.packed_groups import matrix_of
from adapters.models.kernels.triton.packed_levels import find_power, share_of
from adapters.models.kernels.triton.packed_numbers import numbers_of_words, order_columns, scales_of_words


@gluon.jit
def _add_pieces(pieces, EMPTY: gl.constexpr, num_warps: gl.constexpr):
    """Add up pieces in order. pieces: a tuple of sums `[parts, rows of w, 8]`, whose parts follow each other by as many
    pieces as there are tensors. EMPTY: pieces that have no columns, which are zeros.
    """
    COUNT: gl.constexpr = len(pieces)
    PARTS: gl.constexpr = pieces[0].shape[0]
    PAIRS: gl.constexpr = pieces[0].shape[1] // 2
    WIDTH: gl.constexpr = pieces[0].shape[2]
    DOWN: gl.constexpr = min(num_warps, max(1, PAIRS * WIDTH // 32))
    LANES: gl.constexpr = gl.BlockedLayout([2, 1, 1], [1, 32 // WIDTH, WIDTH], [1, DOWN, num_warps // DOWN], [0, 2, 1])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    cube = gl.allocate_shared_memory(gl.float32, [COUNT, PARTS, 2, PAIRS, WIDTH], CUBE)
    for number in gl.static_range(COUNT):
        cube.index(number).store(pieces[number].reshape((PARTS, PAIRS, 2, WIDTH)).permute((0, 2, 1, 3)))
    sums = cube._reinterpret(gl.float32, [COUNT * PARTS, 2, PAIRS, WIDTH], LINES)  # noqa: SLF001
    total = sums.index(0).load(LANES)
    for number in gl.static_range(1, COUNT * PARTS):
        total = total + sums.index(number % COUNT * PARTS + number // COUNT).load(LANES)
    for _ in gl.static_range(EMPTY):
        total = total + 0.0
    return total.permute((1, 0, 2)).reshape((2 * PAIRS, WIDTH))


@gluon.jit
def _load_level(at, NAME: gl.constexpr, FORM: gl.constexpr):
    """Load the word that has a level of 128 columns. at: the first word of each row's."""
    word = gl.load(at + share_of(FORM, NAME).first // 32 * 8)
    return word, word


@gluon.jit
def _request(places, step, FORM: gl.constexpr):
    """Load block number `step` of every part, of a form that `has_scale_of_word`, as `load_block` does.

    places: pointers to the words and the levels of each part's first block. They are computed once, so that an address
    is a constant more.
    """
    of_words, of_levels = places
    words = gl.load(of_words + step * 128)
    at = of_levels + step * (FORM.planes * 8)
    scale = _load_level(at, "scale", FORM)
    inner = _load_level(at, "inner", FORM)
    least = _load_level(at, "least", FORM)
    return words, (scale, inner, least, _load_level(at, "own", FORM))


@gluon.jit
def _take_of_lane(number, lane):
    """Return the number that a lane of the same four has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;",
        "=r,r,r",
        [number, lane],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _unpack(packed, coordinates, dtype: gl.constexpr, FORM: gl.constexpr):
    """Return a block as `weights_of` does. Each lane computes the scales of one of the four words of a row."""
    words, levels = packed
    n, t, c = coordinates
    both = _take_of_lane(scales_of_words(levels, t, find_power(n), FORM), c)
    return order_columns(numbers_of_words(words, both, dtype), FORM)


@gluon.jit
def multiply_registers(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    chosen_ptr,
    words_apart,
    levels_apart,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    EXPERTS: gl.constexpr,
    SHARED: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    PARTS: gl.constexpr,
    OWN: gl.constexpr,
    EMPTY: gl.constexpr,
    BLOCK_N: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[number] = x[number] @ w[chosen[number]].T for the experts that a row chose out of EXPERTS.

    A program has BLOCK_N of the COLUMNS rows of a weight. SHARED: all experts have the same row of x. A row of w has
    BLOCKS blocks, EACH of a piece. A warp has OWN pieces, and PARTS warps have those of a sum; EMPTY further ones have
    no columns. EARLY: see `packed_groups.multiply_few`.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, num_warps // PARTS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PARTS, num_warps, BLOCK_N)
    PART: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    STEPS: gl.constexpr = OWN * EACH
    ACROSS: gl.constexpr = COLUMNS // BLOCK_N
    number = gl.program_id(0) // ACROSS
    n0 = gl.program_id(0) % ACROSS * BLOCK_N
    coordinates = locate_piece(n0, COLUMNS, BLOCK_N, LANES)
    first = gl.arange(0, PARTS, layout=PART)[:, None, None, None] * STEPS
    if PDL and not EARLY:
        gdc_wait()
    expert = gl.minimum(gl.load(chosen_ptr + number), EXPERTS - 1)  # a padded row chose none
    matrix = matrix_of(words_ptr, levels_ptr, words_apart, levels_apart, expert)
    gl.static_assert(FORM.has_scale_of_word)
    n, t, c = coordinates
    words, levels = matrix
    block = (n >> 3) * BLOCKS + first
    places = (words + (block * 128 + (n & 7) * 16 + t * 4 + c), levels + (block * (FORM.planes * 8) + (n & 7)))
    held = ()
    for step in gl.static_range(STEPS):
        held = held + (_request(places, step, FORM),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        if EARLY:
            gdc_wait()
    row = copy_row(x_ptr + (0 if SHARED else number * DEPTH), STEPS, PARTS, FORM.block, num_warps)
    pieces = ()
    for piece in gl.static_range(OWN):
        acc = gl.zeros([PARTS, BLOCK_N, 8], gl.float32, layout=MMA)
        for number_of_block in gl.static_range(EACH):
            columns_of_x = row.index(piece * EACH + number_of_block).load(gl.SliceLayout(2, RIGHT))
            right = columns_of_x[:, :, None].broadcast_to([PARTS, FORM.block, 8])
            w = _unpack(held[piece * EACH + number_of_block], coordinates, dtype, FORM)
            acc = mma_v2(gl.convert_layout(w, LEFT, assert_trivial=True), right, acc)
        pieces = pieces + (acc,)  # noqa: RUF005
    found = restore(_add_pieces(pieces, EMPTY, num_warps), dtype, FORM)
    to = out_ptr
    if GATED:
        gate, up = gl.split(found.reshape((BLOCK_N // 2, 2, 8)).permute((0, 2, 1)))
        out = apply_gate(gate, up, dtype, GATED)
        to += number * (COLUMNS // 2) + n0 // 2
    else:
        out = found.to(dtype)
        to += number * COLUMNS + n0
    n = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(to + n + m * 0, out, mask=m < 1)
    if PDL and not EARLY:
        gdc_wait()
