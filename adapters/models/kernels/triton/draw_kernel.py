"""Tokens drawn from rows of logits, in Triton, and the weights of picked ones: to the bit what a host finds.

Nothing is sorted. A row is cut into parts of BLOCK logits. Every part finds its likeliest token, its best one with
noise, and the sum of its weights; then one program for each row decides. With a top-k of up to MANY it takes the k
likeliest tokens out of the parts, one after the other.

Otherwise it looks at the token that is best with noise. If fewer than k tokens are likelier, and these weigh less
than the mass, it is the result. If not, neither it nor any less likely token may be drawn, and the best of the rest
is looked at. That ends soon, because the best token with noise is rarely unlikely.

The host's draws are in `cpu/host_draw.py`. Launch with `enable_fp_fusion=False` (`logit_parts.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from adapters.models.kernels.functions import exact_functions
from adapters.models.kernels.triton.logit_parts import (
    NONE,
    ahead,
    block_of,
    exact_weight,
    gumbel,
    logit_of,
    next_part,
    token_of,
    without,
)

UNIT = tl.constexpr(2.0**-exact_functions.BITS)
ASKED = tl.constexpr(6)  # numbers of a row that is drawn from
MANY = tl.constexpr(exact_functions.MOST_TAKEN)


@triton.jit
def asked_of(asked_ptr):
    """Load a draw: the row of the logits; its noise's key; top-k, the width where there is none; temperature, the
    lowest logarithm of a weight (min-p), and the mass (top-p).
    """
    temperature = tl.load(asked_ptr + 3).to(tl.float64, bitcast=True)
    least = tl.load(asked_ptr + 4).to(tl.float64, bitcast=True)
    mass = tl.load(asked_ptr + 5).to(tl.float64, bitcast=True)
    return tl.load(asked_ptr), tl.load(asked_ptr + 1), tl.load(asked_ptr + 2), temperature, least, mass


@triton.jit
def part_draws(
    logits_ptr,
    extremes_ptr,
    asked_ptr,
    factors_ptr,
    keys_ptr,
    sums_ptr,
    winners_ptr,
    scores_ptr,
    stride,
    width,
    parts,
    BLOCK: tl.constexpr,
):
    """Process BLOCK logits of a row that is drawn from. keys: int64 `[R, parts]`, the key of the likeliest one.

    Without a top-k of up to MANY also: sums, int64, of all weights where top-p is asked for; winners, int64, and
    scores, float64: the key of the token that is best with noise, and its score. Of equal scores the likelier token
    wins. extremes: those of these logits. asked: int64 `[R, ASKED]`, floats by their bits.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source, noise, most, temperature, least, mass = asked_of(asked_ptr + ASKED * row)
    largest = tl.load(extremes_ptr + 3 * source + 2)
    x, keys, at = block_of(logits_ptr + source * stride, part, width, BLOCK)
    to = row * parts + part
    tl.store(keys_ptr + to, tl.max(keys, 0))
    if most > MANY:
        scaled = (x.to(tl.float64) - largest) / temperature
        if mass < 1:
            tl.store(sums_ptr + to, tl.sum(tl.where(keys > NONE, exact_weight(scaled, factors_ptr), 0), 0))
        score = tl.where((keys > NONE) & (scaled >= least), scaled + gumbel(noise, at), float("-inf"))
        best = tl.max(score, 0)
        tl.store(winners_ptr + to, tl.max(tl.where(score == best, keys, NONE), 0))
        tl.store(scores_ptr + to, best)


@triton.jit
def weight_of_top(logits_ptr, factors_ptr, keys, lanes, most, largest, temperature, width, parts, BLOCK: tl.constexpr):
    """Return the sum of the weights of the `most` likeliest tokens, fewer than all.

    The logit of the last of them is found by bisection, and all tokens that have it weigh the same.
    """
    low = tl.full((), -(2**31), tl.int64)
    high = tl.max(keys, 0) >> 32
    while low < high:
        middle = (low + high + 1) >> 1
        bound = (middle << 32) - 1
        count = tl.zeros((), tl.int64)
        part = next_part(keys, lanes, bound, -1, parts)
        while part < parts:
            _, found, _ = block_of(logits_ptr, part, width, BLOCK)
            count += tl.sum((found > bound).to(tl.int64), 0)
            part = next_part(keys, lanes, bound, part, parts)
        if count >= most:
            low = middle
        else:
            high = middle - 1
    last = (low << 32) + 0xFFFFFFFF
    count, total = ahead(logits_ptr, factors_ptr, keys, lanes, last, largest, temperature, width, parts, BLOCK)
    return total + (most - count) * exact_weight((logit_of(last).to(tl.float64) - largest) / temperature, factors_ptr)


@triton.jit
def best_above(logits_ptr, keys, lanes, bound, noise, largest, temperature, least, width, parts, BLOCK: tl.constexpr):
    """Return the key of the token that is best with noise among those that are likelier than the bound's."""
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.max(keys, 0)
    part = next_part(keys, lanes, bound, -1, parts)
    while part < parts:
        x, found, at = block_of(logits_ptr, part, width, BLOCK)
        scaled = (x.to(tl.float64) - largest) / temperature
        score = tl.where((found > bound) & (scaled >= least), scaled + gumbel(noise, at), float("-inf"))
        most = tl.max(score, 0)
        if most > best:
            best = most
            winner = tl.max(tl.where(score == most, found, NONE), 0)
        part = next_part(keys, lanes, bound, part, parts)
    return winner


@triton.jit
def best_taken(taken_ptr, factors_ptr, noise, most, temperature, least, mass, largest, TAKEN: tl.constexpr):
    """Return the key of the token that is best with noise of the `most` likeliest ones, without those that top-p and
    min-p exclude. taken: int64, their keys, the likeliest first.
    """
    lanes = tl.arange(0, TAKEN)
    first = most * 0
    total = tl.zeros((), tl.int64)
    while (first < most) & (mass < 1):
        scaled = (logit_of(load_taken(taken_ptr, first, most, TAKEN)).to(tl.float64) - largest) / temperature
        total += tl.sum(tl.where(first + lanes < most, exact_weight(scaled, factors_ptr), 0), 0)
        first += TAKEN
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.load(taken_ptr)
    first = most * 0
    before = tl.zeros((), tl.int64)
    while first < most:
        keys = load_taken(taken_ptr, first, most, TAKEN)
        scaled = (logit_of(keys).to(tl.float64) - largest) / temperature
        weights = tl.where(first + lanes < most, exact_weight(scaled, factors_ptr), 0)
        likelier = before + tl.cumsum(weights, 0) - weights
        kept = (scaled >= least) & (first + lanes < most)
        if mass < 1:
            kept = kept & (likelier.to(tl.float64) < total.to(tl.float64) * mass)
        score = tl.where(kept, scaled + gumbel(noise, token_of(keys)), float("-inf"))
        high = tl.max(score, 0)
        if high > best:
            best = high
            winner = tl.max(tl.where(score == high, keys, NONE), 0)
        before += tl.sum(weights, 0)
        first += TAKEN
    return winner


@triton.jit
def load_taken(taken_ptr, first, most, TAKEN: tl.constexpr):
    at = first + tl.arange(0, TAKEN)
    return tl.load(taken_ptr + at, at < most, NONE)


@triton.jit
def row_draws(
    logits_ptr,
    extremes_ptr,
    asked_ptr,
    factors_ptr,
    keys_ptr,
    sums_ptr,
    winners_ptr,
    scores_ptr,
    taken_ptr,
    tokens_ptr,
    found_ptr,
    stride,
    width,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAKEN: tl.constexpr,
):
    """Decide what a row draws: tokens, int64, and the first column of found, float64 `[*, 3]`, of that row of the
    logits.

    PARTS: a power of two that is at least `parts`. taken: int64 `[R, MANY]`, memory for the top-k, of which TAKEN are
    looked at together.
    """
    row = tl.program_id(0).to(tl.int64)
    source, noise, most, temperature, least, mass = asked_of(asked_ptr + ASKED * row)
    largest = tl.load(extremes_ptr + 3 * source + 2)
    logits_ptr += source * stride
    taken_ptr += row * MANY
    lanes = tl.arange(0, PARTS)
    keys = tl.load(keys_ptr + row * parts + lanes, lanes < parts, NONE)
    likeliest = tl.max(keys, 0)
    winner = likeliest
    if largest - largest == 0:  # the pick from a row that is not finite is never used
        if most <= MANY:
            left = keys
            count = most * 0
            while count < most:
                key = tl.max(left, 0)
                tl.store(taken_ptr + count, key)
                left = without(logits_ptr, left, lanes, key, width, BLOCK)
                count += 1
            tl.debug_barrier()  # makes the stores visible to all threads
            winner = best_taken(taken_ptr, factors_ptr, noise, most, temperature, least, mass, largest, TAKEN)
        else:
            scores = tl.load(scores_ptr + row * parts + lanes, lanes < parts, float("-inf"))
            winners = tl.load(winners_ptr + row * parts + lanes, lanes < parts, NONE)
            winner = tl.max(tl.where(scores == tl.max(scores, 0), winners, NONE), 0)
            if (mass < 1) | (most < width):
                total = tl.sum(tl.load(sums_ptr + row * parts + lanes, lanes < parts, 0), 0)
                if (most < width) & (mass < 1):
                    total = weight_of_top(
                        logits_ptr, factors_ptr, keys, lanes, most, largest, temperature, width, parts, BLOCK
                    )
                enough = total.to(tl.float64) * mass
                count, before = ahead(
                    logits_ptr, factors_ptr, keys, lanes, winner, largest, temperature, width, parts, BLOCK
                )
                while ((count >= most) | ((mass < 1) & (before.to(tl.float64) >= enough))) & (winner < likeliest):
                    winner = best_above(
                        logits_ptr, keys, lanes, winner, noise, largest, temperature, least, width, parts, BLOCK
                    )
                    count, before = ahead(
                        logits_ptr, factors_ptr, keys, lanes, winner, largest, temperature, width, parts, BLOCK
                    )
    token = token_of(winner)
    tl.store(tokens_ptr + source, token)
    tl.store(found_ptr + 3 * source, token.to(tl.float64))


@triton.jit
def part_weights(
    logits_ptr, extremes_ptr, rows_ptr, factors_ptr, keys_ptr, sums_ptr, stride, width, parts, BLOCK: tl.constexpr
):
    """Find the key of the likeliest of BLOCK logits of row `rows[row]`, and the sum of all weights, int64 `[R,
    parts]`.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = tl.load(rows_ptr + row)
    largest = tl.load(extremes_ptr + 3 * source + 2)
    x, keys, _ = block_of(logits_ptr + source * stride, part, width, BLOCK)
    tl.store(keys_ptr + row * parts + part, tl.max(keys, 0))
    weights = tl.where(keys > NONE, exact_weight(x.to(tl.float64) - largest, factors_ptr), 0)
    tl.store(sums_ptr + row * parts + part, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["most"])
def row_leaders(
    logits_ptr,
    extremes_ptr,
    rows_ptr,
    tokens_ptr,
    keys_ptr,
    sums_ptr,
    out_ptr,
    stride,
    width,
    parts,
    most,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write out float64 `[R, 2 + 2 most]`: how far the token's logit is below the highest, the ids of the `most`
    likeliest tokens and how far theirs are below it, and the sum of all weights.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows_ptr + row)
    largest = tl.load(extremes_ptr + 3 * source + 2)
    token = tl.load(tokens_ptr + source)
    logits_ptr += source * stride
    out_ptr += row * (2 + 2 * most)
    lanes = tl.arange(0, PARTS)
    left = tl.load(keys_ptr + row * parts + lanes, lanes < parts, NONE)
    tl.store(out_ptr, tl.load(logits_ptr + token).to(tl.float64) - largest)
    count = 0
    while count < most:
        key = tl.max(left, 0)
        tl.store(out_ptr + 1 + count, token_of(key).to(tl.float64))
        tl.store(out_ptr + 1 + most + count, logit_of(key).to(tl.float64) - largest)
        left = without(logits_ptr, left, lanes, key, width, BLOCK)
        count += 1
    total = tl.sum(tl.load(sums_ptr + row * parts + lanes, lanes < parts, 0), 0)
    tl.store(out_ptr + 1 + 2 * most, total.to(tl.float64) * UNIT)
