"""Tokens drawn from rows of logits, in Triton: those that a host draws (`device/sampling/host_draw.py`); and what is told of
picked ones, to the bit what a host tells.

Nothing is sorted. A row is cut into parts of BLOCK logits, and every part finds its likeliest token, its best one with
noise and the sum of its weights; then one program a row decides. With a top-k of up to MANY it takes the k likeliest
tokens out of the parts, one after the other. Otherwise it looks at the token that is best with noise: if what is
likelier are less than k, and has less than the mass, it is the one; if not, neither it nor anything less likely may be
drawn, and the best of the rest is looked at, which ends soon, since what is best is rarely unlikely.

Launch with `enable_fp_fusion=False` (`logits.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from adapters.models.kernels import exact_functions
from adapters.models.kernels.triton.logit_parts import (
    NONE,
    ahead,
    block_of,
    gumbel,
    logit_of,
    next_part,
    steady_weight,
    token_of,
    without,
)

UNIT = tl.constexpr(2.0**-exact_functions.BITS)
ASKED = tl.constexpr(6)  # numbers of a row that is drawn from
MANY = tl.constexpr(exact_functions.MANY)


@triton.jit
def asked_of(asked_ptr):
    """Which row of the logits; its noise's key, int64; top-k, the width where there is none; float64 temperature, the
    lowest logarithm of a weight (min-p), and the mass (top-p).
    """
    temperature = tl.load(asked_ptr + 3).to(tl.float64, bitcast=True)
    least = tl.load(asked_ptr + 4).to(tl.float64, bitcast=True)
    mass = tl.load(asked_ptr + 5).to(tl.float64, bitcast=True)
    return tl.load(asked_ptr), tl.load(asked_ptr + 1), tl.load(asked_ptr + 2), temperature, least, mass


@triton.jit
def part_draws(
    logits_ptr,
    told_ptr,
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
    """Of BLOCK logits of a row that is drawn from. keys int64 `[R, parts]`: the likeliest one's. But with a top-k of up
    to MANY, sums int64: of all weights, where top-p is asked for; winners int64, scores float64: the key of the one
    that is best with noise, and how good that is. Of equal ones the likelier wins.

    told: of these logits, as `row_extremes` has it. asked int64 `[R, ASKED]`: as `asked_of` has it, floats by their
    bits.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, noise, most, temperature, least, mass = asked_of(asked_ptr + ASKED * row)
    largest = tl.load(told_ptr + 3 * source + 2)
    x, keys, at = block_of(logits_ptr + source * stride, part, width, BLOCK)
    to = row * parts + part
    tl.store(keys_ptr + to, tl.max(keys, 0))
    if most > MANY:
        scaled = (x.to(tl.float64) - largest) / temperature
        if mass < 1:
            tl.store(sums_ptr + to, tl.sum(tl.where(keys > NONE, steady_weight(scaled, factors_ptr), 0), 0))
        score = tl.where((keys > NONE) & (scaled >= least), scaled + gumbel(noise, at), float("-inf"))
        best = tl.max(score, 0)
        tl.store(winners_ptr + to, tl.max(tl.where(score == best, keys, NONE), 0))
        tl.store(scores_ptr + to, best)


@triton.jit
def weight_of_top(logits_ptr, factors_ptr, keys, lanes, most, largest, temperature, width, parts, BLOCK: tl.constexpr):
    """The sum of the weights of the `most` likeliest tokens, less than all: the logit of the last of them is found by
    halving what it may be, and all that have it weigh the same.
    """
    low, high = tl.full((), -(2**31), tl.int64), tl.max(keys, 0) >> 32
    while low < high:
        middle = (low + high + 1) >> 1
        bound, count = (middle << 32) - 1, tl.zeros((), tl.int64)
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
    return total + (most - count) * steady_weight((logit_of(last).to(tl.float64) - largest) / temperature, factors_ptr)


@triton.jit
def best_above(logits_ptr, keys, lanes, bound, noise, largest, temperature, least, width, parts, BLOCK: tl.constexpr):
    """The key of the token that is best with noise of those that are likelier than the bound's."""
    best, winner = tl.full((), float("-inf"), tl.float64), tl.max(keys, 0)
    part = next_part(keys, lanes, bound, -1, parts)
    while part < parts:
        x, found, at = block_of(logits_ptr, part, width, BLOCK)
        scaled = (x.to(tl.float64) - largest) / temperature
        score = tl.where((found > bound) & (scaled >= least), scaled + gumbel(noise, at), float("-inf"))
        most = tl.max(score, 0)
        if most > best:
            best, winner = most, tl.max(tl.where(score == most, found, NONE), 0)
        part = next_part(keys, lanes, bound, part, parts)
    return winner


@triton.jit
def best_taken(taken_ptr, factors_ptr, noise, most, temperature, least, mass, largest, TAKEN: tl.constexpr):
    """The key of the one that is best with noise of the `most` likeliest tokens, less those that top-p and min-p leave
    out. taken int64: their keys, the likeliest first.
    """
    lanes = tl.arange(0, TAKEN)
    first, total = most * 0, tl.zeros((), tl.int64)
    while (first < most) & (mass < 1):
        scaled = (logit_of(taken_of(taken_ptr, first, most, TAKEN)).to(tl.float64) - largest) / temperature
        total += tl.sum(tl.where(first + lanes < most, steady_weight(scaled, factors_ptr), 0), 0)
        first += TAKEN
    best, winner = tl.full((), float("-inf"), tl.float64), tl.load(taken_ptr)
    first, before = most * 0, tl.zeros((), tl.int64)
    while first < most:
        keys = taken_of(taken_ptr, first, most, TAKEN)
        scaled = (logit_of(keys).to(tl.float64) - largest) / temperature
        weights = tl.where(first + lanes < most, steady_weight(scaled, factors_ptr), 0)
        likelier = before + tl.cumsum(weights, 0) - weights
        kept = (scaled >= least) & (first + lanes < most)
        if mass < 1:
            kept = kept & (likelier.to(tl.float64) < total.to(tl.float64) * mass)
        score = tl.where(kept, scaled + gumbel(noise, token_of(keys)), float("-inf"))
        high = tl.max(score, 0)
        if high > best:
            best, winner = high, tl.max(tl.where(score == high, keys, NONE), 0)
        before += tl.sum(weights, 0)
        first += TAKEN
    return winner


@triton.jit
def taken_of(taken_ptr, first, most, TAKEN: tl.constexpr):
    at = first + tl.arange(0, TAKEN)
    return tl.load(taken_ptr + at, at < most, NONE)


@triton.jit
def row_draws(
    logits_ptr,
    told_ptr,
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
    """What a row draws: tokens int64 and found float64 `[*, 3]`, its first column, of that row of the logits. PARTS: a
    power of two, `parts` at least. taken int64 `[R, MANY]`: where the top-k are put together, TAKEN of which are looked
    at at once.
    """
    row = tl.program_id(0).to(tl.int64)
    source, noise, most, temperature, least, mass = asked_of(asked_ptr + ASKED * row)
    largest = tl.load(told_ptr + 3 * source + 2)
    logits_ptr += source * stride
    taken_ptr += row * MANY
    lanes = tl.arange(0, PARTS)
    keys = tl.load(keys_ptr + row * parts + lanes, lanes < parts, NONE)
    likeliest = tl.max(keys, 0)
    winner = likeliest
    if largest - largest == 0:  # nobody uses what is picked of a row that is not finite
        if most <= MANY:
            left, count = keys, most * 0
            while count < most:
                key = tl.max(left, 0)
                tl.store(taken_ptr + count, key)
                left = without(logits_ptr, left, lanes, key, width, BLOCK)
                count += 1
            tl.debug_barrier()  # all of it is there for all threads
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
    logits_ptr, told_ptr, rows_ptr, factors_ptr, keys_ptr, sums_ptr, stride, width, parts, BLOCK: tl.constexpr
):
    """Of BLOCK logits of row `rows[row]`: the likeliest one's key, and the sum of all weights, int64 `[R, parts]`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(rows_ptr + row)
    largest = tl.load(told_ptr + 3 * source + 2)
    x, keys, _ = block_of(logits_ptr + source * stride, part, width, BLOCK)
    tl.store(keys_ptr + row * parts + part, tl.max(keys, 0))
    weights = tl.where(keys > NONE, steady_weight(x.to(tl.float64) - largest, factors_ptr), 0)
    tl.store(sums_ptr + row * parts + part, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["most"])
def row_leaders(
    logits_ptr,
    told_ptr,
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
    """out float64 `[R, 2 + 2 most]`: how far the token's logit is below the highest, the ids of the `most` likeliest
    and how far theirs are, and the sum of all weights.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows_ptr + row)
    largest = tl.load(told_ptr + 3 * source + 2)
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
