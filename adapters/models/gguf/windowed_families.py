"""The architectures `gemma3`, `gemma4` and `gpt-oss`, whose layers have windows or see all rows.

The converter makes these changes:
* It adds 1 to all norms of Gemma 3, as `qwen35` has it.
* Gemma 4 rotates a part of each head in layers that see all rows. The file has a factor for each frequency of these
  layers instead: 1, or 1e30 for those that are not rotated.
* The biases of gpt-oss's experts are in one tensor for each product, as the weights are.

Files do not say everything that config.json says. What they leave out is as llama.cpp has it: which layers of Gemma 3
and gpt-oss see all rows, how Gemma 3 with 62 layers scales its queries, and that YaRN of gpt-oss is not truncated, as
it was published.
"""

from __future__ import annotations

import math
from typing import Any

from adapters.checkpoint.config_fields import LIMITS
from adapters.checkpoint.gguf.gguf_tensor import make_tensor
from adapters.checkpoint.gguf.header import ListField
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.decoder.config.layered_config import FULL, SLIDING
from adapters.models.decoder.layers.feed_forward import ROUTER_BIAS
from adapters.models.families import gemma3
from adapters.models.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    FRAME,
    Architecture,
    Inverse,
    read_frame_settings,
    read_shared_settings,
)
from adapters.models.gguf.gguf_dense import FREQUENCIES, find_no_inverse, read_scaling
from adapters.models.gguf.qwen35 import subtract_one

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
LARGEST_LAYERS = 62  # of Gemma 3 27B, whose queries are scaled by the hidden size for each head
SOFTMAX_OF_CHOSEN = 3  # llama.cpp's number of the function that weights experts
UNROTATED = 1e29  # frequencies that are divided by at least this much do not rotate

FOUR_NORMS = {
    **FRAME,
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
GEMMA4_PARTS = {
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
GPT_OSS_PARTS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.sinks": "attn_sinks.weight",
    ROUTER_BIAS: "ffn_gate_inp.bias",
    **{f"mlp.experts.*.{part}_proj.bias": f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")},
}


def read_layer_kinds(metadata: Metadata, layers: int, interval: int) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError.

    interval: every layer of this number sees all rows, unless the file says which layers do.
    """
    layers = min(layers, LIMITS["num_hidden_layers"])
    if not metadata.read_count(WINDOW, 0):
        return [FULL] * layers
    if isinstance(metadata.find_field(PATTERN), ListField):
        return [SLIDING if slides else FULL for slides in metadata.read_layer_flags(PATTERN, layers)]
    interval = metadata.read_count(PATTERN, interval)
    return [SLIDING if not interval or (layer + 1) % interval else FULL for layer in range(layers)]


def read_gemma3_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `gemma3` as config.json has them. Raises CheckpointError."""
    shared = read_shared_settings(metadata, has_windows=True)
    layers = shared["num_hidden_layers"]
    head = shared["head_dim"]
    metadata.refuse("rope.dimension_count", head)
    full = {"rope_theta": metadata.read_number("rope.freq_base"), **read_scaling(metadata, keeps_multiplier=False)}
    per_head = shared["hidden_size"] // max(shared["num_attention_heads"], 1)
    return {
        **shared,
        **read_window_settings(metadata, full),
        "layer_types": read_layer_kinds(metadata, layers, gemma3.INTERVAL),
        "query_pre_attn_scalar": per_head if layers == LARGEST_LAYERS else head,
    }


def read_window_settings(metadata: Metadata, full: dict[str, Any]) -> dict[str, Any]:
    """Return what Gemma's architectures store alike. full: the rotary settings of layers that see all rows."""
    sliding = {
        "rope_type": "default",
        "rope_theta": metadata.read_number("rope.freq_base_swa", gemma3.THETAS[SLIDING]),
    }
    return {
        "sliding_window": metadata.read_count(WINDOW, 0) or None,
        "final_logit_softcapping": metadata.read_number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {FULL: full, SLIDING: sliding},
    }


def read_gemma4_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `gemma4` as config.json has them. Raises CheckpointError."""
    frame = read_frame_settings(metadata)
    layers = frame["num_hidden_layers"]
    types = read_layer_kinds(metadata, layers, gemma3.INTERVAL)
    full_head = metadata.read_count("attention.key_length")
    head = metadata.read_count("attention.key_length_swa")
    metadata.refuse("attention.value_length", full_head)
    metadata.refuse("attention.value_length_swa", head)
    metadata.refuse("rope.dimension_count", full_head)
    metadata.refuse("rope.dimension_count_swa", head)
    metadata.refuse("rope.scaling.type", "none")
    inputs = metadata.read_count("embedding_length_per_layer_input", 0)
    table = metadata.tensors.get("per_layer_token_embd.weight")
    shared_rows = metadata.read_count("attention.shared_kv_layers", 0)
    first_full = next((layer for layer, kind in enumerate(types) if kind == FULL), 0)
    full = {
        "rope_type": "proportional",
        "rope_theta": metadata.read_number("rope.freq_base"),
        "partial_rotary_factor": read_rotated_part(metadata, full_head),
    }
    return {
        **frame,
        **read_window_settings(metadata, full),
        **read_kv_heads(metadata, types),
        **read_widths(metadata, layers - shared_rows, len(types)),
        **(read_gemma4_experts(metadata) if metadata.read_count("expert_count", 0) else {}),
        "layer_types": types,
        "head_dim": head,
        "global_head_dim": full_head,
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in metadata.tensors,
        "num_kv_shared_layers": shared_rows,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
    }


def read_kv_heads(metadata: Metadata, types: list[str]) -> dict[str, int]:
    """Return the key/value heads of layers with a window and of others. Raises CheckpointError."""
    counts = metadata.read_layer_counts("attention.head_count_kv", len(types))
    by_kind = {
        kind: {count for count, own in zip(counts, types, strict=True) if own == kind} for kind in (SLIDING, FULL)
    }
    if any(len(found) > 1 for found in by_kind.values()):
        raise metadata.make_error("gemma4.attention.head_count_kv differs between layers of one kind")
    full = min(by_kind[FULL], default=0)
    return {"num_key_value_heads": min(by_kind[SLIDING], default=full), "num_global_key_value_heads": full}


def read_widths(metadata: Metadata, first: int, layers: int) -> dict[str, Any]:
    """Return the columns of feed-forwards. first: the first layer that reads the rows of an earlier one.

    Such layers may be twice as wide. Raises CheckpointError.
    """
    widths = metadata.read_layer_counts("feed_forward_length", layers)
    width = widths[0] if widths else 0
    is_double = len(set(widths)) > 1
    if is_double and widths != [width * (1 + (layer >= first)) for layer in range(layers)]:
        raise metadata.make_error("gemma4.feed_forward_length is not the same, or double for layers that share rows")
    return {"intermediate_size": width, "use_double_wide_mlp": is_double}


def read_gemma4_experts(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of experts as config.json has them. Raises CheckpointError."""
    return {
        "enable_moe_block": True,
        "num_experts": metadata.read_count("expert_count"),
        "top_k_experts": metadata.read_count("expert_used_count"),
        "moe_intermediate_size": metadata.read_count("expert_feed_forward_length"),
    }


def read_rotated_part(metadata: Metadata, head: int) -> float:
    """Return the part of a head that is rotated, from the factors of frequencies. Raises CheckpointError."""
    stored = metadata.tensors.get(FREQUENCIES)
    if stored is None or stored.shape != (head // 2,) or stored.packing.name != "F32":
        raise metadata.make_error(f"{FREQUENCIES} is missing, or not {head // 2} numbers of type F32")
    factors = make_tensor(stored).read(FREQUENCIES)
    rotated = int((factors == 1).sum())
    if not (factors[:rotated] == 1).all() or not (factors[rotated:] >= UNROTATED).all() or not rotated:
        raise metadata.make_error(f"{FREQUENCIES} has other numbers than 1 and then 1e30")
    # A little more than the quotient, because the family rotates the whole part of its product with the head's size.
    return 1.0 if rotated == head // 2 else math.nextafter(2 * rotated / head, 1)


def read_gpt_oss_experts(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of gpt-oss's experts. Their weights are a softmax of the chosen ones' logits.

    Raises CheckpointError.
    """
    metadata.refuse("expert_gating_func", SOFTMAX_OF_CHOSEN)
    return {
        "num_local_experts": metadata.read_count("expert_count"),
        "num_experts_per_tok": metadata.read_count("expert_used_count"),
    }


def read_gpt_oss_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `gpt-oss` as config.json has them. Raises CheckpointError."""
    shared = read_shared_settings(metadata, read_gpt_oss_experts, has_windows=True)
    metadata.refuse("rope.dimension_count", shared["head_dim"])
    rope = {"rope_theta": metadata.read_number("rope.freq_base"), **read_scaling(metadata, keeps_multiplier=False)}
    return {
        **shared,
        "intermediate_size": metadata.read_count("expert_feed_forward_length"),
        "sliding_window": metadata.read_count(WINDOW, 0) or None,
        "layer_types": read_layer_kinds(metadata, shared["num_hidden_layers"], 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def find_gemma3_inverse(config: Any, name: str) -> Inverse | None:  # noqa: ARG001 - the interface of `Architecture`
    """Return the function that undoes the converter's change of a published tensor; None if it has none."""
    return subtract_one if name.endswith("norm.weight") else None


GEMMA3 = Architecture(read_gemma3_settings, {**FOUR_NORMS, **ATTENTION}, find_gemma3_inverse)
GEMMA4 = Architecture(
    read_gemma4_settings,
    {**FOUR_NORMS, **ATTENTION, **EXPERTS, **GEMMA4_PARTS},
    find_no_inverse,
    ignored=frozenset({FREQUENCIES}),
)
GPT_OSS = Architecture(read_gpt_oss_settings, {**FRAME, **ATTENTION, **EXPERTS, **GPT_OSS_PARTS}, find_no_inverse)
