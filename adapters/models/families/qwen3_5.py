"""Qwen3.5 and Qwen3.6 (dense): hybrid models with recurrent layers.

Three of four layers have a gated delta rule instead of attention. The attention of the others is gated.
Published checkpoints also handle images: the text model is described under `text_config`, and the names of its tensors
begin with `model.language_model.`. Checkpoints of the text model alone have neither. The image parts are left out.
Multimodal rotary embedding gives a token three positions. For text all three are the same, so it equals the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import (
    check_field,
    find_text_settings,
    read_rope,
    read_size,
    refuse_flag,
)
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import DenseFields, read_dense_fields
from adapters.models.decoder.config.rope import Rotary, count_rotated
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family, use_own_shape
from adapters.models.decoder.layers.feed_forward import Matrix
from adapters.models.decoder.layers.recurrent_layer import (
    delta_layer_matrices,
    delta_layer_products,
    delta_layer_tensors,
)
from adapters.models.kernels.interfaces.delta_interface import TAPS, DeltaShape
from adapters.models.kernels.interfaces.product_list import Weight

LINEAR = "linear_attention"
FULL = "full_attention"
INTERVAL = 4  # every fourth layer attends, where config.json gives neither layer_types nor an interval
PARTIAL = 0.25  # the share of a head that is rotated, where config.json does not give it
HEAD_DIM = 256
ROPES = ("default", "mrope")
_SKIPPED = ("model.visual.", "visual.", "mtp.")


@frozen
class Qwen35Config(DenseConfig):
    """A hybrid model.

    linear: the shape of the recurrent layers. layer_types: LINEAR or FULL for each layer. rotated: how many numbers of
    a head are rotated.
    """

    qk_norm: ClassVar[bool] = True
    output_gate: ClassVar[bool] = True
    zero_centred: ClassVar[bool] = True

    linear: DeltaShape = field(kw_only=True)
    layer_types: tuple[str, ...] = field(kw_only=True)
    rotated: int = field(kw_only=True)

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rotated, self.rope_theta)

    @property
    def delta(self) -> DeltaShape:
        return self.linear

    def recurrent(self, layer: int) -> bool:
        return self.layer_types[layer] == LINEAR

    def shape_of(self, layer: int) -> Qwen35Config:  # noqa: ARG002 - as in `DenseConfig`
        return self

    def layer_tensors(self, layer: int) -> Shapes:
        own = delta_layer_tensors(self.shape_of(layer), f"model.layers.{layer}.")
        return own if self.recurrent(layer) else super().layer_tensors(layer)

    def layer_matrices(self, layer: int) -> Iterator[Matrix]:
        if not self.recurrent(layer):
            return super().layer_matrices(layer)
        return delta_layer_matrices(self.shape_of(layer), f"model.layers.{layer}.")

    def layer_products(self, layer: int) -> tuple[Weight, ...]:
        return delta_layer_products(self.shape_of(layer)) if self.recurrent(layer) else super().layer_products(layer)

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer of each kind that the model has, as the first of two layers."""
        kinds = dict.fromkeys(self.layer_types)
        return tuple((self._small(layer_types=(kind, FULL)), range(1)) for kind in kinds)


def parse(raw: Mapping[str, Any]) -> Qwen35Config:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    text = find_text_settings(raw, "qwen3_5_text")
    for name in ("num_experts", "num_local_experts"):
        check_field(text, name, (0,))
    return Qwen35Config(**read_hybrid_fields(text))


class HybridFields(DenseFields):
    """The fields of `Qwen35Config`."""

    rope_theta: float
    linear: DeltaShape
    layer_types: tuple[str, ...]
    rotated: int


def read_hybrid_fields(text: Mapping[str, Any], inner: int | None = None) -> HybridFields:
    """Read the settings of a hybrid model's text part. Raises CheckpointError.

    text: the settings that `find_text_settings` found. inner: as in `read_dense_fields`. rope_theta is required, as
    with qwen3.
    """
    refuse_flag(text, "attention_bias")
    check_field(text, "attn_output_gate", (True,))
    check_field(text, "output_gate_type", ("swish", "silu"))
    check_field(text, "mamba_ssm_dtype", ("float32",))
    check_field(text, "linear_conv_kernel_dim", (TAPS,))
    rope = read_rope(text, ROPES, partial=PARTIAL)
    head = read_size(text, "head_dim", HEAD_DIM)
    rotated = count_rotated(head, rope["partial_rotary_factor"])
    linear = DeltaShape(
        read_size(text, "linear_num_key_heads"),
        read_size(text, "linear_num_value_heads"),
        read_size(text, "linear_key_head_dim"),
        read_size(text, "linear_value_head_dim"),
    )
    if linear.value_heads % linear.key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {linear.value_heads} is not a multiple of linear_num_key_heads "
            f"{linear.key_heads}"
        )
    layer_types = _layer_types(text)
    return {
        **read_dense_fields(text, head_dim=HEAD_DIM, inner=inner, has_layer_kinds=True),
        "rope_theta": rope["rope_theta"],
        "linear": linear,
        "layer_types": layer_types,
        "rotated": rotated,
    }


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Return each layer's kind, from `layer_types` or from the interval at which layers attend."""
    count = read_size(text, "num_hidden_layers")
    found = text.get("layer_types")
    if found is None:
        interval = read_size(text, "full_attention_interval", INTERVAL)
        return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(count))
    if not isinstance(found, list) or len(found) != count or any(kind not in (LINEAR, FULL) for kind in found):
        raise CheckpointError(
            f"config.json: layer_types is not a list of {count} kinds of layers; accepted: {LINEAR!r}, {FULL!r}"
        )
    return tuple(found)


def find_text_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    """Return our name of a tensor: the published one without the prefix of a model that also handles images.

    It is empty for tensors that do not belong to the text model, and for those of the prediction head.
    """
    if published.startswith(_SKIPPED):
        return ""
    return published.replace("model.language_model.", "model.", 1)


FAMILY = Family("qwen3_5", parse, DenseShard, find_text_name, head_shape=use_own_shape)
