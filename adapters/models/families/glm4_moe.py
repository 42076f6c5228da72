"""GLM-4.5 to 4.7 with experts: half of each head is rotated, and the router scores experts by sigmoids.

Queries, keys and values have biases. The larger models norm heads as well. The first layers have a dense feed-forward.
All rows go through one more expert, which has no gate. Published checkpoints have a prediction head: it is stored as
one more layer behind the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_flag, read_rope, read_size
from adapters.models.decoder.dense_config import DenseConfig, parse_dense
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.experts_config import read_sigmoid_experts
from adapters.models.decoder.family import HEAD_PREFIX, Family
from adapters.models.decoder.rope import Rotary, count_rotated
from adapters.models.kernels.experts_interface import SigmoidExpertsShape

PARTIAL = 0.5  # the default of partial_rotary_factor
HEAD = {  # the prediction head's tensors around its layer, as published and by our names
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "norm.weight",
}


@frozen
class Glm4MoeConfig(DenseConfig):
    """experts: None only for the shape of a dense layer. dense: the number of dense layers, which come first."""

    qkv_bias: ClassVar[bool] = True

    experts: SigmoidExpertsShape | None = field(kw_only=True)
    dense: int = field(kw_only=True)
    rotated: int = field(kw_only=True)

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rotated, self.rope_theta)

    def shape_of(self, layer: int) -> DenseConfig:
        return evolve(self, experts=None) if layer < self.dense else self

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer with few experts and one dense layer, as far as the model has such layers."""
        assert self.experts is not None
        few = self.experts.shrink_for_probe()
        kinds = [dense for dense in (0, 1) if (self.dense < self.num_layers, self.dense > 0)[dense]]
        return tuple((self._small(experts=few, dense=dense), range(1)) for dense in kinds)


@frozen
class NormedGlm4MoeConfig(Glm4MoeConfig):
    qk_norm: ClassVar[bool] = True


def parse(raw: Mapping[str, Any]) -> Glm4MoeConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    if not read_flag(raw, "attention_bias"):
        raise CheckpointError("config.json: attention_bias false is not supported; accepted: true")
    rope = read_rope(raw, ("default",), partial=PARTIAL)
    head = read_size(raw, "head_dim", max(1, read_size(raw, "hidden_size") // read_size(raw, "num_attention_heads")))
    shared = read_size(raw, "moe_intermediate_size") * read_size(raw, "n_shared_experts", 1)
    own: dict[str, Any] = {
        "experts": read_sigmoid_experts(
            raw, count="n_routed_experts", inner="moe_intermediate_size", shared=shared, groups=True
        ),
        "dense": read_size(raw, "first_k_dense_replace") if raw.get("first_k_dense_replace", 1) else 0,
        "rotated": count_rotated(head, rope["partial_rotary_factor"]),
        "rope_theta": rope["rope_theta"],
    }
    return parse_dense(raw, NormedGlm4MoeConfig if read_flag(raw, "use_qk_norm") else Glm4MoeConfig, **own)


def find_name(published: str, config: DenseConfig) -> str:
    """Return our name of a tensor. The prediction head's copies of the embedding and of the head are not used."""
    name = published.replace(".mlp.shared_experts.", ".mlp.shared_expert.", 1)
    published_head = f"model.layers.{config.num_layers}."
    if not name.startswith(published_head):
        return name
    part = name.removeprefix(published_head)
    if part in ("embed_tokens.weight", "shared_head.head.weight"):
        return ""
    return HEAD_PREFIX + HEAD.get(part, f"layers.0.{part}")


def head_shape(config: Glm4MoeConfig) -> Glm4MoeConfig:
    """Return the shape of the prediction head's layer, which has experts."""
    return config


FAMILY = Family("glm4_moe", parse, DenseShard, find_name, head_shape=head_shape)
