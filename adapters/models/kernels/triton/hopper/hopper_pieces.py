"""Products of many rows on Hopper (compute capability 9.0) that add up columns in pieces, as `packed` does.

The sum of a piece and the sum of the pieces before it are both in registers, so a tile is half of that of a product
with one chain. Shared memory is read more often then, so this takes longer: see decision 031.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton import linear
from adapters.models.kernels.triton.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_products import bring

_apply_gate = gluon.jit(linear.apply_gate.fn)


@gluon.jit
def _request(descriptors, rings, come, origin, slot, k, pred):
    """Load the columns from k on, of x and of w, to their slot of the ring."""
    x_desc, w_desc = descriptors
    x_ring, w_ring = rings
    m0, n0 = origin
    mbarrier.expect(come.index(slot), x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=pred)
    bring(x_desc, [m0, k], come.index(slot), x_ring.index(slot), pred=pred)
    bring(w_desc, [n0, k], come.index(slot), w_ring.index(slot), pred=pred)


@gluon.jit
def _store(acc, out_ptr, m0, n0, rows, columns, stride, GATED: gl.constexpr):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape((acc.shape[0], acc.shape[1] // 2, 2)))
        out = _apply_gate(gate, up, dtype, GATED)
        n0 = n0 // 2
        columns = columns // 2
    else:
        out = acc.to(dtype)
    m = m0 + gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, out.type.layout))[:, None]
    n = n0 + gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * stride + n, out, mask=(m < rows) & (n < columns))


@gluon.jit(do_not_specialize=["rows"])
def linear_pieces(
    x_desc,
    w_desc,
    out_ptr,
    rows,
    columns,
    depth,
    piece,
    stride,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. piece: columns that are one chain, a multiple of a block's.
    stride: from one row of out to the next.

    STAGES blocks of x and w are in shared memory or on their way there. Data behind the last row of w or x is zeros.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, BLOCK_N)
    program = gl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * BLOCK_N
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    program_barrier()
    descriptors = (x_desc, w_desc)
    rings = (x_ring, w_ring)
    if PDL:
        gdc_wait()
    steps = gl.cdiv(depth, BLOCK_K)
    for at in gl.static_range(STAGES):
        _request(descriptors, rings, come, (m0, n0), at, at * BLOCK_K, at < steps)
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    here = 0
    turn = 0
    for first in range(0, steps, piece // BLOCK_K):
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
        for step in range(first, gl.minimum(first + piece // BLOCK_K, steps)):
            mbarrier.wait(come.index(here), turn)
            acc = warpgroup_mma(x_ring.index(here), w_ring.index(here).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            program_barrier()  # both warp groups have multiplied the block before: its memory is free
            free = gl.where(here == 0, STAGES - 1, here - 1)
            more = (step > 0) & (step - 1 + STAGES < steps)
            _request(descriptors, rings, come, (m0, n0), free, (step - 1 + STAGES) * BLOCK_K, more)
            turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
            here = gl.where(here == STAGES - 1, 0, here + 1)
        total = total + warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if PDL:
        gdc_launch_dependents()
    _store(total, out_ptr, m0, n0, rows, columns, stride, GATED)
