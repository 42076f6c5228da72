"""Qwen3 (dense): heads of queries and keys are normed, nothing has a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from adapters.checkpoint.config_fields import refuse_flag
from adapters.models.decoder.dense_config import DenseConfig, parse_dense
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.rope import parse_rope

HEAD_DIM = 128  # where none is told, as in transformers


@frozen
class Qwen3Config(DenseConfig):
    qk_norm: ClassVar[bool] = True


def parse(raw: Mapping[str, Any]) -> Qwen3Config:
    """rope_theta must be told: all published files do, and a wrong one is not noticed at once."""
    refuse_flag(raw, "attention_bias")
    theta, _ = parse_rope(raw, ("default",))
    return parse_dense(raw, Qwen3Config, head_dim=HEAD_DIM, rope_theta=theta)


FAMILY = Family("qwen3", parse, DenseShard)
