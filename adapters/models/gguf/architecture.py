"""How one architecture of llama.cpp becomes a family of ours: settings as config.json has them, and tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen
from torch import Tensor

from adapters.checkpoint.gguf.metadata import Metadata

Undo: TypeAlias = Callable[[Tensor], Tensor]

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
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


# Of all experts in one tensor; `*` stands for the number of each.
EXPERTS = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.experts.*.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
}
SHARED = {
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
SPARSE = ("qwen3next",)  # architectures with experts that are not called so


@frozen
class Parts:
    """What files have in the place of one published tensor: these, each with the rows that `rows` says of it, and
    `join` makes one of them again.
    """

    names: tuple[str, ...]
    rows: Callable[[Any], tuple[int, ...]]
    join: Callable[[Any, Sequence[Tensor]], Tensor]


@frozen
class Architecture:
    """settings: as config.json has them. layer: a layer's tensors, as they are published and as llama.cpp calls them.
    apart: what files may have of a layer in several tensors, by the published name. undo: what brings a tensor back to
    what was published, if anything was done to it. adjusted: the configuration, if a tensor is part of it. spare:
    tensors that it has read. head: those of a prediction head, behind the last layer.
    """

    settings: Callable[[Metadata], dict[str, Any]]
    layer: Mapping[str, str]
    undo: Callable[[Any, str], Undo | None]
    adjusted: Callable[[Any, Metadata], Any] = lambda config, _: config
    spare: frozenset[str] = frozenset()
    head: Mapping[str, str] = {}
    apart: Mapping[str, Parts] = {}


def shared_settings(found: Metadata) -> dict[str, Any]:
    """What all architectures have alike, with experts where they have any. Raises CheckpointError."""
    sparse = found.architecture.endswith("moe") or found.architecture in SPARSE
    for name in ("attention.sliding_window",) if sparse else ("expert_count", "attention.sliding_window"):
        found.refuse(name, 0)
    found.refuse("attention.causal", True)
    heads = found.read_count("attention.head_count")
    hidden = found.read_count("embedding_length")
    head = found.read_count("attention.key_length", hidden // max(heads, 1))
    found.refuse("attention.value_length", head)
    embedding = found.tensors.get("token_embd.weight")
    if embedding is None:
        raise found.make_error("tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": found.read_count(
            "feed_forward_length", found.read_count("expert_feed_forward_length") if sparse else None
        ),
        **(experts(found) if sparse else {}),
        "num_hidden_layers": found.read_count("block_count") - heads_of_its_own(found),
        "num_attention_heads": heads,
        "num_key_value_heads": found.read_count("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": found.read_count("context_length"),
        "rms_norm_eps": found.read_number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in found.tensors,
        # these families are published in bfloat16: in float16 their hidden states may overflow, whatever a file stores
        "dtype": "float32" if embedding.packing.name == "F32" else "bfloat16",
    }


def experts(found: Metadata) -> dict[str, Any]:
    """llama.cpp has the weights of those that are chosen add up to one, whatever was published."""
    found.refuse("expert_weights_norm", True)
    found.refuse("expert_weights_scale", 1.0, 0.0)
    found.refuse("expert_gating_func", 1)
    found.refuse("expert_group_count", 0, 1)
    return {
        "num_experts": found.read_count("expert_count"),
        "num_experts_per_tok": found.read_count("expert_used_count"),
        "moe_intermediate_size": found.read_count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def heads_of_its_own(found: Metadata) -> int:
    """Layers behind the model's that are its prediction head: none or one."""
    found.refuse("nextn_predict_layers", 0, 1)
    return found.read_count("nextn_predict_layers", 0)
