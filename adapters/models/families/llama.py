"""Llama 2, 3 and what is built like them (dense): no norm of heads, no bias, rotary embedding scaled variously."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from adapters.checkpoint.config_fields import refuse_flag
from adapters.models.decoder.dense_config import DenseConfig, parse_dense
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.rope import Rotary, Scaling, parse_rope

THETA = 10_000.0  # Llama 2's files do not tell it
ROPES = ("default", "linear", "llama3", "yarn")  # not `dynamic` and `longrope`: there a row depends on what follows it


@frozen
class LlamaConfig(DenseConfig):
    rope_scaling: Scaling | None = None

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.rope_theta, self.rope_scaling)


def parse(raw: Mapping[str, Any]) -> LlamaConfig:
    for name in ("attention_bias", "mlp_bias"):
        refuse_flag(raw, name)
    theta, scaling = parse_rope(raw, ROPES, THETA)
    return parse_dense(raw, LlamaConfig, rope_theta=theta, rope_scaling=scaling)


FAMILY = Family("llama", parse, DenseShard)
