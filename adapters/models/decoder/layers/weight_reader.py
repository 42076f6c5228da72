"""Reads the weights of a model onto a device."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, PackedSource, StackedWeight
from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.layers.embedding import host_table
from adapters.models.decoder.layers.host_experts import HostExperts

_EXPERTS = ".mlp.experts."


@frozen
class WeightReader:
    """Reads weights onto a device, in the model's dtype.

    offloaded: keeps the weights of experts in host memory; None: they go to the device. wide_norms: norms multiply in
    float32, and round once. cpu_experts: compute the experts of this layer on the host; None: the device does.
    """

    weights: WeightSource
    device: torch.device
    dtype: torch.dtype
    offloaded: HostExperts | None = None
    wide_norms: bool = False
    cpu_experts: CpuExperts | None = None

    @property
    def on_host(self) -> WeightReader:
        """The reader of the experts that the host computes."""
        assert self.cpu_experts is not None
        return evolve(
            self, weights=self.cpu_experts.weights, device=torch.device("cpu"), offloaded=None, cpu_experts=None
        )

    def __call__(self, *names: str) -> Tensor:
        """Return the named tensors, stacked along their rows."""
        parts = [self.weights.read(name).to(self.device, self.dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def table(self, *, on_host: bool) -> Tensor:
        """Return the embedding. on_host: keep it in host memory, if the device can read it there."""
        name = "model.embed_tokens.weight"
        kept = host_table(self.weights.read(name).to(self.dtype)) if on_host else None
        return self(name) if kept is None else kept

    def matrix(self, *names: str) -> StackedWeight:
        """Return the named tensors, stacked along their rows. Packed ones stay packed."""
        return StackedWeight(tuple(self._part(name) for name in names), self.dtype, self.device)

    def head(self, table: Tensor | None) -> Tensor | StackedWeight:
        """Return the weight of the head. table: the embedding that it is tied to; None: the head has its own weight.

        A tied head shares the memory of the embedding, unless the checkpoint has that packed.
        """
        if table is None:
            return self.matrix("lm_head.weight")
        name = "model.embed_tokens.weight"
        return table if self._find_packed_source(name) is None else self.matrix(name)

    def _part(self, name: str) -> Tensor | PackedMatrix:
        source = self._find_packed_source(name)
        if source is None:
            return self(name)
        matrix = source.read_packed(name)
        # No kernel rounds rows of experts.
        return evolve(matrix, layout=evolve(matrix.layout, rounds_rows=False)) if _EXPERTS in name else matrix

    def _find_packed_source(self, name: str) -> PackedSource | None:
        source = self.weights
        return source if isinstance(source, PackedSource) and source.find_layout(name) is not None else None

    def wide(self, name: str) -> Tensor:
        """Return one tensor in float32."""
        return self.weights.read(name).to(self.device, torch.float32).contiguous()

    def norm(self, name: str, *, zero_centred: bool) -> Tensor:
        """Return the factors of a norm: the weight as it is, or 1 + weight in float32.

        In the model's dtype the sum would be rounded.
        """
        if zero_centred:
            return self.wide(name) + 1
        return self.wide(name) if self.wide_norms else self(name)
