"""Tokens drawn on a host, with noise only for the tokens that could be drawn.

Two logarithms for each token are most of what a draw costs, so few tokens get any. With truncation these are the
tokens that it leaves. Without, they are the tokens near the likeliest one, and those whose noise is large enough to
make up for their distance, which their random bits tell. The result is the one that noise for all tokens would give.
All rows go together: an operation on a few hundred elements takes no longer than one on ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.functions.exact_exp import exact_weights
from adapters.models.kernels.functions.exact_functions import BITS
from adapters.models.kernels.functions.noise import FRACTION, exact_gumbel_at, gumbel_at, noise_keys, noise_order
from adapters.models.kernels.functions.truncation import find_likeliest, make_column
from effects.job import Sampling

SHORT = 64
# Candidates are ranked among SHORT tokens first, then WIDER times as many: ranking all is slower than a layer.
WIDER = 8
NEAR = 8.0  # natural logarithms below the likeliest token; of tokens further off about one in e**10 is looked at
LOWEST = -6.0  # no noise is lower
CLOSE = 1e-9  # scores further apart than this are ordered alike by a library's logarithms and by exact ones
ERROR = 1e-6  # far more than the rounding error of noise


@define(eq=False)
class Drawing:
    """Rows of logits, float32 `[R, V]`, and the best tokens so far.

    temperatures: float64 `[R, 1]`. keys: int64 `[R]`, of the rows' noise. noise: returns the noise of pairs of a key
    and a token. close: whether two scores were so near that an error of the library's logarithm could decide between
    them.
    """

    logits: Tensor
    temperatures: Tensor
    keys: Tensor
    noise: Callable[[Tensor, Tensor], Tensor]
    close: bool = field(init=False, default=False)
    peaks: Tensor = field(init=False)  # float64 [R, 1]
    best: Tensor = field(init=False)  # float64 [R]: their sums with noise
    tokens: Tensor = field(init=False)  # int64 [R]; V: none

    def __attrs_post_init__(self) -> None:
        self.peaks = self.logits.amax(-1, keepdim=True).double()
        self.best = torch.full((len(self.logits),), -math.inf, dtype=torch.float64)
        self.tokens = torch.full((len(self.logits),), self.logits.shape[-1])

    def scale_logits(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return logits of these rows, one or more tokens each, over the temperature; the likeliest token has 0."""
        return (logits.double() - self.peaks[rows]) / self.temperatures[rows]

    def consider_tokens(self, rows: Tensor, ids: Tensor) -> None:
        """Update the best tokens with these candidates, int64 `[n]` both. The lowest id wins among equal sums."""
        scaled = (self.logits[rows, ids].double() - self.peaks[rows, 0]) / self.temperatures[rows, 0]
        scores = scaled + self.noise(self.keys[rows], ids)
        best = self.best.scatter_reduce(0, rows, scores, "amax")
        wins = scores == best[rows]
        tokens = self.tokens.masked_fill(best > self.best, self.logits.shape[-1])
        tokens = tokens.scatter_reduce(0, rows[wins], ids[wins], "amin")
        near = (scores > best[rows] - CLOSE) & (ids != tokens[rows])
        moved = (best - self.best < CLOSE) & (tokens != self.tokens)
        self.close |= bool(near.any() or moved.any())
        self.best = best
        self.tokens = tokens


def draw_rows(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Draw from adjusted logits, float32 `[R, V]`: int64 `[R]`. The token of a row that is not finite is arbitrary
    and never used.
    """
    keys = noise_keys((sampling.seed, position) for sampling, position in zip(samplings, positions, strict=True))
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings], dtype=torch.float64)
    cut = [row for row, sampling in enumerate(samplings) if sampling.top_k or sampling.top_p < 1 or sampling.min_p]
    for noise in (gumbel_at, exact_gumbel_at):
        drawing = Drawing(logits, temperatures, keys, noise)
        if cut:
            _draw_truncated(drawing, cut, samplings)
        if len(cut) < len(samplings):
            _draw_from_all(drawing, sorted({*range(len(samplings))}.difference(cut)))
        if not drawing.close:
            break
    return drawing.tokens.clamp_max_(logits.shape[-1] - 1)


def _draw_truncated(drawing: Drawing, rows: Sequence[int], samplings: Sequence[Sampling]) -> None:
    """Look for the tokens that may be drawn among ever more of a row's likeliest ones, until one is found that may
    not.
    """
    vocab = drawing.logits.shape[-1]
    limits = {row: min(samplings[row].top_k or vocab, vocab) for row in rows}
    width = min(max([SHORT, *(limit for limit in limits.values() if limit < vocab)]), vocab)
    while rows:
        ids, kept = _find_allowed(drawing, rows, [samplings[row] for row in rows], width)
        ends = [width >= limits[row] or not last for row, last in zip(rows, kept[:, -1].tolist(), strict=True)]
        kept &= torch.tensor(ends).unsqueeze(1)
        drawing.consider_tokens(torch.tensor(rows)[kept.nonzero()[:, 0]], ids[kept])
        rows = [row for row, ended in zip(rows, ends, strict=True) if not ended]
        width = min(WIDER * width, vocab)


def _find_allowed(
    drawing: Drawing, rows: Sequence[int], samplings: Sequence[Sampling], width: int
) -> tuple[Tensor, Tensor]:
    """Return the `width` likeliest tokens of each row, int64 `[rows, width]`, and which of them may be drawn (bool).

    Those are the tokens that top-k leaves, of these the ones that top-p leaves, and of all the ones that min-p leaves.
    rows: of `drawing`, one for each of `samplings`.
    """
    logits = drawing.logits[rows]
    ids = find_likeliest(logits, width)
    scaled = drawing.scale_logits(logits.gather(-1, ids), rows)
    kept = torch.arange(width) < make_column([sampling.top_k or logits.shape[-1] for sampling in samplings], ids)
    if any(sampling.top_p < 1 for sampling in samplings):
        weights = exact_weights(scaled, BITS).mul_(kept)
        total = weights.sum(-1, keepdim=True)
        for index, (row, sampling) in enumerate(zip(rows, samplings, strict=True)):
            if sampling.top_p < 1 and not 0 < sampling.top_k < logits.shape[-1]:
                total[index] = exact_weights(drawing.scale_logits(logits[index : index + 1], [row]), BITS).sum()
        mass = make_column([sampling.top_p for sampling in samplings], scaled)
        kept &= ((weights.cumsum(-1) - weights).double() < total.double() * mass) | (mass >= 1)
    if any(sampling.min_p for sampling in samplings):
        least = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings]
        kept &= scaled >= make_column(least, scaled)
    return ids, kept


def _draw_from_all(drawing: Drawing, rows: Sequence[int]) -> None:
    """Draw without truncation. Of tokens that are not near the likeliest one, only those are considered whose noise
    exceeds what the best score so far lacks there.
    """
    logits = drawing.logits[rows]
    at = torch.tensor(rows)
    least = (drawing.peaks[rows] - NEAR * drawing.temperatures[rows]).to(logits.dtype)
    near = (logits >= least).nonzero().unbind(-1)
    drawing.consider_tokens(at[near[0]], near[1])
    lacking = (drawing.best[rows] - drawing.scale_logits(least, rows)[:, 0] - ERROR).clamp_min_(LOWEST)
    enough = lacking.neg_().exp_().neg_().exp_().tolist()  # the fractions that have so much noise
    far = [
        (noise_order(drawing.keys[row], logits.shape[-1]) >= int(min(1, fraction) * FRACTION) - 2).nonzero()[:, 0]
        for row, fraction in zip(rows, enough, strict=True)
    ]
    drawing.consider_tokens(at.repeat_interleave(torch.tensor([len(ids) for ids in far])), torch.cat(far))
