"""Sampling on a CUDA device: `SamplingKernels` by launches of the Triton programs in `triton/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define
from torch import Tensor

from adapters.models.kernels.cuda.draw import draw_tokens, find_extremes, weigh_tokens
from adapters.models.kernels.cuda.penalties import GpuPenalties, apply_penalties
from adapters.models.kernels.interfaces.sampling_interface import Penalties, RowPicker
from effects.ids import Tokens
from effects.job import Sampling


@define(eq=False)
class CudaSampling:
    """Implements `SamplingKernels`. device: the GPU that has the logits."""

    device: torch.device

    def open_picker(self) -> RowPicker | None:
        return None

    def find_extremes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return find_extremes(logits)

    def draw_tokens(
        self,
        logits: Tensor,
        extremes: Tensor,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        *,
        tokens: Tensor,
        found: Tensor,
    ) -> None:
        draw_tokens(logits, extremes, rows, samplings, positions, tokens=tokens, found=found)

    def weigh_tokens(self, logits: Tensor, rows: Sequence[int], tokens: Tensor, count: int) -> Tensor:
        extremes = find_extremes(logits)[1]
        return weigh_tokens(logits, extremes, rows, tokens, count)

    def make_penalties(self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float]) -> Penalties:
        return GpuPenalties(sampling, prompt, vocab, biases, self.device)

    def apply_penalties(self, logits: Tensor, rows: Sequence[tuple[Penalties | None, Sequence[int]]]) -> Tensor:
        return apply_penalties(logits, rows)
