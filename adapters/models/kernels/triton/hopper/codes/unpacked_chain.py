"""Attention of a chunk on Hopper over codes that `unpack_codes` has unpacked to memory.

Consumers are those of `plain_chain` and of `hopper_chain`. Bulk copies bring numbers, as they do where rows are not
coded, and the scales of a tile along with them: 64 float32 numbers for keys and as many for values. Consumers multiply
scores and weights with these, as `attention` does. The scale of a row that is not seen is zero, and so are its numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.chains.plain_chain import consume_slots
from adapters.models.kernels.triton.hopper.hopper_consumers import BLOCK_M, consume_tiles
from adapters.models.kernels.triton.hopper.hopper_products import bring
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers


@gluon.jit
def _fill_rings(descs, rings, scale_rings, bars, base, tiles, STAGES: gl.constexpr):
    """Bring tiles of keys and of values with their scales, each as soon as its slot of the ring is free.

    descs, rings, scale_rings: of keys and values; descs has those of their scales, too. bars: see `hopper_chain`.
    """
    k_desc, v_desc, k_scale_desc, v_scale_desc = descs
    k_ring, v_ring = rings
    k_scales, v_scales = scale_rings
    k_come, k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    BYTES: gl.constexpr = k_desc.block_type.nbytes + k_scale_desc.block_type.nbytes
    for number in range(tiles):
        row = base + number * BLOCK_N
        at = number % STAGES
        turn = (number // STAGES & 1) ^ 1
        mbarrier.wait(k_free.index(at), turn)
        mbarrier.expect(k_come.index(at), BYTES)
        bring(k_scale_desc, [row // BLOCK_N, 0], k_come.index(at), k_scales.index(at))
        bring(k_desc, [row, 0], k_come.index(at), k_ring.index(at))
        mbarrier.wait(v_free.index(at), turn)
        mbarrier.expect(v_come.index(at), BYTES)
        bring(v_scale_desc, [row // BLOCK_N, 0], v_come.index(at), v_scales.index(at))
        bring(v_desc, [row, 0], v_come.index(at), v_ring.index(at))


@gluon.jit
def _fill_slots(descs, rings, scale_rings, bars, base, tiles, STAGES: gl.constexpr):
    """Bring what `plain_chain.fill_slots` does, and to each slot both scales of the tile whose keys it has."""
    k_desc, v_desc, k_scale_desc, v_scale_desc = descs
    k_ring, v_ring = rings
    k_scales, v_scales = scale_rings
    come, free = bars
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    BYTES: gl.constexpr = k_desc.block_type.nbytes
    SCALES: gl.constexpr = 2 * k_scale_desc.block_type.nbytes
    for number in range(gl.where(tiles > 0, tiles + 1, 0)):
        at = number % STAGES
        row = base + number * BLOCK_N
        has_keys = number < tiles
        mbarrier.wait(free.index(at), (number // STAGES & 1) ^ 1)
        # The number of bytes is a constant, so one of three is expected.
        mbarrier.expect(come.index(at), BYTES + SCALES, pred=number == 0)
        mbarrier.expect(come.index(at), 2 * BYTES + SCALES, pred=(number > 0) & has_keys)
        mbarrier.expect(come.index(at), BYTES, pred=number == tiles)
        bring(v_desc, [row - BLOCK_N, 0], come.index(at), v_ring.index(at), pred=number > 0)
        bring(k_desc, [row, 0], come.index(at), k_ring.index(at), pred=has_keys)
        bring(k_scale_desc, [row // BLOCK_N, 0], come.index(at), k_scales.index(at), pred=has_keys)
        bring(v_scale_desc, [row // BLOCK_N, 0], come.index(at), v_scales.index(at), pred=has_keys)


@gluon.jit(do_not_specialize=["tile_limit", "first_head"])
def attend_unpacked_chain(
    q_ptr,
    k_desc,
    v_desc,
    k_scale_desc,
    v_scale_desc,
    tiles_ptr,
    out_ptr,
    sinks_ptr,
    first_head,
    apart,
    tile_limit,
    scale,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    SINKS: gl.constexpr,
    PLAIN: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `hopper_chain.attend_chain_ahead` without windows, for KV key heads from `first_head` on.

    k_desc, v_desc: numbers, of a head every `apart` rows. k_scale_desc, v_scale_desc: the scales of a tile are a row.
    PLAIN: consumers are those of `plain_chain`, which know no sinks. STAGES: of every ring.
    """
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    OF_PART: gl.constexpr = CONSUMERS * BLOCK_M
    COLUMNS: gl.constexpr = num_warps // 4
    gl.static_assert(CONSUMERS == 1 or num_warps == 4)
    gl.static_assert(not PLAIN or (CONSUMERS == 2 and not SINKS))
    if PDL:
        gdc_launch_dependents()
    tile = tile_limit - 1 - gl.program_id(0) // (KV * PARTS)
    begins = (PARTS - 1 - gl.program_id(0) // KV % PARTS) * OF_PART
    base = gl.program_id(0) % KV * apart
    kv_head = first_head + gl.program_id(0) % KV
    row0 = gl.load(tiles_ptr + tile * 8)
    count = gl.load(tiles_ptr + tile * 8 + 1)
    first = gl.load(tiles_ptr + tile * 8 + 3)
    last = first + gl.minimum(count, (begins + OF_PART + GROUP - 1) // GROUP) - 1
    tiles = gl.where(begins < count * GROUP, gl.maximum(gl.cdiv(last + 1, BLOCK_N), 1), 0)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, HEAD], v_desc.layout)
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], k_scale_desc.layout)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], v_scale_desc.layout)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = (
        k_scales._reinterpret(gl.float32, [STAGES, BLOCK_N], LINE),  # noqa: SLF001 - there is no other name
        v_scales._reinterpret(gl.float32, [STAGES, BLOCK_N], LINE),  # noqa: SLF001
    )
    queries = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, BLOCK_M, HEAD], k_desc.layout)
    come = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, CONSUMERS)
    bars = (come, free)
    if not PLAIN:
        bars = (come, free, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS))
    if PDL:
        gdc_wait()
    tile_rows = (row0, count, first, begins, last, tiles)
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    if PLAIN:
        gl.warp_specialize(
            [
                (
                    consume_slots,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, scales, queries, bars, tile_rows, kv_head, scale, 0, HEADS,
                        GROUP, SPLIT, STAGES, True,
                    ),
                ),
                (
                    consume_slots,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, scales, queries, bars, tile_rows, kv_head, scale, 1, HEADS,
                        GROUP, SPLIT, STAGES, True,
                    ),
                ),
                (
                    _fill_slots,
                    (
                        (k_desc, v_desc, k_scale_desc, v_scale_desc), (k_ring, v_ring), (k_scales, v_scales), bars,
                        base, tiles, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, scales, queries, bars, tile_rows,
                        kv_head, scale, 0, HEADS, GROUP, SPLIT, STAGES, STAGES, COLUMNS, 0, SINKS, True,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, scales, queries, bars, tile_rows,
                        kv_head, scale, 1, HEADS, GROUP, SPLIT, STAGES, STAGES, COLUMNS, 0, SINKS, True,
                    ),
                ),
                (
                    _fill_rings,
                    (
                        (k_desc, v_desc, k_scale_desc, v_scale_desc), (k_ring, v_ring), (k_scales, v_scales), bars,
                        base, tiles, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, scales, queries, bars, tile_rows,
                        kv_head, scale, 0, HEADS, GROUP, SPLIT, STAGES, STAGES, COLUMNS, 0, SINKS, True,
                    ),
                ),
                (
                    _fill_rings,
                    (
                        (k_desc, v_desc, k_scale_desc, v_scale_desc), (k_ring, v_ring), (k_scales, v_scales), bars,
                        base, tiles, STAGES,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
