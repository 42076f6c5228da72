"""Products of many rows on Hopper (compute capability 9.0): a candidate for `linear.linear_wide`.

The sums are those of `linear`: one chain over ascending k in steps of 16. What differs is who does what. As many
programs run as there are processors, and each computes one tile after the other. One warp brings blocks of both
operands to a ring of shared memory, by bulk copies that run ahead, into the next tile as well. Two consumers multiply
64 rows each with the same block of weights. They leave results in shared memory, and a bulk copy writes them while the
next tile is multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_chain import _make_barriers
from adapters.models.kernels.triton.hopper.hopper_merge import _everybody_here
from adapters.models.kernels.triton.hopper.hopper_products import _apply_gate, bring

take = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # Triton 3.9 has renamed it
ROWS = gl.constexpr(64)  # of a consumer
CONSUMERS = gl.constexpr(2)


@gluon.jit
def _place(tile, rows, columns, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """Return the first row and the first column of a tile. GROUP tiles of rows share weights in L2."""
    row_tiles = gl.cdiv(rows, CONSUMERS * ROWS)
    column_tiles = gl.cdiv(columns, BLOCK_N)
    group = tile // (GROUP * column_tiles)
    height = gl.minimum(row_tiles - group * GROUP, GROUP)
    row = group * GROUP + tile % (GROUP * column_tiles) % height
    return row * (CONSUMERS * ROWS), tile % (GROUP * column_tiles) // height * BLOCK_N


@gluon.jit
def _produce(
    x_desc,
    w_desc,
    x_ring,
    w_ring,
    come,
    free,
    rows,
    columns,
    steps,
    tiles,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Bring the blocks of all tiles of this program in order, each as soon as its slot of the ring is free."""
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    BYTES: gl.constexpr = w_desc.block_type.nbytes + CONSUMERS * x_desc.block_type.nbytes
    here = 0
    turn = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0 = _place(tile, rows, columns, BLOCK_N, GROUP)
        for step in range(steps):
            bar = come.index(here)
            mbarrier.wait(free.index(here), turn)
            mbarrier.expect(bar, BYTES)
            bring(w_desc, [n0, step * BLOCK_K], bar, w_ring.index(here))
            for consumer in gl.static_range(CONSUMERS):
                bring(x_desc, [m0 + consumer * ROWS, step * BLOCK_K], bar, x_ring.index(CONSUMERS * here + consumer))
            turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
            here = gl.where(here == STAGES - 1, 0, here + 1)
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _write(out_desc, memory, values, m, n):
    """Write a block of results as soon as the block before has left its memory. Columns behind the last are left."""
    tma.store_wait(0)
    memory.store(values)
    fence_async_shared()
    _everybody_here()
    take(out_desc, [m, n], memory)


@gluon.jit
def _consume(
    out_desc,
    x_ring,
    w_ring,
    memories,
    come,
    free,
    rows,
    columns,
    steps,
    tiles,
    NUMBER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply consumer NUMBER's rows of all tiles of this program."""
    dtype: gl.constexpr = x_ring.dtype
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    WIDTH: gl.constexpr = out_desc.block_type.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    memory = memories.index(NUMBER)
    here = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0 = _place(tile, rows, columns, BLOCK_N, GROUP)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=MMA)
        for step in range(steps):
            mbarrier.wait(come.index(here), turn)
            x = x_ring.index(CONSUMERS * here + NUMBER)
            adding = warpgroup_mma(x, w_ring.index(here).permute((1, 0)), acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(adding,))  # the step before has been read
            before = gl.where(here == 0, STAGES - 1, here - 1)
            mbarrier.arrive(free.index(before), count=1, pred=step > 0)
            turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
            here = gl.where(here == STAGES - 1, 0, here + 1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(gl.where(here == 0, STAGES - 1, here - 1)), count=1)
        m = m0 + NUMBER * ROWS
        if GATED:
            gate, up = gl.split(acc.reshape((ROWS, BLOCK_N // 2, 2)))
            _write(out_desc, memory, _apply_gate(gate, up, dtype, GATED), m, n0 // 2)
        elif BLOCK_N == WIDTH:
            _write(out_desc, memory, acc.to(dtype), m, n0)
        else:
            left, right = gl.split(acc.to(dtype).reshape((ROWS, 2, WIDTH)).permute((0, 2, 1)))
            _write(out_desc, memory, left, m, n0)
            _write(out_desc, memory, right, m, n0 + WIDTH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def linear_wide_ahead(
    x_desc,
    w_desc,
    out_desc,
    rows,
    columns,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[rows, columns] = x @ w.T for many rows.

    A block of x is that of one consumer, and a block of out is what a consumer writes at once: a tile's columns, or
    half of them. STAGES blocks are in shared memory or on their way there. Data behind the last row of w or x is zeros.
    """
    gl.static_assert(num_warps == 4)
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    memories = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, out_desc.block_type.shape[1]], out_desc.layout)
    come = _make_barriers(STAGES, 1)
    free = _make_barriers(STAGES, CONSUMERS)
    steps = gl.cdiv(depth, BLOCK_K)
    tiles = gl.cdiv(rows, CONSUMERS * ROWS) * gl.cdiv(columns, BLOCK_N)
    if PDL:
        gdc_wait()
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, x_ring, w_ring, memories, come, free, rows, columns, steps, tiles, 0, STAGES, GROUP,
                    GATED,
                ),
            ),
            (
                _consume,
                (
                    out_desc, x_ring, w_ring, memories, come, free, rows, columns, steps, tiles, 1, STAGES, GROUP,
                    GATED,
                ),
            ),
            (
                _produce,
                (
                    x_desc, w_desc, x_ring, w_ring, come, free, rows, columns, steps, tiles, STAGES, GROUP, PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
