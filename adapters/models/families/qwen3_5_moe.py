"""Qwen3.5 and Qwen3.6 with experts: every layer's feed-forward is one, with an expert that all rows go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from adapters.models.decoder.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.experts_config import read_experts
from adapters.models.decoder.family import Family
from adapters.models.families.qwen3_5 import FULL, Qwen35Config, accept, head_shape, named, parse_hybrid, text_of
from adapters.models.kernels.experts_interface import ExpertsShape


@frozen
class Qwen35MoeConfig(Qwen35Config):
    """experts: None only of one dense layer. dense_layers: those without any."""

    experts: ExpertsShape | None = field(kw_only=True)
    dense_layers: tuple[int, ...] = field(kw_only=True, default=())

    def shape_of(self, layer: int) -> Qwen35Config:
        return evolve(self, experts=None) if layer in self.dense_layers else self

    def probed(self) -> Sequence[tuple[DenseConfig, range]]:
        """One layer of each kind that there is, with few experts where it has any."""
        assert self.experts is not None
        few = self.experts.shrink_for_probe()
        dense = ((0,) if layer in self.dense_layers else () for layer in range(self.num_layers))
        kinds = dict.fromkeys(zip(self.layer_types, dense, strict=True))
        return tuple(
            (self._small(layer_types=(kind, FULL), experts=few, dense_layers=dense), range(1)) for kind, dense in kinds
        )


def parse(raw: Mapping[str, Any]) -> Qwen35MoeConfig:
    """As with qwen3_5; the chosen experts' weights always add up to one. Raises CheckpointError."""
    text = text_of(raw, "qwen3_5_moe_text")
    accept(text, "norm_topk_prob", (True,))
    accept(text, "decoder_sparse_step", (1,))
    accept(text, "mlp_only_layers", ([],))
    experts = read_experts(text, normed=True, shared=True)
    return parse_hybrid(text, Qwen35MoeConfig, experts=experts, inner=experts.inner)


FAMILY = Family("qwen3_5_moe", parse, DenseShard, named, head_shape)
