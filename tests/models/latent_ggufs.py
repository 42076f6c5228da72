"""GGUF files of models with compressed rows, and of Laguna: metadata and names as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapters.models.decoder.config.layered_config import LayeredConfig
from adapters.models.decoder.config.rope import ScaledRotary, Yarn
from adapters.models.kernels.interfaces.experts_interface import SigmoidExpertsShape

LATENT_NAMES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral4": "mistral4",
    "laguna": "laguna",
}


def split_keys_values(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """The projections of keys, transposed, and of values; nothing for other tensors."""
    if not name.endswith("kv_b_proj.weight"):
        return {}
    own = config.latent
    both = tensor.view(config.num_heads, own.plain + own.values, own.latent)
    keys, values = torch.split(both, [own.plain, own.values], 1)
    layer = f"blk.{name.split('.')[2]}"
    return {f"{layer}.attn_k_b.weight": keys.transpose(1, 2), f"{layer}.attn_v_b.weight": values}


def latent_settings(config: Any, name: str) -> dict[str, Any]:
    own = laguna_settings(config) if isinstance(config, LayeredConfig) else compressed_settings(config, name)
    experts = config.experts
    return {
        "ARCH.block_count": config.num_layers,
        "ARCH.context_length": config.max_positions,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ARCH.leading_dense_block_count": len(config.dense),
        "ARCH.expert_count": experts.count,
        "ARCH.expert_used_count": experts.chosen,
        "ARCH.expert_feed_forward_length": experts.inner,
        "ARCH.expert_weights_scale": experts.factor,
        "ARCH.expert_weights_norm": True if experts.is_normalized else None,
        "ARCH.expert_gating_func": 2 if isinstance(experts, SigmoidExpertsShape) else None,
        "ARCH.expert_group_count": experts.groups,
        "ARCH.expert_group_used_count": experts.chosen_groups,
        **own,
    }


def compressed_settings(config: Any, name: str) -> dict[str, Any]:
    own = config.latent
    rotary = config.rotary
    found = {
        "ARCH.feed_forward_length": config.intermediate_size,
        "ARCH.attention.head_count": config.num_heads,
        "ARCH.attention.head_count_kv": 1,
        "ARCH.attention.q_lora_rank": own.queries or None,
        "ARCH.attention.kv_lora_rank": own.latent,
        "ARCH.attention.key_length": own.row,
        "ARCH.attention.value_length": own.latent,
        "ARCH.attention.key_length_mla": own.query,
        "ARCH.attention.value_length_mla": own.values,
        "ARCH.rope.dimension_count": own.rotated,
        "ARCH.rope.freq_base": float(rotary.theta),
        "ARCH.expert_shared_count": config.experts.shared // config.experts.inner,
        **yarn_settings(rotary.scaling),
    }
    if isinstance(rotary.scaling, Yarn):
        found["ARCH.rope.scaling.yarn_log_multiplier"] = 0.1 * (1.0 if name == "mistral4" else 0.9)
    if isinstance(rotary, ScaledRotary):
        found["ARCH.attention.temperature_scale"] = rotary.beta
    return found


def laguna_settings(config: Any) -> dict[str, Any]:
    windows = [kind.traits.window for kind in config.kinds]
    full = next(kind for kind in config.kinds if not kind.traits.window)
    found = {
        "ARCH.feed_forward_length": full.intermediate_size,
        "ARCH.attention.head_count": [kind.num_heads for kind in config.kinds],
        "ARCH.attention.head_count_kv": full.num_kv_heads,
        "ARCH.attention.key_length": full.head_dim,
        "ARCH.attention.value_length": full.head_dim,
        "ARCH.rope.dimension_count": full.rotary.head_dim,
        "ARCH.rope.freq_base": float(full.rotary.theta),
        "ARCH.expert_shared_feed_forward_length": config.experts.shared,
        **yarn_settings(full.rotary.scaling),
    }
    if any(windows):
        sliding = next(kind for kind in config.kinds if kind.traits.window)
        found |= {
            "ARCH.attention.sliding_window": max(windows),
            "ARCH.attention.sliding_window_pattern": [window > 0 for window in windows],
            "ARCH.rope.dimension_count_swa": sliding.rotary.head_dim,
            "ARCH.rope.freq_base_swa": float(sliding.rotary.theta),
        }
    return found


def yarn_settings(scaling: object) -> dict[str, Any]:
    if not isinstance(scaling, Yarn):
        return {}
    return {
        "ARCH.rope.scaling.type": "yarn",
        "ARCH.rope.scaling.factor": scaling.factor,
        "ARCH.rope.scaling.original_context_length": int(scaling.original),
    }
