"""Scores, weights and sums of attention on Hopper, as the consumers of `hopper_pairs` have them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _find_peaks(scores, ROUNDS: gl.constexpr):
    """Return the greatest score of each row. Pairs are compared first, because a chain of comparisons takes long."""
    found = scores
    for _ in gl.static_range(ROUNDS):
        first, second = gl.split(found.reshape([found.shape[0], 2, found.shape[1] // 2]).permute((0, 2, 1)))
        found = gl.maximum(first, second)
    return gl.max(found, 1)


@gluon.jit
def weigh_tile(scores, MASKED: gl.constexpr, key0, position, peak, total, scale):
    """Do what `hopper_attention._weigh_scores` does, with comparisons side by side."""
    layout: gl.constexpr = scores.type.layout
    if MASKED:
        key = key0 + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    greatest = gl.convert_layout(_find_peaks(scores, 3), gl.SliceLayout(1, layout))
    new_peak = gl.maximum(peak, greatest * scale)
    spread = gl.zeros(scores.shape, gl.float32, layout=layout) + new_peak[:, None]
    scales = gl.full(scores.shape, 1.0, gl.float32, layout=layout) * scale
    weights = gl.exp2(gl.fma(scores, scales, -spread))
    fade = gl.exp2(peak - new_peak)
    return weights, fade, new_peak, gl.fma(total, fade, gl.sum(weights, 1))


@gluon.jit
def halve(scores, LAYOUT: gl.constexpr):
    """Return the scores of the first tile of a pair, and of the second."""
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1] // 2
    first, second = gl.split(scores.reshape([M, 2, N]).permute((0, 2, 1)))
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)


@gluon.jit
def fade_sums(acc, fade):
    """Multiply the sums of each row with its factor, because their weights were those of a lower peak."""
    layout: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(fade, gl.SliceLayout(1, layout))[:, None]
