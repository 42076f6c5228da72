"""Products of few rows in FP8 on Hopper (compute capability 9.0), with the bits of `fp8_wide`.

A weight is the tall operand, and its bytes go from memory to the tensor cores as they are. A group's product starts
from zero, so products of several groups are computed at the same time. Weights are loaded while the kernels before
still run, as `hopper_products` explains.
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

from adapters.models.kernels.triton import linear
from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.fp8.fp8_rows import SIDE, quantise_groups
from adapters.models.kernels.triton.hopper.hopper_packed_row import find_largest_power
from adapters.models.kernels.triton.hopper.hopper_products import bring

_apply_gate = gluon.jit(linear.apply_gate.fn)
HEIGHT = gl.constexpr(64)  # rows of w of a program


@gluon.jit
def _request(w_desc, ring, bar, slot, n0, apart, group, EXTRA: gl.constexpr, pred):
    """Load a group of columns of the program's rows of w: two boxes. EXTRA: bytes of x that come with it."""
    mbarrier.expect(bar, 2 * w_desc.block_type.nbytes + EXTRA, pred=pred)
    bring(w_desc, [n0, group * SIDE], bar, ring.index(2 * slot), pred=pred)
    bring(w_desc, [n0 + apart, group * SIDE], bar, ring.index(2 * slot + 1), pred=pred)


@gluon.jit
def _request_groups(w_desc, ring, bar, slot, n0, apart, step, PER: gl.constexpr, pred):
    """Load PER groups of columns of the program's rows of w."""
    mbarrier.expect(bar, 2 * PER * w_desc.block_type.nbytes, pred=pred)
    for part in gl.static_range(PER):
        at = slot * PER + part
        column = (step * PER + part) * SIDE
        bring(w_desc, [n0, column], bar, ring.index(2 * at), pred=pred)
        bring(w_desc, [n0 + apart, column], bar, ring.index(2 * at + 1), pred=pred)


@gluon.jit
def _store(total, out_ptr, n0, m0, rows, stride, GATED: gl.constexpr, num_warps: gl.constexpr):
    """Store sums `[rows of w, rows of x]`."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    # A thread has both rows of a pair, which are half of the height apart.
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    pairs = gl.convert_layout(total, PAIRS)
    if GATED:
        gate, up = gl.split(pairs.reshape((2, HEIGHT // 2, total.shape[1])).permute((1, 2, 0)))
        out = _apply_gate(gate, up, dtype, GATED)
    else:
        out = pairs.to(dtype)
    n = n0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    m = m0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * stride + n, out, mask=(m < rows) & (n >= 0))


@gluon.jit(do_not_specialize=["rows"])
def multiply_narrow(
    w_desc, x_desc, xs_ptr, ws_ptr, out_ptr, rows, columns, groups, xs_stride, stride,
    STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute out[rows, columns] = x @ w.T for few rows. w_desc: boxes of 32 rows. The rest is as in `multiply_wide`."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    X_BYTES: gl.constexpr = BLOCK_M * SIDE
    n0 = gl.program_id(0) * (HEIGHT // 2 if GATED else HEIGHT)
    m0 = gl.program_id(1) * BLOCK_M
    apart = columns // 2 if GATED else HEIGHT // 2
    boxes = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, HEIGHT // 2, SIDE], w_desc.layout)
    w_ring = boxes._reinterpret(w_desc.dtype, [STAGES, HEIGHT, SIDE], w_desc.layout)  # noqa: SLF001
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, SIDE], x_desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    program_barrier()
    for at in gl.static_range(STAGES):
        _request(w_desc, boxes, come.index(at), at, n0, apart, at, X_BYTES, at < groups)
    i = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, MMA))
    j = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
    row_of_w = n0 + i % (HEIGHT // 2) + i // (HEIGHT // 2) * apart
    ws = ws_ptr + row_of_w // SIDE * groups
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in gl.static_range(STAGES):
        bring(x_desc, [m0, at * SIDE], come.index(at), x_ring.index(at), pred=at < groups)
    total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    product = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    here = 0
    turn = 0
    for group in range(groups):
        tall = gl.load(ws + group)
        flat = gl.load(xs_ptr + group * xs_stride + m0 + j, mask=m0 + j < rows, other=0.0)
        mbarrier.wait(come.index(here), turn)
        begun = warpgroup_mma(w_ring.index(here), x_ring.index(here).permute((1, 0)), product, use_acc=False, is_async=True)
        scale = flat[None, :] * tall[:, None]
        product = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
        coming = group + STAGES
        more = coming < groups
        program_barrier()
        _request(w_desc, boxes, come.index(here), here, n0, apart, coming, X_BYTES, more)
        bring(x_desc, [m0, coming * SIDE], come.index(here), x_ring.index(here), pred=more)
        total = gl.fma(product, scale, total)
        turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
        here = gl.where(here == STAGES - 1, 0, here + 1)
    _store(total, out_ptr, n0, m0, rows, stride, GATED, num_warps)


@gluon.jit
def multiply_row(
    w_desc, x_ptr, ws_ptr, out_ptr, columns,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, PER: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute out[columns] = x @ w.T for one row, which every program quantises by itself.

    The row of x is the first of eight, of which the others are whatever memory holds: they are never stored.
    """
    BLOCK_M: gl.constexpr = 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    AT_ONCE: gl.constexpr = find_largest_power(GROUPS)
    LANES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    code: gl.constexpr = w_desc.dtype
    n0 = gl.program_id(0) * (HEIGHT // 2 if GATED else HEIGHT)
    apart = columns // 2 if GATED else HEIGHT // 2
    boxes = gl.allocate_shared_memory(code, [2 * PER * STAGES, HEIGHT // 2, SIDE], w_desc.layout)
    w_ring = boxes._reinterpret(code, [PER * STAGES, HEIGHT, SIDE], w_desc.layout)  # noqa: SLF001
    x_rows = gl.allocate_shared_memory(code, [GROUPS, BLOCK_M, SIDE], w_desc.layout)
    # The first of eight rows lies as it would without swizzling.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    plain = x_rows._reinterpret(code, [GROUPS // AT_ONCE, AT_ONCE, BLOCK_M, SIDE], PLAIN)  # noqa: SLF001
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = GROUPS // AT_ONCE
    low_scales = gl.allocate_shared_memory(gl.float32, [GROUPS, 1], FLAT)
    high_scales = low_scales
    if GATED:
        high_scales = gl.allocate_shared_memory(gl.float32, [GROUPS, 1], FLAT)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    program_barrier()
    for at in gl.static_range(STAGES):
        _request_groups(w_desc, boxes, come.index(at), at, n0, apart, at, PER, True)
    own = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, LANES))
    k = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LANES))
    one = ws_ptr + n0 // SIDE * GROUPS + own
    two = ws_ptr + (n0 + apart) // SIDE * GROUPS + own
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    found = ()
    for first in gl.static_range(0, GROUPS, AT_ONCE):
        found = found + (gl.load(x_ptr + (first + own[:, None]) * SIDE + k[None, :]),)  # noqa: RUF005
    for part in gl.static_range(GROUPS // AT_ONCE):
        codes, own_scales = quantise_groups(found[part])
        plain.index(part).slice(0, 1, 1).store(codes.reshape((AT_ONCE, 1, SIDE)))
        low = own_scales * gl.load(one + part * AT_ONCE)
        low_scales._reinterpret(gl.float32, [PARTS, AT_ONCE], FLAT).index(part).store(low)  # noqa: SLF001
        if GATED:
            high = own_scales * gl.load(two + part * AT_ONCE)
            high_scales._reinterpret(gl.float32, [PARTS, AT_ONCE], FLAT).index(part).store(high)  # noqa: SLF001
    fence_async_shared()
    program_barrier()
    total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    nothing = gl.zeros([HEIGHT, BLOCK_M], gl.float32, layout=MMA)
    i = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, MMA))
    here = 0
    turn = 0
    for step in range(GROUPS // PER):
        mbarrier.wait(come.index(here), turn)
        begun = ()
        for part in gl.static_range(PER):
            right = x_rows.index(step * PER + part).permute((1, 0))
            left = w_ring.index(here * PER + part)
            begun = begun + (warpgroup_mma(left, right, nothing, use_acc=False, is_async=True),)  # noqa: RUF005
        scales = ()
        for part in gl.static_range(PER):
            scale = low_scales.index(step * PER + part).load(gl.SliceLayout(1, MMA))[:, None]
            if GATED:
                upper = high_scales.index(step * PER + part).load(gl.SliceLayout(1, MMA))[:, None]
                scale = gl.where(i[:, None] < HEIGHT // 2, scale, upper)
            scales = scales + (scale,)  # noqa: RUF005
        for part in gl.static_range(PER):
            product = warpgroup_mma_wait(num_outstanding=PER - 1 - part, deps=(begun[part],))
            total = gl.fma(product, gl.broadcast(scales[part], total)[0], total)
        if GROUPS > STAGES * PER:
            coming = step + STAGES
            program_barrier()
            _request_groups(w_desc, boxes, come.index(here), here, n0, apart, coming, PER, coming < GROUPS // PER)
        turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
        here = gl.where(here == STAGES - 1, 0, here + 1)
    _store(total, out_ptr, n0, 0, 1, 0, GATED, num_warps)
