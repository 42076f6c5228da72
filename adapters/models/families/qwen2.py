"""Qwen2 and Qwen2.5 (dense): the projections of queries, keys and values have a bias.

Published files describe sliding windows (`sliding_window`, `max_window_layers`) and switch them off
(`use_sliding_window` false). Such files are served. Files that switch them on are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.rope import parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family


@frozen
class Qwen2Config(DenseConfig):
    qkv_bias: ClassVar[bool] = True


def parse(raw: Mapping[str, Any]) -> Qwen2Config:
    """Return the configuration that this config.json describes. Raises CheckpointError.

    rope_theta is required, as with qwen3: the default of transformers is not that of any published model.
    """
    theta, _ = parse_rope(raw, ("default",))
    return Qwen2Config(**read_dense_fields(raw), rope_theta=theta)


FAMILY = Family("qwen2", parse, DenseShard)
