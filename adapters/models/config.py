"""Qwen3's configuration: config.json parsed and validated, or refused with one clear line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from adapters.models import MODEL_TYPES

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Larger than any published dense Qwen3 by a wide margin; they bound what a hostile file can make us allocate.
_LIMITS = {
    "vocab_size": 1 << 21,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 512,
    "num_attention_heads": 512,
    "num_key_value_heads": 512,
    "head_dim": 512,
    "max_position_embeddings": 1 << 24,
}
_GREATEST = 1e30  # of any number in config.json that is no count


class CheckpointError(Exception):
    """A checkpoint that cannot be served; the message is one line that says what is wrong and what is accepted."""


@frozen
class Qwen3Config:
    """A dense Qwen3. H query heads and KV key/value heads of `head_dim`; H * head_dim need not equal hidden_size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: torch.dtype | None = None
    """What config.json says the weights are in; None if it says nothing."""

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype: torch.dtype, layers: int | None = None) -> int:
        count = self.num_layers if layers is None else layers
        return 2 * count * self.num_kv_heads * self.head_dim * dtype.itemsize


def shown(value: object) -> str:
    """What was found where something else is accepted; short, and one line, whatever it is."""
    if isinstance(value, list | dict):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    return repr(value)[:40]


def parse_config(raw: Mapping[str, Any]) -> Qwen3Config:
    """Hugging Face's config.json, legacy or transformers-5 style. Raises CheckpointError.

    Where a key is missing, the default is that of transformers' Qwen3Config; rope_theta has no default, since a
    wrong one is not noticed at once.
    """
    _refuse_other_models(raw)
    sizes = {name: read_size(raw, name) for name in _LIMITS if name not in ("num_key_value_heads", "head_dim")}
    heads = sizes["num_attention_heads"]
    kv_heads = read_size(raw, "num_key_value_heads") if raw.get("num_key_value_heads") is not None else heads
    head_dim = read_size(raw, "head_dim") if raw.get("head_dim") is not None else 128
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
    return Qwen3Config(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=sizes["max_position_embeddings"],
        rope_theta=_rope_theta(raw),
        rms_norm_eps=read_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        tie_word_embeddings=read_flag(raw, "tie_word_embeddings"),
        dtype=_dtype(raw),
    )


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        accepted = ", ".join(map(repr, MODEL_TYPES))
        raise CheckpointError(f"config.json: model_type {shown(kind)} is not supported; accepted: {accepted}")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {shown(raw['hidden_act'])} is not supported; accepted: 'silu'")
    if raw.get("quantization_config") is not None:
        raise CheckpointError("config.json: quantization_config is not supported; accepted: unquantised weights")
    if read_flag(raw, "attention_bias"):
        raise CheckpointError("config.json: attention_bias true is not supported; accepted: false")
    kinds = raw.get("layer_types") or []
    sliding = isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds)
    if read_flag(raw, "use_sliding_window") or sliding or not isinstance(kinds, list):
        raise CheckpointError("config.json: sliding window attention is not supported; accepted: full attention")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    return read_positive(read_rope(raw, ("default",))["rope_theta"], "rope_theta")


def read_rope(raw: Mapping[str, Any], accepted: Sequence[str]) -> dict[str, Any]:
    """The rotary settings, of one of the accepted types: `rope_type`, `rope_theta` and whatever else is told.

    Legacy files hold rope_theta and rope_scaling; transformers 5 writes rope_parameters.
    """
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {name} is not an object")
        rope.update(value or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in accepted:
        options = ", ".join(map(repr, accepted))
        raise CheckpointError(f"config.json: rope type {shown(kind)} is not supported; accepted: {options}")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor is not supported; accepted: 1.0")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise CheckpointError("config.json: rope_theta is missing")
    return {**rope, "rope_type": kind, "rope_theta": theta}


def read_size(raw: Mapping[str, Any], name: str) -> int:
    """One of the counts of config.json; bounded, since memory is allocated by it."""
    value = raw.get(name)
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LIMITS[name]:
        raise CheckpointError(f"config.json: {name} {shown(value)} is not an integer in 1..{_LIMITS[name]}")
    return value


def read_positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _GREATEST:
        raise CheckpointError(f"config.json: {name} {shown(value)} is not a positive number up to {_GREATEST:g}")
    return float(value)


def read_flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} {shown(value)} is not true or false")
    return value


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"config.json: dtype {shown(name)} is not supported; accepted: {', '.join(DTYPES)}")
    return DTYPES[name]
