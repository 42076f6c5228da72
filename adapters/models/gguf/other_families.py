"""The architectures `mistral3`, `seed_oss`, `glm4moe` and `minimax-m2`.

Names differ from the published ones. As for `llama`, the converter interleaves the halves of Mistral's heads. GLM's
prediction head is stored as one more layer, as it was published.
"""

from __future__ import annotations

import math
from typing import Any

from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.decoder.layers.feed_forward import CORRECTION
from adapters.models.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    FRAME,
    HEAD_AROUND_LAYER,
    HEAD_COPIES,
    SHARED,
    Architecture,
    read_shared_settings,
    read_sigmoid_settings,
)
from adapters.models.gguf.gguf_dense import (
    FREQUENCIES,
    add_frequency_factors,
    find_llama_inverse,
    find_no_inverse,
    read_settings,
)

POST_NORM = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
ROUTED = {**EXPERTS, CORRECTION: "exp_probs_b.bias"}
GLM = {**FRAME, **POST_NORM, **ATTENTION, **ROUTED, **SHARED}
GLM_HEAD = HEAD_AROUND_LAYER | {f"mtp.layers.0.{published}": name for published, name in GLM.items()}


def read_mistral_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `mistral3`: queries may be scaled by position. Raises CheckpointError.

    A multiplier of the logarithm says that cosines and sines are not scaled.
    """
    beta = metadata.read_number("attention.temperature_scale", 0.0)
    multiplier = metadata.read_number("rope.scaling.yarn_log_multiplier", 0.0)
    found = read_settings(metadata, keeps_multiplier=True)
    rope = found["rope_parameters"]
    if multiplier:
        rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    if beta:
        rope["llama_4_scaling_beta"] = beta
    return found


def read_seed_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `seed_oss`. Raises CheckpointError."""
    own = {"attention_bias": True, "attention_out_bias": "blk.0.attn_output.bias" in metadata.tensors}
    return {**read_settings(metadata), **own}


def read_partial_rope(metadata: Metadata, head: int) -> dict[str, Any]:
    """Return the settings of rotary embedding over a part of each head. Raises CheckpointError."""
    metadata.refuse("rope.scaling.type", "none")
    rotated = metadata.read_count("rope.dimension_count", head)
    part = compute_rotated_part(rotated, head)
    return {"rope_theta": metadata.read_number("rope.freq_base"), "partial_rotary_factor": part}


def compute_rotated_part(rotated: int, head: int) -> float:
    """Return the part of a head that is rotated.

    It is a little more than the quotient, because families round its product with the head's size down.
    """
    part = rotated / max(head, 1)
    return part if rotated >= head else math.nextafter(part, 1)


def read_glm_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `glm4moe`. Raises CheckpointError."""
    shared = read_shared_settings(metadata, read_sigmoid_settings)
    dense = metadata.read_count("leading_dense_block_count", 0)
    return {
        **shared,
        "n_routed_experts": metadata.read_count("expert_count"),
        "n_shared_experts": metadata.read_count("expert_shared_count", 1),
        "first_k_dense_replace": dense,
        "attention_bias": True,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.tensors,
        "rope_parameters": read_partial_rope(metadata, shared["head_dim"]),
    }


def read_minimax_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `minimax-m2`. Raises CheckpointError."""
    shared = read_shared_settings(metadata, read_sigmoid_settings)
    metadata.refuse("expert_weights_scale", 1.0, 0.0)
    return {
        **shared,
        "intermediate_size": shared["moe_intermediate_size"],
        "num_local_experts": metadata.read_count("expert_count"),
        "rope_parameters": read_partial_rope(metadata, shared["head_dim"]),
    }


MISTRAL3 = Architecture(
    read_mistral_settings,
    FRAME | ATTENTION,
    find_llama_inverse,
    adjust_config=add_frequency_factors,
    ignored=frozenset({FREQUENCIES}),
)
SEED_OSS = Architecture(
    read_seed_settings,
    {**FRAME, **POST_NORM, **ATTENTION, "self_attn.o_proj.bias": "attn_output.bias"},
    find_no_inverse,
)
GLM4_MOE = Architecture(read_glm_settings, GLM, find_no_inverse, head_names=GLM_HEAD, unused_layer_tensors=HEAD_COPIES)
MINIMAX_M2 = Architecture(read_minimax_settings, {**FRAME, **ATTENTION, **ROUTED}, find_no_inverse)
