"""Attention of many rows on Hopper (compute capability 9.0): `attention.attend_chain` with a warp for loads alone.

The arithmetic is that of `attention`: tiles of keys in order, and splits folded in order. What differs is who does
what. One warp looks up pages and brings keys and values to rings of shared memory, by bulk copies that run ahead.
Consumers compute 64 rows of queries each and read the same rings. While one consumer computes weights, the tensor
cores work for the other. A consumer's own products of a tile's weights and of the next tile's keys are in flight at
once.

The fold of all splits before lies in shared memory. It is touched once in a split, and registers hold queries instead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.hopper.hopper_attention import _NOTHING, _forget, _weigh_scores
from adapters.models.kernels.triton.hopper.hopper_products import bring

BLOCK_M = gl.constexpr(64)  # rows of queries of one consumer: heads of one key head, row after row
FOLD_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # no two rows of a fragment share banks


@gluon.jit
def _make_barriers(STAGES: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(STAGES):
        mbarrier.init(bars.index(at), count=count)
    return bars


@gluon.jit
def _produce(
    k_desc,
    v_desc,
    k_ring,
    v_ring,
    bars,
    pages_ptr,
    base,
    kv_head,
    tiles,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Bring all tiles of keys and values in order, each as soon as its slot of the ring is free."""
    k_come, k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    for number in range(tiles):
        at = number * BLOCK_N
        row = base + at
        if PAGE > 0:
            row = (gl.load(pages_ptr + at // PAGE) * KV + kv_head) * PAGE + at % PAGE
        k_at = number % K_STAGES
        mbarrier.wait(k_free.index(k_at), (number // K_STAGES & 1) ^ 1)
        mbarrier.expect(k_come.index(k_at), k_desc.block_type.nbytes)
        bring(k_desc, [row, 0], k_come.index(k_at), k_ring.index(k_at))
        v_at = number % V_STAGES
        mbarrier.wait(v_free.index(v_at), (number // V_STAGES & 1) ^ 1)
        mbarrier.expect(v_come.index(v_at), v_desc.block_type.nbytes)
        bring(v_desc, [row, 0], v_come.index(v_at), v_ring.index(v_at))


@gluon.jit
def _multiply_keys(q, k_ring, k_come, number, nothing, STAGES: gl.constexpr):
    """Begin the product of queries and the keys of tile `number`."""
    at = number % STAGES
    mbarrier.wait(k_come.index(at), number // STAGES & 1)
    return warpgroup_mma(q, k_ring.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(p, v_ring, v_come, number, acc, use_acc, STAGES: gl.constexpr):
    """Begin adding the weighted values of tile `number`."""
    at = number % STAGES
    mbarrier.wait(v_come.index(at), number // STAGES & 1)
    return warpgroup_mma(p, v_ring.index(at), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _fold(fold, acc, peak, total, all_peak, all_total):
    """Add a split to the fold of those before, as `online_softmax.fold_split` does."""
    layout: gl.constexpr = acc.type.layout
    new_peak = gl.maximum(all_peak, peak)
    old = gl.exp2(all_peak - new_peak)
    new = gl.exp2(peak - new_peak)
    all_total = gl.fma(total, new, all_total * old)
    spread = gl.zeros(acc.shape, gl.float32, layout=layout) + gl.convert_layout(new, gl.SliceLayout(1, layout))[:, None]
    faded = fold.load(layout) * gl.convert_layout(old, gl.SliceLayout(1, layout))[:, None]
    return gl.fma(acc, spread, faded), new_peak, all_total


@gluon.jit
def _step(
    p,
    acc,
    peak,
    total,
    use_acc,
    q,
    k_ring,
    v_ring,
    bars,
    number,
    first,
    position,
    scale,
    nothing,
    ENDS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Add the values of tile `number`, and compute the weights of the tile behind it. ENDS: the tile ends a split.

    Returns acc of this tile, and of the next one p, by how much acc fades for it, peak and total.
    """
    k_come, k_free, v_come, v_free = bars
    BLOCK_N: gl.constexpr = nothing.shape[1]
    scores = _multiply_keys(q, k_ring, k_come, number + 1, nothing, K_STAGES)
    acc = _multiply_values(p, v_ring, v_come, number, acc, use_acc, V_STAGES)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(k_free.index((number + 1) % K_STAGES), count=1)
    key0 = (number + 1) * BLOCK_N
    OF_ROWS: gl.constexpr = peak.type.layout
    if ENDS:
        peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=OF_ROWS)
        total = gl.zeros([BLOCK_M], gl.float32, layout=OF_ROWS)
    weights, fade, peak, total = _weigh_scores(scores, key0 + BLOCK_N > first + 1, key0, position, peak, total, scale)
    WEIGHTS: gl.constexpr = p.type.layout
    coming = gl.convert_layout(weights.to(p.dtype), WEIGHTS)
    acc, p, coming = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p, coming))
    mbarrier.arrive(v_free.index(number % V_STAGES), count=1)
    return acc, coming, fade, peak, total


@gluon.jit
def _consume(
    q_ptr,
    out_ptr,
    k_ring,
    v_ring,
    folds,
    bars,
    tile_rows,
    kv_head,
    scale,
    NUMBER: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Compute consumer NUMBER's rows of a tile. tile_rows: the tile's first row, rows, first position, tiles of keys.

    ROWS: of one consumer. COLUMNS: warps that share a row of the output. Each of them computes all weights of the row,
    which takes less time than to exchange them, and adds them in the order of `attention`.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    HEAD: gl.constexpr = k_ring.shape[2]
    OF_SPLIT: gl.constexpr = SPLIT // BLOCK_N
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * COLUMNS, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLUMNS], [16, HEAD // COLUMNS, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    row0, count, first, tiles = tile_rows
    fold = folds.index(NUMBER)
    if tiles > 0:
        fold.store(gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT))
        i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, QUERIES))
        d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, QUERIES))
        row = NUMBER * ROWS + i // GROUP
        real = (row < count) & (i < ROWS * GROUP)
        of_head = ((row0 + row) * HEADS + kv_head * GROUP + i % GROUP).to(gl.int64)
        q = gl.load(q_ptr + of_head[:, None] * HEAD + d[None, :], mask=real[:, None], other=0.0)
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        last = first + count - 1
        begin = first + NUMBER * ROWS
        position = gl.minimum(begin + m // GROUP, last)
        k_come, k_free, v_come, _v_free = bars
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
        acc = gl.zeros([BLOCK_M, HEAD], gl.float32, layout=OUT)
        all_peak = gl.full([BLOCK_M], _NOTHING, gl.float32, layout=gl.SliceLayout(1, SCORES))
        all_total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        scores = _multiply_keys(q, k_ring, k_come, 0, nothing, K_STAGES)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(k_free.index(0), count=1)
        weights, _fade, peak, total = _weigh_scores(
            scores, begin + 1 < BLOCK_N, 0, position, all_peak, all_total, scale
        )
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        whole = (tiles - 1) // OF_SPLIT
        for split in range(whole):
            for tile in gl.static_range(OF_SPLIT):
                split_peak = peak
                split_total = total
                acc, p, fade, peak, total = _step(
                    p, acc, peak, total, tile > 0, q, k_ring, v_ring, bars, split * OF_SPLIT + tile, begin, position,
                    scale, nothing, tile == OF_SPLIT - 1, K_STAGES, V_STAGES,
                )  # fmt: skip
                if tile == OF_SPLIT - 1:
                    folded, all_peak, all_total = _fold(fold, acc, split_peak, split_total, all_peak, all_total)
                    fold.store(folded)
                else:
                    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        for number in range(whole * OF_SPLIT, tiles - 1):
            acc, p, fade, peak, total = _step(
                p, acc, peak, total, number > whole * OF_SPLIT, q, k_ring, v_ring, bars, number, begin, position, scale,
                nothing, False, K_STAGES, V_STAGES,
            )  # fmt: skip
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        end = tiles - 1
        at = end % V_STAGES
        mbarrier.wait(v_come.index(at), end // V_STAGES & 1)
        if tiles * BLOCK_N > last + 1:
            _forget(v_ring.index(at), last - end * BLOCK_N, 4 * COLUMNS)
        acc = warpgroup_mma(p, v_ring.index(at), acc, use_acc=end > whole * OF_SPLIT, is_async=True)
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        folded, all_peak, all_total = _fold(fold, acc, peak, total, all_peak, all_total)
        total = gl.convert_layout(all_total, gl.SliceLayout(1, OUT))
        out = folded / gl.where(total > 0.0, total, 1.0)[:, None]
        o = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
        e = gl.arange(0, HEAD, layout=gl.SliceLayout(0, OUT))
        own = NUMBER * ROWS + o // GROUP
        kept = (own < count) & (o < ROWS * GROUP)
        to = ((row0 + own) * HEADS + kv_head * GROUP + o % GROUP).to(gl.int64) * HEAD
        out = gl.where(first < 0, 0.0, out)  # a padded row, whose first tile may hold anything
        gl.store(out_ptr + to[:, None] + e[None, :], out.to(dtype), mask=kept[:, None])


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
    HEADS: gl.constexpr,
    KV: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
    PAGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Do the same as `attention.attend_chain`, for plain attention of rows that are not coded.

    A tile has CONSUMERS * (64 // GROUP) rows. With one consumer, eight warps share its rows of the output.
    """
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD: gl.constexpr = k_desc.block_type.shape[1]
    ROWS: gl.constexpr = BLOCK_M // GROUP
    COLUMNS: gl.constexpr = num_warps // 4
    gl.static_assert(PAGE % BLOCK_N == 0)
    gl.static_assert(CONSUMERS == 1 or num_warps == 4)
    if PDL:
        gdc_launch_dependents()
    tile = tile_limit - 1 - gl.program_id(0) // KV
    kv_head = gl.program_id(0) % KV
    row0 = gl.load(tiles_ptr + tile * 8)
    count = gl.load(tiles_ptr + tile * 8 + 1)
    slot = gl.load(tiles_ptr + tile * 8 + 2)
    first = gl.load(tiles_ptr + tile * 8 + 3)
    tiles = gl.where(count > 0, gl.maximum(gl.cdiv(first + count, BLOCK_N), 1), 0)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, BLOCK_N, HEAD], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, BLOCK_N, HEAD], v_desc.layout)
    folds = gl.allocate_shared_memory(gl.float32, [CONSUMERS, BLOCK_M, HEAD], FOLD_LAYOUT)
    bars = (
        _make_barriers(K_STAGES, 1),
        _make_barriers(K_STAGES, CONSUMERS),
        _make_barriers(V_STAGES, 1),
        _make_barriers(V_STAGES, CONSUMERS),
    )
    if PDL:
        gdc_wait()
    tile_rows = (row0, count, first, tiles)
    base = (slot * KV + kv_head) * capacity
    pages = pages_ptr + slot * (capacity // PAGE if PAGE else 0)
    # Tuples stand in the calls, because a sum of tuples or a name for one would turn constants into tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, folds, bars, tile_rows, kv_head, scale, 0, ROWS, HEADS, GROUP,
                        SPLIT, K_STAGES, V_STAGES, COLUMNS,
                    ),
                ),
                (
                    _consume,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, folds, bars, tile_rows, kv_head, scale, 1, ROWS, HEADS, GROUP,
                        SPLIT, K_STAGES, V_STAGES, COLUMNS,
                    ),
                ),
                (
                    _produce,
                    (
                        k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, tiles, KV, PAGE, K_STAGES, V_STAGES,
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
                    _consume,
                    (
                        q_ptr, out_ptr, k_ring, v_ring, folds, bars, tile_rows, kv_head, scale, 0, ROWS, HEADS, GROUP,
                        SPLIT, K_STAGES, V_STAGES, COLUMNS,
                    ),
                ),
                (
                    _produce,
                    (
                        k_desc, v_desc, k_ring, v_ring, bars, pages, base, kv_head, tiles, KV, PAGE, K_STAGES, V_STAGES,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
