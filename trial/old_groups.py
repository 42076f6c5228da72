"""Products of many pairs of rows and experts on Hopper (compute capability 9.0), with weights that stay packed.

The sums are those of `packed_groups.multiply_many`. What differs is who multiplies: `wgmma` reads the unpacked weights
from registers, where the words already lie as it needs them, and rows of x from shared memory. So a weight is unpacked
once for up to 128 pairs, and while the products of the block before are computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.packed import lanes_of, load_block, locate_piece, restore
from adapters.models.kernels.triton.packed_groups import matrix_of, read_tile, store_pairs
from adapters.models.kernels.triton.packed_numbers import weights_of


@gluon.jit
def _fetch_rows(x_at, ring, inside, k, block, depth):
    """Copy a block of the columns of all rows to its slot of the ring; zeros where there are none."""
    STAGES: gl.constexpr = ring.shape[0]
    BLOCK: gl.constexpr = ring.shape[2]
    mask = inside & (block * BLOCK + k < depth)
    async_copy.async_copy_global_to_shared(ring.index(block % STAGES), x_at + block * BLOCK, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _unpack_block(held, coordinates, dtype: gl.constexpr, FORM: gl.constexpr, LEFT: gl.constexpr):
    w = weights_of(held, coordinates, dtype, FORM, True)
    return gl.convert_layout(w.reshape((w.shape[1], w.shape[2])), LEFT, assert_trivial=True)


@gluon.jit(do_not_specialize=["blocks", "each"])
def multiply_many_ahead(
    words_ptr,
    levels_ptr,
    x_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    words_apart,
    levels_apart,
    columns,
    depth,
    blocks,
    each,
    SHARE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    FORM: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out[pair] = x[pair // SHARE] @ w[slot].T for tiles of BLOCK_M pairs.

    A program has one tile of pairs and BLOCK_N rows of the expert's weight, 16 in each warp. Of STAGES blocks of x one
    is multiplied, and the others are on their way. X_LAYOUT: of a block of x in shared memory.
    blocks, each, EARLY: as in `multiply_many`.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BLOCK: gl.constexpr = FORM.block
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LANES: gl.constexpr = lanes_of(1, num_warps, BLOCK_N)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [num_warps, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, num_warps], [0, 1])
    across = gl.cdiv(columns, BLOCK_N)
    tile = gl.program_id(0) // across
    n0 = gl.program_id(0) % across * BLOCK_N
    if PDL and not EARLY:
        gdc_wait()
    if tile < gl.load(total_ptr):
        slot, own_pairs, count = read_tile(pairs_ptr, tiles_ptr, tile, 0)
        matrix = matrix_of(words_ptr, levels_ptr, words_apart, levels_apart, slot)
        coordinates = locate_piece(n0, columns, BLOCK_N, LANES)
        held = load_block(matrix, coordinates, 0, blocks, FORM)
        if PDL:
            gdc_launch_dependents()
            if EARLY:
                gdc_wait()
        ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK], X_LAYOUT)
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))[:, None]
        k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, COPY))[None, :]
        row = gl.load(own_pairs + gl.minimum(m, count - 1)) // SHARE
        x_at = x_ptr + row.to(gl.int64) * depth + k
        for stage in gl.static_range(STAGES - 1):
            _fetch_rows(x_at, ring, m < count, k, stage, depth)
        w = _unpack_block(held, coordinates, dtype, FORM, LEFT)
        held = load_block(matrix, coordinates, gl.minimum(1, blocks - 1), blocks, FORM)
        total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
        for start in range(0, blocks, each):
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
            for step in range(start, gl.minimum(start + each, blocks)):
                async_copy.wait_group(STAGES - 2)
                fence_async_shared()
                program_barrier()  # all warps have this block, and have multiplied the one before
                acc = warpgroup_mma(w, ring.index(step % STAGES).permute((1, 0)), acc, is_async=True)
                _fetch_rows(x_at, ring, m < count, k, step + STAGES - 1, depth)
                coming = _unpack_block(held, coordinates, dtype, FORM, LEFT)
                held = load_block(matrix, coordinates, gl.minimum(step + 2, blocks - 1), blocks, FORM)
                acc, w, coming = warpgroup_mma_wait(num_outstanding=0, deps=(acc, w, coming))
                w = coming
            total = total + acc
        async_copy.wait_group(0)
        found = gl.convert_layout(restore(total, dtype, FORM), PAIRS)
        store_pairs(found, out_ptr, own_pairs, n0, count, columns, GATED, 0)
    if PDL:
        gdc_wait()  # a kernel behind this one that waits for it must not start before the one in front has ended
