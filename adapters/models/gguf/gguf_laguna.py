"""The architecture `laguna`: windows in some layers, and numbers of query heads by layer.

Only names differ from the published ones. Files need not say which layers see all rows: every fourth one does, from the
first on, as in the published models.
"""

from __future__ import annotations

from typing import Any

from adapters.checkpoint.config_fields import LIMITS
from adapters.checkpoint.gguf.header import ListField
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.decoder.config.layered_config import FULL, SLIDING
from adapters.models.decoder.layers.feed_forward import CORRECTION
from adapters.models.gguf.architecture import (
    ATTENTION,
    EXPERTS,
    FRAME,
    SHARED,
    Architecture,
    read_frame_settings,
    read_sigmoid_settings,
)
from adapters.models.gguf.gguf_dense import find_no_inverse, read_scaling
from adapters.models.gguf.other_families import compute_rotated_part
from adapters.models.gguf.windowed_families import PATTERN, WINDOW

INTERVAL = 4
LAYER = {
    **FRAME,
    **ATTENTION,
    **EXPERTS,
    **SHARED,
    CORRECTION: "exp_probs_b.bias",
    "self_attn.g_proj.weight": "attn_gate.weight",
}


def read_layer_types(metadata: Metadata, layers: int) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError."""
    if not metadata.read_count(WINDOW, 0):
        return [FULL] * layers
    if isinstance(metadata.find_field(PATTERN), ListField):
        return [SLIDING if slides else FULL for slides in metadata.read_layer_flags(PATTERN, layers)]
    interval = metadata.read_count(PATTERN, INTERVAL) or INTERVAL
    return [SLIDING if layer % interval else FULL for layer in range(layers)]


def read_laguna_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of `laguna` as config.json has them. Raises CheckpointError."""
    frame = read_frame_settings(metadata, heads_differ=True)
    layers = min(frame["num_hidden_layers"], LIMITS["num_hidden_layers"])
    head = metadata.read_count("attention.key_length")
    metadata.refuse("attention.value_length", head)
    dense = metadata.read_count("leading_dense_block_count", 0)
    full = {
        "rope_theta": metadata.read_number("rope.freq_base"),
        "partial_rotary_factor": compute_rotated_part(metadata.read_count("rope.dimension_count", head), head),
        **read_scaling(metadata, keeps_multiplier=False),
    }
    sliding = {
        "rope_type": "default",
        "rope_theta": metadata.read_number("rope.freq_base_swa", full["rope_theta"]),
        "partial_rotary_factor": compute_rotated_part(metadata.read_count("rope.dimension_count_swa", head), head),
    }
    experts = read_sigmoid_settings(metadata)
    return {
        **frame,
        **experts,
        "num_attention_heads_per_layer": metadata.read_layer_counts("attention.head_count", layers),
        "num_key_value_heads": metadata.read_count("attention.head_count_kv"),
        "head_dim": head,
        "gating": "per-head" if count_gate_rows(metadata) == frame["num_attention_heads"] else "per-element",
        "intermediate_size": metadata.read_count("feed_forward_length"),
        "num_experts": metadata.read_count("expert_count"),
        "shared_expert_intermediate_size": metadata.read_count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": experts["routed_scaling_factor"],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "sliding_window": metadata.read_count(WINDOW, 0) or None,
        "layer_types": read_layer_types(metadata, layers),
        "rope_parameters": {FULL: full, SLIDING: sliding},
    }


def count_gate_rows(metadata: Metadata) -> int:
    """Return the rows of the first layer's gate: one for each head, or one for each number of a head."""
    gate = metadata.tensors.get("blk.0.attn_gate.weight")
    if gate is None:
        raise metadata.make_error("tensor blk.0.attn_gate.weight is missing")
    return gate.shape[0]


LAGUNA = Architecture(read_laguna_settings, LAYER, find_no_inverse)
