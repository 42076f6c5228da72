"""The architectures `deepseek2` and `mistral4`: attention over compressed rows (MLA).

The converter splits `kv_b_proj` into the projections of keys and of values, and transposes those of keys. Older files
have it as published. Rows of rotated parts keep their published order.

Several families are `deepseek2`: DeepSeek-V2, DeepSeek-V3, GLM-4.7-Flash and Mistral Large 3. The router tells which
one it is. Queries that are scaled by position belong to Mistral. Scores by sigmoids belong to DeepSeek-V3, and
GLM-4.7-Flash is served as that one, because both compute the same.

Example: a head has 24 numbers of a key that are not rotated and 20 of a value, and a latent has 32. Then `attn_k_b` is
`[heads, 32, 24]`, `attn_v_b` is `[heads, 20, 32]`, and `kv_b_proj` is `[heads * 44, 32]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.decoder.config.latent_config import LatentConfig
from adapters.models.decoder.layers.feed_forward import CORRECTION
from adapters.models.gguf.architecture import (
    EXPERTS,
    FRAME,
    HEAD_AROUND_LAYER,
    HEAD_COPIES,
    SHARED,
    Architecture,
    SplitTensor,
    read_frame_settings,
)
from adapters.models.gguf.gguf_dense import find_no_inverse, read_scaling

SOFTMAX = 1  # llama.cpp's numbers of the functions that score experts
SIGMOID = 2
LEGACY_FACTOR = 0.1  # the converter multiplies the weight of YaRN's logarithm with it
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
KEYS_VALUES = "self_attn.kv_b_proj.weight"
LAYER = {
    **FRAME,
    **EXPERTS,
    **SHARED,
    CORRECTION: "exp_probs_b.bias",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    KEYS_VALUES: "attn_kv_b.weight",
}


def read_latent_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings that all these families share, as config.json has them. Raises CheckpointError."""
    metadata.refuse("attention.sliding_window", 0)
    frame = read_frame_settings(metadata)
    heads = frame["num_attention_heads"]
    metadata.refuse("attention.head_count_kv", 1, heads)
    rotated = metadata.read_count("rope.dimension_count")
    is_split = metadata.find_field("attention.key_length_mla") is not None
    ending = "_mla" if is_split else ""
    first_dense = metadata.read_count("leading_dense_block_count", 0)
    return {
        **frame,
        "intermediate_size": metadata.read_count("feed_forward_length"),
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.read_count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.read_count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.read_count(f"attention.key_length{ending}") - rotated,
        "v_head_dim": metadata.read_count(f"attention.value_length{ending}"),
        "first_k_dense_replace": first_dense,
        "n_routed_experts": metadata.read_count("expert_count"),
        "num_experts_per_tok": metadata.read_count("expert_used_count"),
        "moe_intermediate_size": metadata.read_count("expert_feed_forward_length"),
        "n_shared_experts": metadata.read_count("expert_shared_count"),
        "norm_topk_prob": bool(metadata.find_field("expert_weights_norm")),
        "routed_scaling_factor": metadata.read_number("expert_weights_scale", 1.0) or 1.0,
        "n_group": metadata.read_count("expert_group_count", 1) or 1,
        "topk_group": metadata.read_count("expert_group_used_count", 1) or 1,
        "rope_parameters": read_rope_settings(metadata),
    }


def read_rope_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the rotary settings. Files have one weight of YaRN's logarithm, for scores. Raises CheckpointError."""
    rope = {
        "rope_theta": metadata.read_number("rope.freq_base"),
        **read_scaling(metadata, keeps_multiplier=True),
    }
    weight = round(metadata.read_number(MULTIPLIER, 0.0) / LEGACY_FACTOR, 6)
    return rope | ({"mscale": weight, "mscale_all_dim": weight} if weight else {})


def read_deepseek_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `deepseek2`, with the model type that its router tells. Raises CheckpointError."""
    if metadata.read_number("attention.temperature_scale", 0.0):
        return {**read_mistral4_settings(metadata), "model_type": "mistral4"}
    shared = read_latent_settings(metadata)
    metadata.refuse("expert_gating_func", SIGMOID, SOFTMAX, 0)
    # Files of GLM-4.7-Flash may not name the function. Only routers that score by sigmoids have corrections.
    is_corrected = f"blk.{shared['first_k_dense_replace']}.exp_probs_b.bias" in metadata.tensors
    function = metadata.read_count("expert_gating_func", 0) or (SIGMOID if is_corrected else SOFTMAX)
    if function == SIGMOID:
        return {**shared, "model_type": "deepseek_v3"}
    method = "group_limited_greedy" if shared["n_group"] > 1 else "greedy"
    return {**shared, "model_type": "deepseek_v2", "topk_method": method}


def read_mistral4_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `mistral4`: queries are scaled by position. Raises CheckpointError.

    Files may leave out by how much; then it is as in the published models.
    """
    metadata.refuse("expert_gating_func", SOFTMAX, 0)
    shared = read_latent_settings(metadata)
    rope = shared["rope_parameters"]
    original = rope.get("original_max_position_embeddings")
    if original is not None:
        metadata.refuse("attention.temperature_length", original)
    beta = metadata.read_number("attention.temperature_scale", 0.0)
    return {**shared, "rope_parameters": rope | ({"llama_4_scaling_beta": beta} if beta else {})}


def list_part_shapes(config: LatentConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the two stored projections: of keys, which is transposed, and of values."""
    own = config.latent
    return (config.num_heads, own.latent, own.plain), (config.num_heads, own.values, own.latent)


def join_keys_and_values(config: LatentConfig, parts: Sequence[Tensor]) -> Tensor:
    """Return the published projection: for each head its rows of keys, and then those of values."""
    keys, values = (part.view(shape).float() for part, shape in zip(parts, list_part_shapes(config), strict=True))
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1).to(parts[0].dtype)


SPLIT = {KEYS_VALUES: SplitTensor(("attn_k_b.weight", "attn_v_b.weight"), list_part_shapes, join_keys_and_values)}
DEEPSEEK2 = Architecture(
    read_deepseek_settings,
    LAYER,
    find_no_inverse,
    head_names=HEAD_AROUND_LAYER | {f"mtp.layers.0.{published}": name for published, name in LAYER.items()},
    split_tensors=SPLIT,
    unused_layer_tensors=HEAD_COPIES,
)
MISTRAL4 = Architecture(read_mistral4_settings, LAYER, find_no_inverse, split_tensors=SPLIT)
