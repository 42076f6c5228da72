"""Reads the fields of config.json that all dense decoders have. Each family adds its own to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import read_dtype, read_flag, read_positive, read_size


class DenseFields(TypedDict):
    """The fields of `DenseConfig` that config.json names alike in every family: all but `rope_theta`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype | None


def read_dense_fields(
    raw: Mapping[str, Any], *, head_dim: int | None = None, inner: int | None = None, has_layer_kinds: bool = False
) -> DenseFields:
    """Read Hugging Face's config.json, legacy or transformers-5 style. Raises CheckpointError.

    head_dim: used if config.json has none; by default the hidden size divided by the heads. inner: the intermediate
    size if config.json has none, for models without a dense layer. has_layer_kinds: layers are of several kinds, and
    the family reads `layer_types` itself. Otherwise every layer must attend to the whole sequence.
    """
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json: hidden_act {describe_value(raw['hidden_act'])} is not supported; accepted: 'silu'"
        )
    kinds = raw.get("layer_types") or []
    sliding = not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    if read_flag(raw, "use_sliding_window") or (sliding and not has_layer_kinds):
        raise CheckpointError("config.json: sliding window attention is not supported; accepted: full attention")
    heads = read_size(raw, "num_attention_heads")
    hidden = read_size(raw, "hidden_size")
    kv_heads = read_size(raw, "num_key_value_heads", heads)
    size = read_size(raw, "head_dim", head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if size % 2:
        raise CheckpointError(f"config.json: head_dim {size} is odd; rotary embedding needs an even one")
    dtype = read_dtype(raw)
    return {
        "vocab_size": read_size(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read_size(raw, "intermediate_size", inner),
        "num_layers": read_size(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "max_positions": read_size(raw, "max_position_embeddings"),
        "rms_norm_eps": read_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        "tie_word_embeddings": read_flag(raw, "tie_word_embeddings"),
        "dtype": None if dtype is None else getattr(torch, dtype),
    }
