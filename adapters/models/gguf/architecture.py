"""The description of one architecture of llama.cpp: how its settings and tensors become those of a family of ours.

Settings become fields of config.json. Tensors get their published names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen
from torch import Tensor

from adapters.checkpoint.gguf.header import ListField
from adapters.checkpoint.gguf.metadata import Metadata

Inverse: TypeAlias = Callable[[Tensor], Tensor]

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
FRAME = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
ATTENTION = {
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
}


# Each of these files' tensors holds the matrices of all experts; `*` stands for the number of an expert.
EXPERTS = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.experts.*.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
}
SHARED = {
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
SPARSE = ("qwen3next",)  # architectures with experts whose names do not end in "moe"


@frozen
class SplitTensor:
    """One published tensor that files store as several tensors.

    names: of the stored tensors in a layer. list_shapes: returns the shape of each of them. join: makes the published
    tensor from them.
    """

    names: tuple[str, ...]
    list_shapes: Callable[[Any], tuple[tuple[int, ...], ...]]
    join: Callable[[Any, Sequence[Tensor]], Tensor]


# The tensors of a prediction head around its layer, by our names and as llama.cpp calls them.
HEAD_AROUND_LAYER = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
# Copies of the embedding and of the head, which a prediction head shares with the model.
HEAD_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


@frozen
class Architecture:
    """The form in which GGUF files of an architecture keep a model.

    read_settings: returns a mapping with the keys of Hugging Face's config.json, which a family's parser reads.
    layer_names: the tensors of a layer, by their published names and as llama.cpp calls them.
    find_inverse: returns what brings a tensor back to its published form, or None if nothing was done to it.
    adjust_config: returns the configuration, with what tensors of the file add to it.
    ignored: the names of tensors that only `adjust_config` reads.
    head_names: the tensors of a prediction head, which stands behind the last layer; as in `layer_names`.
    split_tensors: tensors of a layer that files may have in several parts, by their published names.
    unused_layer_tensors: names, within a layer, of tensors that files may have and that are not used.
    """

    read_settings: Callable[[Metadata], dict[str, Any]]
    layer_names: Mapping[str, str]
    find_inverse: Callable[[Any, str], Inverse | None]
    adjust_config: Callable[[Any, Metadata], Any] = lambda config, _: config
    ignored: frozenset[str] = frozenset()
    head_names: Mapping[str, str] = {}
    split_tensors: Mapping[str, SplitTensor] = {}
    unused_layer_tensors: tuple[str, ...] = ()


def read_frame_settings(metadata: Metadata, *, heads_differ: bool = False) -> dict[str, Any]:
    """Return the settings that all architectures store alike, without those that layers may differ in.

    heads_differ: layers may have different numbers of query heads; then those of the first layer are returned.
    Raises CheckpointError.
    """
    metadata.refuse("attention.causal", True)
    embedding = metadata.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.make_error("tensor token_embd.weight is missing")
    layers = metadata.read_count("block_count") - count_prediction_layers(metadata)
    heads = "attention.head_count"
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.read_count("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": read_first_count(metadata, heads) if heads_differ else metadata.read_count(heads),
        "max_position_embeddings": metadata.read_count("context_length"),
        "rms_norm_eps": metadata.read_number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        # These families are published in bfloat16. Their hidden states may overflow in float16, even if the file
        # stores float16.
        "dtype": "float32" if embedding.packing.name == "F32" else "bfloat16",
    }


def read_first_count(metadata: Metadata, name: str) -> int:
    """Return a number of the first layer, for a field that has one for all layers or a list. Raises CheckpointError."""
    if not isinstance(metadata.find_field(name), ListField):
        return metadata.read_count(name)
    found = metadata.header.read_integers(f"{metadata.architecture}.{name}")
    if not found:
        raise metadata.make_error(f"{metadata.architecture}.{name} is an empty list")
    return found[0]


def read_shared_settings(
    metadata: Metadata,
    read_experts: Callable[[Metadata], dict[str, Any]] | None = None,
    *,
    has_windows: bool = False,
) -> dict[str, Any]:
    """Return the settings of models whose layers have heads and feed-forwards of the same size. Raises CheckpointError.

    read_experts: reads the settings of experts if the architecture has its own; None: as most have them. has_windows:
    the caller reads the windows of layers.
    """
    sparse = read_experts is not None or metadata.architecture.endswith("moe") or metadata.architecture in SPARSE
    for name in (() if has_windows else ("attention.sliding_window",)) + (() if sparse else ("expert_count",)):
        metadata.refuse(name, 0)
    frame = read_frame_settings(metadata)
    heads = frame["num_attention_heads"]
    head = metadata.read_count("attention.key_length", frame["hidden_size"] // max(heads, 1))
    metadata.refuse("attention.value_length", head)
    return {
        **frame,
        "intermediate_size": metadata.read_count(
            "feed_forward_length", metadata.read_count("expert_feed_forward_length") if sparse else None
        ),
        **((read_experts or read_expert_settings)(metadata) if sparse else {}),
        "num_key_value_heads": metadata.read_count("attention.head_count_kv", heads),
        "head_dim": head,
    }


def read_expert_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of experts. Raises CheckpointError.

    llama.cpp makes the weights of the chosen experts add up to one, even if the published model did not.
    """
    metadata.refuse("expert_weights_norm", True)
    metadata.refuse("expert_weights_scale", 1.0, 0.0)
    metadata.refuse("expert_gating_func", 1)
    metadata.refuse("expert_group_count", 0, 1)
    return {
        "num_experts": metadata.read_count("expert_count"),
        "num_experts_per_tok": metadata.read_count("expert_used_count"),
        "moe_intermediate_size": metadata.read_count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def read_sigmoid_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of experts whose scores are sigmoids. Raises CheckpointError."""
    metadata.refuse("expert_weights_norm", True)
    metadata.refuse("expert_gating_func", 2)
    return {
        "num_experts_per_tok": metadata.read_count("expert_used_count"),
        "moe_intermediate_size": metadata.read_count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "routed_scaling_factor": metadata.read_number("expert_weights_scale", 1.0),
        "n_group": metadata.read_count("expert_group_count", 1) or 1,
        "topk_group": metadata.read_count("expert_group_used_count", 1) or 1,
    }


def count_prediction_layers(metadata: Metadata) -> int:
    """Return how many layers behind the model's last one are its prediction head: 0 or 1."""
    metadata.refuse("nextn_predict_layers", 0, 1)
    return metadata.read_count("nextn_predict_layers", 0)
