"""Products of one row's experts on Hopper (compute capability 9.0), with weights that stay packed.

The order of the sums is that of `packed_groups.multiply_few`. Here there is one row, and the rows of every expert's
weight fill whole units of ROWS. Every program finds the chosen experts itself (`wanted_experts`). A product of gates
also computes the activation. Then a unit has eight rows of gates and the eight rows that these gates scale, in turn, so
that both of a pair are in one thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.rows.wanted_experts import find_wanted, pick_expert
from adapters.models.kernels.triton.packed import add_pieces, apply_gate, fetch_x, lanes_of
from adapters.models.kernels.triton.packed_groups import keep_order
from adapters.models.kernels.triton.packed_numbers import weights_of

ROWS = 16  # of the weight, in a unit
_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(8)  # columns of a product of the tensor cores, of which one is the row of x


@gluon.jit
def _request(
    matrix,
    side,
    place,
    step,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    FORM: gl.constexpr,
):
    """Load block number `step` of every piece, of the rows of a unit, whose first eight rows have the number `side`.

    place: of the first unit, how far the words and the levels of each piece are from the matrix's; and pieces. These
    are computed once, so that an address is one addition.
    """
    of_words, of_levels, piece = place
    PIECES: gl.constexpr = piece.shape[0]
    words, levels = matrix
    words += side * (BLOCKS * 128) + step * 128
    levels += side * (BLOCKS * FORM.planes * 8) + step * (FORM.planes * 8)
    if (PIECES - 1) * EACH + step >= BLOCKS:
        behind = gl.maximum(piece * EACH + step - (BLOCKS - 1), 0)
        of_words = of_words - behind * 128
        of_levels = of_levels - behind * (FORM.planes * 8)
    found = gl.load(words + of_words)
    scale = gl.load(levels + of_levels)
    # There is one word of scales, and no other level.
    level = ((scale, scale), (scale, scale), (scale, scale), (scale, scale))
    return found, (level, level)


@gluon.jit
def _gate_pairs(total, bias_ptr, COLUMNS: gl.constexpr, GATE: gl.constexpr, dtype: gl.constexpr):
    """Return what the gates of a unit let through. bias_ptr: of its first gate."""
    gate, up = gl.split(total.reshape((_ROWS // 2, 2, _WIDTH)).permute((0, 2, 1)))
    bias = bias_ptr + gl.arange(0, _ROWS // 2, layout=gl.SliceLayout(1, gate.type.layout))
    gate = gate.to(dtype).to(gl.float32) + gl.load(bias).to(gl.float32)[:, None]
    up = up.to(dtype).to(gl.float32) + gl.load(bias + COLUMNS // 2).to(gl.float32)[:, None]
    return apply_gate(gate, up, dtype, GATE)


@gluon.jit
def _add_bias(total, bias_ptr, dtype: gl.constexpr):
    """Return the sums of a unit with their biases. bias_ptr: of its first row."""
    bias = gl.load(bias_ptr + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, total.type.layout)))
    return (total.to(dtype).to(gl.float32) + bias.to(gl.float32)[:, None]).to(dtype)


@gluon.jit
def multiply_row(
    words_ptr,
    levels_ptr,
    x_ptr,
    bias_ptr,
    logits_ptr,
    correction_ptr,
    out_ptr,
    words_apart,
    levels_apart,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    TILES: gl.constexpr,
    EXPERTS: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCKS: gl.constexpr,
    EACH: gl.constexpr,
    FORM: gl.constexpr,
    GATE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[tile] = x[tile] @ w[expert].T for the TILES experts that a row chooses out of EXPERTS.

    logits, correction: see `find_wanted`. bias: `[EXPERTS, COLUMNS]`, is added to sums that have been rounded. GATE:
    all experts have the same row of x. COLUMNS are gates, and behind them as many values that these gates scale; out
    has the activation of both (`linear.apply_gate`). If GATE is 0, there is no gate. The logits are then older than the
    kernel before this one, so weights are requested while that one still runs. BLOCKS: of a row of w. EACH:
    blocks of a piece.

    Every program takes an equal share of all units, in order. Each warp has a piece of all sums. The packed words of
    the next unit are on their way while one is multiplied.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, _ROWS)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LANES)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // BLOCK, BLOCK // 8], [PIECES, num_warps // PIECES, 1], [2, 1, 0]
    )
    BANKS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ACROSS: gl.constexpr = COLUMNS // _ROWS  # units of an expert
    SIDES: gl.constexpr = 1 if GATE else 2  # eights of rows from one unit to the next
    ring = gl.allocate_shared_memory(dtype, [EACH, PIECES, _WIDTH, BLOCK], BANKS)
    i = gl.arange(0, _ROWS, layout=ROW)[None, :, None, None]
    t = gl.arange(0, 4, layout=LANE)[None, None, :, None]
    c = gl.arange(0, 4, layout=WORD)[None, None, None, :]
    n = i // 2 + i % 2 * (COLUMNS // 2) if GATE else i
    piece = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None]
    block = (n >> 3) * BLOCKS + piece * EACH
    place = (block * 128 + (n & 7) * 16 + t * 4 + c, block * (FORM.planes * 8) + (n & 7), piece)
    m = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    before = gl.arange(0, PIECES, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None] * (EACH * BLOCK)
    begin = gl.program_id(0) * (TILES * ACROSS) // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * (TILES * ACROSS) // gl.num_programs(0)
    if PDL and GATE:
        gdc_wait()
    wanted = find_wanted(logits_ptr, correction_ptr, EXPERTS, TILES)
    for tile in range(begin // ACROSS, gl.cdiv(end, ACROSS)):
        expert = pick_expert(wanted, tile, TILES).to(gl.int64)
        matrix = (words_ptr + expert * words_apart, levels_ptr + expert * levels_apart)
        start = gl.maximum(begin - tile * ACROSS, 0)
        stop = gl.minimum(end - tile * ACROSS, ACROSS)
        held = ()
        for step in gl.static_range(EACH):
            held = held + (_request(matrix, start * SIDES, place, step, BLOCKS, EACH, FORM),)  # noqa: RUF005
        if PDL:
            gdc_launch_dependents()
            if not GATE:
                gdc_wait()
        if (tile == begin // ACROSS) | (not GATE):
            row = 0 if GATE else tile
            program_barrier()  # all warps have read the row of the tile before
            for stage in gl.static_range(EACH):
                fetch_x(x_ptr, ring, (m * 0 + row, m < 1, before, k), stage, EACH, DEPTH, BLOCK)
            async_copy.wait_group(0)
            program_barrier()
        for unit in range(start, stop):
            acc = gl.zeros([PIECES, _ROWS, _WIDTH], gl.float32, layout=MMA)
            # Behind the last unit its own words are requested again, which are still in the cache.
            following = gl.minimum(unit + 1, stop - 1) * SIDES
            coming = ()
            for step in gl.static_range(EACH):
                w = gl.convert_layout(weights_of(held[step], (i, t, c), dtype, FORM, True), LEFT, assert_trivial=True)
                coming = coming + (_request(matrix, following, place, step, BLOCKS, EACH, FORM),)  # noqa: RUF005
                keep_order(unit)
                acc = mma_v2(w, ring.index(step).permute((0, 2, 1)).load(RIGHT), acc)
            held = coming
            total = add_pieces(acc, num_warps)
            if GATE:
                bias = bias_ptr + (expert * COLUMNS + unit * (_ROWS // 2))
                found = _gate_pairs(total, bias, COLUMNS, GATE, dtype)
            else:
                found = _add_bias(total, bias_ptr + (expert * COLUMNS + unit * _ROWS), dtype)
            HEIGHT: gl.constexpr = found.shape[0]
            row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, found.type.layout))[:, None]
            column = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, found.type.layout))[None, :]
            gl.store(out_ptr + ((tile * ACROSS + unit) * HEIGHT + row + column * 0), found, mask=column < 1)
    if PDL:
        gdc_wait()  # a kernel behind this one that waits for it must not start before the one in front has ended
