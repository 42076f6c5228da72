"""Products of few rows on Hopper (compute capability 9.0) that load weights while the kernels before still run.

The sums are those of `linear`: one chain over ascending k in steps of 16, by `wgmma` here as there. What differs is
when weights are loaded. A step is a chain of kernels, each of which waits for the one before, but weights do not
depend on any of them. So a program first fills its ring of shared memory with weights and allows the next kernel to
start. When all programs of a kernel are running, programs of the next one take the processors that are left and do
the same. They cannot keep an earlier kernel's programs out, because a kernel's programs start only when all of the
one before have started.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton import linear

_apply_gate = gluon.jit(linear.apply_gate.fn)
bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # Triton 3.9 has renamed it


@gluon.jit(do_not_specialize=["rows"])
def linear_ahead(
    w_desc,
    x_desc,
    out_ptr,
    rows,
    columns,
    depth,
    stride,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    BESIDE: gl.constexpr,
    TALL_ROWS: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for few rows. stride: from one row of out to the next.

    out: of the type of w, or float32. Results are rounded to the type of w all the same.

    BESIDE: the kernel before this one lets it start only after it has waited for all that x needs, and neither needs
    what the other writes. Then this one does not wait for it before its own end.

    One program owns a block of 64 weight rows, the tall operand, over the whole depth. STAGES blocks of w and x are
    in shared memory or on their way there. Descriptors say how large blocks are; data behind the last row of w or x
    is zeros. TALL_ROWS: the tall operand is 64 rows of x, so that a block may have fewer weight rows.
    """
    dtype: gl.constexpr = w_desc.dtype
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_M) * BLOCK_K * dtype.primitive_bitwidth // 8
    SHAPE: gl.constexpr = [BLOCK_M, BLOCK_N] if TALL_ROWS else [BLOCK_N, BLOCK_M]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, SHAPE[1], 16])
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    steps = gl.cdiv(depth, BLOCK_K)
    for at in gl.static_range(STAGES):
        mbarrier.expect(come.index(at), BYTES, pred=at < steps)
        bring(w_desc, [n0, at * BLOCK_K], come.index(at), w_ring.index(at), pred=at < steps)
    if PDL:
        gdc_launch_dependents()
        if not BESIDE:
            gdc_wait()
    for at in gl.static_range(STAGES):
        bring(x_desc, [m0, at * BLOCK_K], come.index(at), x_ring.index(at), pred=at < steps)
    acc = gl.zeros(SHAPE, gl.float32, layout=MMA)
    here = 0
    turn = 0
    for step in range(steps):
        mbarrier.wait(come.index(here), turn)
        if TALL_ROWS:
            adding = warpgroup_mma(x_ring.index(here), w_ring.index(here).permute((1, 0)), acc, is_async=True)
        else:
            adding = warpgroup_mma(w_ring.index(here), x_ring.index(here).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(adding,))  # the memory of the step before is free now
        free = gl.where(here == 0, STAGES - 1, here - 1)
        coming = step - 1 + STAGES
        more = (step > 0) & (coming < steps)
        mbarrier.expect(come.index(free), BYTES, pred=more)
        bring(w_desc, [n0, coming * BLOCK_K], come.index(free), w_ring.index(free), pred=more)
        bring(x_desc, [m0, coming * BLOCK_K], come.index(free), x_ring.index(free), pred=more)
        turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
        here = gl.where(here == STAGES - 1, 0, here + 1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, num_warps], [0, 1])
    pairs = gl.convert_layout(acc.permute((1, 0)) if TALL_ROWS else acc, PAIRS)
    if GATED:
        gate, up = gl.split(pairs.reshape((BLOCK_N // 2, 2, BLOCK_M)).permute((0, 2, 1)))
        out = _apply_gate(gate, up, dtype, GATED)
        n0 = n0 // 2
        columns = columns // 2
    else:
        out = pairs.to(dtype)
    n = n0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    m = m0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    at = m.to(gl.int64) * stride + n
    gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(m < rows) & (n < columns))
    if PDL and BESIDE:
        gdc_wait()  # the kernel after this one waits for this one only
