"""GLM-4.7-Flash: the layers of DeepSeek-V3, with a list of those that have a dense feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.checkpoint.config_fields import read_size
from adapters.models.decoder.config.deepseek_names import find_deepseek_name
from adapters.models.decoder.config.experts_config import read_dense_list
from adapters.models.decoder.config.latent_config import LatentConfig, read_latent_fields
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, use_own_shape
from adapters.models.families.deepseek_v3 import read_experts

QUERIES = 768  # the default of q_lora_rank


def parse(raw: Mapping[str, Any]) -> LatentConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    layers = read_size(raw, "num_hidden_layers")
    # Published files give first_k_dense_replace, and those of transformers mlp_layer_types.
    named = raw.get("mlp_layer_types") is not None or raw.get("first_k_dense_replace") is None
    dense = read_dense_list(raw, layers) if named else None
    return LatentConfig(experts=read_experts(raw), **read_latent_fields({"q_lora_rank": QUERIES, **raw}, dense))


FAMILY = Family("glm4_moe_lite", parse, DenseShard, find_deepseek_name, head_shape=use_own_shape)
