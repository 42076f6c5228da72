"""Qwen3-Next: the predecessor of Qwen3.5, with experts and with other names for the recurrent layers' projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from adapters.models.decoder.config.experts_config import read_dense_layers, read_experts
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, use_own_shape
from adapters.models.families.qwen3_5 import find_text_name, read_hybrid_fields
from adapters.models.families.qwen3_5_moe import Qwen35MoeConfig


@frozen
class Qwen3NextConfig(Qwen35MoeConfig):
    by_key_head: ClassVar[bool] = True


def parse(raw: Mapping[str, Any]) -> Qwen3NextConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError.

    The fields are those of qwen3_5, but all of them are at the top level.
    """
    experts = read_experts(raw, default_normalized=True, shared=True)
    dense = read_dense_layers(raw)
    return Qwen3NextConfig(**read_hybrid_fields(raw), experts=experts, dense_layers=dense)


FAMILY = Family("qwen3_next", parse, DenseShard, find_text_name, head_shape=use_own_shape)
