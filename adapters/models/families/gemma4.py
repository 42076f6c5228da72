"""Gemma 4 (text): layers with windows and layers that see all rows, which have heads of other sizes.

Layers that see all rows may use one projection for keys and values, and rotate a quarter of each head. In small models
the last layers read the keys and values of earlier ones, and every layer has inputs of its own. One model has experts
parallel to its MLPs. Checkpoints that also handle images and sound are served without those parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import (
    check_field,
    find_text_settings,
    read_flag,
    read_positive,
    read_size,
    refuse_flag,
)
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.config.dense_config import PROBED_VOCABULARY, DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.experts_config import read_experts
from adapters.models.decoder.config.layered_config import (
    FULL,
    PROBED_LAYERS,
    SLIDING,
    LayerKind,
    find_rope_settings,
    read_layer_types,
)
from adapters.models.decoder.config.rope import Proportional, Rotary, parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.layers.feed_forward import Matrix, idle_weights
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.shard_crossing import Crossing
from adapters.models.families import gemma3
from adapters.models.families.gemma4_layer import (
    EndingShape,
    Gemma4Ending,
    Gemma4Inputs,
    InputsShape,
    SparseFeed,
    load_ending,
    load_inputs,
)
from adapters.models.kernels.activations import GELU
from adapters.models.kernels.formats.row_format import Rows
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Weight

THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
PARTIAL = 0.25  # the share of a head that is rotated in layers that see all rows
GLOBAL_HEAD_DIM = 512
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
_SKIPPED = tuple(
    f"{start}{part}."
    for start in ("model.", "")
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector")
)
_OF_SHARED = re.compile(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


@frozen
class Gemma4Config(gemma3.GemmaConfig):
    """A Gemma 4 model.

    sparse: the experts parallel to the MLPs; None: there are none. inputs: numbers of each layer's own inputs; 0:
    layers have none. input_vocabulary: rows of the embedding of those inputs.
    """

    zero_centred: ClassVar[bool] = False
    wide_norms: ClassVar[bool] = True

    sparse: ExpertsShape | None = field(kw_only=True, default=None)
    inputs: int = field(kw_only=True, default=0)
    input_vocabulary: int = field(kw_only=True, default=0)

    @property
    def experts(self) -> ExpertsShape | None:
        """The experts of the model; the feed-forward proper of a layer is dense."""
        return self.sparse if self.kind is None else None

    def find_crossing(self, cut: int, dtype: torch.dtype, rows: Rows) -> Crossing:
        """Inputs of layers are made from tokens, which only the first shard gets."""
        found = super().find_crossing(cut, dtype, rows)
        return evolve(found, inputs=self.inputs * (self.num_layers - cut))

    @property
    def inputs_shape(self) -> InputsShape | None:
        if not self.inputs:
            return None
        return InputsShape(self.num_layers, self.inputs, self.input_vocabulary, self.hidden_size)

    def ending_of(self, layer: int) -> EndingShape:
        """Return what is special about the end of a layer."""
        sparse = None
        if self.sparse is not None:
            traits = self.kinds[layer].traits
            sparse = SparseFeed(self.hidden_size, self.intermediate_size, self.sparse, traits)
        return EndingShape(self.hidden_size, self.inputs, sparse)

    def tensors(self, layers: range | None = None) -> Shapes:
        found = dict(super().tensors(layers))
        if self.inputs_shape is not None and (layers is None or layers.start == 0):
            found |= self.inputs_shape.list_tensors()
        return found

    def layer_tensors(self, layer: int) -> Shapes:
        prefix = f"model.layers.{layer}."
        own = {prefix + name: shape for name, shape in self.ending_of(layer).list_tensors().items()}
        return {**super().layer_tensors(layer), **own}

    def layer_products(self, layer: int) -> tuple[Weight, ...]:
        found = (*super().layer_products(layer), *self.ending_of(layer).list_products())
        if self.inputs_shape is None:
            return found
        small = evolve(self.inputs_shape, layers=PROBED_LAYERS)
        return (*found, self.inputs_shape.product, small.product)

    def layer_matrices(self, layer: int) -> Iterator[Matrix]:
        yield from super().layer_matrices(layer)
        yield from self.ending_of(layer).list_matrices(f"model.layers.{layer}.")

    def count_idle_weights(self, layer: int) -> int:
        sparse = self.ending_of(layer).sparse
        return 0 if sparse is None else idle_weights(sparse)

    def load_ending(self, read: WeightReader, kernels: Kernels, layer: int) -> Gemma4Ending:
        shape = self.ending_of(layer)
        return load_ending(read, kernels, shape, f"model.layers.{layer}.", eps=self.rms_norm_eps, activation=GELU)

    def load_row_inputs(self, read: WeightReader, kernels: Kernels) -> Gemma4Inputs | None:
        shape = self.inputs_shape
        return None if shape is None else load_inputs(read, kernels, shape, self.rms_norm_eps)

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return what a layered model returns, with few experts and a small table of inputs."""
        few = None if self.sparse is None else self.sparse.shrink_for_probe()
        small = evolve(self, sparse=few, input_vocabulary=PROBED_VOCABULARY)
        return super(Gemma4Config, small).list_probed_layers()


def parse(raw: Mapping[str, Any]) -> Gemma4Config:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    text = gemma3.with_defaults(find_text_settings(raw, "gemma4_text"), DEFAULTS)
    refuse_flag(text, "attention_bias")
    check_field(text, "hidden_activation", ("gelu_pytorch_tanh",))
    check_field(text, "use_bidirectional_attention", ("vision",))
    types = read_layer_types({**text, "layer_types": _end_with_full(text.get("layer_types"))}, gemma3.INTERVAL)
    of_kind = {kind: _read_kind(text, kind, types) for kind in (FULL, SLIDING)}
    kinds = share_rows([of_kind[kind] for kind in types], text)
    return Gemma4Config(
        **read_dense_fields(text, has_layer_kinds=True),
        rope_theta=of_kind[FULL].rotary.theta,
        kinds=kinds,
        final_cap=gemma3.read_cap(text, "final_logit_softcapping"),
        sparse=_read_experts(text),
        inputs=_read_inputs(text),
        input_vocabulary=_read_input_vocabulary(text),
    )


def _read_input_vocabulary(text: Mapping[str, Any]) -> int:
    if not _read_inputs(text):
        return 0
    found = read_size({"vocab_size": text.get("vocab_size_per_layer_input")}, "vocab_size", DEFAULTS["vocab_size"])
    if found < read_size(text, "vocab_size"):
        raise CheckpointError(f"config.json: vocab_size_per_layer_input {found} is less than vocab_size")
    return found


def _end_with_full(types: object) -> object:
    """Return layer types of which the last one sees all rows, as transformers makes them."""
    return [*types[:-1], FULL] if isinstance(types, list) and types else types


def _read_experts(text: Mapping[str, Any]) -> ExpertsShape | None:
    if not read_flag(text, "enable_moe_block"):
        return None
    named = {"num_experts_per_tok": text.get("top_k_experts"), "norm_topk_prob": True}
    return read_experts({**text, **named}, default_normalized=True, shared=False)


def _read_inputs(text: Mapping[str, Any]) -> int:
    found = text["hidden_size_per_layer_input"]
    return 0 if found == 0 and found is not False else read_size({"hidden_size": found}, "hidden_size")


def _read_kind(text: Mapping[str, Any], kind: str, types: Sequence[str]) -> LayerKind:
    full = kind == FULL
    shares = read_flag(text, "attention_k_eq_v") and full
    head = read_size(text, "head_dim")
    kv_heads = read_size(text, "num_key_value_heads")
    if full:
        own = _find_own_settings(text, types)
        head = read_size({"head_dim": own.get("head_dim")}, "head_dim", GLOBAL_HEAD_DIM)
        kv_heads = read_size({"num_key_value_heads": own.get("num_key_value_heads")}, "num_key_value_heads", kv_heads)
    heads = read_size(text, "num_attention_heads")
    if heads % kv_heads or head % 2:
        raise CheckpointError(f"config.json: {heads} heads of {head} with {kv_heads} of keys are not supported")
    traits = LayerTraits(
        window=0 if full else gemma3.read_window(text),
        query_scale=head**0.5,
        v_norm=True,
        shares_projection=shares,
        post_norms=True,
        activation=GELU,
    )
    inner = read_size(text, "intermediate_size")
    return LayerKind(heads, kv_heads, head, inner, _read_rotary(text, kind, head), traits)


def _find_own_settings(text: Mapping[str, Any], types: Sequence[str]) -> Mapping[str, Any]:
    """Return the sizes of heads in layers that see all rows: published by name, or by transformers for each layer."""
    by_layer = text.get("per_layer_config")
    if isinstance(by_layer, Mapping):
        # Numbers of layers may have leading zeros, so that all of them are as long.
        own = {name.lstrip("0") or "0": settings for name, settings in by_layer.items()}
        found = [own.get(str(layer), {}) for layer, kind in enumerate(types) if kind == FULL]
        if not all(isinstance(parameters, Mapping) and parameters == found[0] for parameters in found):
            raise CheckpointError("config.json: per_layer_config is not the same for all layers that see all rows")
        return {"head_dim": text["head_dim"], **found[0]}
    shared = text.get("num_global_key_value_heads") if read_flag(text, "attention_k_eq_v") else None
    return {"head_dim": text.get("global_head_dim"), "num_key_value_heads": shared}


def _read_rotary(text: Mapping[str, Any], kind: str, head: int) -> Rotary:
    found = find_rope_settings(text, kind, {})
    rope = found.get("rope_parameters")
    if kind == FULL and (rope is None or rope.get("rope_type") == "proportional"):
        own = {} if rope is None else rope
        theta = read_positive(own.get("rope_theta", THETAS[kind]), "rope_theta")
        partial = own.get("partial_rotary_factor", PARTIAL if rope is None else 1.0)
        share = read_positive(partial, "partial_rotary_factor")
        if share > 1:
            raise CheckpointError(f"config.json: partial_rotary_factor {share:g} is more than 1")
        factor = read_positive(own.get("factor", 1.0), "factor")
        return Rotary(head, theta, Proportional(int(share * head // 2), factor))
    theta, scaling = parse_rope(found, ("default",), THETAS[kind])
    return Rotary(head, theta, scaling)


def share_rows(kinds: list[LayerKind], text: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Return the kinds of all layers. The last `num_kv_shared_layers` of them read what earlier layers keep.

    Each of these reads the last layer of its own kind that has keys and values. Raises CheckpointError.
    """
    count = text.get("num_kv_shared_layers") or 0
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < len(kinds):
        raise CheckpointError(f"config.json: num_kv_shared_layers is not a number of layers below {len(kinds)}")
    first = len(kinds) - count
    double = read_flag(text, "use_double_wide_mlp")
    found = list(kinds)
    for layer in range(first, len(kinds)):
        kind = kinds[layer]
        sources = [at for at in range(first) if kinds[at] == kind]
        if not sources:
            raise CheckpointError(f"config.json: layer {layer} has no layer of its kind to share keys and values with")
        traits = evolve(kind.traits, source=sources[-1])
        inner = kind.intermediate_size * (2 if double else 1)
        found[layer] = evolve(kind, traits=traits, intermediate_size=inner)
    return tuple(found)


def find_text_name(published: str, config: DenseConfig) -> str:
    """Return our name of a tensor; empty for tensors that do not belong to the text model.

    Experts and their router have the names that they have in other families.
    """
    if published.startswith(_SKIPPED):
        return ""
    name = gemma3.find_text_name(published, config)
    return name.replace(".experts.", ".mlp.experts.", 1).replace(".router.proj.", ".mlp.gate.", 1)


def is_unused(name: str) -> bool:
    """Return whether a tensor may be one of a layer that reads the keys and values of another one."""
    return _OF_SHARED.fullmatch(name) is not None


FAMILY = Family("gemma4", parse, DenseShard, find_text_name, is_unused=is_unused)
