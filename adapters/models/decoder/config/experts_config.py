"""Reads the experts from config.json: their number and sizes, and the layers without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from attrs import evolve

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import read_flag, read_positive, read_size
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape, GroupedExpertsShape, SigmoidExpertsShape

MOST = 1 << 16  # experts of all layers: almost three times as many as any published model has


def read_experts(raw: Mapping[str, Any], *, default_normalized: bool, shared: bool) -> ExpertsShape:
    """Read the shape of a feed-forward with experts. Raises CheckpointError.

    default_normalized: the default for `norm_topk_prob`. shared: does the family have an expert that all rows use?
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


def read_sigmoid_experts(
    raw: Mapping[str, Any], *, count: str, inner: str, shared: int = 0, groups: bool = False
) -> SigmoidExpertsShape:
    """Read the shape of a feed-forward whose router scores by sigmoids. Raises CheckpointError.

    count, inner: the fields of the number of experts and of their columns. shared: columns of the shared expert.
    groups: does the family choose groups of experts first, and scale the weights?
    """
    return _read_grouped(SigmoidExpertsShape, raw, count, inner, shared, groups=groups)


def read_softmax_experts(raw: Mapping[str, Any], *, count: str, inner: str, shared: int) -> GroupedExpertsShape:
    """Read the shape of a feed-forward whose router scores by a softmax, by groups. Raises CheckpointError.

    The arguments are those of `read_sigmoid_experts`.
    """
    return _read_grouped(GroupedExpertsShape, raw, count, inner, shared, groups=True)


GroupedT = TypeVar("GroupedT", bound=GroupedExpertsShape)


def _read_grouped(
    kind: type[GroupedT], raw: Mapping[str, Any], count: str, inner: str, shared: int, *, groups: bool
) -> GroupedT:
    plain = {"num_experts": raw.get(count), "moe_intermediate_size": raw.get(inner), "norm_topk_prob": True}
    shape = read_experts({**raw, **plain}, default_normalized=True, shared=False)
    own = kind(shape.count, shape.chosen, shape.inner, is_normalized=True, shared=shared)
    if not groups:
        return own
    found = evolve(
        own,
        is_normalized=raw.get("norm_topk_prob") is None or read_flag(raw, "norm_topk_prob"),
        groups=read_size(raw, "n_group", 1),
        chosen_groups=read_size(raw, "topk_group", 1),
        factor=read_positive(raw.get("routed_scaling_factor", 1.0), "routed_scaling_factor"),
    )
    size = found.count // found.groups
    whole = size * found.groups == found.count and found.chosen_groups <= found.groups
    if found.groups > 1 and not (whole and size > 1 and found.chosen <= size * found.chosen_groups):
        raise CheckpointError(
            f"config.json: {found.count} experts in n_group {found.groups} groups, topk_group {found.chosen_groups} of "
            f"which are chosen, have no room for num_experts_per_tok {found.chosen}"
        )
    return found


def read_dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without experts: the named ones, and all but every `decoder_sparse_step`-th layer.

    Raises CheckpointError.
    """
    layers = read_size(raw, "num_hidden_layers")
    step = read_size(raw, "decoder_sparse_step", 1)
    named = raw.get("mlp_only_layers")
    whole = isinstance(named, list) and all(
        isinstance(number, int) and not isinstance(number, bool) for number in named
    )
    if named is not None and not whole:
        raise CheckpointError("config.json: mlp_only_layers is not a list of numbers of layers")
    return tuple(layer for layer in range(layers) if layer in (named or ()) or (layer + 1) % step)


def read_dense_list(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without experts: by default the first one. Raises CheckpointError."""
    found = raw.get("mlp_layer_types")
    if found is None:
        return (0,)
    if not isinstance(found, list) or len(found) != layers or any(kind not in ("dense", "sparse") for kind in found):
        raise CheckpointError(
            f"config.json: mlp_layer_types {describe_value(found)} is not a list of {layers} kinds of feed-forwards; "
            "accepted: 'dense', 'sparse'"
        )
    return tuple(layer for layer, kind in enumerate(found) if kind == "dense")
