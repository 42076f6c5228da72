"""Attention of many rows on Hopper over coded keys and values: `hopper_chain` with warps that unpack codes.

Bulk copies cannot turn codes into numbers. So eight warps take the place of the one that asks for copies: four unpack
keys, and four unpack values. Codes are copied to shared memory, two tiles ahead, by copies that need no registers.
Warps read them there, turn them into bfloat16, which holds every code exactly, and write these to the ring that
consumers read. They do so for half of a tile at a time, because consumers leave few registers. A code's scale comes
along: consumers multiply scores and weights with it, as `attention` does, because there are fewer of them than codes.

Chunks of one slot have a kernel of their own where there is memory for unpacked rows (`codes/unpacked_chain.py`).

The scale of a row that a program does not see is zero. Its codes may be anything, because every code is a finite
number. So nothing must be forgotten at the ends of a chain.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_attention import _lowest_key
from adapters.models.kernels.triton.hopper.hopper_consumers import BLOCK_M, consume_tiles
from adapters.models.kernels.triton.hopper.hopper_numbers import INT4, unpack_words
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers

WARPS = gl.constexpr(4)  # that unpack keys, and as many that unpack values
COPIES = gl.constexpr(2)  # tiles of codes in shared memory or on their way there
PIECES = gl.constexpr(2)  # of a tile, which are unpacked one after the other


@gluon.jit
def _ask_for_tile(words_ptr, row, low, high, codes, scales, APART: gl.constexpr):
    """Begin to copy a tile's codes to `codes` `[rows, words]`, and its scales, which stand behind them.

    row: the first one of the tile. low, high: rows of the tile that are seen lie between; scales of others are zeros.
    Without such rows nothing is copied. APART: the words from a row to the next, of which a scale is one.
    """
    WORDS: gl.constexpr = codes.shape[1]
    WIDE: gl.constexpr = min(32, WORDS)
    COPIED: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    if high > 0:
        i = gl.arange(0, codes.shape[0], layout=gl.SliceLayout(1, COPIED))
        j = gl.arange(0, WORDS, layout=gl.SliceLayout(0, COPIED))
        first = words_ptr + gl.to_tensor(row).to(gl.int64) * APART
        async_copy.async_copy_global_to_shared(codes, first + (i[:, None] * APART + j[None, :]))
        s = gl.arange(0, codes.shape[0], layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        async_copy.async_copy_global_to_shared(scales, first + (s * APART + WORDS), mask=(s >= low) & (s < high))
    async_copy.commit_group()


@gluon.jit
def _put_tile(codes, scales, ring, ring_scales, KIND: gl.constexpr):
    """Write a tile's numbers and scales to where consumers read them. ring: two bfloat16 are one number of it."""
    WORDS: gl.constexpr = codes.shape[1]
    ROWS: gl.constexpr = codes.shape[0] // PIECES
    READ: gl.constexpr = gl.BlockedLayout([1, 2], [64 // WORDS, WORDS // 2], [WARPS, 1], [1, 0])
    ring_scales.store(scales.load(gl.BlockedLayout([1], [32], [WARPS], [0])).to(gl.float32, bitcast=True))
    for piece in gl.static_range(PIECES):
        words = codes.slice(piece * ROWS, ROWS).load(READ)
        ring.slice(piece * ROWS, ROWS).store(unpack_words(words, KIND))
    fence_async_shared()
    program_barrier()


@gluon.jit
def _ask_for_rows(number, words_ptr, codes, scales, rows, KV: gl.constexpr, PAGE: gl.constexpr, APART: gl.constexpr):
    """Begin to copy tile `number` of a program, if it has so many. rows: see `_unpack_ring`."""
    pages_ptr, base, kv_head, low, tiles, lowest, last = rows
    at = (low + number) * codes.shape[1]
    row = base + at
    if PAGE > 0:
        row = (gl.load(pages_ptr + at // PAGE, mask=number < tiles, other=0) * KV + kv_head) * PAGE + at % PAGE
    until = gl.where(number < tiles, last + 1 - at, 0)
    copy = number % COPIES
    _ask_for_tile(words_ptr, row, lowest - at, until, codes.index(copy), scales.index(copy), APART)


@gluon.jit
def _unpack_ring(
    words_ptr,
    ring,
    ring_scales,
    come,
    free,
    codes,
    scales,
    rows,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    APART: gl.constexpr,
):
    """Unpack tiles of keys or of values in order, each as soon as its slot of the ring is free.

    come, free: the ring's barriers. codes, scales: memory for COPIES tiles of codes and of their scales. rows: the
    slot's pages, its first row where rows are not paged, and the key head. Then come the program's first tile, how many
    it has, and the first and the last key that it sees.
    """
    tiles = rows[4]
    for ahead in gl.static_range(COPIES):
        _ask_for_rows(ahead, words_ptr, codes, scales, rows, KV, PAGE, APART)
    for number in range(tiles):
        at = number % STAGES
        copy = number % COPIES
        mbarrier.wait(free.index(at), (number // STAGES & 1) ^ 1)
        async_copy.wait_group(COPIES - 1)
        _put_tile(codes.index(copy), scales.index(copy), ring.index(at), ring_scales.index(at), KIND)
        mbarrier.arrive(come.index(at), count=1)
        _ask_for_rows(number + COPIES, words_ptr, codes, scales, rows, KV, PAGE, APART)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["tile_limit"])
def attend_coded_chain(
    q_ptr,
    k_words,
    v_words,
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
    KINDS: gl.constexpr,
    APART: gl.constexpr,
    TILE: gl.constexpr,
    NUMBERS: gl.constexpr,
    WORDS: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `hopper_chain.attend_chain_ahead` over rows of codes.

    k_words, v_words: keys and values as int32, APART from a row to the next. KINDS: what their codes are. TILE:
    keys of a tile, and numbers of a head. NUMBERS, WORDS: layouts of a tile in shared memory as bfloat16 and as int32,
    which agree about every byte.
    """
    BLOCK_N: gl.constexpr = TILE[0]
    HEAD: gl.constexpr = TILE[1]
    K_KIND: gl.constexpr = KINDS[0]
    V_KIND: gl.constexpr = KINDS[1]
    K_WORDS: gl.constexpr = HEAD // 8 if K_KIND == INT4 else HEAD // 4
    V_WORDS: gl.constexpr = HEAD // 8 if V_KIND == INT4 else HEAD // 4
    OF_PART: gl.constexpr = CONSUMERS * BLOCK_M
    COLUMNS: gl.constexpr = num_warps // 4
    gl.static_assert(PAGE % BLOCK_N == 0)
    gl.static_assert(CONSUMERS == 1 or num_warps == 4)
    if PDL:
        gdc_launch_dependents()
    tile = tile_limit - 1 - gl.program_id(0) // (KV * PARTS)
    begins = (PARTS - 1 - gl.program_id(0) // KV % PARTS) * OF_PART
    kv_head = gl.program_id(0) % KV
    row0 = gl.load(tiles_ptr + tile * 8)
    count = gl.load(tiles_ptr + tile * 8 + 1)
    slot = gl.load(tiles_ptr + tile * 8 + 2)
    first = gl.load(tiles_ptr + tile * 8 + 3)
    last = first + gl.minimum(count, (begins + OF_PART + GROUP - 1) // GROUP) - 1
    lowest = _lowest_key(first + begins // GROUP, WINDOW)
    low = lowest // BLOCK_N
    tiles = gl.where(begins < count * GROUP, gl.maximum(gl.cdiv(last + 1, BLOCK_N) - low, 1), 0)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [K_STAGES, BLOCK_N, HEAD], NUMBERS)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES, BLOCK_N, HEAD], NUMBERS)
    k_halves = k_ring._reinterpret(gl.int32, [K_STAGES, BLOCK_N, HEAD // 2], WORDS)  # noqa: SLF001 - there is no other name
    v_halves = v_ring._reinterpret(gl.int32, [V_STAGES, BLOCK_N, HEAD // 2], WORDS)  # noqa: SLF001
    queries = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, BLOCK_M, HEAD], NUMBERS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = (
        gl.allocate_shared_memory(gl.float32, [K_STAGES, BLOCK_N], PLAIN),
        gl.allocate_shared_memory(gl.float32, [V_STAGES, BLOCK_N], PLAIN),
    )
    BY_ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_codes = gl.allocate_shared_memory(gl.int32, [COPIES, BLOCK_N, K_WORDS], BY_ROWS)
    v_codes = gl.allocate_shared_memory(gl.int32, [COPIES, BLOCK_N, V_WORDS], BY_ROWS)
    k_scales = gl.allocate_shared_memory(gl.int32, [COPIES, BLOCK_N], PLAIN)
    v_scales = gl.allocate_shared_memory(gl.int32, [COPIES, BLOCK_N], PLAIN)
    bars = (
        make_barriers(K_STAGES, 1),
        make_barriers(K_STAGES, CONSUMERS),
        make_barriers(V_STAGES, 1),
        make_barriers(V_STAGES, CONSUMERS),
    )
    if PDL:
        gdc_wait()
    tile_rows = (row0, count, first, begins, last, tiles)
    if WINDOW > 0:
        tile_rows = (row0, count, first, begins, last, low, tiles)
    base = (slot * KV + kv_head) * capacity
    pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, scales, queries, bars, tile_rows,
                        kv_head, scale, 0, HEADS, GROUP, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS, True,
                    ),
                ),
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, scales, queries, bars, tile_rows,
                        kv_head, scale, 1, HEADS, GROUP, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS, True,
                    ),
                ),
                (
                    _unpack_ring,
                    (
                        k_words, k_halves, scales[0], bars[0], bars[1], k_codes, k_scales,
                        (pages, base, kv_head, low, tiles, lowest, last), K_STAGES, K_KIND, KV, PAGE, APART,
                    ),
                ),
                (
                    _unpack_ring,
                    (
                        v_words, v_halves, scales[1], bars[2], bars[3], v_codes, v_scales,
                        (pages, base, kv_head, low, tiles, lowest, last), V_STAGES, V_KIND, KV, PAGE, APART,
                    ),
                ),
            ],
            [4, WARPS, WARPS],
            [REGISTERS, 256 - REGISTERS, 256 - REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume_tiles,
                    (
                        q_ptr, out_ptr, sinks_ptr if SINKS else 0, k_ring, v_ring, scales, queries, bars, tile_rows,
                        kv_head, scale, 0, HEADS, GROUP, SPLIT, K_STAGES, V_STAGES, COLUMNS, WINDOW, SINKS, True,
                    ),
                ),
                (
                    _unpack_ring,
                    (
                        k_words, k_halves, scales[0], bars[0], bars[1], k_codes, k_scales,
                        (pages, base, kv_head, low, tiles, lowest, last), K_STAGES, K_KIND, KV, PAGE, APART,
                    ),
                ),
                (
                    _unpack_ring,
                    (
                        v_words, v_halves, scales[1], bars[2], bars[3], v_codes, v_scales,
                        (pages, base, kv_head, low, tiles, lowest, last), V_STAGES, V_KIND, KV, PAGE, APART,
                    ),
                ),
            ],
            [WARPS, WARPS],
            [256 - REGISTERS, 256 - REGISTERS],
        )  # fmt: skip
