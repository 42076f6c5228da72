"""Models with attention over compressed keys and values (MLA): their configuration, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_flag, read_rope, read_size, refuse_flag
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import DenseFields, read_dense_fields
from adapters.models.decoder.config.rope import Rotary, Scaling, parse_rope, scale_attention
from adapters.models.decoder.layers.latent_layer import LatentShape
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.kernels.formats.row_format import Rows, row_types
from adapters.models.kernels.interfaces.experts_interface import GroupedExpertsShape

ROPES = ("default", "linear", "yarn")


@frozen
class LatentConfig(DenseConfig):
    """A model whose layers keep one compressed row of each token, as one key head of `head_dim` numbers.

    experts: None only for the shape of a dense layer. dense: the layers without experts.
    """

    latent: LatentShape = field(kw_only=True)
    rope_scaling: Scaling | None = field(kw_only=True, default=None)
    experts: GroupedExpertsShape | None = field(kw_only=True)
    dense: tuple[int, ...] = field(kw_only=True, default=())

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.latent.rotated, self.rope_theta, self.rope_scaling)

    @property
    def traits(self) -> LayerTraits:
        return LayerTraits(latent=self.latent.latent)

    def row_bytes(self, rows: Rows) -> int:
        return row_types(rows).keys.row_bytes(self.head_dim)

    def shape_of(self, layer: int) -> LatentConfig:
        return evolve(self, experts=None) if layer in self.dense else self

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer with few experts and one dense layer, as far as the model has such layers."""
        assert self.experts is not None
        kinds = dict.fromkeys((0,) if layer in self.dense else () for layer in range(self.num_layers))
        few = self.experts.shrink_for_probe()
        return tuple((self._small(experts=few, dense=dense), range(1)) for dense in kinds)


class LatentFields(DenseFields):
    """The fields of `LatentConfig`, without `experts`."""

    rope_theta: float
    rope_scaling: Scaling | None
    latent: LatentShape
    dense: tuple[int, ...]


def read_latent_fields(raw: Mapping[str, Any], dense: tuple[int, ...] | None = None) -> LatentFields:
    """Read the config.json of a model with such attention. Raises CheckpointError.

    dense: the layers without experts; by default the first `first_k_dense_replace`.
    """
    refuse_flag(raw, "attention_bias")
    heads = read_size(raw, "num_attention_heads")
    if read_size(raw, "num_key_value_heads", heads) != heads:
        raise CheckpointError(f"config.json: num_key_value_heads is not num_attention_heads, {heads}")
    sizes = {
        name: read_size({"hidden_size": raw.get(name)}, "hidden_size")
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    }
    rotated = sizes["qk_rope_head_dim"]
    partial = (raw.get("rope_parameters") or {}).get("partial_rotary_factor")
    theta, scaling = parse_rope(raw, ROPES, partial=partial)
    latent = LatentShape(
        queries=0 if raw.get("q_lora_rank") is None else read_size({"hidden_size": raw["q_lora_rank"]}, "hidden_size"),
        latent=sizes["kv_lora_rank"],
        rotated=rotated,
        plain=sizes["qk_nope_head_dim"],
        values=sizes["v_head_dim"],
        scale=_read_scale(raw, sizes["qk_nope_head_dim"] + rotated),
        interleaved=raw.get("rope_interleave") is None or read_flag(raw, "rope_interleave"),
    )
    if rotated % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim {rotated} is odd; rotary embedding needs an even one")
    dense_layers = _read_dense_layers(raw) if dense is None else dense
    # Heads have no size of their own in config.json: a row of the cache has the latent part and the rotated one.
    fields = read_dense_fields({**raw, "head_dim": 2, "num_key_value_heads": 1})
    return {
        **fields,
        "head_dim": latent.row,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "latent": latent,
        "dense": dense_layers,
    }


def _read_scale(raw: Mapping[str, Any], query: int) -> float:
    """Return the scale of scores: YaRN as DeepSeek uses it makes them larger."""
    rope = read_rope(raw, ROPES, partial=1.0)
    scale = query**-0.5
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return scale
    return scale * scale_attention(rope, "mscale_all_dim") ** 2


def _read_dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    first = raw.get("first_k_dense_replace")
    count = read_size(raw, "first_k_dense_replace") if first else 0
    return tuple(range(min(count, read_size(raw, "num_hidden_layers"))))
