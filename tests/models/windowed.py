"""Small models whose layers have windows, as the configurations that transformers gets."""

from __future__ import annotations

from adapters.models.decoder.config.layered_config import LayeredConfig
from adapters.models.decoder.family import family_of
from tests.models.checkpoints import GEOMETRIES, YARN, rope

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3 = {
    "sliding_window": 48,
    "layer_types": [SLIDING, FULL, SLIDING],
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA4 = {
    "hidden_size_per_layer_input": 0,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 48,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, FULL, FULL],
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 25.0}
SHARING = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 160,
}
BESIDE = {"enable_moe_block": True, "num_experts": 9, "top_k_experts": 3, "moe_intermediate_size": 40}

# As in the 31B model five of six layers have a window, and their rows are four times as wide as those of the others.
LAYOUT_31B = {
    "num_hidden_layers": 12,
    "layer_types": [*[SLIDING] * 5, FULL] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 1024,
    "max_position_embeddings": 32768,
}

GPT_OSS = {
    **rope(),
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "sliding_window": 40,
    "layer_types": [SLIDING, FULL, SLIDING],
}

LAGUNA = {
    "num_hidden_layers": 4,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "num_attention_heads_per_layer": [4, 6, 2, 4],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "sliding_window": 48,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "moe_routed_scaling_factor": 1.5,
    "rope_parameters": {
        FULL: {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 50000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
LAGUNA_YARN = {
    **LAGUNA,
    **GEOMETRIES["mqa"],
    "num_attention_heads_per_layer": [5, 3, 5, 1],
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "gating": "per-element",
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5, "rope_theta": 50000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}

# The model_type, and the configuration that transformers gets.
WINDOWED: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3, mqa, an odd scale, capped": (
        "gemma3_text",
        {**GEMMA3, **GEOMETRIES["mqa"], "query_pre_attn_scalar": 24, "final_logit_softcapping": 20.0},
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4, keys as values": ("gemma4_text", {**GEMMA4, **KEYS_AS_VALUES}),
    "gemma4, inputs of layers, rows shared": ("gemma4_text", {**GEMMA4, **SHARING}),
    "gemma4, experts": ("gemma4_text", {**GEMMA4, **KEYS_AS_VALUES, **BESIDE}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, yarn, tied": (
        "gpt_oss",
        {**GPT_OSS, **GEOMETRIES["mqa"], **rope("yarn", **YARN, truncate=False), "tie_word_embeddings": True},
    ),
    "laguna": ("laguna", LAGUNA),
    "laguna, mqa, yarn, wide gates": ("laguna", LAGUNA_YARN),
    "laguna, no windows": ("laguna", {**LAGUNA, "layer_types": [FULL] * 4, "mlp_layer_types": None}),
    "gemma3, a long window": ("gemma3_text", {**GEMMA3, "sliding_window": 290}),
}

# Configurations that are too slow for tests of every model.
LARGE = {
    "gemma4, 31b layout": ("gemma4_text", {**GEMMA4, **KEYS_AS_VALUES, **LAYOUT_31B}),
    "gemma3, twelve layers": (
        "gemma3_text",
        {**GEMMA3, "num_hidden_layers": 12, "layer_types": [*[SLIDING] * 5, FULL] * 2},
    ),
}


def read_config(name: str) -> LayeredConfig:
    """The configuration of one of them, without a checkpoint."""
    return parse_config(*(WINDOWED | LARGE)[name])


def parse_config(model_type: str, settings: dict[str, object]) -> LayeredConfig:
    """Return the configuration of a model with these fields in its config.json."""
    sizes = {"vocab_size": 160, "intermediate_size": 104, "num_hidden_layers": 3, "max_position_embeddings": 4096}
    raw = {**sizes, **GEOMETRIES["gqa 2 to 1"], "hidden_activation": "gelu_pytorch_tanh", **settings}
    found = family_of({"model_type": model_type}).parse(raw)
    assert isinstance(found, LayeredConfig)
    return found
