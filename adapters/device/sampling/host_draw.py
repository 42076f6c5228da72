"""Tokens drawn on a host, with noise for those tokens alone that could be the one.

Two logarithms a token are most of what a draw costs, so few tokens get any: what truncation leaves, or, where nothing
is truncated, those that are near the likeliest one, and those whose noise is known, by its bits, to make up for the
distance. What is picked is what noise for all of them would pick. All rows go together: a few hundred elements take an
operation no longer than ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.device.sampling.exact_exp import steady_weights
from adapters.device.sampling.noise import FRACTION, fractions, gumbel_at, keys_of, steady_gumbel_at
from adapters.device.sampling.truncation import column, leaders
from adapters.models.kernels.exact_functions import BITS
from effects.job import Sampling

SHORT, WIDER = 64, 8  # what may be drawn is looked for among so few first: ranking all takes longer than a layer does
NEAR = 8.0  # natural logarithms below the likeliest token: of what is further off, about one in e**10 is looked at
LOWEST = -6.0  # no noise is lower
CLOSE = 1e-9  # farther apart, no library's logarithms make another token the one than those that are right to the bit
ERROR = 1e-6  # far more than noise is off by rounding


@define(eq=False)
class Drawing:
    """Rows of logits, float32 `[R, V]`, and the best tokens so far. temperatures: float64 `[R, 1]`; keys: int64 `[R]`,
    of their noise. noise: of a key and a token each. close: has it been near enough for a library's logarithm to be
    wrong?
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

    def scaled(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Of these rows, one or more tokens each; the likeliest one has 0."""
        return (logits.double() - self.peaks[rows]) / self.temperatures[rows]

    def consider(self, rows: Tensor, ids: Tensor) -> None:
        """Is it one of these? int64 `[n]` both; of equal sums the lowest id wins."""
        scaled = (self.logits[rows, ids].double() - self.peaks[rows, 0]) / self.temperatures[rows, 0]
        scores = scaled + self.noise(self.keys[rows], ids)
        best = self.best.scatter_reduce(0, rows, scores, "amax")
        wins = scores == best[rows]
        tokens = self.tokens.masked_fill(best > self.best, self.logits.shape[-1])
        tokens = tokens.scatter_reduce(0, rows[wins], ids[wins], "amin")
        near = (scores > best[rows] - CLOSE) & (ids != tokens[rows])
        moved = (best - self.best < CLOSE) & (tokens != self.tokens)
        self.close |= bool(near.any() or moved.any())
        self.best, self.tokens = best, tokens


def drawn(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """From adjusted logits, float32 `[R, V]` -> int64 `[R]`. Any token, where a row is not finite: nobody uses it."""
    keys = keys_of((sampling.seed, position) for sampling, position in zip(samplings, positions, strict=True))
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings], dtype=torch.float64)
    cut = [row for row, sampling in enumerate(samplings) if sampling.top_k or sampling.top_p < 1 or sampling.min_p]
    for noise in (gumbel_at, steady_gumbel_at):
        drawing = Drawing(logits, temperatures, keys, noise)
        if cut:
            _truncated(drawing, cut, samplings)
        if len(cut) < len(samplings):
            _whole(drawing, sorted({*range(len(samplings))}.difference(cut)))
        if not drawing.close:
            break
    return drawing.tokens.clamp_max_(logits.shape[-1] - 1)


def _truncated(drawing: Drawing, rows: Sequence[int], samplings: Sequence[Sampling]) -> None:
    """Those of a row are looked for among ever more of its likeliest tokens, until one that may not be drawn is."""
    vocab = drawing.logits.shape[-1]
    limits = {row: min(samplings[row].top_k or vocab, vocab) for row in rows}
    width = min(max([SHORT, *(limit for limit in limits.values() if limit < vocab)]), vocab)
    while rows:
        ids, kept = _leading(drawing, rows, [samplings[row] for row in rows], width)
        ends = [width >= limits[row] or not last for row, last in zip(rows, kept[:, -1].tolist(), strict=True)]
        kept &= torch.tensor(ends).unsqueeze(1)
        drawing.consider(torch.tensor(rows)[kept.nonzero()[:, 0]], ids[kept])
        rows = [row for row, ended in zip(rows, ends, strict=True) if not ended]
        width = min(WIDER * width, vocab)


def _leading(drawing: Drawing, rows: Sequence[int], samplings: Sequence[Sampling], width: int) -> tuple[Tensor, Tensor]:
    """The `width` likeliest tokens of each row, and which of them may be drawn: by top-k, by top-p over what it left,
    and by min-p.
    """
    logits = drawing.logits[rows]
    ids = leaders(logits, width)
    scaled = drawing.scaled(logits.gather(-1, ids), rows)
    kept = torch.arange(width) < column([sampling.top_k or logits.shape[-1] for sampling in samplings], ids)
    if any(sampling.top_p < 1 for sampling in samplings):
        weights = steady_weights(scaled, BITS).mul_(kept)
        total = weights.sum(-1, keepdim=True)
        for index, (row, sampling) in enumerate(zip(rows, samplings, strict=True)):
            if sampling.top_p < 1 and not 0 < sampling.top_k < logits.shape[-1]:
                total[index] = steady_weights(drawing.scaled(logits[index : index + 1], [row]), BITS).sum()
        mass = column([sampling.top_p for sampling in samplings], scaled)
        kept &= ((weights.cumsum(-1) - weights).double() < total.double() * mass) | (mass >= 1)
    if any(sampling.min_p for sampling in samplings):
        least = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings]
        kept &= scaled >= column(least, scaled)
    return ids, kept


def _whole(drawing: Drawing, rows: Sequence[int]) -> None:
    """Of what is not near the likeliest one, only what has more noise than the best of those that are lacks there."""
    logits, at = drawing.logits[rows], torch.tensor(rows)
    least = (drawing.peaks[rows] - NEAR * drawing.temperatures[rows]).to(logits.dtype)
    near = (logits >= least).nonzero().unbind(-1)
    drawing.consider(at[near[0]], near[1])
    lacking = (drawing.best[rows] - drawing.scaled(least, rows)[:, 0] - ERROR).clamp_min_(LOWEST)
    enough = lacking.neg_().exp_().neg_().exp_().tolist()  # the fractions that have so much noise
    far = [
        (fractions(drawing.keys[row], logits.shape[-1]) >= int(min(1, fraction) * FRACTION) - 2).nonzero()[:, 0]
        for row, fraction in zip(rows, enough, strict=True)
    ]
    drawing.consider(at.repeat_interleave(torch.tensor([len(ids) for ids in far])), torch.cat(far))
