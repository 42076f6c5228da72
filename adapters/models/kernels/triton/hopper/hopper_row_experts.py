"""Products of one row's experts on Hopper (compute capability 9.0), with weights that stay packed.

The sums are those of `packed_groups.multiply_few`: the same pieces of columns, each one chain over ascending k in steps
of 16, added in order. What differs is how much is on its way. One row chose a handful of experts, so a program has few
units of work, and waiting for the first words takes as long as reading the rest. Here asynchronous copies request
several units at once, in rings of shared memory. The row of x stays in registers.

A gate product is followed by the activation, which is computed here, too. Rows of the weight lie in eights. A unit
takes eight gates and the eight numbers that these let through, so that both of a pair are in one thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.packed import add_pieces, apply_gate, lanes_of, lanes_of_sums, load_x, split_pairs
from adapters.models.kernels.triton.packed_numbers import weights_of

ROWS = gl.constexpr(16)  # of the weight, in a unit
WIDTH = gl.constexpr(8)  # columns of a product of the tensor cores; all are the row of x


@gluon.constexpr_function
def _round_up_to_power(number):
    return 1 << (number - 1).bit_length()


@gluon.jit
def _find_expert(chosen_ptr, tile, EXPERTS: gl.constexpr):
    """Return the expert of a pair. A padded row chose none, and reads the last one."""
    return gl.minimum(gl.load(chosen_ptr + tile), EXPERTS - 1).to(gl.int64)


@gluon.jit
def _request_unit(
    sources,
    rings,
    chosen_ptr,
    at,
    unit,
    end,
    across,
    SIDES: gl.constexpr,
    EXPERTS: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
):
    """Request the words and scales of a unit, if it is before `end`, as one group of copies.

    sources: pointers to the words and scales of all experts, how far experts are apart, and where those of a thread are
    in the first unit of an expert: words of each block of a piece, and scales of all of them. rings: of words, one for
    each block of a piece, and of scales. at: their slot. across: units of an expert. SIDES: eights of rows from one
    unit to the next.
    """
    words_ptr, levels_ptr, words_apart, levels_apart, places, scales, inside = sources
    words_rings, levels_ring = rings
    if unit < end:
        tile = unit // across
        expert = _find_expert(chosen_ptr, tile, EXPERTS)
        side = (unit - tile * across) * SIDES
        words = words_ptr + (expert * words_apart + side * (BLOCKS * 128))
        levels = levels_ptr + (expert * levels_apart + side * (BLOCKS * 8))
        for step in gl.static_range(EACH):
            async_copy.async_copy_global_to_shared(words_rings[step].index(at), words + places[step])
        async_copy.async_copy_global_to_shared(levels_ring.index(at), levels + scales, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _load_rows(x_ptr, row, depth, EACH: gl.constexpr, PIECES: gl.constexpr, BLOCK: gl.constexpr, RIGHT: gl.constexpr):
    """Return the blocks of every piece of a row of x, each as the right side of a product. RIGHT: its layout."""
    HALVES: gl.constexpr = gl.DotOperandLayout(1, RIGHT.parent, 1)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    k = gl.arange(0, BLOCK // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
    before = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None]
    before = before * (EACH * (BLOCK // 2))
    m = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))[None, None, :]
    at = (m * 0 + row * (depth // 2) + before, before, k)
    found = ()
    for step in gl.static_range(EACH):
        pairs = load_x(x_ptr, at, step, EACH, depth, False, BLOCK)
        found = found + (split_pairs(pairs, dtype, RIGHT),)  # noqa: RUF005
    return found


@gluon.jit
def _split_gates(total):
    """Return the sums of gates, and of what they let through."""
    return gl.split(total.reshape((ROWS // 2, 2, WIDTH)).permute((0, 2, 1)))


@gluon.jit
def _find_rows(i, across, GATE: gl.constexpr):
    """Return the eights that rows `i` of an expert's first unit belong to, and their places there.

    Of the two eights of a unit, the second one is behind the first one, or it has what the first one lets through.
    """
    if GATE:
        side = (i % 2) * across
        row = i // 2
    else:
        side = i // 8
        row = i % 8
    return side, row


@gluon.jit
def _locate_words(
    across,
    LANES: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    GATE: gl.constexpr,
):
    """Return rows, lanes and words of a unit, and where the words of each block of a piece are. LANES: their layout."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LANES)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    i = gl.arange(0, ROWS, layout=ROW)[None, :, None, None]
    t = gl.arange(0, 4, layout=LANE)[None, None, :, None]
    c = gl.arange(0, 4, layout=WORD)[None, None, None, :]
    piece = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None]
    side, row = _find_rows(i, across, GATE)
    words = ()
    for step in gl.static_range(EACH):
        block = gl.minimum(piece * EACH + step, BLOCKS - 1)
        words = words + ((side * BLOCKS + block) * 128 + row * 16 + t * 4 + c,)  # noqa: RUF005
    return (i, t, c), words


@gluon.jit
def _locate_scales(
    across,
    LEVELS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    HELD: gl.constexpr,
    GATE: gl.constexpr,
):
    """Return where the scales of a unit are, `[HELD * pieces, rows]`, and which there are: of each piece's first block,
    of the second one, and so on. LEVELS: their layout.
    """
    own = gl.arange(0, HELD * PIECES, layout=gl.SliceLayout(1, LEVELS))[:, None]
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LEVELS))[None, :]
    side, row = _find_rows(j, across, GATE)
    block = gl.minimum(own % PIECES * EACH + own // PIECES, BLOCKS - 1)
    return (side * BLOCKS + block) * 8 + row, own + j * 0 < EACH * PIECES


@gluon.jit
def _store_column(found, out_ptr, unit):
    """Store the first of equal columns, the results of a unit."""
    HEIGHT: gl.constexpr = found.shape[0]
    n = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, found.type.layout))[:, None]
    m = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, found.type.layout))[None, :]
    gl.store(out_ptr + unit * HEIGHT + n + m * 0, found, mask=m < 1)


@gluon.jit
def multiply_row(  # noqa: C901, PLR0912 - branches of constants
    words_ptr,
    levels_ptr,
    x_ptr,
    bias_ptr,
    chosen_ptr,
    out_ptr,
    words_apart,
    levels_apart,
    columns,
    depth,
    TILES: gl.constexpr,
    EXPERTS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDENT: gl.constexpr,
    FORM: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[tile] = x[tile] @ w[chosen[tile]].T for the TILES experts that a row chose.

    GATE: all experts have the same row of x, and `columns` are those of the gate, and as many behind them that it lets
    through; out has what comes of it (`linear.apply_gate`). bias: `[EXPERTS, columns]`, is added to these sums first.
    0: there is neither. BLOCKS: of a row of w. EACH: of a piece. STAGES: units whose words are in shared memory or on
    their way there. Every program takes an equal share of all units, in order. RESIDENT: programs that a processor has
    at a time, of whose multiple there are.

    EARLY: experts were chosen before the kernel before this one started. Only then are weights requested while that
    kernel still runs.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, ROWS)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    BLOCKS_HELD: gl.constexpr = _round_up_to_power(EACH)
    words_rings = ()
    for _ in gl.static_range(EACH):
        words_rings = words_rings + (gl.allocate_shared_memory(gl.int32, [STAGES, PIECES, ROWS, 4, 4], LINES),)  # noqa: RUF005
    LEVELS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [num_warps, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    levels_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCKS_HELD * PIECES, ROWS], FLAT)
    levels = levels_ring._reinterpret(gl.int32, [STAGES * BLOCKS_HELD, PIECES, ROWS, 1, 1], LINES)  # noqa: SLF001 - see `add_pieces`
    rings = (words_rings, levels_ring)
    across = columns // ROWS
    SIDES: gl.constexpr = 1 if GATE else 2
    coordinates, words = _locate_words(across, LANES, PIECES, BLOCKS, EACH, GATE)
    scales, inside = _locate_scales(across, LEVELS, PIECES, BLOCKS, EACH, BLOCKS_HELD, GATE)
    sources = (words_ptr, levels_ptr, words_apart, levels_apart, words, scales, inside)
    units = TILES * across
    # Programs that a processor has at a time take neighbouring shares: together they have the same, but for one unit.
    turn = gl.num_programs(0) // RESIDENT
    share = gl.program_id(0) % turn * RESIDENT + gl.program_id(0) // turn
    begin = share * units // gl.num_programs(0)
    end = (share + 1) * units // gl.num_programs(0)
    if PDL and not EARLY:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _request_unit(sources, rings, chosen_ptr, stage, begin + stage, end, across, SIDES, EXPERTS, BLOCKS, EACH)
    if PDL:
        gdc_launch_dependents()
        if EARLY:
            gdc_wait()
    # Biases are loaded before the sums that they are added to are there, and lie as these will.
    like = gl.zeros([2, ROWS // 2, WIDTH], gl.float32, layout=lanes_of_sums(ROWS // 2, WIDTH, num_warps))
    gates, _ = _split_gates(like.permute((1, 0, 2)).reshape((ROWS, WIDTH)))
    own = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, gates.type.layout))
    here = 0
    for tile in range(begin // across, gl.cdiv(end, across)):
        right = _load_rows(x_ptr, 0 if GATE else tile, depth, EACH, PIECES, FORM.block, RIGHT)
        expert = _find_expert(chosen_ptr, tile, EXPERTS)
        for unit in range(gl.maximum(begin, tile * across), gl.minimum(end, (tile + 1) * across)):
            if GATE:
                bias = bias_ptr + expert * columns + (unit - tile * across) * (ROWS // 2) + own
                gate_bias = gl.load(bias).to(gl.float32)[:, None]
                up_bias = gl.load(bias + columns // 2).to(gl.float32)[:, None]
            async_copy.wait_group(STAGES - 1)
            program_barrier()
            held = ()
            for step in gl.static_range(EACH):
                level = levels.index(here * BLOCKS_HELD + step).load(LANES)
                held = held + ((words_rings[step].index(here).load(LANES), level),)  # noqa: RUF005
            program_barrier()  # all warps have this unit in registers: its memory is free
            following = unit + STAGES
            _request_unit(sources, rings, chosen_ptr, here, following, end, across, SIDES, EXPERTS, BLOCKS, EACH)
            acc = gl.zeros([PIECES, ROWS, WIDTH], gl.float32, layout=MMA)
            for step in gl.static_range(EACH):
                level = (held[step][1], held[step][1])
                kinds = (level, level, level, level)
                w = weights_of((held[step][0], (kinds, kinds)), coordinates, dtype, FORM, True)
                acc = mma_v2(gl.convert_layout(w, LEFT, assert_trivial=True), right[step], acc)
            total = add_pieces(acc, num_warps)
            if GATE:
                gate, up = _split_gates(total)
                gate = gate.to(dtype).to(gl.float32) + gate_bias
                up = up.to(dtype).to(gl.float32) + up_bias
                _store_column(apply_gate(gate, up, dtype, GATE), out_ptr, unit)
            else:
                _store_column(total.to(dtype), out_ptr, unit)
            here = gl.where(here == STAGES - 1, 0, here + 1)
    if PDL:
        gdc_wait()  # a kernel behind this one that waits for it must not start before the one in front has ended
