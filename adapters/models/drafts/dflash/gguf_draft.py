"""Reads a DFlash, DFlash 2 or DSpark draft from a GGUF file: its settings as config.json has them, and its tensors.

Two forms are published. llama.cpp's has the architecture `dflash`. It numbers the target's layers by what enters them,
so each number is one more than in config.json. The form of Lucebox has an architecture that ends in `dflash-draft`, own
settings below `dflash.`, and layers numbered as in config.json. Norms are stored as published in both.
"""

from __future__ import annotations

import re
from typing import Any

from attrs import evolve

from adapters.checkpoint.checkpoint_error import describe_value
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor, make_tensor
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.drafts.gguf_files import count_gguf_tokens
from adapters.models.gguf.architecture import ATTENTION, FRAME
from adapters.models.gguf.gguf_dense import read_scaling

MAINLINE = "dflash"
SUFFIX = "dflash-draft"
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
# Names in files, and the published ones. Where there are several, forms differ.
_OUTSIDE = {
    **dict.fromkeys(("fc.weight", "dflash.fc.weight", "dflash_fc.weight"), "fc.weight"),
    **dict.fromkeys(
        ("enc.output_norm.weight", "dflash.hidden_norm.weight", "dflash_hidden_norm.weight"), "hidden_norm.weight"
    ),
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector.hidden_proj.weight": "candidate_selector.hidden_projection.weight",
    "selector.pred_codebook": "candidate_selector.predecessor_codebook",
    "selector.succ_codebook": "candidate_selector.successor_codebook",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
_PLACES = {"attn": "attention", "ffn": "mlp"}
_WITHIN = {
    **{stored: published for published, stored in (FRAME | ATTENTION).items()},
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    **{f"{short}_conv{mark}base": f"{place}_conv.base_kernel" for short, place in _PLACES.items() for mark in "_."},
    **{
        f"{short}_conv{mark}proj.weight": f"{place}_conv.kernel_projection.weight"
        for short, place in _PLACES.items()
        for mark in "_."
    },
}


def find_gguf_tensors(metadata: Metadata) -> dict[str, GgufTensor]:
    """Return all tensors of a file, by their published names; unknown ones keep their names. Raises CheckpointError."""
    _check_architecture(metadata)
    tensors: dict[str, GgufTensor] = {}
    for stored_name, stored in metadata.tensors.items():
        layer = _LAYER.fullmatch(stored_name)
        name = _OUTSIDE.get(stored_name, stored_name)
        if layer is not None:
            name = f"layers.{layer[1]}.{_WITHIN.get(layer[2], layer[2])}"
        if name in tensors:
            raise metadata.make_error(f"tensor {name} is there twice, under different names")
        # Writers leave out leading dimensions of size one.
        has_one_row = name == "confidence_head.proj.weight" and len(stored.shape) == 1
        tensors[name] = make_tensor(evolve(stored, shape=(1, *stored.shape)) if has_one_row else stored)
    return tensors


def read_gguf_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a draft as config.json has them. Raises CheckpointError."""
    _check_architecture(metadata)
    layers = metadata.read_count("block_count")
    head = metadata.read_count("attention.key_length")
    metadata.refuse("attention.value_length", head)
    metadata.refuse("rope.dimension_count", head)
    for name in ("hyper_connection_count", "expert_count"):
        metadata.refuse(name, 0)
    own = "" if metadata.architecture == MAINLINE else "dflash."
    settings = {
        "model_type": "qwen3",
        "hidden_size": metadata.read_count("embedding_length"),
        "intermediate_size": metadata.read_count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": metadata.read_count("attention.head_count"),
        "num_key_value_heads": metadata.read_count("attention.head_count_kv"),
        "head_dim": head,
        "rms_norm_eps": metadata.read_number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": metadata.read_number("rope.freq_base"),
            **read_scaling(metadata, keeps_multiplier=False),
        },
        "vocab_size": count_gguf_tokens(metadata),
        "block_size": metadata.find_field(own + "block_size"),
        "mask_token_id": metadata.find_field(own + "mask_token_id")
        or metadata.header.fields.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": _read_target_layers(metadata),
        "causal": metadata.find_field("attention.causal"),
        "sample_from_anchor": metadata.find_field(own + "sample_from_anchor"),
        "output_multiplier": metadata.find_field("logit_scale") or None,
        "final_logit_softcapping": metadata.find_field("final_logit_softcapping"),
        **{name: metadata.find_field(own + name) for name in ("conv_kernel_size", "conv_group_size")},
        **{name: metadata.find_field(own + name) for name in ("selector_rank", "selector_top_k")},
        **_read_windows(metadata, layers),
        **_read_markov(metadata),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _check_architecture(metadata: Metadata) -> None:
    if metadata.architecture != MAINLINE and not metadata.architecture.endswith(SUFFIX):
        raise metadata.make_error(
            f"general.architecture {describe_value(metadata.architecture)} is no DFlash draft; "
            f"accepted: {MAINLINE!r}, {SUFFIX!r}, and names that end in it"
        )


def _read_target_layers(metadata: Metadata) -> list[int] | None:
    if metadata.architecture == MAINLINE:
        return [number - 1 for number in metadata.header.read_integers(f"{MAINLINE}.target_layers")]
    name = f"{metadata.architecture}.dflash.target_layer_ids"
    return metadata.header.read_integers(name) if name in metadata.header.fields else None


def _read_windows(metadata: Metadata, layers: int) -> dict[str, Any]:
    """Return which layers have a window. Lucebox ignores a window without a pattern."""
    window = metadata.read_count("attention.sliding_window", 0)
    pattern = "attention.sliding_window_pattern"
    if not window or (metadata.architecture != MAINLINE and metadata.find_field(pattern) is None):
        return {}
    kinds = [
        "sliding_attention" if slides else "full_attention" for slides in metadata.read_layer_flags(pattern, layers)
    ]
    return {"layer_types": kinds, "sliding_window": window}


def _read_markov(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a Markov head. Files have the plain kind only, and its sizes are those of the tensors."""
    stored = metadata.tensors.get("markov_w1.weight")
    return {} if stored is None else {"markov_head_type": "vanilla", "markov_rank": stored.shape[-1]}
