"""Top-k, top-p and min-p: which tokens may be drawn. Every comparison is exact, so a row's neighbours cannot matter.

Probabilities are summed as integers, whose sums are the same in any order, and ties go to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.device.exponent import steady_weights
from effects.job import Sampling

SCALE_BITS = 42
SCALE = 2.0**SCALE_BITS  # the likeliest token's weight as an integer; the sum of 2**20 tokens of it still fits
_LOW = 0xFFFFFFFF


def leaders(logits: Tensor, count: int) -> Tensor:
    """Token ids of the `count` largest logits, likeliest first, lower ids first among equals: int64 `[R, count]`."""
    logits = logits + 0.0  # makes -0 equal to 0, also for those who compare bits
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    if (ids := _clear_leaders(logits, count)) is not None:
        return ids
    bits = logits.view(torch.int32).long()
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats, and below a tie-break
    keys = (ordered << 32) | (_LOW - torch.arange(logits.shape[-1]))
    return _LOW - (torch.topk(keys, count).values & _LOW)


def _clear_leaders(logits: Tensor, count: int) -> Tensor | None:
    """The same in a third of the time; None where equal logits stand on both sides of a row's last one."""
    values, ids = logits.topk(count)
    last = values[:, -1:]
    if 0 < count < logits.shape[-1] and not torch.equal((logits == last).sum(-1), (values == last).sum(-1)):
        return None
    ids = ids.sort(-1).values
    return ids.gather(-1, logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices)


def weights_of(scaled: Tensor) -> Tensor:
    """exp of float64 values that are at most 0, as integers that sum alike in any order; on a host, to the bit those of
    any other.
    """
    if scaled.device.type == "cpu":
        return steady_weights(scaled, SCALE_BITS)
    return (scaled.exp() * SCALE).round_().long()


def allowed(logits: Tensor, scaled: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
    """Bool `[R, V]`, or None where no row truncates.

    logits: float32 `[R, V]`. scaled: float64 `[R, V]`, (logits - their maximum) / temperature. The order is top-k,
    top-p over what it left, min-p. The likeliest token always stays.
    """
    keep: Tensor | None = None
    if any(sampling.top_k or sampling.top_p < 1 for sampling in samplings):
        keep = _prefix(logits, scaled, samplings)
    if any(sampling.min_p for sampling in samplings):
        least = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings]
        above = scaled >= column(least, scaled)
        keep = above if keep is None else keep & above
    return keep


def _prefix(logits: Tensor, scaled: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Top-k and top-p both keep the first few of the tokens in order of likelihood."""
    vocab = logits.shape[-1]
    limits = [min(sampling.top_k or vocab, vocab) for sampling in samplings]
    weights = weights_of(scaled)
    limit, mass = column(limits, weights), column([sampling.top_p for sampling in samplings], scaled)
    ids = leaders(logits, max(limits))
    within = torch.arange(max(limits), device=logits.device) < limit
    ranked = weights.gather(-1, ids).mul_(within)
    before = ranked.cumsum(-1) - ranked
    total = torch.where(limit >= vocab, weights.sum(-1, keepdim=True), ranked.sum(-1, keepdim=True))
    kept = within & ((before.double() < total.double() * mass) | (mass >= 1))
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, kept)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One value a row, `[R, 1]`, in the dtype and on the device of `like`; the host does not wait."""
    return torch.tensor(values, dtype=like.dtype).unsqueeze(1).to(like.device, non_blocking=True)
