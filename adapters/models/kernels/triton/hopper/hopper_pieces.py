"""Products of many rows on Hopper (compute capability 9.0) that add up columns in pieces, as `packed` does.

Problem. A program has the sum of a piece and the sum of the pieces before it in registers, so its tile is half of that
of a product with one chain. And where a piece ends, its sum must be complete before it can be added, so the tensor
cores would wait: some 1,250 cycles for each piece, whatever its length.

Idea. Two pieces have registers in turn. The first product of a piece is launched before the sum of the piece in front
of it is waited for and added, so the tensor cores always have work. There are as many programs as processors, and each
computes one tile after the other. One warp brings blocks of x and w to rings in shared memory, those of the next tile
while one is stored. Each of two consumers multiplies 64 rows of x and does not wait for the other.
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
def _place(index, tiles, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Return the first row and the first column of a tile. tiles: in both directions."""
    row_tiles, column_tiles = tiles
    group = index // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    m0 = (group * GROUP + (index % (GROUP * column_tiles)) % height) * BLOCK_M
    n0 = (index % (GROUP * column_tiles)) // height * BLOCK_N
    return m0, n0


@gluon.jit
def _fill(x_desc, w_desc, x_ring, w_ring, come, free, tiles, steps, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Bring all steps of columns of all tiles in order, each as soon as its slot of the rings is free."""
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    done = 0
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        m0, n0 = _place(index, tiles, x_desc.block_type.shape[0], w_desc.block_type.shape[0], GROUP)
        for step in range(steps):
            at = (done + step) % STAGES
            mbarrier.wait(free.index(at), ((done + step) // STAGES & 1) ^ 1)
            mbarrier.expect(come.index(at), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            bring(x_desc, [m0, step * BLOCK_K], come.index(at), x_ring.index(at))
            bring(w_desc, [n0, step * BLOCK_K], come.index(at), w_ring.index(at))
        done += steps


@gluon.jit
def _multiply(acc, number, x_ring, w_ring, come, NUMBER: gl.constexpr):
    """Launch the product of a consumer's rows. number: of the step, among those of all tiles."""
    at = number % x_ring.shape[0]
    mbarrier.wait(come.index(at), number // x_ring.shape[0] & 1)
    left = x_ring.index(at).slice(NUMBER * HEIGHT, HEIGHT, 0)
    return warpgroup_mma(left, w_ring.index(at).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _consume(
    out_ptr,
    x_ring,
    w_ring,
    come,
    free,
    tiles,
    rows,
    columns,
    steps,
    each,
    stride,
    NUMBER: gl.constexpr,
    GATED: gl.constexpr,
    GROUP: gl.constexpr,
    PIECES: gl.constexpr,
):
    """Compute consumer NUMBER's rows of x of all tiles. each: steps of a piece; the last one may have fewer."""
    STAGES: gl.constexpr = x_ring.shape[0]
    WIDTH: gl.constexpr = w_ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    done = 0
    for index in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        m0, n0 = _place(index, tiles, x_ring.shape[1], WIDTH, GROUP)
        total = gl.zeros([HEIGHT, WIDTH], gl.float32, layout=MMA)
        before = total
        for piece in gl.static_range(PIECES):
            low = piece * each
            acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout=MMA)
            acc = _multiply(acc, done + low, x_ring, w_ring, come, NUMBER)
            if piece == 0:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            else:
                acc, before = warpgroup_mma_wait(num_outstanding=1, deps=(acc, before))
                mbarrier.arrive(free.index((done + low - 1) % STAGES), count=1)
                total = total + before
            for step in range(low + 1, gl.minimum(low + each, steps)):
                acc = _multiply(acc, done + step, x_ring, w_ring, come, NUMBER)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                mbarrier.arrive(free.index((done + step - 1) % STAGES), count=1)
            before = acc
        before = warpgroup_mma_wait(num_outstanding=0, deps=(before,))
        mbarrier.arrive(free.index((done + steps - 1) % STAGES), count=1)
        _store(total + before, out_ptr, m0 + NUMBER * HEIGHT, n0, rows, columns, stride, GATED)
        done += steps


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
    PIECES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows. piece: columns that are one chain, a multiple of a block's.
    PIECES: that the depth has. stride: from one row of out to the next.

    A tile has the 128 rows of a box of x_desc. GROUP: tiles of rows that follow each other. STAGES blocks of x and w
    are in shared memory or on their way there. Data behind the last row of w or x is zeros.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    gl.static_assert(BLOCK_M == 2 * HEIGHT)
    tiles = (gl.cdiv(rows, BLOCK_M), gl.cdiv(columns, BLOCK_N))
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
                (
                    out_ptr, x_ring, w_ring, come, free, tiles, rows, columns, steps, each, stride, 0, GATED, GROUP,
                    PIECES,
                ),
            ),
            (
                _consume,
                (
                    out_ptr, x_ring, w_ring, come, free, tiles, rows, columns, steps, each, stride, 1, GATED, GROUP,
                    PIECES,
                ),
            ),
            (_fill, (x_desc, w_desc, x_ring, w_ring, come, free, tiles, steps, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
