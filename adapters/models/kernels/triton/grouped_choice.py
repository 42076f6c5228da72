"""The choice of experts in groups, by sigmoids or a softmax of their logits, in Triton.

It is that of `choose_experts` in `experts_interface`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.experts import TAKEN

LEAST = tl.constexpr(1e-20)  # added to the sum of the chosen experts' scores


@triton.jit
def make_keys(values, indices):
    """Return integers that compare as the values do; of equal values the one at the lower index is greater."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 16) - indices


@triton.jit
def read_value(key):
    """Return the value of a key."""
    ordered = ((key + ((-key) & 0xFFFF)) >> 16).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def choose_in_groups(
    logits_ptr,
    correction_ptr,
    positions_ptr,
    chosen_ptr,
    weights_ptr,
    factor,
    COUNT: tl.constexpr,
    ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    INDICES: tl.constexpr,
    NORMED: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the ACTIVE experts of one row and their weights, the most wanted first; of equals the lower number.

    chosen, weights, EXPERTS: as in `choose`. The factor of the shared expert is 1. INDICES: GROUPS rounded up to a
    power of two. SIGMOID: scores are sigmoids, to which a correction is added, and a group counts by its two best
    experts.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    rank = tl.arange(0, RANKS)
    correction = tl.load(correction_ptr + e, e < COUNT, 0.0)
    real = tl.load(positions_ptr + row) >= 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(logits_ptr + row * COUNT + e, e < COUNT, 0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        keys = tl.where(e < COUNT, make_keys(scores + correction, e), TAKEN)
    else:
        logits = tl.where(e < COUNT, logits, float("-inf"))
        shares = tl.exp(logits - tl.max(logits, 0))
        scores = shares / tl.sum(shares, 0)
        keys = tl.where(e < COUNT, make_keys(logits, e), TAKEN)
    if GROUPS > 1:
        group = e // (COUNT // GROUPS)
        index = tl.arange(0, INDICES)
        sums = tl.full((INDICES,), TAKEN, tl.int64)
        for g in tl.static_range(GROUPS):
            own = tl.where((group == g) & (e < COUNT), keys, TAKEN)
            first = tl.max(own, 0)
            total = read_value(first)
            if SIGMOID:
                total += read_value(tl.max(tl.where(own == first, TAKEN, own), 0))
            sums = tl.where(index == g, make_keys(total, g), sums)
        open_groups = tl.zeros((EXPERTS,), tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.max(sums, 0)
            sums = tl.where(sums == best, TAKEN, sums)
            open_groups = tl.where(group == ((-best) & 0xFFFF).to(tl.int32), 1, open_groups)
        keys = tl.where(open_groups == 1, keys, TAKEN)
    chosen = tl.zeros((RANKS,), tl.int32)
    weights = tl.zeros((RANKS,), tl.float32)
    added = 0.0
    for r in tl.static_range(ACTIVE):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, TAKEN, keys)
        number = ((-best) & 0xFFFF).to(tl.int32)
        weight = tl.sum(tl.where(e == number, scores, 0.0), 0)
        added = added + weight
        chosen = tl.where(rank == r, number, chosen)
        weights = tl.where(rank == r, weight, weights)
    if NORMED:
        weights = weights / (added + LEAST)
    weights = tl.where(rank == ACTIVE, 1.0, weights * factor)
    tl.store(chosen_ptr + row * ACTIVE + rank, tl.where(real, chosen, COUNT), rank < ACTIVE)
    tl.store(weights_ptr + row * RANKS + rank, weights)
