"""Biases and penalties on a GPU: one launch for all rows of a step, whichever requests they belong to.

The kernels are in `triton/penalties_kernel.py`. `cpu/penalties.py` makes the same bits on a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from adapters.models.kernels.cuda.draw import BLOCK, OPTIONS
from adapters.models.kernels.interfaces.sampling_interface import PENDING, Penalties
from adapters.models.kernels.triton.penalties_kernel import change_part, count_token, mark_token, put_bias
from adapters.models.kernels.triton_launch import launch
from effects.ids import Tokens
from effects.job import Sampling

NUMBERS = 7  # that the kernel reads about a row; all are 0 for a row without penalties


class GpuPenalties:
    """Implements `Penalties`.

    The device counts tokens of the answer in batches of more than PENDING. Until then each step carries them along.
    """

    def __init__(
        self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float], device: torch.device
    ) -> None:
        factors = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.remembers = factors != (1, 0, 0)
        self._device = device
        # int32 [V]: twice how often the token is in the answer, and one more if it is in the prompt.
        self._history: Tensor | None = None
        self._bias: Tensor | None = None  # float32 [V]
        self._pending = list[int]()
        if self.remembers:
            self._history = torch.zeros(vocab, dtype=torch.int32, device=device)
            if prompt:
                launch(mark_token, (len(prompt),), self._history, self._on_device(prompt, torch.int32), num_warps=1)
        if biases:
            self._bias = torch.zeros(vocab, device=device)
            ids = self._on_device([*biases], torch.int32)
            values = self._on_device([*biases.values()], torch.float32)
            launch(put_bias, (len(biases),), self._bias, ids, values, num_warps=1)
        addresses = (0 if one is None else one.data_ptr() for one in (self._history, self._bias))
        self._asked = (*addresses, *np.array(factors, np.float32).view(np.int32).tolist())

    def append(self, tokens: Sequence[int]) -> None:
        if self._history is None:
            return
        self._pending += tokens
        if len(self._pending) > PENDING:
            ids = self._on_device(self._pending, torch.int32)
            launch(count_token, (len(self._pending),), self._history, ids, num_warps=1)
            self._pending.clear()

    def _on_device(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

    def describe(self, drafted: Sequence[int], start: int) -> tuple[list[int], list[int]]:
        """Return what the kernel reads about a row, and the tokens that the device has not counted yet. These begin at
        `start` among the tokens of all rows.
        """
        uncounted = [*self._pending, *drafted] if self.remembers else []
        return [*self._asked, start, len(uncounted)], uncounted


def apply_penalties(logits: Tensor, rows: Sequence[tuple[Penalties | None, Sequence[int]]]) -> Tensor:
    """Return adjusted logits as `SamplingKernels.apply_penalties` does."""
    described = list[int]()
    uncounted = list[int]()
    for penalties, drafted in rows:
        if isinstance(penalties, GpuPenalties):
            numbers, tokens = penalties.describe(drafted, len(uncounted))
            described += numbers
            uncounted += tokens
        else:
            described += [0] * NUMBERS
    width = logits.shape[-1]
    out = torch.empty(len(rows), width, device=logits.device)
    asked = torch.tensor(described + uncounted, dtype=torch.int64).to(logits.device, non_blocking=True)
    grid = (len(rows), -(-width // BLOCK))
    launch(change_part, grid, logits, out, asked, logits.stride(0), width, len(rows), **OPTIONS)
    return out
