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
from adapters.models.decoder.config.deepseek_names import find_deepseek_name
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.experts_config import read_sigmoid_experts
from adapters.models.decoder.config.rope import Rotary, count_rotated
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, use_own_shape
from adapters.models.kernels.interfaces.experts_interface import SigmoidExpertsShape

PARTIAL = 0.5  # the default of partial_rotary_factor


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
    experts = read_sigmoid_experts(
        raw, count="n_routed_experts", inner="moe_intermediate_size", shared=shared, groups=True
    )
    dense = read_size(raw, "first_k_dense_replace") if raw.get("first_k_dense_replace", 1) else 0
    rotated = count_rotated(head, rope["partial_rotary_factor"])
    kind = NormedGlm4MoeConfig if read_flag(raw, "use_qk_norm") else Glm4MoeConfig
    return kind(**read_dense_fields(raw), experts=experts, dense=dense, rotated=rotated, rope_theta=rope["rope_theta"])


FAMILY = Family("glm4_moe", parse, DenseShard, find_deepseek_name, head_shape=use_own_shape)
