"""Products of many rows on Hopper (compute capability 9.0) that add up columns in pieces, as `packed` does.

The sum of a piece and the sum of the pieces before it are both in registers, so a tile is half of that of a product
with one chain. Shared memory is read more often then. One warp brings blocks of x and w to rings in shared memory. Each
of two consumers multiplies 64 rows of x and does not wait for the other: while one adds up its pieces, the tensor
cores work for the other one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton import linear
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers

_apply_gate = gluon.jit(linear.apply_gate.fn)


HEIGHT = gl.constexpr(64)  # rows of a consumer
REGISTERS = gl.constexpr(240)  # of a thread of a consumer


@gluon.jit
def multiply_steps(low, high, left_ring, right_ring, come, free, NUMBER: gl.constexpr, MMA: gl.constexpr):
    """Multiply the steps from `low` to `high`, from zero, and release the slots of both rings that they were in.

    left_ring: `[slots, rows, columns]`, of which consumer NUMBER has HEIGHT rows. right_ring: `[slots, rows, columns]`.
    """
    STAGES: gl.constexpr = left_ring.shape[0]
    WIDTH: gl.constexpr = right_ring.shape[1]
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout=MMA)
    for step in range(low, high):
        at = step % STAGES
        mbarrier.wait(come.index(at), step // STAGES & 1)
        left = left_ring.index(at).slice(NUMBER * HEIGHT, HEIGHT, 0)
        acc = warpgroup_mma(left, right_ring.index(at).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        before = gl.where(at == 0, STAGES - 1, at - 1)
        mbarrier.arrive(free.index(before), count=1, pred=step > low)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(free.index((high - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _fill(x_desc, w_desc, x_ring, w_ring, come, free, m0, n0, steps, STAGES: gl.constexpr):
    """Bring all steps of columns in order, each as soon as its slot of the rings is free."""
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    for step in range(steps):
        at = step % STAGES
        mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(at), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
        bring(x_desc, [m0, step * BLOCK_K], come.index(at), x_ring.index(at))
        bring(w_desc, [n0, step * BLOCK_K], come.index(at), w_ring.index(at))


@gluon.jit
def _consume(
    out_ptr,
    x_ring,
    w_ring,
    come,
    free,
    m0,
    n0,
    rows,
    columns,
    steps,
    each,
    stride,
    NUMBER: gl.constexpr,
    GATED: gl.constexpr,
):
    """Compute consumer NUMBER's rows of x. each: steps of a piece."""
    WIDTH: gl.constexpr = w_ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    total = gl.zeros([HEIGHT, WIDTH], gl.float32, layout=MMA)
    for first in range(0, steps, each):
        high = gl.minimum(first + each, steps)
        total = total + multiply_steps(first, high, x_ring, w_ring, come, free, NUMBER, MMA)
    _store(total, out_ptr, m0 + NUMBER * HEIGHT, n0, rows, columns, stride, GATED)


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
):
    """Compute out[rows, columns] = x @ w.T for many rows. piece: columns that are one chain, a multiple of a block's.
    stride: from one row of out to the next.

    A program has the 128 rows of a box of x_desc. STAGES blocks of x and w are in shared memory or on their way there.
    Data behind the last row of w or x is zeros.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    gl.static_assert(BLOCK_M == 2 * HEIGHT)
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(columns, BLOCK_N)
    program = gl.program_id(0)
    group = program // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (program % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (program % (GROUP * column_tiles)) // height * BLOCK_N
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    come = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, 2)
    steps = gl.cdiv(depth, BLOCK_K)
    each = piece // BLOCK_K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _consume,
                (out_ptr, x_ring, w_ring, come, free, m0, n0, rows, columns, steps, each, stride, 0, GATED),
            ),
            (
                _consume,
                (out_ptr, x_ring, w_ring, come, free, m0, n0, rows, columns, steps, each, stride, 1, GATED),
            ),
            (_fill, (x_desc, w_desc, x_ring, w_ring, come, free, m0, n0, steps, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
