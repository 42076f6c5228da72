"""Laguna: layers with and without windows, which have other numbers of heads and rotate other parts of them.

What each head attends to is multiplied with the softplus of a gate. All but the first feed-forwards have experts, which
a router scores by sigmoids. All rows go through one more expert, which has no gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import check_field, read_rope, read_size, refuse_flag
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.experts_config import read_dense_list, read_sigmoid_experts
from adapters.models.decoder.config.layered_config import (
    FULL,
    SLIDING,
    LayeredConfig,
    LayerKind,
    find_rope_settings,
    read_layer_types,
)
from adapters.models.decoder.config.rope import Rotary, count_rotated, parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.kernels.interfaces.experts_interface import SigmoidExpertsShape

# The defaults of transformers, for files that leave these fields out.
HEAD_DIM = 128
WINDOW = 512
THETAS = {FULL: 500_000.0, SLIDING: 10_000.0}
PARTIAL = {FULL: 0.5, SLIDING: 1.0}
ROPES = ("default", "linear", "yarn")
GATES = (True, "per-head", "per-element")
NAMES = {
    ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
}


@frozen
class LagunaConfig(LayeredConfig):
    """experts: None only for the shape of a dense layer. dense: the layers without experts."""

    qk_norm: ClassVar[bool] = True

    experts: SigmoidExpertsShape | None = field(kw_only=True)
    dense: tuple[int, ...] = field(kw_only=True)

    def shape_of(self, layer: int) -> LayeredConfig:
        model = evolve(self, experts=None) if layer in self.dense else self
        return super(LagunaConfig, model).shape_of(layer)

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer of each kind, dense or with few experts."""
        assert self.experts is not None
        few = self.experts.shrink_for_probe()
        kinds = dict.fromkeys((kind, layer in self.dense) for layer, kind in enumerate(self.kinds))
        return tuple(
            (self._small(kinds=(kind, kind), experts=few, dense=(0,) if is_dense else ()), range(1))
            for kind, is_dense in kinds
        )


def parse(raw: Mapping[str, Any]) -> LagunaConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    refuse_flag(raw, "attention_bias")
    refuse_flag(raw, "moe_apply_router_weight_on_input")
    check_field(raw, "moe_router_logit_softcapping", (0, 0.0))
    check_field(raw, "gating", GATES)
    layers = read_size(raw, "num_hidden_layers")
    types = read_layer_types(raw, 1)
    head = read_size(raw, "head_dim", HEAD_DIM)
    gates = head if raw.get("gating") == "per-element" else 1
    window = read_size({"max_position_embeddings": raw.get("sliding_window")}, "max_position_embeddings", WINDOW)
    rotary = {kind: _read_rotary(raw, kind, head) for kind in dict.fromkeys(types)}
    traits = {FULL: LayerTraits(gates=gates), SLIDING: LayerTraits(gates=gates, window=window)}
    kv_heads = read_size(raw, "num_key_value_heads")
    inner = read_size(raw, "intermediate_size")
    counts = _read_heads(raw, layers, kv_heads)
    kinds = tuple(
        LayerKind(count, kv_heads, head, inner, rotary[kind], traits[kind])
        for count, kind in zip(counts, types, strict=True)
    )
    return LagunaConfig(
        **read_dense_fields(raw, head_dim=HEAD_DIM, has_layer_kinds=True),
        rope_theta=rotary[FULL].theta,
        kinds=kinds,
        experts=_read_experts(raw),
        dense=read_dense_list(raw, layers),
    )


def _read_experts(raw: Mapping[str, Any]) -> SigmoidExpertsShape:
    named = {**raw, "routed_scaling_factor": raw.get("moe_routed_scaling_factor", 1.0), "norm_topk_prob": True}
    shared = read_size({"intermediate_size": raw.get("shared_expert_intermediate_size")}, "intermediate_size")
    return read_sigmoid_experts(named, count="num_experts", inner="moe_intermediate_size", shared=shared, groups=True)


def _read_heads(raw: Mapping[str, Any], layers: int, kv_heads: int) -> list[int]:
    """Return the number of query heads of each layer. Raises CheckpointError."""
    usual = read_size(raw, "num_attention_heads")
    found = raw.get("num_attention_heads_per_layer")
    if found is None:
        return [usual] * layers
    if not isinstance(found, list) or len(found) != layers:
        raise CheckpointError(f"config.json: num_attention_heads_per_layer is not a list of {layers} numbers of heads")
    counts = [read_size({"num_attention_heads": count}, "num_attention_heads") for count in found]
    for count in counts:
        if count % kv_heads:
            raise CheckpointError(
                f"config.json: {count} of num_attention_heads_per_layer is not a multiple of num_key_value_heads "
                f"{kv_heads}"
            )
    return counts


def _read_rotary(raw: Mapping[str, Any], kind: str, head: int) -> Rotary:
    found = find_rope_settings(raw, kind, {})
    rope = read_rope(found, ROPES, THETAS[kind], PARTIAL[kind])
    theta, scaling = parse_rope(found, ROPES, THETAS[kind], PARTIAL[kind])
    return Rotary(count_rotated(head, rope["partial_rotary_factor"]), theta, scaling)


def find_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    """Return our name of a tensor."""
    for theirs, ours in NAMES.items():
        published = published.replace(theirs, ours, 1)
    return published


FAMILY = Family("laguna", parse, DenseShard, find_name)
