"""Qwen3 (dense): heads of queries and keys are normed, and nothing has a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from adapters.checkpoint.config_fields import refuse_flag
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.rope import parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family

HEAD_DIM = 128  # the default of transformers, for files without head_dim


@frozen
class Qwen3Config(DenseConfig):
    qk_norm: ClassVar[bool] = True


def parse(raw: Mapping[str, Any]) -> Qwen3Config:
    """Return the configuration that this config.json describes. Raises CheckpointError.

    rope_theta is required. All published files have it, and a wrong default would not be noticed at once.
    """
    refuse_flag(raw, "attention_bias")
    theta, _ = parse_rope(raw, ("default",))
    return Qwen3Config(**read_dense_fields(raw, head_dim=HEAD_DIM), rope_theta=theta)


FAMILY = Family("qwen3", parse, DenseShard)
