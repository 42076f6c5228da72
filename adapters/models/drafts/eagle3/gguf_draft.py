"""Reads an EAGLE-3 draft from a GGUF file of llama.cpp: its settings as config.json has them, and its tensors.

The architecture is `eagle3`. Layers are numbered by what enters them, `d2t` has the target's tokens themselves, and the
rows of queries and keys are interleaved as in files of `llama`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from attrs import evolve

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.gguf.gguf_tensor import GgufTensor, make_tensor
from adapters.checkpoint.gguf.metadata import Metadata
from adapters.models.drafts.eagle3.config import EAGLE3, LAYER_IDS, Eagle3Config
from adapters.models.drafts.gguf_files import count_gguf_tokens
from adapters.models.gguf.architecture import ATTENTION, FRAME
from adapters.models.gguf.gguf_dense import FREQUENCIES, read_frequency_factors, read_scaling, split_halves

# Older files call the list otherwise.
_LAYER_LISTS = ("target_layers", "extract_layers")
_LAYER = re.compile(r"blk\.0\.(.*)")
_OUTSIDE = {
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "enc.output_norm.weight": "input_norm.weight",
}
_WITHIN = {
    **{stored: published for published, stored in (FRAME | ATTENTION).items()},
    "attn_norm_2.weight": "hidden_norm.weight",
}


def read_eagle3_settings(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a draft as config.json has them. Raises CheckpointError."""
    if metadata.architecture != EAGLE3:
        raise CheckpointError(f"general.architecture {metadata.architecture!r} is no EAGLE-3 draft")
    heads = metadata.read_count("attention.head_count")
    hidden = metadata.read_count("embedding_length")
    head_dim = metadata.read_count("attention.key_length", metadata.read_count("rope.dimension_count", hidden // heads))
    metadata.refuse("rope.dimension_count", head_dim)
    metadata.refuse("attention.value_length", head_dim)
    settings = {
        "num_hidden_layers": metadata.read_count("block_count"),
        "hidden_size": hidden,
        "intermediate_size": metadata.read_count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.read_count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.read_number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": metadata.read_number("rope.freq_base"),
            **read_scaling(metadata, keeps_multiplier=False),
        },
        "vocab_size": count_gguf_tokens(metadata),
        "target_hidden_size": metadata.find_field("target_hidden_size"),
        "eagle_config": {LAYER_IDS: _read_target_layers(metadata)},
        **{name: metadata.find_field(name) for name in ("norm_before_residual", "norm_before_fc")},
    }
    return {name: value for name, value in settings.items() if value is not None}


def find_eagle3_tensors(metadata: Metadata, settings: Mapping[str, Any]) -> dict[str, GgufTensor]:
    """Return all tensors of a file, by their published names; unknown ones keep their names. Raises CheckpointError."""
    undo = {
        "self_attn.q_proj.weight": partial(split_halves, heads=settings["num_attention_heads"]),
        "self_attn.k_proj.weight": partial(split_halves, heads=settings["num_key_value_heads"]),
    }
    tensors: dict[str, GgufTensor] = {}
    for stored_name, stored in metadata.tensors.items():
        if stored_name == FREQUENCIES:
            continue
        layer = _LAYER.fullmatch(stored_name)
        within = None if layer is None else _WITHIN.get(layer[1], layer[1])
        name = _OUTSIDE.get(stored_name, stored_name) if within is None else f"layers.0.{within}"
        if name in tensors:
            raise metadata.make_error(f"tensor {name} is there twice, under different names")
        tensors[name] = make_tensor(stored, undo.get(within or ""))
    return tensors


def add_eagle3_frequencies(config: Eagle3Config, metadata: Metadata) -> Eagle3Config:
    """Return the configuration with the factors that divide rotary frequencies, if the file has some."""
    factors = read_frequency_factors(metadata, config.head_dim, has_scaling=config.rotary.scaling is not None)
    return config if factors is None else evolve(config, rotary=evolve(config.rotary, scaling=factors))


def _read_target_layers(metadata: Metadata) -> list[int]:
    """Return the numbers of the layers whose outputs are read. Raises CheckpointError."""
    for name in _LAYER_LISTS:
        if metadata.find_field(name) is not None:
            return [number - 1 for number in metadata.header.read_integers(f"{EAGLE3}.{name}")]
    raise metadata.make_error(f"{EAGLE3}.{_LAYER_LISTS[0]} is missing")
