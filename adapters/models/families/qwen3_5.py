"""Qwen3.5 and Qwen3.6 (dense): three of four layers have a gated delta rule in the place of attention, which is gated.

Published checkpoints are of several media: the text model is under `text_config`, its tensors are called
`model.language_model.`; saves of the text alone have neither. What belongs to images is left out. Of text all three
positions of a token are the same, so multimodal rotary embedding is the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import read_rope, read_size, refuse_flag
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.dense_config import DenseConfig, parse_dense
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.feed_forward import Matrix
from adapters.models.decoder.recurrent_layer import delta_layer_matrices, delta_layer_products, delta_layer_tensors
from adapters.models.decoder.rope import Rotary
from adapters.models.kernels.delta_interface import TAPS, DeltaShape
from adapters.models.kernels.product_list import Weight

LINEAR = "linear_attention"
FULL = "full_attention"
INTERVAL = 4  # where neither the layers' kinds nor an interval are told
PARTIAL = 0.25  # of a head is rotated where it is not told
HEAD_DIM = 256
ROPES = ("default", "mrope")
_SKIPPED = ("model.visual.", "visual.", "mtp.")


@frozen
class Qwen35Config(DenseConfig):
    """linear: of the recurrent layers. layer_types: of each layer, LINEAR or FULL. rotated: numbers of a head."""

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

    def probed(self) -> Sequence[tuple[DenseConfig, range]]:
        """One layer of each kind that there is, as the first of two."""
        kinds = dict.fromkeys(self.layer_types)
        return tuple((self._small(layer_types=(kind, FULL)), range(1)) for kind in kinds)


HybridT = TypeVar("HybridT", bound=Qwen35Config)


def parse(raw: Mapping[str, Any]) -> Qwen35Config:
    """Raises CheckpointError."""
    text = text_of(raw, "qwen3_5_text")
    for name in ("num_experts", "num_local_experts"):
        accept(text, name, (0,))
    return parse_hybrid(text, Qwen35Config)


def parse_hybrid(text: Mapping[str, Any], kind: type[HybridT], **own: Any) -> HybridT:
    """rope_theta must be told, as with qwen3. text: as `text_of` found it. own: the family's own fields."""
    refuse_flag(text, "attention_bias")
    accept(text, "attn_output_gate", (True,))
    accept(text, "output_gate_type", ("swish", "silu"))
    accept(text, "mamba_ssm_dtype", ("float32",))
    accept(text, "linear_conv_kernel_dim", (TAPS,))
    rope = read_rope(text, ROPES, partial=PARTIAL)
    head = read_size(text, "head_dim", HEAD_DIM)
    rotated = int(head * rope["partial_rotary_factor"])
    if rotated < 2 or rotated % 2:
        raise CheckpointError(f"config.json: {rotated} of {head} numbers of a head are rotated; it must be pairs")
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
    return parse_dense(
        text,
        kind,
        head_dim=HEAD_DIM,
        rope_theta=rope["rope_theta"],
        linear=linear,
        layer_types=_layer_types(text),
        rotated=rotated,
        **own,
    )


def text_of(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The text model's settings, whichever level they are at. What is told at either holds, the text's own first."""
    inner = raw.get("text_config")
    if inner is None:
        return dict(raw)
    if not isinstance(inner, Mapping):
        raise CheckpointError("config.json: text_config is not an object")
    if inner.get("model_type", model_type) != model_type:
        kind = describe_value(inner["model_type"])
        raise CheckpointError(f"config.json: text_config.model_type {kind} is not supported; accepted: {model_type!r}")
    either = ("tie_word_embeddings", "dtype", "torch_dtype")
    return {**inner, **{name: raw[name] for name in either if name in raw and inner.get(name) is None}}


def accept(text: Mapping[str, Any], name: str, values: Sequence[object]) -> None:
    """Raises CheckpointError for a field that is told and is none of these."""
    told = text.get(name)
    if told is not None and not any(told == value and type(told) is type(value) for value in values):
        accepted = ", ".join(map(repr, values))
        raise CheckpointError(f"config.json: {name} {describe_value(told)} is not supported; accepted: {accepted}")


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    """As they are told, or by the interval at which layers attend."""
    count = read_size(text, "num_hidden_layers")
    told = text.get("layer_types")
    if told is None:
        interval = read_size(text, "full_attention_interval", INTERVAL)
        return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(count))
    if not isinstance(told, list) or len(told) != count or any(kind not in (LINEAR, FULL) for kind in told):
        raise CheckpointError(
            f"config.json: layer_types is not a list of {count} kinds of layers; accepted: {LINEAR!r}, {FULL!r}"
        )
    return tuple(told)


def named(published: str) -> str:
    """Without the prefix of a model of several media; empty for what is not of the text, and for draft layers."""
    if published.startswith(_SKIPPED):
        return ""
    return published.replace("model.language_model.", "model.", 1)


def head_shape(config: Qwen35Config) -> Qwen35Config:
    """The head's layer is one of attention, like the model's own."""
    return config


FAMILY = Family("qwen3_5", parse, DenseShard, named, head_shape)
