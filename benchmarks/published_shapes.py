"""Published shapes of families with windows or experts, whose weights are drawn: their configuration and their bytes.

Used by `benchmarks.family_speeds` and `benchmarks.peer_models`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

from adapters.checkpoint.packed_matrix import MXFP4, StepLayout
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.layered_config import FULL, SLIDING, LayeredConfig
from adapters.models.decoder.family import family_of
from adapters.models.open_checkpoint import EXPERTS

DTYPE = torch.bfloat16
Q4_K = StepLayout("uint4", 32, per=8, inner=True, least="own")
Q6_K = StepLayout("int8", 16, per=16, inner=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROUTER = ".mlp.gate.weight"
GEMMA = {
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 262_144,
    "hidden_size_per_layer_input": 0,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "vocab_size": 201_088,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@frozen
class PublishedShape:
    """What config.json says, the layers up to one that sees all rows, and the share of the limit to be reached in %.

    experts: how experts are packed. matrices: how all matrices of layers are packed, and `head` how the head is.
    """

    settings: Mapping[str, Any]
    interval: int
    goal: float
    experts: StepLayout | None = None
    matrices: StepLayout | None = field(default=None, kw_only=True)
    head: StepLayout | None = field(default=None, kw_only=True)

    def make_settings(self, layers: int = 0) -> dict[str, Any]:
        """Return config.json. layers: other than the shape has."""
        count = layers or self.settings["num_hidden_layers"]
        kinds = [SLIDING if (at + 1) % self.interval else FULL for at in range(count)]
        return {**self.settings, "num_hidden_layers": count, "layer_types": [*kinds[:-1], FULL]}

    def parse(self, layers: int = 0) -> DenseConfig:
        settings = self.make_settings(layers)
        found = family_of(settings).parse(settings)
        assert isinstance(found, DenseConfig)
        return found

    def list_published(self, config: DenseConfig) -> dict[str, tuple[int, ...]]:
        """Return the tensors by published names. Gemma 4 has the experts beside the feed-forward."""
        there = ".experts." if self.settings["model_type"] == GEMMA["model_type"] else EXPERTS
        return {name.replace(EXPERTS, there): size for name, size in config.tensors().items()}

    def find_layouts(self, config: DenseConfig) -> dict[str, StepLayout]:
        """Return how tensors are packed, by their names. Tensors that are not packed are left out."""
        found = dict[str, StepLayout]()
        for name, size in config.tensors().items():
            layout = self.experts if EXPERTS in name and name.endswith("weight") else None
            if self.matrices is not None and len(size) > 1 and ".layers." in name and not name.endswith(ROUTER):
                layout = self.matrices
            if name == HEAD:
                layout = self.head
            if layout is not None:
                found[name] = layout
        return found


def make_qwen3_30b_a3b(**packing: StepLayout) -> PublishedShape:
    return PublishedShape(QWEN3_30B_A3B, interval=1, goal=60, **packing)


SHAPES = {
    "gemma4-31b": PublishedShape(
        {
            **GEMMA,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
        interval=6,
        goal=80,
    ),
    "gemma4-26b-a4b": PublishedShape(
        {
            **GEMMA,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        interval=6,
        goal=60,
    ),
    "gpt-oss-20b": PublishedShape(
        {
            **GPT_OSS,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        interval=2,
        goal=60,
        experts=MXFP4,
    ),
    "30b-a3b": make_qwen3_30b_a3b(),
    "30b-a3b-q4_k": make_qwen3_30b_a3b(matrices=Q4_K, head=Q6_K),
    # To try the benchmark itself.
    "small-gpt-oss": PublishedShape(
        {
            **GPT_OSS,
            "vocab_size": 4096,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        interval=2,
        goal=0,
        experts=MXFP4,
    ),
    "small-gemma": PublishedShape(
        {
            **GEMMA,
            "vocab_size": 4096,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 64,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        interval=3,
        goal=0,
    ),
}


def find_window(config: DenseConfig, layer: int) -> int | None:
    return config.kinds[layer].traits.window if isinstance(config, LayeredConfig) else None


def count_token_bytes(shape: PublishedShape, config: DenseConfig, context: int) -> int:
    """Return the bytes that decoding one token must read."""
    layouts, experts = shape.find_layouts(config), config.experts
    found = 0.0
    for name, size in config.tensors().items():
        if name == EMBEDDING and HEAD in config.tensors():
            continue
        layout = layouts.get(name)
        share = experts.chosen / experts.count if experts is not None and EXPERTS in name else 1.0
        found += share * math.prod(size) * (8 * DTYPE.itemsize if layout is None else layout.bits) / 8
    for layer in range(config.num_layers):
        seen = min(context, find_window(config, layer) or context)
        found += seen * config.shape_of(layer).row_bytes(DTYPE)
    return int(found)
