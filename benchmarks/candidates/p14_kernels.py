"""Trials: `packed_row` and `packed_single` with clocks, with parts left out, and with the next weight brought to L2."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer, smid

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_packed import lines_of_levels, lines_of_words, request_weights, take_weights
from adapters.models.kernels.triton.hopper.hopper_packed_row import _fetch_row
from adapters.models.kernels.triton.hopper import hopper_row_registers as hr
from adapters.models.kernels.triton.packed import add_pieces, lanes_of, load_block, locate_piece, restore, store_narrow
from adapters.models.kernels.triton.packed_numbers import weights_of

_copy_row = hr._copy_row
_multiply_block = hr._multiply_block


@gluon.jit
def _prefetch(address, size):
    return gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def bring_next(words_ptr, levels_ptr, units, w_stride, l_stride, first, size, num_warps: gl.constexpr):
    """Bring 1/256 shares [first, first + size) of each unit (eight rows) to L2. All programs share the units."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    unit = gl.arange(0, 32 * num_warps, layout=THREADS) * gl.num_programs(0) + gl.program_id(0)
    wanted = unit < units
    words = words_ptr.to(gl.int64) + unit.to(gl.int64) * w_stride + ((w_stride * first >> 8) & -16)
    levels = levels_ptr.to(gl.int64) + unit.to(gl.int64) * l_stride + ((l_stride * first >> 8) & -16)
    _prefetch(words, gl.where(wanted, (w_stride * size >> 8) & -16, 0))
    _prefetch(levels, gl.where(wanted, (l_stride * size >> 8) & -16, 0))


@gluon.jit
def _clock():
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["units", "w_stride", "l_stride", "first", "size", "blocks"])
def row_trial(
    words_desc, levels_desc, x_ptr, out_ptr, columns,
    next_words, next_levels, units, w_stride, l_stride, first, size, clock_ptr, own_words, own_levels, blocks,
    STEPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr, GATED: gl.constexpr,
    COMING: gl.constexpr, OWN: gl.constexpr, MODE: gl.constexpr, CLOCK: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):
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
    n0 = gl.program_id(0) * BLOCK_N
    if CLOCK:
        g0 = globaltimer()
        c0 = _clock()
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES] + words_desc.block_type.shape, words_desc.layout)
    l_ring = gl.allocate_shared_memory(gl.int32, [STAGES] + levels_desc.block_type.shape, levels_desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    program_barrier()
    descriptors = (words_desc, levels_desc)
    rings = (w_ring, l_ring)
    for at in gl.static_range(STAGES):
        request_weights(descriptors, rings, come, at, n0 // 8, at, True)
    if OWN:
        bring_own(own_words, own_levels, n0 // 8, BLOCK_N // 8, blocks, gl.cdiv(blocks * FORM.block, 128), OWN, FORM, num_warps)
    if COMING:
        bring_next(next_words, next_levels, units, w_stride, l_stride, first, size, num_warps)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if CLOCK:
        g1 = globaltimer()
        c1 = _clock()
    row = _fetch_row(x_ptr, STEPS, PIECES, COLUMNS, num_warps)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    keep = gl.zeros([BLOCK_N // 8, PIECES, 4 * BLOCKS, 32], gl.int32, layout=WORDS)
    program_barrier()
    if CLOCK:
        c2 = _clock()
    slot = 0
    turn = 0
    for step in range(STEPS):
        if MODE == 2:
            mbarrier.wait(come.index(slot), turn, pred=step < STAGES)
        else:
            mbarrier.wait(come.index(slot), turn)
        lines = w_ring.index(slot).load(WORDS)
        levels = l_ring.index(slot).load(LEVELS)
        if MODE != 2:
            if step + STAGES < STEPS:
                program_barrier()
                request_weights(descriptors, rings, come, slot, n0 // 8, step + STAGES, True)
        if MODE == 1:
            keep = keep ^ lines
        else:
            columns_of_x = row.index(step).load(gl.SliceLayout(2, RIGHT))
            right = columns_of_x[:, :, None].broadcast_to([PIECES, COLUMNS, BLOCK_M])
            w = gl.convert_layout(take_weights(lines, levels, n0, dtype, FORM), LEFT, assert_trivial=True)
            acc = mma_v2(w, right, acc)
        turn = gl.where(slot == STAGES - 1, turn ^ 1, turn)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    if CLOCK:
        c3 = _clock()
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, 0, 1, columns, 0, dtype, GATED)
    if MODE == 1:
        gl.store(next_words + keep, keep, mask=keep == 0x12345678)
    if CLOCK:
        program_barrier()
        c4 = _clock()
        at = clock_ptr + gl.program_id(0) * 8
        gl.store(at, smid().to(gl.int64))
        gl.store(at + 1, g0)
        gl.store(at + 2, g1)
        gl.store(at + 3, c1 - c0)
        gl.store(at + 4, c2 - c1)
        gl.store(at + 5, c3 - c2)
        gl.store(at + 6, c4 - c3)
        gl.store(at + 7, globaltimer())


@gluon.jit
def bring_own(words_ptr, levels_ptr, unit, UNITS: gl.constexpr, blocks, records, share, FORM: gl.constexpr, num_warps: gl.constexpr):
    """Bring share / 4 of the words and levels of some units to L2."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    part = gl.arange(0, 32 * num_warps, layout=THREADS)
    w_bytes = blocks * (512 * UNITS // 32)
    l_bytes = records * (FORM.planes * 32 * UNITS // 32)
    words = words_ptr.to(gl.int64) + (unit.to(gl.int64) * blocks) * 512 + part * w_bytes
    levels = levels_ptr.to(gl.int64) + (unit.to(gl.int64) * records) * (FORM.planes * 32) + part * l_bytes
    _prefetch(words, gl.where(part < 32, (w_bytes * share >> 2) & -16, 0))
    _prefetch(levels, gl.where(part < 32, (l_bytes * share >> 2) & -16, 0))


@gluon.jit(do_not_specialize=["blocks", "units", "w_stride", "l_stride", "first_share", "size"])
def single_trial(
    words_ptr, levels_ptr, x_ptr, out_ptr, columns, blocks,
    next_words, next_levels, units, w_stride, l_stride, first_share, size,
    EACH: gl.constexpr, PIECES: gl.constexpr, BLOCK_N: gl.constexpr, AHEAD: gl.constexpr,
    FORM: gl.constexpr, GATED: gl.constexpr, COMING: gl.constexpr, OWN: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PIECES, num_warps // PIECES, 1], [1, 16, 8])
    LANES: gl.constexpr = lanes_of(PIECES, num_warps, BLOCK_N)
    PIECE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
    n0 = gl.program_id(0) * BLOCK_N
    matrix = (words_ptr, levels_ptr)
    coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
    first = gl.arange(0, PIECES, layout=PIECE)[:, None, None, None] * EACH
    held = ()
    for ahead in gl.static_range(AHEAD):
        held = held + (load_block(matrix, coordinates, first + ahead, blocks, FORM),)
    if OWN:
        bring_own(words_ptr, levels_ptr, n0 // 8, BLOCK_N // 8, blocks, gl.cdiv(blocks * FORM.block, 128), OWN, FORM, num_warps)
    if COMING:
        bring_next(next_words, next_levels, units, w_stride, l_stride, first_share, size, num_warps)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = _copy_row(x_ptr, EACH, PIECES, FORM.block, num_warps)
    acc = gl.zeros([PIECES, BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    for step in range(0, EACH - AHEAD, AHEAD):
        coming = ()
        for ahead in gl.static_range(AHEAD):
            acc = _multiply_block(acc, row, step + ahead, held[ahead], coordinates, dtype, FORM)
            coming = coming + (load_block(matrix, coordinates, first + (step + AHEAD + ahead), blocks, FORM),)
        held = coming
    for ahead in gl.static_range(AHEAD):
        acc = _multiply_block(acc, row, EACH - AHEAD + ahead, held[ahead], coordinates, dtype, FORM)
    total = restore(add_pieces(acc, num_warps), dtype, FORM)
    store_narrow(total, out_ptr, n0, 0, 1, columns, 0, dtype, GATED)
