"""What biases and penalties make of a request's logits: on a host by torch, a row at a time; on a GPU in one launch for
all rows of a step, whoever they are (`models/kernels/triton/penalties_kernel.py`). The same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from adapters.device.sampling.gpu_draw import BLOCK, HOW
from effects.ids import Tokens
from effects.job import Sampling

PENDING = 32  # tokens of an answer that are told of with each step until they are counted on the GPU


class Penalties(Protocol):
    """Of one request. remembers: does what it makes of logits depend on the answer so far?"""

    remembers: bool

    def append(self, tokens: Sequence[int]) -> None:
        """These are part of the answer now."""
        ...


def penalties_of(sampling: Sampling, prompt: Tokens, vocab: int, device: torch.device) -> Penalties | None:
    """None, where a request has none. prompt: every token before the answer. Raises ValueError for a bias on a token
    that the model does not have.
    """
    biases = dict(sampling.logit_bias)
    for token in biases:
        if not 0 <= token < vocab:
            raise ValueError(f"logit_bias names token {token}; the model's are 0..{vocab - 1}")
    remembers = sampling.repetition_penalty != 1 or bool(sampling.presence_penalty or sampling.frequency_penalty)
    if not biases and not remembers:
        return None
    kind = GpuPenalties if device.type == "cuda" else HostPenalties
    return kind(sampling, prompt if sampling.repetition_penalty != 1 else (), vocab, biases, device)


class HostPenalties:
    def __init__(
        self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float], device: torch.device
    ) -> None:
        self._sampling, self._device = sampling, device
        self._bias = (
            (torch.tensor(list(biases), device=device), torch.tensor(list(biases.values()), device=device))
            if biases
            else None
        )
        self._seen: Tensor | None = None  # bool [V]: in the prompt or in the answer
        self._counts: Tensor | None = None  # float32 [V]: how often in the answer
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

    def adjusted(self, logits: Tensor, drafted: Sequence[int] = ()) -> Tensor:
        """float32 `[V]`, as if `drafted` were the end of the answer. `logits` stays as is."""
        sampling, logits = self._sampling, logits.clone()
        seen, counts = self._seen, self._counts
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


class GpuPenalties:
    def __init__(
        self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float], device: torch.device
    ) -> None:
        from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415
        from adapters.models.kernels.triton.penalties_kernel import mark_token, put_bias  # noqa: PLC0415 - needs Triton

        factors = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        self.remembers, self._device = factors != (1, 0, 0), device
        self._history: Tensor | None = None  # int32 [V]: twice how often in the answer, and one more for the prompt
        self._bias: Tensor | None = None  # float32 [V]
        self._pending = list[int]()
        if self.remembers:
            self._history = torch.zeros(vocab, dtype=torch.int32, device=device)
            if prompt:
                launch(mark_token, (len(prompt),), self._history, self._there(prompt, torch.int32), num_warps=1)
        if biases:
            self._bias = torch.zeros(vocab, device=device)
            values = self._there([*biases.values()], torch.float32)
            launch(put_bias, (len(biases),), self._bias, self._there([*biases], torch.int32), values, num_warps=1)
        places = (0 if one is None else one.data_ptr() for one in (self._history, self._bias))
        self._asked = *places, *np.array(factors, np.float32).view(np.int32).tolist()

    def append(self, tokens: Sequence[int]) -> None:
        if self._history is None:
            return
        self._pending += tokens
        if len(self._pending) > PENDING:
            from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415
            from adapters.models.kernels.triton.penalties_kernel import count_token  # noqa: PLC0415 - needs Triton

            ids = self._there(self._pending, torch.int32)
            launch(count_token, (len(self._pending),), self._history, ids, num_warps=1)
            self._pending.clear()

    def _there(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

    def asked(self, drafted: Sequence[int], start: int) -> tuple[list[int], list[int]]:
        """What the kernel is told of a row, and of tokens that it does not know of yet, which begin at `start`."""
        more = [*self._pending, *drafted] if self.remembers else []
        return [*self._asked, start, len(more)], more


def changed(logits: Tensor, rows: Sequence[tuple[Penalties | None, Sequence[int]]]) -> Tensor:
    """float32 `[R, V]`, on a GPU, with what each row's request makes of it; `logits`, of as many rows at least, stays
    as it is. The host waits for nothing.
    """
    from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415
    from adapters.models.kernels.triton.penalties_kernel import change_part  # noqa: PLC0415 - needs Triton

    told, more = list[int](), list[int]()
    for penalties, drafted in rows:
        if isinstance(penalties, GpuPenalties):
            numbers, besides = penalties.asked(drafted, len(more))
            told += numbers
            more += besides
        else:
            told += [0] * 7
    width = logits.shape[-1]
    out = torch.empty(len(rows), width, device=logits.device)
    asked = torch.tensor(told + more, dtype=torch.int64).to(logits.device, non_blocking=True)
    grid = len(rows), -(-width // BLOCK)
    launch(change_part, grid, logits, out, asked, logits.stride(0), width, len(rows), **HOW)
    return out
