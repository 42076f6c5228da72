"""Attention of many rows on Hopper (compute capability 9.0): `attention.attend_chain` with a warp for loads alone.

The arithmetic is that of `attention`: tiles of keys in order, and splits folded in order. What differs is who does
what, and when. One warp looks up pages and brings keys and values to rings of shared memory, by bulk copies that run
ahead. Consumers compute 64 rows of queries each and read the same rings (`hopper_consumers`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_attention import _lowest_key
from adapters.models.kernels.triton.hopper.hopper_consumers import BLOCK_M, consume_tiles
from adapters.models.kernels.triton.hopper.hopper_ring import fill_rings, make_barriers


@gluon.jit
def _find_item(
    tiles_ptr,
    item,
    KV: gl.constexpr,
    PARTS: gl.constexpr,
    OF_PART: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return what an item computes: the tile's first row, rows, slot, first position, the item's first head, its last
    position, the first tile of keys and how many it has, and the key head.
    """
    tile = item // (KV * PARTS)
    begins = item // KV % PARTS * OF_PART
    row0 = gl.load(tiles_ptr + tile * 8)
    count = gl.load(tiles_ptr + tile * 8 + 1)
    slot = gl.load(tiles_ptr + tile * 8 + 2)
    first = gl.load(tiles_ptr + tile * 8 + 3)
    last = first + gl.minimum(count, (begins + OF_PART + GROUP - 1) // GROUP) - 1
    low = _lowest_key(first + begins // GROUP, WINDOW) // BLOCK_N if WINDOW > 0 else 0
    tiles = gl.where(begins < count * GROUP, gl.maximum(gl.cdiv(last + 1, BLOCK_N) - low, 1), 0)
    return row0, count, slot, first, begins, last, low, tiles, item % KV


@gluon.jit
def _choose_item(turn):
    """Return the item that a program computes in a turn.

    The first tiles of a prompt have the fewest keys, and tiles without rows come last. Every other turn goes backwards,
    so that no program gets the longest item of each.
    """
    programs = gl.num_programs(0)
    at = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 1, programs - 1 - at, at)


@gluon.jit
def _consume_items(
    q_ptr,
    out_ptr,
    sinks_ptr,
    k_ring,
    v_ring,
    queries,
    bars,
    tiles_ptr,
    tile_limit,
    scale,
    NUMBER: gl.constexpr,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SPLIT: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
):
    """Compute the part of each item of the program that one of its two consumers has."""
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    items = tile_limit * (KV * PARTS)
    turn = 0
    read = 0
    item = _choose_item(turn)
    while item < items:
        row0, count, _slot, first, begins, last, low, tiles, kv_head = _find_item(
            tiles_ptr, item, KV, PARTS, 2 * BLOCK_M, GROUP, BLOCK_N, WINDOW
        )
        tile_rows = (row0, count, first, begins, last, tiles)
        if WINDOW > 0:
            tile_rows = (row0, count, first, begins, last, low, tiles)
        consume_tiles(
            q_ptr, out_ptr, sinks_ptr, k_ring, v_ring, 0, queries, bars, tile_rows, kv_head, scale, NUMBER, HEADS,
            GROUP, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS, False, True, read,
        )  # fmt: skip
        read += tiles
        turn += 1
        item = _choose_item(turn)


@gluon.jit
def _fill_items(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    bars,
    tiles_ptr,
    tile_limit,
    pages_ptr,
    capacity,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Bring keys and values of each item of the program, those of the next one while the one before is computed."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    items = tile_limit * (KV * PARTS)
    turn = 0
    read = 0
    item = _choose_item(turn)
    while item < items:
        _row0, _count, slot, _first, _begins, _last, low, tiles, kv_head = _find_item(
            tiles_ptr, item, KV, PARTS, 2 * BLOCK_M, GROUP, BLOCK_N, WINDOW
        )
        base = (slot * KV + kv_head) * capacity
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        fill_rings(
            k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, low, tiles, KV, PAGE, K_STAGES, V_STAGES, read
        )
        read += tiles
        turn += 1
        item = _choose_item(turn)


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_chain_ahead(
    q_ptr,
    k_desc,
    v_desc,
    tiles_ptr,
    out_ptr,
    pages_ptr,
    capacity,
    tile_limit,
    scale,
    sinks_ptr,
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `attention.attend_chain`, without caps and latents, for rows that are not coded.

    An item has CONSUMERS * 64 heads, and PARTS items have the heads of a tile. So no head is left out where 64 is no
    multiple of GROUP. With two consumers a program computes one item after the other, and loads keys and values of the
    next one meanwhile. With one consumer there is a program for each item, and eight warps share its rows of the
    output.
    """
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = num_warps // 4
    gl.static_assert(PAGE % BLOCK_N == 0)
    gl.static_assert(CONSUMERS == 1 or num_warps == 4)
    if PDL:
        gdc_launch_dependents()
    if CONSUMERS == 1:
        item = tile_limit * (KV * PARTS) - 1 - gl.program_id(0)  # those with the most keys come first
        row0, count, slot, first, begins, last, low, tiles, kv_head = _find_item(
            tiles_ptr, item, KV, PARTS, BLOCK_M, GROUP, BLOCK_N, WINDOW
        )
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, BLOCK_N, HEAD], v_desc.layout)
    queries = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, BLOCK_M, HEAD], k_desc.layout)
    bars = (
        make_barriers(K_STAGES, 1),
        make_barriers(K_STAGES, CONSUMERS),
        make_barriers(V_STAGES, 1),
        make_barriers(V_STAGES, CONSUMERS),
    )
    if PDL:
        gdc_wait()
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume_items,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, queries, bars, tiles_ptr, tile_limit,
                        scale, 0, HEADS, KV, GROUP, PARTS, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS,
                    ),
                ),
                (
                    _consume_items,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, queries, bars, tiles_ptr, tile_limit,
                        scale, 1, HEADS, KV, GROUP, PARTS, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS,
                    ),
                ),
                (
                    _fill_items,
                    (
                        k_desc, v_desc, k_ring, v_ring, bars, tiles_ptr, tile_limit, pages_ptr, capacity, KV, GROUP,
                        PARTS, PAGE, WINDOW, K_STAGES, V_STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        tile_rows = (row0, count, first, begins, last, tiles)
        if WINDOW > 0:
            tile_rows = (row0, count, first, begins, last, low, tiles)
        base = (slot * KV + kv_head) * capacity
        pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, 0, queries, bars, tile_rows, kv_head,
                        scale, 0, HEADS, GROUP, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS,
                    ),
                ),
                (
                    fill_rings,
                    (
                        k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, low, tiles, KV, PAGE, K_STAGES,
                        V_STAGES,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
