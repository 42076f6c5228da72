"""Parses the configuration of a Gemma 4 assistant and compares it with its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import find_text_settings, read_size
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.config.layered_config import LayerKind
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.family import ModelConfig
from adapters.models.families import gemma4

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# One more than the most proposals, as of a prediction head: each takes a forward, and later ones are accepted less.
BLOCK = 8


@frozen
class AssistantConfig:
    """An assistant. layers: the shapes of its layers, each with the layer of the target whose rows it reads.

    hidden_size: of the target, whose hidden states it continues. It has no rows of its own.
    """

    layers: gemma4.Gemma4Config
    hidden_size: int
    target_layers: int

    num_layers = 0
    block = BLOCK

    @property
    def num_kv_heads(self) -> int:
        return self.layers.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers.head_dim

    @property
    def rotary(self) -> Rotary:
        return self.layers.shape_of(0).rotary

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's last layer: the assistant continues from the target's final hidden state."""
        return (self.target_layers - 1,)

    def row_facts(self) -> tuple[object, ...]:
        return (TYPES[0],)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:  # noqa: ARG002
        return 0


def parse_assistant(raw: Mapping[str, Any], target: ModelConfig) -> AssistantConfig:
    """Return the configuration of an assistant for this target. Raises CheckpointError."""
    if not isinstance(target, gemma4.Gemma4Config):
        raise CheckpointError(f"config.json: model_type {raw.get('model_type')!r} drafts for models of Gemma 4 alone")
    backbone = read_size({"hidden_size": raw.get("backbone_hidden_size")}, "hidden_size")
    text = dict(find_text_settings({**raw, "model_type": "gemma4"}, "gemma4_text"))
    for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if text.get(name):
            raise CheckpointError(f"config.json: {name} {describe_value(text[name])} of an assistant is not supported")
    # All layers share rows, but not with each other: each of them reads those of a layer of the target.
    without = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": None}
    own = gemma4.parse({**text, **without})
    for name, ours, theirs in (
        ("backbone_hidden_size", backbone, target.hidden_size),
        ("vocab_size", own.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise CheckpointError(f"config.json: {name} is {ours}, but the target has {theirs}: a draft of another")
    kinds = tuple(_find_source(kind, target) for kind in own.kinds)
    return AssistantConfig(evolve(own, kinds=kinds), target.hidden_size, target.num_layers)


def _find_source(kind: LayerKind, target: gemma4.Gemma4Config) -> LayerKind:
    """Return a kind that reads the rows of the target's last layer of the same kind. Raises CheckpointError."""
    window = kind.traits.window
    having = [at for at, kind in enumerate(target.kinds) if kind.traits.source is None and kind.traits.window == window]
    if not having:
        raise CheckpointError(f"config.json: the target has no layer with a window of {window} rows")
    source = target.kinds[having[-1]]
    if (kind.num_kv_heads, kind.head_dim) != (source.num_kv_heads, source.head_dim):
        ours = f"{kind.num_kv_heads} key heads of {kind.head_dim}"
        theirs = f"{source.num_kv_heads} of {source.head_dim}"
        raise CheckpointError(f"config.json: {ours} are read, but the target has {theirs}: a draft of another")
    return evolve(kind, traits=evolve(kind.traits, source=having[-1]))


def list_assistant_tensors(config: AssistantConfig) -> Shapes:
    """Return the published names and shapes of the tensors that are used.

    The head is the embedding. Published centroids, which pick a part of the vocabulary, are not used: all of it is
    scored.
    """
    layers = config.layers
    hidden = layers.hidden_size
    found: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (hidden, 2 * config.hidden_size),
        "post_projection.weight": (config.hidden_size, hidden),
        "model.embed_tokens.weight": (layers.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers.num_layers):
        found |= layers.layer_tensors(layer)
    return found
