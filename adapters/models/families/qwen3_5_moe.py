"""Qwen3.5 and Qwen3.6 with experts: every feed-forward consists of experts, one of which all rows go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from adapters.checkpoint.config_fields import check_field, find_text_settings
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.experts_config import read_experts
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, use_own_shape
from adapters.models.families.qwen3_5 import (
    FULL,
    Qwen35Config,
    find_text_name,
    read_hybrid_fields,
)
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape


@frozen
class Qwen35MoeConfig(Qwen35Config):
    """A hybrid model with experts.

    experts: None only for the shape of one dense layer. dense_layers: the layers without experts.
    """

    experts: ExpertsShape | None = field(kw_only=True)
    dense_layers: tuple[int, ...] = field(kw_only=True, default=())

    def shape_of(self, layer: int) -> Qwen35Config:
        return evolve(self, experts=None) if layer in self.dense_layers else self

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer of each kind that the model has. A layer with experts gets few of them."""
        assert self.experts is not None
        few = self.experts.shrink_for_probe()
        dense = ((0,) if layer in self.dense_layers else () for layer in range(self.num_layers))
        kinds = dict.fromkeys(zip(self.layer_types, dense, strict=True))
        return tuple(
            (self._small(layer_types=(kind, FULL), experts=few, dense_layers=dense), range(1)) for kind, dense in kinds
        )


def parse(raw: Mapping[str, Any]) -> Qwen35MoeConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError.

    The fields are those of qwen3_5. The weights of the chosen experts always add up to one.
    """
    text = find_text_settings(raw, "qwen3_5_moe_text")
    check_field(text, "norm_topk_prob", (True,))
    check_field(text, "decoder_sparse_step", (1,))
    check_field(text, "mlp_only_layers", ([],))
    experts = read_experts(text, default_normalized=True, shared=True)
    return Qwen35MoeConfig(**read_hybrid_fields(text, experts.inner), experts=experts)


FAMILY = Family("qwen3_5_moe", parse, DenseShard, find_text_name, head_shape=use_own_shape)
