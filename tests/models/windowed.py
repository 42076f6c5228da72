"""Small models whose layers have windows: what transformers is told of each."""

from __future__ import annotations

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

GPT_OSS = {
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "sliding_window": 40,
    "layer_types": [SLIDING, FULL, SLIDING],
}

# model_type, and what transformers is told.
WINDOWED: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3, mqa, an odd scale, capped": (
        "gemma3_text",
        {**GEMMA3, **GEOMETRIES["mqa"], "query_pre_attn_scalar": 24, "final_logit_softcapping": 20.0},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, yarn, tied": (
        "gpt_oss",
        {**GPT_OSS, **GEOMETRIES["mqa"], **rope("yarn", **YARN, truncate=False), "tie_word_embeddings": True},
    ),
    "gemma3, a long window": ("gemma3_text", {**GEMMA3, "sliding_window": 290}),
}
