"""The online softmax of attention in Triton: tiles of keys join a split, and splits join each other, in order."""

from __future__ import annotations

import triton
import triton.language as tl

# Stands for "no key yet": finite, so that differences of two of them are zero rather than NaN.
NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def _cap_scores(scores, scale, CAP: tl.constexpr):
    """Let `scores * scale` be at most CAP in size: CAP * tanh(scores * scale / CAP), divided by the scale again."""
    x = scores * (scale / CAP)
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - e) / (1.0 + e) * (CAP / scale)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def lowest_key(first, WINDOW: tl.constexpr):
    """Return the first key that the row at `first` sees."""
    return tl.maximum(first - WINDOW + 1, 0) if WINDOW > 0 else first * 0


@triton.jit
def absorb_tile(
    q,
    k,
    v,
    k_scale,
    v_scale,
    last,
    key,
    position,
    acc,
    peak,
    total,
    scale,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    CODED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    q_rest=None,
    k_rest=None,
    REST: tl.constexpr = 0,
):
    """Add one key tile to the online softmax. acc: `[M, HEAD]`; peak and total: `[M]`, in base-2 exponents.

    q_rest, k_rest: tiles of REST more numbers of queries and keys.

    Of coded rows the scores and the weights are scaled, because there are fewer of them than codes.
    """
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if REST > 0:
        scores = tl.dot(q_rest, k_rest.T, scores, input_precision=PRECISION)
    if CODED:
        scores = scores * k_scale[None, :]
    if CAP > 0:
        scores = _cap_scores(scores, scale * 0.6931471805599453, CAP)
    if MASKED:
        seen = key[None, :] <= position[:, None]
        known = key <= last
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
            known = known & (key > tl.min(position, 0) - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        v = tl.where(known[:, None], v, 0.0)
        if CODED:
            v_scale = tl.where(known, v_scale, 0.0)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    spread = tl.broadcast_to(new_peak[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, -spread))
    fade = tl.exp2(peak - new_peak)
    total = tl.fma(total, fade, tl.sum(weights, 1))
    if CODED:
        weights = weights * v_scale[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def fold_split(acc, peak, total, all_acc, all_peak, all_total):
    """Add one split's result to the fold of the splits before it. Return the three numbers of the new fold.

    acc, peak, total: of the new split. all_acc, all_peak, all_total: of all splits before it.

    All are float32. acc: `[M, HEAD]`, the sum of the weighted values. peak: `[M]`, the highest score, as an exponent
    of 2. total: `[M]`, the sum of the weights. A weight is 2 ** (score - peak).
    """
    new_peak = tl.maximum(all_peak, peak)
    old = tl.exp2(all_peak - new_peak)
    new = tl.exp2(peak - new_peak)
    all_total = tl.fma(total, new, all_total * old)
    all_acc = tl.fma(acc, tl.broadcast_to(new[:, None], acc.shape), all_acc * old[:, None])
    return all_acc, new_peak, all_total


@triton.jit
def join_sink(sink, all_acc, all_peak, all_total):
    """Add each row's sink to the fold of its splits: one more key, whose value is zero."""
    nothing = tl.zeros(all_acc.shape, tl.float32)
    once = tl.full(sink.shape, 1.0, tl.float32)
    return fold_split(nothing, sink, once, all_acc, all_peak, all_total)
