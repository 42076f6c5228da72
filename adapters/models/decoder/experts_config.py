"""Reads the experts from config.json: their number and sizes, and the layers without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_flag, read_size
from adapters.models.kernels.experts_interface import ExpertsShape

MOST = 1 << 16  # experts of all layers: almost three times as many as any published model has


def read_experts(raw: Mapping[str, Any], *, default_normalized: bool, shared: bool) -> ExpertsShape:
    """Read the shape of a feed-forward with experts. Raises CheckpointError.

    normed: the default for `norm_topk_prob`. shared: does the family have an expert that all rows use?
    """
    name = "num_local_experts" if raw.get("num_experts") is None and "num_local_experts" in raw else "num_experts"
    count = read_size({"num_experts": raw.get(name)}, "num_experts")
    active = read_size(raw, "num_experts_per_tok")
    layers = read_size(raw, "num_hidden_layers")
    if active > count:
        raise CheckpointError(f"config.json: num_experts_per_tok {active} is more than num_experts, {count}")
    if count * layers > MOST:
        raise CheckpointError(f"config.json: {count} experts in each of {layers} layers; accepted: {MOST} in all")
    return ExpertsShape(
        count=count,
        chosen=active,
        inner=read_size(raw, "moe_intermediate_size"),
        is_normalized=default_normalized if raw.get("norm_topk_prob") is None else read_flag(raw, "norm_topk_prob"),
        shared=read_size(raw, "shared_expert_intermediate_size") if shared else 0,
    )


def read_dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without experts: the named ones, and all but every `decoder_sparse_step`-th layer.

    Raises CheckpointError.
    """
    layers = read_size(raw, "num_hidden_layers")
    step = read_size(raw, "decoder_sparse_step", 1)
    named = raw.get("mlp_only_layers")
    whole = isinstance(named, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in named)
    if named is not None and not whole:
        raise CheckpointError("config.json: mlp_only_layers is not a list of numbers of layers")
    return tuple(layer for layer in range(layers) if layer in (named or ()) or (layer + 1) % step)
