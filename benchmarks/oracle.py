"""transformers' configuration of the same model: what our figures are compared with."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config as OracleConfig

from adapters.models.families.qwen3 import Qwen3Config


def oracle_config(config: Qwen3Config, **more: Any) -> OracleConfig:
    return OracleConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        **more,
    )
