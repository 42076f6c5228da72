"""Attention of many rows on Hopper over coded keys and values: `hopper_chain` with warps that unpack codes.

Bulk copies cannot turn codes into numbers. So four warps take the place of the one that asks for copies. They load
codes to registers, one tile ahead of the tile that they write, and turn them into bfloat16, which holds every code
exactly. Then they write these to the rings that consumers read. A code's scale comes along: consumers multiply scores
and weights with it, as `attention` does, because there are fewer of them than codes.

Rows that a program does not see are zeros here. So nothing must be forgotten at the ends of a chain.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.barriers import program_barrier
from adapters.models.kernels.triton.hopper.hopper_attention import _lowest_key
from adapters.models.kernels.triton.hopper.hopper_consumers import BLOCK_M, consume_tiles
from adapters.models.kernels.triton.hopper.hopper_ring import make_barriers

INT8 = gl.constexpr(1)  # kinds of rows
FP8 = gl.constexpr(2)
INT4 = gl.constexpr(4)
WARPS = gl.constexpr(4)  # that unpack


@gluon.jit
def _number_int8(word):
    """Return the four codes of each word as two words of two bfloat16 each.

    Seven bits of a code c are the fraction of 128 + c (or 256 + c, if c is negative); then 128 (or 256) is subtracted.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 b, $2, 0, 0x4342;
        lop3.b32 c, a, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 d, a, 0x00800080, 0xc300c300, 0xea;
        add.rn.bf16x2 $0, c, d;
        lop3.b32 c, b, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 d, b, 0x00800080, 0xc300c300, 0xea;
        add.rn.bf16x2 $1, c, d;
        }
        """,
        "=r,=r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _number_fp8(word):
    """Return the four codes (e4m3) of each word as two words of two bfloat16 each.

    The bits of a code become those of a bfloat16 whose exponent is too small by 120. The product with 2 ** 120 is
    exact.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, e;
        mov.b32 e, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        and.b32 c, c, 0x07f007f0;
        lop3.b32 d, a, 0x80008000, c, 0xea;
        mul.rn.bf16x2 $0, d, e;
        shr.u32 c, b, 4;
        and.b32 c, c, 0x07f007f0;
        lop3.b32 d, b, 0x80008000, c, 0xea;
        mul.rn.bf16x2 $1, d, e;
        }
        """,
        "=r,=r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _number_int4(word):
    """Return the eight codes of each word: those in lower halves of its bytes as two words of two bfloat16, and those
    in upper halves. Twice a code c is the fraction of 128 + 2 c; then 143 is subtracted.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, e;
        mov.b32 e, 0xc30fc30f;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shl.b32 c, a, 1;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $0, c, e;
        shl.b32 c, b, 1;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $1, c, e;
        shr.u32 c, a, 3;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $2, c, e;
        shr.u32 c, b, 3;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $3, c, e;
        }
        """,
        "=r,=r,=r,=r,r", [word], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _join_pairs(first, second):
    return gl.join(first, second).reshape((first.shape[0], 2 * first.shape[1]))


@gluon.jit
def _take_tile(
    words_ptr, row, low, high, ROWS: gl.constexpr, HEAD: gl.constexpr, KIND: gl.constexpr, APART: gl.constexpr
):
    """Load the words of a tile's codes `[ROWS, words]` and its scales, which stand behind them as one more word.

    row: the first one of the tile. low, high: rows of the tile that are seen lie between; others are zeros. APART: the
    words from a row to the next.
    """
    WORDS: gl.constexpr = HEAD // 8 if KIND == INT4 else HEAD // 4
    CODES: gl.constexpr = gl.BlockedLayout([1, 2], [64 // WORDS, WORDS // 2], [WARPS, 1], [1, 0])
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, CODES))
    j = gl.arange(0, WORDS, layout=gl.SliceLayout(0, CODES))
    at = (row + i).to(gl.int64) * APART
    words = gl.load(words_ptr + at[:, None] + j[None, :], mask=((i >= low) & (i < high))[:, None], other=0)
    s = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    scale = gl.load(words_ptr + (row + s).to(gl.int64) * APART + WORDS, mask=(s >= low) & (s < high), other=0)
    return words, scale.to(gl.float32, bitcast=True)


@gluon.jit
def _put_tile(words, ring, KIND: gl.constexpr):
    """Write a tile's numbers to shared memory. ring: two bfloat16 are one number of it."""
    if KIND == INT4:
        a, b, c, d = _number_int4(words)
        halves = gl.join(_join_pairs(a, b), _join_pairs(c, d)).permute((0, 2, 1))
        numbers = halves.reshape((halves.shape[0], 2 * halves.shape[2]))
    elif KIND == FP8:
        a, b = _number_fp8(words)
        numbers = _join_pairs(a, b)
    else:
        a, b = _number_int8(words)
        numbers = _join_pairs(a, b)
    ring.store(numbers)
    fence_async_shared()
    program_barrier()


@gluon.jit
def _unpack_rings(
    k_words,
    v_words,
    k_ring,
    v_ring,
    scales,
    bars,
    pages_ptr,
    base,
    kv_head,
    low,
    tiles,
    lowest,
    last,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    KINDS: gl.constexpr,
    APART: gl.constexpr,
):
    """Unpack tiles of keys and values in order, from tile `low` on, each as soon as its slot of the ring is free.

    lowest, last: the first and the last key that the program sees. KINDS: of keys and of values.
    """
    k_come, k_free, v_come, v_free = bars
    of_keys, of_values = scales
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    HEAD: gl.constexpr = 2 * k_ring.shape[2]
    K_KIND: gl.constexpr = KINDS[0]
    V_KIND: gl.constexpr = KINDS[1]
    row = base + low * BLOCK_N
    if PAGE > 0:
        row = (gl.load(pages_ptr + low * BLOCK_N // PAGE, mask=tiles > 0, other=0) * KV + kv_head) * PAGE
        row += low * BLOCK_N % PAGE
    since = lowest - low * BLOCK_N
    until = gl.where(tiles > 0, last + 1 - low * BLOCK_N, 0)
    keys, k_scale = _take_tile(k_words, row, since, until, BLOCK_N, HEAD, K_KIND, APART)
    values, v_scale = _take_tile(v_words, row, since, until, BLOCK_N, HEAD, V_KIND, APART)
    for number in range(tiles):
        at = (low + number + 1) * BLOCK_N
        row = base + at
        more = number + 1 < tiles
        if PAGE > 0:
            page = gl.load(pages_ptr + at // PAGE, mask=more, other=0)
            row = (page * KV + kv_head) * PAGE + at % PAGE
        until = gl.where(more, last + 1 - at, 0)
        k_at = number % K_STAGES
        mbarrier.wait(k_free.index(k_at), (number // K_STAGES & 1) ^ 1)
        of_keys.index(k_at).store(k_scale)
        _put_tile(keys, k_ring.index(k_at), K_KIND)
        mbarrier.arrive(k_come.index(k_at), count=1)
        keys, k_scale = _take_tile(k_words, row, lowest - at, until, BLOCK_N, HEAD, K_KIND, APART)
        v_at = number % V_STAGES
        mbarrier.wait(v_free.index(v_at), (number // V_STAGES & 1) ^ 1)
        of_values.index(v_at).store(v_scale)
        _put_tile(values, v_ring.index(v_at), V_KIND)
        mbarrier.arrive(v_come.index(v_at), count=1)
        values, v_scale = _take_tile(v_words, row, lowest - at, until, BLOCK_N, HEAD, V_KIND, APART)


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
                    _unpack_rings,
                    (
                        k_words, v_words, k_halves, v_halves, scales, bars, pages, base, kv_head, low, tiles, lowest,
                        last, KV, PAGE, K_STAGES, V_STAGES, KINDS, APART,
                    ),
                ),
            ],
            [4, WARPS],
            [REGISTERS, 504 - 2 * REGISTERS],
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
                    _unpack_rings,
                    (
                        k_words, v_words, k_halves, v_halves, scales, bars, pages, base, kv_head, low, tiles, lowest,
                        last, KV, PAGE, K_STAGES, V_STAGES, KINDS, APART,
                    ),
                ),
            ],
            [WARPS],
            [504 - 2 * REGISTERS],
        )  # fmt: skip
