"""Qwen3 with experts: attention is that of dense Qwen3, and all or some feed-forwards consist of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from adapters.checkpoint.config_fields import refuse_flag
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.experts_config import read_dense_layers, read_experts
from adapters.models.decoder.config.rope import parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.families.qwen3 import HEAD_DIM, Qwen3Config
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape


@frozen
class Qwen3MoeConfig(Qwen3Config):
    """A Qwen3 model with experts.

    experts: None only for the shape of one dense layer. dense_layers: the layers without experts.
    """

    experts: ExpertsShape | None = field(kw_only=True)
    dense_layers: tuple[int, ...] = field(kw_only=True, default=())

    def shape_of(self, layer: int) -> DenseConfig:
        return evolve(self, experts=None) if layer in self.dense_layers else self

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer with few experts and one dense layer, as far as the model has such layers."""
        assert self.experts is not None
        kinds = dict.fromkeys((0,) if layer in self.dense_layers else () for layer in range(self.num_layers))
        few = self.experts.shrink_for_probe()
        return tuple((self._small(experts=few, dense_layers=dense), range(1)) for dense in kinds)


def parse(raw: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError.

    rope_theta is required, as with qwen3.
    """
    refuse_flag(raw, "attention_bias")
    theta, _ = parse_rope(raw, ("default",))
    experts = read_experts(raw, default_normalized=False, shared=False)
    dense = read_dense_layers(raw)
    fields = read_dense_fields(raw, head_dim=HEAD_DIM)
    return Qwen3MoeConfig(**fields, experts=experts, dense_layers=dense, rope_theta=theta)


FAMILY = Family("qwen3_moe", parse, DenseShard)
