"""Matrix products with packed weights, unpacked in registers and added up in pieces.

A weight becomes step * scale - least in float32, rounded to the dtype of the computation before it is multiplied.
That is the very number that unpacking at load gives. The columns of a matrix are cut into pieces at fixed columns. Each
piece is one chain over ascending k in steps of 16, from zero, and the pieces are added in order. `linear` and
`hopper_pieces` sum unpacked weights in the same way, so the bits are theirs at every row count. `packed_numbers` says
how words lie.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton import linear
from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.packed_levels import EXPONENT, is_scaled, share_of
from adapters.models.kernels.triton.packed_numbers import weights_of

apply_gate = gluon.jit(linear.apply_gate.fn)


@gluon.jit
def _load_level(ptr, n, block, records, NAME: gl.constexpr, SECOND: gl.constexpr, FORM: gl.constexpr):
    """Load the words that hold a block's levels of one kind. SECOND: of the second 16 of each 32 columns."""
    SHARE: gl.constexpr = share_of(FORM, NAME)
    START: gl.constexpr = SHARE.first + SHARE.size if SECOND and SHARE.is_twofold else SHARE.first
    at = ptr + ((n >> 3) * records + block * FORM.block // 128) * (FORM.planes * 8) + (START // 32 * 8) + (n & 7)
    if SHARE.is_half and SHARE.size >= 32:
        at += (block & 1) * (SHARE.size // 32 * 8)
    low = gl.load(at)
    if SHARE.is_half and SHARE.size < 32:
        low = low >> ((block & 1) * SHARE.size)
    high = low  # never read where one word is enough
    if SHARE.size == 64:
        high = gl.load(at + 8)
    return low, high


@gluon.jit
def load_levels(ptr, n, block, records, SECOND: gl.constexpr, FORM: gl.constexpr):
    """Load the words that hold a block's levels. SECOND: see `_load_level`."""
    scale = _load_level(ptr, n, block, records, "scale", SECOND, FORM)
    inner = scale
    least = scale
    own = scale  # never read where there are none
    if FORM.inner:
        inner = _load_level(ptr, n, block, records, "inner", SECOND, FORM)
    if FORM.least != "":
        least = _load_level(ptr, n, block, records, "least", SECOND, FORM)
    if FORM.least == "own":
        own = _load_level(ptr, n, block, records, "own", SECOND, FORM)
    return scale, inner, least, own


@gluon.jit
def load_words(words_ptr, coordinates, block, blocks):
    """Load the words of a block of some rows."""
    n, t, c = coordinates
    return gl.load(words_ptr + ((n >> 3) * blocks + block) * 128 + (n & 7) * 16 + t * 4 + c)


@gluon.jit
def load_block(matrix, coordinates, block, blocks, FORM: gl.constexpr):
    """Load a block of some rows in packed form. matrix: pointers to its words and its levels."""
    words_ptr, levels_ptr = matrix
    n, _, _ = coordinates
    words = load_words(words_ptr, coordinates, block, blocks)
    records = gl.cdiv(blocks * FORM.block, 128)
    first = load_levels(levels_ptr, n, block, records, False, FORM)
    second = first
    if FORM.group * 4 < FORM.block:
        second = load_levels(levels_ptr, n, block, records, True, FORM)
    return words, (first, second)


@gluon.jit
def locate_piece(n0, stop, ROWS: gl.constexpr, LANES: gl.constexpr):
    """Return rows, lanes of a row, and words; no row lies behind the last one."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LANES)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))
    n = n0 + gl.arange(0, ROWS, layout=ROW)[None, :, None, None]
    t = gl.arange(0, 4, layout=LANE)[None, None, :, None]
    c = gl.arange(0, 4, layout=WORD)[None, None, None, :]
    return gl.minimum(n, stop - 1), t, c


@gluon.jit
def load_x(x_ptr, at, step, each, depth, EVEN: gl.constexpr, BLOCK: gl.constexpr):
    """Load the columns of every piece's block number `step`, as the right side of a product.

    at: the index of each row's piece, the number of columns before the piece, and those within a block. They are added
    to the pointer in this order, so that the columns become constants of the instructions. Two columns are one number
    here, because the compiler would take them apart and put them together again. EVEN: there is nothing behind any
    piece's last block, so that nothing has to be zero.
    """
    start, before, k = at
    pairs = x_ptr.to(gl.pointer_type(gl.int32)) + step * (BLOCK // 2)
    if EVEN:
        return gl.load(pairs + start + k)
    column = k + step * (BLOCK // 2)
    inside = (column + before < depth // 2) & (column < each * (BLOCK // 2))
    return gl.load(pairs + start + k, mask=inside, other=0)


@gluon.jit
def split_pairs(pairs, dtype: gl.constexpr, RIGHT: gl.constexpr):
    """Return the columns of pairs `[pieces, pairs, rows of x]` one below the other."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    both = gl.join(low, high).permute((0, 1, 3, 2))
    found = both.reshape((pairs.shape[0], pairs.shape[1] * 2, pairs.shape[2]))
    return gl.convert_layout(found, RIGHT, assert_trivial=True)


@gluon.jit
def fetch_x(x_ptr, ring, at, step, each, depth, BLOCK: gl.constexpr):
    """Copy the columns of every piece's block number `step` to shared memory; zeros where there are none."""
    m, inside, before, k = at
    STAGES: gl.constexpr = ring.shape[0]
    column = k + step * BLOCK
    mask = inside & (column + before < depth) & (column < each * BLOCK)
    buffer = ring.index(step % STAGES)
    async_copy.async_copy_global_to_shared(buffer, x_ptr + step * BLOCK + (m * depth + before) + k, mask=mask)
    async_copy.commit_group()


@gluon.jit
def next_x(x, x_ptr, ring, at, step, each, depth, EVEN: gl.constexpr, BLOCK: gl.constexpr, RIGHT: gl.constexpr):
    """Return block number `step` of x as the right side of a product, and request a later one.

    x: block number `step` in registers, where rows are few. ring: shared memory for some blocks, where they are more.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    if ring is None:
        right = split_pairs(x, dtype, RIGHT)
        following = step + 1
        if EVEN:
            following = gl.minimum(following, each - 1)
        x = load_x(x_ptr, at, following, each, depth, EVEN, BLOCK)
    else:
        STAGES: gl.constexpr = ring.shape[0]
        async_copy.wait_group(STAGES - 2)
        program_barrier()
        fetch_x(x_ptr, ring, at, step + STAGES - 1, each, depth, BLOCK)
        right = ring.index(step % STAGES).permute((0, 2, 1)).load(RIGHT)
    return right, x


@gluon.constexpr_function
def lanes_of(pieces, warps, rows):
    """Return how threads share words `[pieces, rows, 4 lanes, 4 words]`, as those of the left side of a product do.

    A warp has 16 rows of a piece, eight and eight, and further rows at once where there are more than its warps take.
    """
    down = warps // pieces
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    height = 16
    across = []
    while height < 16 * down:
        across.append([0, height, 0, 0])
        height *= 2
    while height < rows:
        registers.append([0, height, 0, 0])
        height *= 2
    piece = 1
    while piece < pieces:
        across.append([piece, 0, 0, 0])
        piece *= 2
    return gl.DistributedLinearLayout(registers, lanes, across, [], [pieces, rows, 4, 4])


@gluon.jit(do_not_specialize=["rows", "blocks", "each"])
def packed_narrow(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    blocks,
    each,
    stride,
    PIECES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    EVEN: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. blocks: of a row of w. each: blocks of a piece. stride: from
    one row of out to the next.

    A program owns BLOCK_N rows of w, and each of its warps one piece of the columns of some of them. A warp has the
    packed words of AHEAD blocks in registers or on their way there. Up to eight rows of x come from memory to
    registers, and no warp waits for another until all pieces are added. More rows come to shared memory first: a load
    of registers touches the line of each row, which takes as many cycles as there are lines.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    matrix = (words_ptr, levels_ptr)
    coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    first = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None] * each
    held = ()
    for ahead in gl.static_range(AHEAD):
        held = held + (load_block(matrix, coordinates, gl.minimum(first + ahead, blocks - 1), blocks, FORM),)  # noqa: RUF005
    STAGED: gl.constexpr = BLOCK_M > 8
    STAGES: gl.constexpr = 3
    ring = None
    x = gl.to_tensor(0)  # never read where x comes from shared memory
    if STAGED:
        COPY: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [1, 256 // BLOCK, BLOCK // 8], [PIECES, num_warps // PIECES, 1], [2, 1, 0]
        )
        BANKS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        ring = gl.allocate_shared_memory(dtype, [STAGES, PIECES, BLOCK_M, BLOCK], BANKS)
        k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
        before = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None] * (each * BLOCK)
        m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
        at = (gl.minimum(m, rows - 1), m < rows, before, k)
    else:
        HALVES: gl.constexpr = gl.DotOperandLayout(1, MMA, 1)
        k = gl.arange(0, BLOCK // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
        before = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None]
        before = before * (each * (BLOCK // 2))
        m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))[None, None, :]
        at = (gl.minimum(m, rows - 1) * (depth // 2) + before, before, k)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    if STAGED:
        for stage in gl.static_range(STAGES - 1):
            fetch_x(x_ptr, ring, at, stage, each, depth, BLOCK)
    else:
        x = load_x(x_ptr, at, 0, each, depth, EVEN, BLOCK)
    for step in range(0, each - AHEAD, AHEAD):
        coming = ()
        for ahead in gl.static_range(AHEAD):
            right, x = next_x(x, x_ptr, ring, at, step + ahead, each, depth, EVEN, BLOCK, RIGHT)
            w = gl.convert_layout(weights_of(held[ahead], coordinates, dtype, FORM, True), LEFT, assert_trivial=True)
            block = gl.minimum(first + (step + ahead + AHEAD), blocks - 1)
            coming = coming + (load_block(matrix, coordinates, block, blocks, FORM),)  # noqa: RUF005
            acc = mma_v2(w, right, acc)
        held = coming
    last = (each - 1) // AHEAD * AHEAD
    for ahead in gl.static_range(AHEAD):
        right, x = next_x(x, x_ptr, ring, at, last + ahead, each, depth, EVEN, BLOCK, RIGHT)
        w = gl.convert_layout(weights_of(held[ahead], coordinates, dtype, FORM, True), LEFT, assert_trivial=True)
        acc = mma_v2(w, right, acc)
    if STAGED:
        async_copy.wait_group(0)
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, m0, rows, columns, stride, dtype, GATED)


@gluon.jit
def restore(total, dtype: gl.constexpr, FORM: gl.constexpr):
    """Return sums of the numbers for sums of 2 ** -EXPONENT of them: the same bits but for the exponent."""
    return total * (2.0**EXPONENT) if is_scaled(FORM, dtype) else total


@gluon.jit
def store_narrow(total, out_ptr, n0, m0, rows, columns, stride, dtype: gl.constexpr, GATED: gl.constexpr):
    """Store the sums `[rows of w, rows of x]` from row n0 of w and row m0 of x on."""
    if GATED:
        gate, up = gl.split(total.reshape((total.shape[0] // 2, 2, total.shape[1])).permute((0, 2, 1)))
        out = apply_gate(gate, up, dtype, GATED)
        n0 = n0 // 2
        columns = columns // 2
    else:
        out = total.to(dtype)
    n = n0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    to = m0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + to.to(gl.int64) * stride + n, out, mask=(to < rows) & (n < columns))


@gluon.jit
def add_pieces(acc, num_warps: gl.constexpr):
    """Add up the sums `[pieces, rows of w, rows of x]` of the warps, in order.

    A thread reads both rows of a pair. In shared memory rows of even numbers lie before those of odd numbers, so that
    the threads of a warp read from different banks.
    """
    COUNT: gl.constexpr = acc.shape[0]
    PAIRS: gl.constexpr = acc.shape[1] // 2
    WIDTH: gl.constexpr = acc.shape[2]
    ACROSS: gl.constexpr = min(32, WIDTH)
    DOWN: gl.constexpr = min(num_warps, max(1, PAIRS * ACROSS // 32))
    LANES: gl.constexpr = gl.BlockedLayout(
        [2, 1, 1], [1, 32 // ACROSS, ACROSS], [1, DOWN, num_warps // DOWN], [0, 2, 1]
    )
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    halves = acc.reshape((COUNT, PAIRS, 2, WIDTH)).permute((0, 2, 1, 3))
    cube = gl.allocate_shared_memory(gl.float32, halves.shape, CUBE, halves)
    pieces = cube._reinterpret(gl.float32, halves.shape, LINES)  # noqa: SLF001 - what `index` returns keeps its layout
    total = pieces.index(0).load(LANES)
    for number in gl.static_range(1, COUNT):
        total = total + pieces.index(number).load(LANES)
    return total.permute((1, 0, 2)).reshape((2 * PAIRS, WIDTH))


@gluon.jit
def unpack(
    words_ptr,
    levels_ptr,
    out_ptr,
    first,
    stop,
    depth,
    blocks,
    BLOCK_N: gl.constexpr,
    FORM: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Unpack rows `[first, stop)` of w to the dtype of the computation, `[stop - first, depth]`."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [1, num_warps, 1, 1], [3, 2, 1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [num_warps, 1], [1, 0])
    n0 = gl.program_id(0) * BLOCK_N
    block = gl.program_id(1)
    coordinates = locate_piece(first + n0, stop, BLOCK_N, LANES)
    packed = load_block((words_ptr, levels_ptr), coordinates, block, blocks, FORM)
    found = gl.convert_layout(weights_of(packed, coordinates, dtype, FORM, False).reshape((BLOCK_N, BLOCK)), ROWS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ROWS))[:, None]
    k = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out_ptr + n * depth + k, found, mask=(n < stop - first) & (k < depth))
