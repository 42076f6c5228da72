"""Biases and penalties of one request on a host, by torch, one row at a time.

`cuda/penalties.py` makes the same bits on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from effects.ids import Tokens
from effects.job import Sampling


class HostPenalties:
    """Implements `Penalties`. prompt: counts as seen for the repetition penalty."""

    def __init__(
        self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float], device: torch.device
    ) -> None:
        self._sampling = sampling
        self._device = device
        self._bias: tuple[Tensor, Tensor] | None = None  # token ids and their values
        if biases:
            ids = torch.tensor(list(biases), device=device)
            self._bias = (ids, torch.tensor(list(biases.values()), device=device))
        self._seen: Tensor | None = None  # bool [V]: the token is in the prompt or in the answer
        self._counts: Tensor | None = None  # float32 [V]: how often the token is in the answer
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._seen.scatter_(0, self._ids(sorted(set(prompt))), True)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(vocab, device=device)
        self.remembers = self._seen is not None or self._counts is not None

    def append(self, tokens: Sequence[int]) -> None:
        if self._seen is not None:
            self._seen.scatter_(0, self._ids(tokens), True)
        if self._counts is not None:
            self._counts.scatter_add_(0, self._ids(tokens), torch.ones(len(tokens), device=self._device))

    def adjust(self, logits: Tensor, drafted: Sequence[int] = ()) -> Tensor:
        """Return adjusted logits, float32 `[V]`, as if `drafted` were the end of the answer. `logits` stays as is."""
        sampling = self._sampling
        logits = logits.clone()
        seen = self._seen
        counts = self._counts
        if self._bias is not None:
            logits.scatter_add_(0, *self._bias)
        if seen is not None:
            if drafted:
                seen = seen.scatter(0, self._ids(drafted), True)
            penalty = torch.full_like(logits, sampling.repetition_penalty)
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if counts is not None:
            if drafted:
                counts = counts.scatter_add(0, self._ids(drafted), torch.ones(len(drafted), device=self._device))
            logits -= counts * sampling.frequency_penalty
            logits -= (counts > 0) * sampling.presence_penalty
        return logits

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self._device)
