"""Qwen3-Next: what became Qwen3.5, with experts, and with other names for what its recurrent layers project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.experts_config import read_dense_layers, read_experts
from adapters.models.decoder.family import Family
from adapters.models.families.qwen3_5 import head_shape, named, parse_hybrid
from adapters.models.families.qwen3_5_moe import Qwen35MoeConfig


@frozen
class Qwen3NextConfig(Qwen35MoeConfig):
    by_key_head: ClassVar[bool] = True


def parse(raw: Mapping[str, Any]) -> Qwen3NextConfig:
    """As with qwen3_5, all at one level. Raises CheckpointError."""
    experts = read_experts(raw, normed=True, shared=True)
    dense = read_dense_layers(raw)
    return parse_hybrid(raw, Qwen3NextConfig, experts=experts, dense_layers=dense)


FAMILY = Family("qwen3_next", parse, DenseShard, named, head_shape)
