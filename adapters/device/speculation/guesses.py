"""Picks of proposals from a draft's logits: as the target would pick, with a share of its noise.

A draft proposes with the sampling settings and the noise of the request. The target picks the largest of its logits /
temperature + noise. The draft does the same with its own logits and the same noise. They agree far more often than if
the draft proposed its likeliest tokens. Only the likeliest tokens are looked at, because a proposal may be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from adapters.device.sampling.sampler import Draw, Sampler
from adapters.models.kernels.factory import build_sampling
from adapters.models.kernels.functions.noise import gumbel_of
from adapters.models.kernels.functions.truncation import make_column
from effects.job import Sampling

CANDIDATES = 64  # the draft's likeliest tokens, from which the proposal of a position is drawn
# The share of the target's noise for the first proposal, and for those that are made without knowing the one before.
FIRST_NOISE_SHARE = 0.8
LATER_NOISE_SHARE = 0.6
TOP_P_SHARE = 0.95  # of the request's top-p: the tail of a draft is less reliable than the target's


def noise_shares(count: int) -> list[float]:
    """Return the share of the target's noise with which each of `count` proposals of one block is picked.

    With all of the noise, a perfect draft would pick the target's own tokens. The less a draft knows, the more its own
    probabilities should count. All proposals but the first are made without knowing the token before them.
    """
    return [FIRST_NOISE_SHARE, *[LATER_NOISE_SHARE] * (count - 1)][:count]


def pick_guesses(logits: Tensor, rows: Sequence[Draw], noise: Sequence[float]) -> list[int]:
    """Pick one token per row of float32 `[R, V]`, bias and penalties included. noise: from `noise_shares`."""
    if logits.is_cuda:
        return list(launch_guesses(logits, rows, noise).tolist())
    if not any(row.sampler.sampling.temperature for row in rows):
        return list(logits.argmax(-1).tolist())
    native = rows[0].sampler.native
    if native is not None:
        wanted = [
            (draft_sampling(row.sampler, share), row.position, None) for row, share in zip(rows, noise, strict=True)
        ]
        return [int(token) for (token, _, _), _ in native.pick(logits, logits, wanted)]
    ids, scores = rank_candidates(logits, rows, noise)
    return list(ids.gather(-1, scores.argmax(-1, keepdim=True)).flatten().tolist())


def launch_guesses(logits: Tensor, rows: Sequence[Draw], noise: Sequence[float]) -> Tensor:
    """Pick the same tokens, int64 `[R]` on the device of the logits. On CUDA the host does not wait for them."""
    if not logits.is_cuda:
        return torch.tensor(pick_guesses(logits, rows, noise))
    warm = [index for index, row in enumerate(rows) if row.sampler.sampling.temperature]
    kernels = build_sampling(logits.device)
    tokens, found = kernels.find_extremes(logits)
    if warm:
        samplings = [draft_sampling(rows[index].sampler, noise[index]) for index in warm]
        positions = [rows[at].position for at in warm]
        kernels.draw_tokens(logits, found, warm, samplings, positions, tokens=tokens, found=found)
    return tokens


def draft_sampling(sampler: Sampler, share: float) -> Sampling:
    """Return the request's settings for a draft, made once. A share of the noise is that share of the temperature."""
    found = sampler.draft_samplings.get(share)
    own = sampler.sampling
    if found is None:
        found = evolve(own, temperature=share * own.temperature, top_p=TOP_P_SHARE * own.top_p, logprobs=-1)
        sampler.draft_samplings[share] = found
    return found


def rank_candidates(logits: Tensor, rows: Sequence[Draw], noise: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each row, int64 `[R, n]`, and the scores that a draw compares, float32 `[R, n]`.

    A score is logit / temperature + a share of the noise, and -inf for a token that the request truncates. For a greedy
    row it is the logit.
    """
    found, ids = logits.topk(min(CANDIDATES, logits.shape[-1]))
    asked = [row.sampler.sampling for row in rows]
    samplings = [sampling if sampling.temperature else Sampling(temperature=1) for sampling in asked]
    warmth = make_column([sampling.temperature for sampling in samplings], found)
    scaled = found / warmth
    drawn = gumbel_of([(sampling.seed, row.position) for sampling, row in zip(asked, rows, strict=True)], ids)
    shares_used = [share * (sampling.temperature > 0) for share, sampling in zip(noise, asked, strict=True)]
    scores = scaled + drawn * make_column(shares_used, drawn)
    shares = (scaled - (logits / warmth).logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1) - shares
    most = make_column([sampling.top_k or CANDIDATES for sampling in samplings], ids)
    out = torch.arange(ids.shape[1], device=ids.device) >= most
    out |= before >= make_column([TOP_P_SHARE * sampling.top_p for sampling in samplings], before)
    out |= shares < shares[:, :1] * make_column([sampling.min_p for sampling in samplings], shares)
    return ids, scores.masked_fill_(out, -math.inf).float()
