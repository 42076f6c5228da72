"""Mistral and the text models of Ministral 3, Mistral Small 3 and Devstral: Llama's layers.

Queries of Ministral 3 and Devstral 2 are scaled by position. Published checkpoints of `mistral3` also handle images.
There the text model is described under `text_config`, and the names of its tensors have a prefix. The image parts are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import find_text_settings, read_positive, read_rope
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.rope import Rotary, ScaledRotary, parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.families.llama import ROPES, LlamaConfig

TYPES = ("mistral", "ministral3")
_SKIPPED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@frozen
class Ministral3Config(LlamaConfig):
    """A model whose queries are scaled as `ScaledRotary` says."""

    beta: float = field(kw_only=True)
    original: int = field(kw_only=True)

    @property
    def rotary(self) -> Rotary:
        return ScaledRotary(self.head_dim, self.rope_theta, self.rope_scaling, beta=self.beta, original=self.original)


def parse(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError.

    rope_theta is required, as with qwen3. A window must be null.
    """
    text = find_text_settings(raw, *TYPES)
    if text.get("sliding_window") is not None:
        window = describe_value(text["sliding_window"])
        raise CheckpointError(f"config.json: sliding_window {window} is not supported; accepted: null")
    theta, scaling = parse_rope(text, ROPES)
    rope = read_rope(text, ROPES)
    beta = rope.get("llama_4_scaling_beta")
    if not beta:
        return LlamaConfig(**read_dense_fields(text), rope_theta=theta, rope_scaling=scaling)
    original = read_positive(rope.get("original_max_position_embeddings"), "original_max_position_embeddings")
    return Ministral3Config(
        **read_dense_fields(text),
        rope_theta=theta,
        rope_scaling=scaling,
        beta=read_positive(beta, "llama_4_scaling_beta"),
        original=int(original),
    )


def find_text_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    """Return the name of a tensor of the text model; empty for those of image parts."""
    if published.startswith(_SKIPPED):
        return ""
    return published.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


FAMILY = Family("mistral", parse, DenseShard, find_text_name)
