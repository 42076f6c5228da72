"""Products of many rows on Hopper whose tiles have 160 columns, for weights that fill no wave of larger tiles.

A wave is as many tiles as there are processors. 512 rows of 5,120 columns are 80 tiles of 256 rows and 128 columns, so
52 of 132 processors would have nothing to do. They are 128 tiles of 128 rows and 160 columns. Blocks have a power of
two of columns, so a tile has one block of 128 and one of 32. Sums are those of `linear`: one chain over ascending k.
One warp brings blocks to rings in shared memory, and each of two consumers multiplies 64 rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers

HEIGHT = gl.constexpr(64)  # rows of a consumer
REGISTERS = gl.constexpr(216)  # of a thread of a consumer


@gluon.jit
def _fill(descs, rings, come, free, m0, n0, steps, STAGES: gl.constexpr, PDL: gl.constexpr):
    """Bring all steps of columns in order, each as soon as its slot of the rings is free.

    The kernel before may have unpacked the weight, so nothing is asked for before it has ended.
    """
    x_desc, wide_desc, rest_desc = descs
    x_ring, wide_ring, rest_ring = rings
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    WIDE: gl.constexpr = wide_desc.block_type.shape[0]
    BYTES: gl.constexpr = x_desc.block_type.nbytes + wide_desc.block_type.nbytes + rest_desc.block_type.nbytes
    if PDL:
        gdc_wait()
    for step in range(steps):
        at = step % STAGES
        mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
        mbarrier.expect(come.index(at), BYTES)
        bring(wide_desc, [n0, step * BLOCK_K], come.index(at), wide_ring.index(at))
        bring(rest_desc, [n0 + WIDE, step * BLOCK_K], come.index(at), rest_ring.index(at))
        bring(x_desc, [m0, step * BLOCK_K], come.index(at), x_ring.index(at))


@gluon.jit
def _store(acc, out_ptr, m0, n0, rows, columns, stride):
    """Store a block of results from row m0 and column n0 on, eight numbers of a thread at once."""
    ACROSS: gl.constexpr = acc.shape[1] // 8 if acc.shape[1] < 256 else 32
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), ROWS)
    m = m0 + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, ROWS))[:, None]
    n = n0 + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out_ptr + m.to(gl.int64) * stride + n, out, mask=(m < rows) & (n < columns))


@gluon.jit
def _consume(out_ptr, rings, come, free, m0, n0, rows, columns, steps, stride, NUMBER: gl.constexpr):
    """Compute consumer NUMBER's rows of x."""
    x_ring, wide_ring, rest_ring = rings
    STAGES: gl.constexpr = x_ring.shape[0]
    WIDE: gl.constexpr = wide_ring.shape[1]
    REST: gl.constexpr = rest_ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    MMA_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    wide = gl.zeros([HEIGHT, WIDE], gl.float32, layout=MMA)
    rest = gl.zeros([HEIGHT, REST], gl.float32, layout=MMA_REST)
    for step in range(steps):
        at = step % STAGES
        mbarrier.wait(come.index(at), step // STAGES & 1)
        x = x_ring.index(at).slice(NUMBER * HEIGHT, HEIGHT, 0)
        wide = warpgroup_mma(x, wide_ring.index(at).permute((1, 0)), wide, is_async=True)
        rest = warpgroup_mma(x, rest_ring.index(at).permute((1, 0)), rest, is_async=True)
        wide, rest = warpgroup_mma_wait(num_outstanding=2, deps=(wide, rest))
        before = gl.where(at == 0, STAGES - 1, at - 1)
        mbarrier.arrive(free.index(before), count=1, pred=step > 0)
    wide, rest = warpgroup_mma_wait(num_outstanding=0, deps=(wide, rest))
    _store(wide, out_ptr, m0 + NUMBER * HEIGHT, n0, rows, columns, stride)
    _store(rest, out_ptr, m0 + NUMBER * HEIGHT, n0 + WIDE, rows, columns, stride)


@gluon.jit(do_not_specialize=["rows"])
def linear_fitted(
    x_desc,
    wide_desc,
    rest_desc,
    out_ptr,
    rows,
    columns,
    depth,
    stride,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T. stride: from one row of out to the next.

    A program has 128 rows of x and the rows of w that a block of each descriptor has. Data behind the last row of w or
    x is zeros.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    WIDE: gl.constexpr = wide_desc.block_type.shape[0]
    REST: gl.constexpr = rest_desc.block_type.shape[0]
    gl.static_assert(BLOCK_M == 2 * HEIGHT)
    row_tiles = gl.cdiv(rows, BLOCK_M)
    program = gl.program_id(0)
    m0 = program % row_tiles * BLOCK_M
    n0 = program // row_tiles * (WIDE + REST)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    wide_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, WIDE, BLOCK_K], wide_desc.layout)
    rest_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, REST, BLOCK_K], rest_desc.layout)
    come = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, 2)
    steps = gl.cdiv(depth, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_ptr, (x_ring, wide_ring, rest_ring), come, free, m0, n0, rows, columns, steps, stride, 0,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, (x_ring, wide_ring, rest_ring), come, free, m0, n0, rows, columns, steps, stride, 1,
                ),
            ),
            (
                _fill,
                (
                    (x_desc, wide_desc, rest_desc), (x_ring, wide_ring, rest_ring), come, free, m0, n0, steps, STAGES,
                    PDL,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
