"""Sampling on a host: `SamplingKernels` by torch, and the compiled library for whole rows where it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define
from torch import Tensor

from adapters.models.kernels.cpu.host_draw import draw_rows
from adapters.models.kernels.cpu.native.draw import NativePicker
from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.models.kernels.cpu.penalties import HostPenalties
from adapters.models.kernels.functions.exact_exp import exact_weights
from adapters.models.kernels.functions.exact_functions import BITS
from adapters.models.kernels.functions.truncation import find_likeliest
from adapters.models.kernels.interfaces.sampling_interface import Penalties, RowPicker
from effects.ids import Tokens
from effects.job import Sampling


@define(eq=False)
class HostSampling:
    """Implements `SamplingKernels`. device: of the logits, normally the processor."""

    device: torch.device

    def open_picker(self) -> RowPicker | None:
        native = find_library()
        return None if native is None else NativePicker(native)

    def find_extremes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = logits.argmax(-1)
        smallest = logits.amin(-1)  # one after the other: that is faster than torch's aminmax
        largest = logits.amax(-1)
        return tokens, torch.stack((tokens.double(), smallest.double(), largest.double()), -1)

    def draw_tokens(
        self,
        logits: Tensor,
        extremes: Tensor,  # noqa: ARG002 - a host finds the largest logit while it draws
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        *,
        tokens: Tensor,
        found: Tensor,
    ) -> None:
        chosen = [*rows]
        tokens[chosen] = draw_rows(logits[chosen], samplings, positions)
        found[:, 0] = tokens

    def weigh_tokens(self, logits: Tensor, rows: Sequence[int], tokens: Tensor, count: int) -> Tensor:
        logits = logits[rows]
        scaled = logits.double()
        scaled -= scaled.amax(-1, keepdim=True)
        total = exact_weights(scaled, BITS).sum(-1, keepdim=True).double() / 2.0**BITS
        ids = find_likeliest(logits, count)
        own = scaled.gather(-1, tokens[rows].unsqueeze(-1))
        return torch.cat((own, ids.double(), scaled.gather(-1, ids), total), -1)

    def make_penalties(self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float]) -> Penalties:
        return HostPenalties(sampling, prompt, vocab, biases, self.device)

    def apply_penalties(self, logits: Tensor, rows: Sequence[tuple[Penalties | None, Sequence[int]]]) -> Tensor:
        adjusted = logits[: len(rows)].clone()
        for index, (penalties, drafted) in enumerate(rows):
            if isinstance(penalties, HostPenalties):
                adjusted[index] = penalties.adjust(logits[index], drafted)
        return adjusted
