"""Products of few rows in FP8 on Hopper (compute capability 9.0), with the bits of `fp8_wide`.

A weight is the tall operand, and its bytes go from memory to the tensor cores as they are. A group's product starts
from zero, so products of several groups are computed at the same time. Weights are loaded while the kernels before
still run, as `hopper_products` explains.

An instruction has 64 rows. Where these would be too few programs, a program has 32 rows of the weight, and instructions
multiply two groups of their columns: rows 0 to 7 of each 16 have the columns of an even group, the others those of the
odd group behind it. Each row of x is there twice as well, with the columns of either group. Half of all sums then
belong to two different groups and are left out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.fp8.fp8_rows import SIDE, quantise_groups
from adapters.models.kernels.triton.hopper.hopper_packed_row import find_largest_power
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.packed import apply_gate

HEIGHT = gl.constexpr(64)  # rows of an instruction
LEAST = gl.constexpr(8)  # columns of an instruction, at least
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def _request_weights(desc, ring, bar, slot, tile, step, pred):
    """Load some groups of columns of a tile of w: of 64 rows, of 32 of a gate and as many of what it gates, or of 32
    rows twice as many groups.
    """
    AT_ONCE: gl.constexpr = desc.block_type.shape[0]
    PART: gl.constexpr = desc.block_type.shape[1]
    mbarrier.expect(bar, desc.block_type.nbytes, pred=pred)
    if len(desc.block_type.shape) == 5:
        bring(desc, [step * AT_ONCE, tile * PART, 0, 0, 0], bar, ring.index(slot), pred=pred)
    else:
        row = tile % PART * (HEIGHT // PART)
        bring(desc, [step * AT_ONCE, tile // PART * PART, row, 0], bar, ring.index(slot), pred=pred)


@gluon.jit
def _request_rows(desc, ring, bar, slot, row, step, pred):
    """Load the same groups of columns of rows of x."""
    AT_ONCE: gl.constexpr = desc.block_type.shape[0]
    if len(desc.block_type.shape) == 4:
        bring(desc, [step * AT_ONCE, row, 0, 0], bar, ring.index(slot), pred=pred)
    else:
        bring(desc, [step * AT_ONCE, row, 0], bar, ring.index(slot), pred=pred)


@gluon.jit
def _separate(sums, GROUPS: gl.constexpr):
    """Return the sums of each of the GROUPS groups that an instruction has multiplied."""
    if GROUPS == 2:
        WIDTH: gl.constexpr = sums.shape[1] // 2
        even, odd = gl.split(sums.reshape((4, 2, 8, WIDTH, 2)).permute((0, 2, 3, 1, 4)))
        first, _ = gl.split(even)
        _, second = gl.split(odd)
        found = (first.reshape((32, WIDTH)), second.reshape((32, WIDTH)))
    else:
        found = (sums,)
    return found


@gluon.jit
def _load_scales(low, high, group, rows, GATED: gl.constexpr, TOTAL: gl.constexpr):
    """Return the scales of the sums of a group."""
    scale = low.index(group).load(gl.SliceLayout(0, TOTAL))[None, :]
    if GATED:
        upper = high.index(group).load(gl.SliceLayout(0, TOTAL))[None, :]
        scale = gl.where(rows < HEIGHT // 2, scale, upper)
    return scale


@gluon.jit
def _multiply_step(
    total, w_ring, x_ring, w_slot, x_slot, low, high, group, rows,
    AT_ONCE: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add the products of AT_ONCE instructions' groups, in order. Their sums are computed at the same time."""
    TOTAL: gl.constexpr = total.type.layout
    WIDTH: gl.constexpr = x_ring.shape[1]
    nothing = gl.zeros([HEIGHT, WIDTH], gl.float32, layout=MMA)
    begun = ()
    for part in gl.static_range(AT_ONCE):
        right = x_ring.index(x_slot + part).permute((1, 0))
        left = w_ring.index(w_slot + part)
        begun = begun + (warpgroup_mma(left, right, nothing, use_acc=False, is_async=True),)  # noqa: RUF005
    scales = ()
    for part in gl.static_range(AT_ONCE * GROUPS):
        found = _load_scales(low, high, group + part, rows, GATED, TOTAL)
        scales = scales + (gl.broadcast(found, total)[0],)  # noqa: RUF005
    for part in gl.static_range(AT_ONCE):
        sums = _separate(warpgroup_mma_wait(num_outstanding=AT_ONCE - 1 - part, deps=(begun[part],)), GROUPS)
        for own in gl.static_range(GROUPS):
            total = gl.fma(sums[own], scales[part * GROUPS + own], total)
    return total


@gluon.jit
def _store(total, out_ptr, n0, m0, rows, stride, GATED: gl.constexpr, num_warps: gl.constexpr):
    """Store sums `[rows of w, rows of x]`."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    # A thread has both rows of a pair, which are half of the height apart.
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    pairs = gl.convert_layout(total, PAIRS)
    if GATED:
        gate, up = gl.split(pairs.reshape((2, HEIGHT // 2, total.shape[1])).permute((1, 2, 0)))
        out = apply_gate(gate, up, dtype, GATED)
    else:
        out = pairs.to(dtype)
    n = n0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    m = m0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * stride + n, out, mask=(m < rows) & (n >= 0))


@gluon.jit
def _keep_scales(low, high, part, own, ws_ptr, n0, apart, first, GROUPS: gl.constexpr, GATED: gl.constexpr):
    """Multiply scales of rows `[some groups, rows]` with those of the weight, and keep them in shared memory."""
    LANES: gl.constexpr = own.type.layout
    group = first + gl.arange(0, own.shape[0], layout=gl.SliceLayout(1, LANES))
    SHAPE: gl.constexpr = [GROUPS // own.shape[0], own.shape[0], own.shape[1]]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tall = gl.load(ws_ptr + n0 // SIDE * GROUPS + group)
    low._reinterpret(gl.float32, SHAPE, PLAIN).index(part).store(own * tall[:, None])  # noqa: SLF001
    if GATED:
        tall = gl.load(ws_ptr + (n0 + apart) // SIDE * GROUPS + group)
        high._reinterpret(gl.float32, SHAPE, PLAIN).index(part).store(own * tall[:, None])  # noqa: SLF001


@gluon.jit(do_not_specialize=["rows"])
def multiply_narrow(
    w_desc, x_desc, xs_ptr, ws_ptr, out_ptr, rows, apart, xs_stride, stride,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute out[rows, columns] = x @ w.T for few rows.

    w_desc: boxes `[steps, halves, rows, 128]` of 64 rows, or `[steps, 4, 2, 8, 128]` of 32 rows and twice as many
    groups. x_desc: the same groups, `[steps, rows, 128]` or `[steps, rows, 2, 128]`. The rest is as in `multiply_wide`.
    """
    AT_ONCE: gl.constexpr = w_desc.block_type.shape[0]
    OF_TILE: gl.constexpr = 2 if len(w_desc.block_type.shape) == 5 else 1
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[1]
    STEPS: gl.constexpr = GROUPS // (AT_ONCE * OF_TILE)
    WIDTH: gl.constexpr = BLOCK_M * OF_TILE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    ROWS: gl.constexpr = HEIGHT // 2 if GATED or OF_TILE == 2 else HEIGHT
    tile = gl.program_id(0)
    m0 = gl.program_id(1) * BLOCK_M
    n0 = tile * ROWS
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    x_boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    w_ring = w_boxes._reinterpret(w_desc.dtype, [STAGES * AT_ONCE, HEIGHT, SIDE], _CODES)  # noqa: SLF001
    x_ring = x_boxes._reinterpret(x_desc.dtype, [STAGES * AT_ONCE, WIDTH, SIDE], _CODES)  # noqa: SLF001
    low = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_M], _FLAT)
    high = low
    if GATED:
        high = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_M], _FLAT)
    w_come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(w_come.index(at), count=1)
        mbarrier.init(x_come.index(at), count=1)
    program_barrier()
    for at in gl.static_range(STAGES):
        _request_weights(w_desc, w_boxes, w_come.index(at), at, tile, at, at < STEPS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in gl.static_range(STAGES):
        mbarrier.expect(x_come.index(at), x_desc.block_type.nbytes, pred=at < STEPS)
        _request_rows(x_desc, x_boxes, x_come.index(at), at, m0, at, at < STEPS)
    SOME: gl.constexpr = find_largest_power(GROUPS)
    ACROSS: gl.constexpr = min(BLOCK_M, 32)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [num_warps, 1], [1, 0])
    group = gl.arange(0, SOME, layout=gl.SliceLayout(1, LANES))[:, None]
    j = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LANES))[None, :]
    for part in gl.static_range(GROUPS // SOME):
        own = gl.load(xs_ptr + (part * SOME + group) * xs_stride + j, mask=(j < rows) & (group >= 0), other=0.0)
        _keep_scales(low, high, part, own, ws_ptr, n0, apart, part * SOME, GROUPS, GATED)
    program_barrier()
    total = _separate(gl.zeros([HEIGHT, WIDTH], gl.float32, layout=MMA), OF_TILE)[0]
    TOTAL: gl.constexpr = total.type.layout
    i = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, TOTAL))[:, None]
    here = 0
    turn = 0
    for step in range(STEPS):
        mbarrier.wait(w_come.index(here), turn)
        mbarrier.wait(x_come.index(here), turn)
        slot = here * AT_ONCE
        total = _multiply_step(
            total, w_ring, x_ring, slot, slot, low, high, step * (AT_ONCE * OF_TILE), i, AT_ONCE, OF_TILE, GATED, MMA
        )
        if STEPS > STAGES:
            coming = step + STAGES
            _request_weights(w_desc, w_boxes, w_come.index(here), here, tile, coming, coming < STEPS)
            mbarrier.expect(x_come.index(here), x_desc.block_type.nbytes, pred=coming < STEPS)
            _request_rows(x_desc, x_boxes, x_come.index(here), here, m0, coming, coming < STEPS)
        turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
        here = gl.where(here == STAGES - 1, 0, here + 1)
    _store(total, out_ptr, n0, m0, rows, stride, GATED, num_warps)


@gluon.jit
def _quantise_row(
    x_ptr, x_rows, low, high, ws_ptr, n0, apart,
    GROUPS: gl.constexpr, OF_TILE: gl.constexpr, GATED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Quantise a row, and keep it in shared memory as often as an instruction has rows of x, with all scales."""
    SOME: gl.constexpr = find_largest_power(GROUPS)
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    own = gl.arange(0, SOME, layout=gl.SliceLayout(1, LANES))[:, None]
    k = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LANES))[None, :]
    found = ()
    for first in gl.static_range(0, GROUPS, SOME):
        found = found + (gl.load(x_ptr + (first + own) * SIDE + k),)  # noqa: RUF005
    into = x_rows._reinterpret(x_rows.dtype, [GROUPS // SOME, SOME // OF_TILE, LEAST, SIDE], CODES)  # noqa: SLF001
    for part in gl.static_range(GROUPS // SOME):
        codes, scales = quantise_groups(found[part])
        every = codes.reshape((SOME // OF_TILE, 1, OF_TILE, SIDE))
        every = every.broadcast_to([SOME // OF_TILE, LEAST // OF_TILE, OF_TILE, SIDE])
        into.index(part).store(every.reshape((SOME // OF_TILE, LEAST, SIDE)))
        _keep_scales(low, high, part, scales[:, None], ws_ptr, n0, apart, part * SOME, GROUPS, GATED)


@gluon.jit
def multiply_row(
    w_desc, x_ptr, ws_ptr, out_ptr, apart,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute out[columns] = x @ w.T for one row, which every program quantises by itself. w_desc: as in
    `multiply_narrow`.
    """
    AT_ONCE: gl.constexpr = w_desc.block_type.shape[0]
    OF_TILE: gl.constexpr = 2 if len(w_desc.block_type.shape) == 5 else 1
    STEPS: gl.constexpr = GROUPS // (AT_ONCE * OF_TILE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEAST, 32])
    ROWS: gl.constexpr = HEIGHT // 2 if GATED or OF_TILE == 2 else HEIGHT
    tile = gl.program_id(0)
    n0 = tile * ROWS
    boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    w_ring = boxes._reinterpret(w_desc.dtype, [STAGES * AT_ONCE, HEIGHT, SIDE], _CODES)  # noqa: SLF001
    x_rows = gl.allocate_shared_memory(w_desc.dtype, [GROUPS // OF_TILE, LEAST, SIDE], _CODES)
    low = gl.allocate_shared_memory(gl.float32, [GROUPS, 1], _FLAT)
    high = low
    if GATED:
        high = gl.allocate_shared_memory(gl.float32, [GROUPS, 1], _FLAT)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    program_barrier()
    for at in gl.static_range(STAGES):
        _request_weights(w_desc, boxes, come.index(at), at, tile, at, True)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _quantise_row(x_ptr, x_rows, low, high, ws_ptr, n0, apart, GROUPS, OF_TILE, GATED, num_warps)
    fence_async_shared()
    program_barrier()
    total = _separate(gl.zeros([HEIGHT, LEAST], gl.float32, layout=MMA), OF_TILE)[0]
    TOTAL: gl.constexpr = total.type.layout
    i = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, TOTAL))[:, None]
    here = 0
    turn = 0
    for step in range(STEPS):
        mbarrier.wait(come.index(here), turn)
        total = _multiply_step(
            total, w_ring, x_rows, here * AT_ONCE, step * AT_ONCE, low, high, step * (AT_ONCE * OF_TILE), i,
            AT_ONCE, OF_TILE, GATED, MMA,
        )  # fmt: skip
        if STEPS > STAGES:
            coming = step + STAGES
            _request_weights(w_desc, boxes, come.index(here), here, tile, coming, coming < STEPS)
        turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
        here = gl.where(here == STAGES - 1, 0, here + 1)
    _store(total, out_ptr, n0, 0, 1, 0, GATED, num_warps)
