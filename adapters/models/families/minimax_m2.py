"""MiniMax-M2: queries and keys of all heads share a norm, and the router scores experts by sigmoids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from adapters.checkpoint.config_fields import check_field, read_rope, read_size
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.experts_config import read_sigmoid_experts
from adapters.models.decoder.config.rope import Rotary, count_rotated
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.kernels.interfaces.experts_interface import SigmoidExpertsShape

HEAD_DIM = 128  # the default of transformers, for files without head_dim
NAMES = {
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


@frozen
class MiniMaxM2Config(DenseConfig):
    qk_norm: ClassVar[bool] = True

    experts: SigmoidExpertsShape = field(kw_only=True)
    rotated: int = field(kw_only=True)

    @property
    def traits(self) -> LayerTraits:
        return LayerTraits(norms_all_heads=True)

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rotated, self.rope_theta)

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer with few experts."""
        return ((self._small(experts=self.experts.shrink_for_probe()), range(1)),)


def parse(raw: Mapping[str, Any]) -> MiniMaxM2Config:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    check_field(raw, "use_qk_norm", (True,))
    check_field(raw, "qk_norm_type", ("per_layer",))
    check_field(raw, "scoring_func", ("sigmoid",))
    check_field(raw, "use_routing_bias", (True,))
    check_field(raw, "shared_intermediate_size", (0,))
    head = read_size(raw, "head_dim", HEAD_DIM)
    rope = read_rope(raw, ("default",), partial=read_size(raw, "rotary_dim", head) / head)
    experts = read_sigmoid_experts(raw, count="num_local_experts", inner="intermediate_size")
    rotated = count_rotated(head, rope["partial_rotary_factor"])
    fields = read_dense_fields(raw, head_dim=HEAD_DIM)
    return MiniMaxM2Config(**fields, experts=experts, rotated=rotated, rope_theta=rope["rope_theta"])


def find_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    """Return our name of a tensor of the experts."""
    for theirs, ours in NAMES.items():
        published = published.replace(theirs, ours, 1)
    return published


FAMILY = Family("minimax_m2", parse, DenseShard, find_name)
