"""Llama 2, Llama 3 and dense models of the same structure.

Heads are not normed, nothing has a bias, and rotary embedding may be scaled in one of several ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from adapters.checkpoint.config_fields import refuse_flag
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.rope import Rotary, Scaling, parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family

THETA = 10_000.0  # the files of Llama 2 do not give rope_theta
# `dynamic` and `longrope` are not accepted: a row would depend on the rows that follow it.
ROPES = ("default", "linear", "llama3", "yarn")


@frozen
class LlamaConfig(DenseConfig):
    rope_scaling: Scaling | None = None

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.rope_theta, self.rope_scaling)


def parse(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    for name in ("attention_bias", "mlp_bias"):
        refuse_flag(raw, name)
    theta, scaling = parse_rope(raw, ROPES, THETA)
    return LlamaConfig(**read_dense_fields(raw), rope_theta=theta, rope_scaling=scaling)


FAMILY = Family("llama", parse, DenseShard)
