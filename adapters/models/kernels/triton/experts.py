"""Experts in Triton: each row's choice, the tiles that follow from it, the products of all experts, and their sum.

Nothing here waits for the host. Only the device knows how many rows an expert has, so grids are as large as they can
ever have to be, and programs without work return. A row and one of its experts are a pair, `row * ACTIVE + rank`. The
result of a pair is left at its number, wherever it was computed.

Products are the chains of `linear`: k rises from 0 in steps of 16 and no tile cuts it. So neither the number of an
expert's rows nor their neighbours can change an element's bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.linear import apply_gate, load_tile

# Below every key of a choice.
TAKEN = tl.constexpr(-(1 << 62))


@triton.jit
def rank_experts(
    logits,
    scales,
    COUNT: tl.constexpr,
    ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Return the experts that a row chooses, and their weights, as `choose` has them. logits, scales: `[EXPERTS]`.

    SHORT: logits are bfloat16, whose lower halves say nothing, so a key has 32 bits. A warp finds the largest of such
    numbers by one instruction.
    """
    e = tl.arange(0, EXPERTS)
    rank = tl.arange(0, RANKS)
    if SCALED:
        factors = tl.zeros((RANKS,), tl.float32) + 1.0
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # of two zeros none is less
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    taken: tl.constexpr = -(1 << 31) if SHORT else TAKEN
    # Keys compare as the logits do, and all of them are different.
    keys = ((ordered >> 16) << 16) + (0xFFFF - e) if SHORT else (ordered.to(tl.int64) << 16) - e
    keys = tl.where(e < COUNT, keys, taken)
    peak = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    chosen = tl.zeros((RANKS,), tl.int32)
    weights = tl.zeros((RANKS,), tl.float32)
    added = 0.0
    for r in tl.static_range(ACTIVE):
        best = tl.max(keys, 0)
        if SCALED:
            factors = tl.where(rank == r, tl.sum(tl.where(keys == best, scales, 0.0), 0), factors)
        keys = tl.where(keys == best, taken, keys)
        number = 0xFFFF - (best & 0xFFFF) if SHORT else (-best) & 0xFFFF
        ordered = (best & -0x10000) | ((best >> 31) & 0xFFFF) if SHORT else ((best + number) >> 16).to(tl.int32)
        logit = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        weight = tl.exp(logit - peak) / total
        added = added + weight
        chosen = tl.where(rank == r, number.to(tl.int32), chosen)
        weights = tl.where(rank == r, weight, weights)
    if NORMED:
        weights = weights / added
    if SCALED:
        weights = weights * factors
    return chosen, weights


@triton.jit
def choose(
    logits_ptr,
    positions_ptr,
    chosen_ptr,
    weights_ptr,
    bias_ptr,
    scales_ptr,
    COUNT: tl.constexpr,
    ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NORMED: tl.constexpr,
    SHARED: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the ACTIVE experts of one row and their weights, the most wanted first; of equals the lower number.

    chosen: int32 `[R, ACTIVE]`, COUNT in padded rows, so that these belong to no expert. weights: float32 `[R,
    RANKS]`; behind those of the experts stands, if SHARED, the factor of the shared one. EXPERTS: COUNT rounded up to
    a power of two. BIASED: the logits of experts have biases, float32. SCALED: the weight of an expert is multiplied
    with its scale, float32. SHORT: see `rank_experts`.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    rank = tl.arange(0, RANKS)
    real = tl.load(positions_ptr + row) >= 0
    if BIASED:
        bias = tl.load(bias_ptr + e, e < COUNT, 0.0)
    scales = tl.zeros((EXPERTS,), tl.float32)  # never read without
    if SCALED:
        scales = tl.load(scales_ptr + e, e < COUNT, 1.0)
    if PDL:
        gdc_wait()
    routed: tl.constexpr = COUNT + (1 if SHARED else 0)
    logits = tl.load(logits_ptr + row * routed + e, e < COUNT, float("-inf")).to(tl.float32)
    if BIASED:
        logits = logits + bias
    chosen, weights = rank_experts(logits, scales, COUNT, ACTIVE, EXPERTS, RANKS, NORMED, SCALED, SHORT)
    if SHARED:
        gate = tl.load(logits_ptr + row * routed + COUNT).to(tl.float32)
        weights = tl.where(rank == ACTIVE, 1.0 / (1.0 + tl.exp(-gate)), weights)
    tl.store(chosen_ptr + row * ACTIVE + rank, tl.where(real, chosen, COUNT), rank < ACTIVE)
    tl.store(weights_ptr + row * RANKS + rank, weights)


@triton.jit(do_not_specialize=["count"])
def deal(
    chosen_ptr,
    slots_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    count,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    IN_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Collect the pairs of one expert, in order behind those of lower experts, and cut them into tiles of TILE pairs.

    pairs: int32 `[count]`. tiles: int32 `[n, 4]`: where the expert's weights are, the first of its pairs there, and
    how many. total: the number of tiles. Every program counts the pairs of all experts, so that none waits for
    another. IN_SLOTS: weights are where `slots`, int32 `[COUNT]`, says, and experts at -1 have no tiles; otherwise
    each expert is at its own number.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    i = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((EXPERTS,), tl.int32)
    for at in range(0, count, BLOCK):
        who = tl.load(chosen_ptr + at + i, at + i < count, COUNT)
        counts += tl.histogram(who, EXPERTS, mask=who < COUNT)
    slot = expert
    if IN_SLOTS:
        slot = tl.load(slots_ptr + expert)
        counts = tl.where(tl.load(slots_ptr + e, e < COUNT, -1) >= 0, counts, 0)
    heights = tl.cdiv(counts, TILE)
    own = tl.sum(tl.where(e == expert, counts, 0), 0)
    first = tl.sum(tl.where(e < expert, counts, 0), 0)
    tile = tl.sum(tl.where(e < expert, heights, 0), 0)
    if expert == 0:
        tl.store(total_ptr, tl.sum(heights, 0))
    if own > 0:
        for at in range(0, own, TILE):
            to = tiles_ptr + (tile + at // TILE) * 4
            tl.store(to, slot)
            tl.store(to + 1, first + at)
            tl.store(to + 2, tl.minimum(own - at, TILE))
        to = first
        for at in range(0, count, BLOCK):
            who = tl.load(chosen_ptr + at + i, at + i < count, COUNT)
            mine = (who == expert).to(tl.int32)
            tl.store(pairs_ptr + to + tl.cumsum(mine, 0) - 1, at + i, mine > 0)
            to += tl.sum(mine, 0)


@triton.jit
def multiply_groups(  # noqa: PLR0912 - branches of constants
    x_ptr,
    w_desc,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    total_ptr,
    columns,
    depth,
    apart,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TALL: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[pair] = x[pair // SHARE] @ w[slot].T for the tiles that `deal` left. w: `[slots, columns,
    depth]`.

    A program has one tile of pairs and BLOCK_N columns. apart: numbers from one slot to the next. PLAIN: see
    `linear.load_tile`. TALL: there are few pairs, and the weights are the tall
    operand. Rows past the tile's pairs are computed from some row and stored nowhere.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    across = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // across
    n0 = tl.program_id(0) % across * BLOCK_N
    if PDL:
        gdc_wait()
    if tile < tl.load(total_ptr):
        slot = tl.load(tiles_ptr + tile * 4)
        first = tl.load(tiles_ptr + tile * 4 + 1)
        count = tl.load(tiles_ptr + tile * 4 + 2)
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        pair = tl.load(pairs_ptr + first + m, m < count, 0)
        x_at = x_ptr + (pair // SHARE).to(tl.int64)[:, None] * depth + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M) if TALL else (BLOCK_M, BLOCK_N), tl.float32)
        for k0 in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            if PLAIN:
                w = load_tile(w_desc + slot.to(tl.int64) * apart, n0, k0, columns, depth, BLOCK_N, BLOCK_K, PLAIN)
            else:
                w = w_desc.load([slot, n0, k0]).reshape(BLOCK_N, BLOCK_K)
            x = tl.load(x_at + k0, (k0 + k < depth)[None, :], 0.0)
            if TALL:
                acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        if GATED:
            width = columns // 2
            n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
            if TALL:
                gate, up = tl.split(acc.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
            else:
                gate, up = tl.split(acc.reshape(BLOCK_M, BLOCK_N // 2, 2))
            out = apply_gate(gate, up, dtype, GATED)
        else:
            width = columns
            n = n0 + tl.arange(0, BLOCK_N)
            out = acc.to(dtype)
        to = pair.to(tl.int64) * width
        if TALL:
            tl.store(out_ptr + to[None, :] + n[:, None], out, (m < count)[None, :] & (n < width)[:, None])
        else:
            tl.store(out_ptr + to[:, None] + n[None, :], out, (m < count)[:, None] & (n < width)[None, :])
    if PDL:
        gdc_launch_dependents()


@triton.jit
def gate_pairs(
    both_ptr,
    bias_ptr,
    chosen_ptr,
    out_ptr,
    width,
    GATE: tl.constexpr,
    COUNT: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute what the gates of a pair let through. both: `[pairs, 2 width]`, the gates, and what they let through.

    Experts were chosen before the kernel before this one started, so that this one may read them, and their biases,
    while that one still runs.

    GATE: see `linear.apply_gate`. BIASED: the biases `[COUNT, 2 width]` of the pair's expert are added first. COUNT: of
    experts; with 1 `chosen` is not read.
    """
    if PDL:
        gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIASED:
        own = n
        if COUNT > 1:
            own += tl.minimum(tl.load(chosen_ptr + pair), COUNT - 1).to(tl.int64) * 2 * width
        gate_bias = tl.load(bias_ptr + own, inside, 0.0).to(tl.float32)
        up_bias = tl.load(bias_ptr + own + width, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    at = pair * 2 * width + n
    gate = tl.load(both_ptr + at, inside, 0.0).to(tl.float32)
    up = tl.load(both_ptr + at + width, inside, 0.0).to(tl.float32)
    if BIASED:
        gate += gate_bias
        up += up_bias
    tl.store(out_ptr + pair * width + n, apply_gate(gate, up, dtype, GATE), inside)


@triton.jit
def add_up(
    made_ptr,
    bias_ptr,
    chosen_ptr,
    weights_ptr,
    shared_ptr,
    positions_ptr,
    out_ptr,
    width,
    ACTIVE: tl.constexpr,
    RANKS: tl.constexpr,
    SHARED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the weighted results of a row's experts, the most wanted first, the shared one last. A padded row
    becomes zeros.

    BIASED: the bias of its expert, `[experts, width]`, is added to a result first, and the sum is rounded. The choice
    was made before the kernel before this one started, so that it may be read while that one still runs.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    real = tl.load(positions_ptr + row) >= 0
    shares = ()
    biases = ()
    for r in tl.static_range(ACTIVE + (1 if SHARED else 0)):
        shares = shares + (tl.load(weights_ptr + row * RANKS + r),)  # noqa: RUF005 - Triton knows no other way
    if BIASED:
        for r in tl.static_range(ACTIVE):
            own = tl.load(chosen_ptr + row * ACTIVE + r, real, 0).to(tl.int64) * width
            biases = biases + (tl.load(bias_ptr + own + d, inside, 0.0).to(tl.float32),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    if real:
        for r in tl.static_range(ACTIVE):
            made = tl.load(made_ptr + (row * ACTIVE + r) * width + d, inside, 0.0).to(tl.float32)
            if BIASED:
                made = (made + biases[r]).to(made_ptr.dtype.element_ty).to(tl.float32)
            total = total + made * shares[r]
        if SHARED:
            own = tl.load(shared_ptr + row * width + d, inside, 0.0).to(tl.float32)
            total = total + own * shares[ACTIVE]
    tl.store(out_ptr + row * width + d, total.to(out_ptr.dtype.element_ty), inside)
