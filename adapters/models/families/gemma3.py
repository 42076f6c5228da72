"""Gemma 3 (text): five of six layers have a window and a rotary embedding of their own, and every layer has four norms.

Published checkpoints of most sizes also handle images. The image parts are left out, as with Qwen3.5. Config files of
these sizes leave out fields that have the defaults of transformers, so the same defaults are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import (
    check_field,
    find_text_settings,
    read_positive,
    read_size,
    refuse_flag,
)
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.layered_config import (
    FULL,
    SLIDING,
    LayeredConfig,
    LayerKind,
    find_rope_settings,
    read_layer_types,
)
from adapters.models.decoder.config.rope import Rotary, parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.kernels.activations import GELU

INTERVAL = 6  # every sixth layer sees all rows, where config.json does not say which ones do
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_SKIPPED = ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")


@frozen
class GemmaConfig(LayeredConfig):
    """A Gemma model. final_cap: of logits; 0: they are not capped."""

    qk_norm: ClassVar[bool] = True
    zero_centred: ClassVar[bool] = True

    final_cap: float = field(kw_only=True, default=0.0)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_cap(self) -> float:
        return self.final_cap


def parse(raw: Mapping[str, Any]) -> GemmaConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    text = with_defaults(find_text_settings(raw, "gemma3_text"), DEFAULTS)
    refuse_flag(text, "attention_bias")
    refuse_flag(text, "use_bidirectional_attention")
    check_field(text, "hidden_activation", ("gelu_pytorch_tanh",))
    kinds = read_layer_types(text, read_interval(text))
    scalar = read_positive(text["query_pre_attn_scalar"], "query_pre_attn_scalar")
    head = read_size(text, "head_dim")
    traits = {
        kind: LayerTraits(
            window=read_window(text) if kind == SLIDING else 0,
            cap=read_cap(text, "attn_logit_softcapping"),
            query_scale=(head / scalar) ** 0.5,
            post_norms=True,
            activation=GELU,
        )
        for kind in (FULL, SLIDING)
    }
    shape = (read_size(text, "num_attention_heads"), read_size(text, "num_key_value_heads"), head)
    inner = read_size(text, "intermediate_size")
    of_kind = {kind: LayerKind(*shape, inner, _read_rotary(text, kind, head), traits[kind]) for kind in (FULL, SLIDING)}
    return GemmaConfig(
        **read_dense_fields(text, has_layer_kinds=True),
        rope_theta=of_kind[FULL].rotary.theta,
        kinds=tuple(of_kind[kind] for kind in kinds),
        final_cap=read_cap(text, "final_logit_softcapping"),
    )


def with_defaults(text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with these values for fields that are not there."""
    return {**defaults, **{name: value for name, value in text.items() if value is not None}}


def read_interval(text: Mapping[str, Any]) -> int:
    """Return the number of layers of which one sees all rows. Raises CheckpointError."""
    found = text.get("sliding_window_pattern", INTERVAL)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= INTERVAL * 100:
        raise CheckpointError("config.json: sliding_window_pattern is not a number of layers")
    return found


def read_window(text: Mapping[str, Any]) -> int:
    """Return the rows of a window. Raises CheckpointError."""
    return read_size({"max_position_embeddings": text["sliding_window"]}, "max_position_embeddings")


def read_cap(text: Mapping[str, Any], name: str) -> float:
    """Return a cap, or 0 where there is none. Raises CheckpointError."""
    return 0.0 if text.get(name) is None else read_positive(text[name], name)


def _read_rotary(text: Mapping[str, Any], kind: str, head: int) -> Rotary:
    local = {"rope_theta": text.get("rope_local_base_freq")} if kind == SLIDING else text
    theta, scaling = parse_rope(find_rope_settings(text, kind, local), ("default", "linear"), THETAS[kind])
    return Rotary(head, theta, scaling)


def find_text_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    """Return our name of a tensor; empty for tensors that do not belong to the text model."""
    if published.startswith(_SKIPPED):
        return ""
    name = published.replace("model.language_model.", "model.", 1)
    return name.removeprefix("language_model.") if name.startswith("language_model.") else name


FAMILY = Family("gemma3", parse, DenseShard, find_text_name)
