"""Products of many rows on Hopper (compute capability 9.0) that add up columns in pieces, as `packed` does.

The sum of a piece and the sum of the pieces before it are both in registers, so a tile is smaller than that of a
product with one chain. It has 192 rows of the weight, as a tile of 128 and one of 64, or 128 alone. 192 rows read less
of x than 128, and both kinds cut a matrix into tiles in another way, so the one that leaves fewer processors without
work serves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper import bring
from adapters.models.kernels.triton.linear import silu_times

_silu_times = gluon.jit(silu_times.fn)


@gluon.jit
def _request(descriptors, rings, come, places, slot, k, REST: gl.constexpr, pred):
    """Load the columns from k on, of x and of both tiles of w, to their place in the ring."""
    x_desc, w_desc, rest_desc = descriptors
    x_ring, w_ring, rest_ring = rings
    m0, n0 = places
    SIZE: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    BYTES: gl.constexpr = SIZE + (rest_desc.block_type.nbytes if REST else 0)
    mbarrier.expect(come.index(slot), BYTES, pred=pred)
    bring(x_desc, [m0, k], come.index(slot), x_ring.index(slot), pred=pred)
    bring(w_desc, [n0, k], come.index(slot), w_ring.index(slot), pred=pred)
    if REST:
        bring(rest_desc, [n0 + w_desc.block_type.shape[0], k], come.index(slot), rest_ring.index(slot), pred=pred)


@gluon.jit
def _store(acc, out_ptr, m0, n0, rows, columns, stride, GATED: gl.constexpr):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape((acc.shape[0], acc.shape[1] // 2, 2)))
        out = _silu_times(gate, up, dtype)
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
    rest_desc,
    out_ptr,
    rows,
    columns,
    depth,
    piece,
    stride,
    STAGES: gl.constexpr,
    REST: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. piece: columns that are one chain, a multiple of a block's.
    stride: from one row of out to the next. REST: a program has the rows of w of both descriptors.

    STAGES blocks of x and w are in shared memory or on their way there. Data behind the last row of w or x is zeros.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    REST_N: gl.constexpr = rest_desc.block_type.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    REST_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, REST_N, 16])
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, BLOCK_N + (REST_N if REST else 0))
    program = gl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * (BLOCK_N + (REST_N if REST else 0))
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    rest_ring = w_ring
    if REST:
        rest_ring = gl.allocate_shared_memory(dtype, [STAGES, REST_N, BLOCK_K], rest_desc.layout)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    gl.thread_barrier()
    descriptors = (x_desc, w_desc, rest_desc)
    rings = (x_ring, w_ring, rest_ring)
    if PDL:
        gdc_wait()
    steps = gl.cdiv(depth, BLOCK_K)
    for at in gl.static_range(STAGES):
        _request(descriptors, rings, come, (m0, n0), at, at * BLOCK_K, REST, at < steps)
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
    rest_total = gl.zeros([BLOCK_M, REST_N], gl.float32, layout=REST_MMA)
    here = 0
    turn = 0
    for first in range(0, steps, piece // BLOCK_K):
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=MMA)
        rest = gl.zeros([BLOCK_M, REST_N], gl.float32, layout=REST_MMA)
        for step in range(first, gl.minimum(first + piece // BLOCK_K, steps)):
            mbarrier.wait(come.index(here), turn)
            x = x_ring.index(here)
            acc = warpgroup_mma(x, w_ring.index(here).permute((1, 0)), acc, is_async=True)
            if REST:
                rest = warpgroup_mma(x, rest_ring.index(here).permute((1, 0)), rest, is_async=True)
                acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            free = gl.where(here == 0, STAGES - 1, here - 1)  # its products are computed, by this warp group at least
            more = (step > 0) & (step - 1 + STAGES < steps)
            gl.thread_barrier()
            _request(descriptors, rings, come, (m0, n0), free, (step - 1 + STAGES) * BLOCK_K, REST, more)
            turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
            here = gl.where(here == STAGES - 1, 0, here + 1)
        if REST:
            acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
            rest_total = rest_total + rest
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        total = total + acc
    if PDL:
        gdc_launch_dependents()
    _store(total, out_ptr, m0, n0, rows, columns, stride, GATED)
    if REST:
        _store(rest_total, out_ptr, m0, n0 + BLOCK_N, rows, columns, stride, GATED)
