"""Products of few pairs of rows and experts on Hopper (compute capability 9.0), with weights that are not packed.

The sums are those of `experts.multiply_groups`: one chain over ascending k in steps of 16. What differs is when weights
are loaded. A program has a ring of them in shared memory, which bulk copies fill, and all columns of its tile's rows.
Only the device knows how many tiles there are, so every program takes an equal share of all blocks of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.packed_groups import number_pairs, read_tile, store_pairs


@gluon.jit
def _request(w_desc, ring, come, row, number, at, pred, STEPS: gl.constexpr):
    """Load block `number` of the rows from `row` on to its slot of the ring. Blocks of all columns are a round."""
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    mbarrier.expect(come.index(at), w_desc.block_type.nbytes, pred=pred)
    place = [row + number // STEPS * BLOCK_N, number % STEPS * BLOCK_K]
    bring(w_desc, place, come.index(at), ring.index(at), pred=pred)


@gluon.jit
def multiply_pairs_ahead(
    w_desc,
    x_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    columns,
    depth,
    SHARE: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    TILES: gl.constexpr,
    EXPERTS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[pair] = x[pair // SHARE] @ w[slot].T for tiles of up to BLOCK_M pairs. w_desc: of weights `[slots *
    columns, depth]`, in blocks of 64 rows.

    STEPS: blocks of all columns. X_LAYOUT: of blocks of x in shared memory. EARLY: tiles were made before the kernel
    before this one started. Only then are weights requested while that kernel still runs. TILES: how many there are; 0:
    only the device knows. EXPERTS: see `read_tile`.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [num_warps, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, num_warps], [0, 1])
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    x_blocks = gl.allocate_shared_memory(dtype, [STEPS, BLOCK_M, BLOCK_K], X_LAYOUT)
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(come.index(at), count=1)
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))[:, None]
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY))[None, :]
    across = gl.cdiv(columns, BLOCK_N)
    if PDL and not EARLY:
        gdc_wait()
    units = (TILES if TILES > 0 else gl.load(total_ptr)) * across
    begin = gl.program_id(0) * units // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * units // gl.num_programs(0)
    here = 0
    turn = 0
    for tile in range(begin // across, gl.cdiv(end, across)):
        slot, own_pairs, count = read_tile(pairs_ptr, tiles_ptr, tile, EXPERTS)
        start = gl.maximum(begin - tile * across, 0)
        stop = gl.minimum(end - tile * across, across)
        first = slot * columns + start * BLOCK_N
        blocks = (stop - start) * STEPS
        for ahead in gl.static_range(STAGES):
            free = gl.where(here + ahead >= STAGES, here + ahead - STAGES, here + ahead)
            _request(w_desc, w_ring, come, first, ahead, free, ahead < blocks, STEPS)
        if PDL:
            gdc_launch_dependents()
            if EARLY:
                gdc_wait()
        row = number_pairs(own_pairs, m, count, EXPERTS) // SHARE
        x_at = x_ptr + row.to(gl.int64) * depth + k
        program_barrier()  # the rows of the tile before have been multiplied
        for block in gl.static_range(STEPS):
            inside = (m < count) & (block * BLOCK_K + k < depth)
            async_copy.async_copy_global_to_shared(x_blocks.index(block), x_at + block * BLOCK_K, mask=inside)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        program_barrier()
        for unit in range(start, stop):
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
            for step in range(STEPS):
                mbarrier.wait(come.index(here), turn)
                right = x_blocks.index(step).permute((1, 0))
                acc = warpgroup_mma(w_ring.index(here), right, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))  # the block before has been multiplied
                number = (unit - start) * STEPS + step
                coming = number - 1 + STAGES
                free = gl.where(here == 0, STAGES - 1, here - 1)
                more = (number > 0) & (coming < blocks)
                _request(w_desc, w_ring, come, first, coming, free, more, STEPS)
                turn = gl.where(here == STAGES - 1, turn ^ 1, turn)
                here = gl.where(here == STAGES - 1, 0, here + 1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            total = gl.convert_layout(acc, PAIRS)
            store_pairs(total, out_ptr, own_pairs, unit * BLOCK_N, count, columns, GATED, EXPERTS)
    if PDL:
        gdc_wait()  # a kernel behind this one that waits for it must not start before the one in front has ended
