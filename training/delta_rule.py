"""The gated delta rule for training: chunks of 64 rows at once, and the states between them by a parallel scan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """For each row S <- exp(decay) S, then S <- S + k (beta (v - k S)), and out comes q S.

    q, k: float32 [rows, heads, length, dk], of length 1, q scaled.  v: [rows, heads, length, dv].
    decay, beta: [rows, heads, length].  Gives float32 [rows, heads, length, dv].
    """
    length = q.shape[2]
    missing = -length % CHUNK
    if missing:
        q, k, v = (functional.pad(part, (0, 0, 0, missing)) for part in (q, k, v))
        decay, beta = (functional.pad(part, (0, missing)) for part in (decay, beta))
    q, k, v = (torch.unflatten(part, 2, (-1, CHUNK)) for part in (q, k, v))
    decay, beta = torch.unflatten(decay, 2, (-1, CHUNK)), torch.unflatten(beta, 2, (-1, CHUNK)).unsqueeze(-1)
    total = decay.cumsum(-1)  # the logarithm of what is left, at a row, of what the chunk began with
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    left = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    since_start, to_end = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    # What the rows of a chunk correct each other by is triangular: solved once for what they write by themselves and
    # for what they take from the state before them.
    system = (beta * k) @ k.mT * left
    both = torch.cat((beta * v, beta * k * since_start), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    own, taken = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    ending = (k * to_end).mT
    kept = torch.diag_embed(total[..., -1].exp().unsqueeze(-1).expand(*total.shape[:-1], k.shape[-1])) - ending @ taken
    before = functional.pad(states_after(kept, ending @ own)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    written = own - taken @ before
    out = (q * since_start) @ before + (q @ k.mT * left) @ written
    return out.flatten(2, 3)[:, :, :length]


def states_after(kept: Tensor, added: Tensor) -> Tensor:
    """The state after each chunk, where a chunk makes `kept @ state + added` of the one before; from zero on.

    kept: [rows, heads, chunks, dk, dk].  added: [rows, heads, chunks, dk, dv].
    """
    step = 1
    while step < added.shape[2]:
        now = kept[:, :, step:]
        added = torch.cat((added[:, :, :step], added[:, :, step:] + now @ added[:, :, :-step]), 2)
        kept = torch.cat((kept[:, :, :step], now @ kept[:, :, :-step]), 2)
        step *= 2
    return added
