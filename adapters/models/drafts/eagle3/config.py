"""Parses the configuration of an EAGLE-3 draft and compares it with the tensors' shapes and with the target.

Published layouts differ in where they say what the draft reads:

* SpecForge, AngelSlim and SGLang: `eagle_config.eagle_aux_hidden_state_layer_ids` has the numbers of the layers whose
  outputs are read, from 0 on.
* vLLM and Speculators: `eagle_aux_hidden_state_layer_ids` at the top level has the numbers of the layers that these
  outputs enter, so each number is one more.
* Files without either mean the outputs of layers 1, L / 2 - 1 and L - 4 of a target with L layers.

Speculators' format has the layer's sizes in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import read_flag, read_positive, read_size
from adapters.models.decoder.config.rope import Rotary, parse_rope
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.layer_traits import USUAL, LayerTraits

EAGLE3 = "eagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
THETA = 10000.0  # of files that name none, as Llama's configuration has it
# One more than the most proposals. The draft runs once for each proposal, and later proposals build on earlier ones.
BLOCK = 8
MOST_LAYERS = 8  # that a draft reads; published ones read 3


@frozen
class Eagle3Shapes:
    """The sizes that the tensors show. fused: inputs of `fc`. query_rows, key_rows: outputs of the projections. vocab:
    rows of the draft's own head; 0: it has none. names: of all tensors.
    """

    hidden_size: int
    intermediate_size: int
    fused: int
    query_rows: int
    key_rows: int
    vocab: int
    names: Collection[str]


@frozen
class Eagle3Norms:
    """The norms that not all drafts have.

    before_residual: the residual stream begins with the normed state. before_fc: the outputs of the auxiliary layers
    are normed together. each_layer: each of these outputs is normed. output: the next proposal continues from the state
    behind the last norm.
    """

    before_residual: bool = False
    before_fc: bool = False
    each_layer: bool = False
    output: bool = False


@frozen
class Eagle3Config:
    """An EAGLE-3 draft: one Llama layer over embeddings and states, which lie side by side in its projections.

    aux_layers: the target's layers whose outputs are read, in the order of `fc`. target_hidden_size: of each of them.
    vocab: rows of the draft's own head; 0: it uses the target's. has_map: `d2t` says which tokens these rows are.
    has_embedding: the draft has an embedding of its own.
    """

    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    output_gate: ClassVar[bool] = False
    zero_centred: ClassVar[bool] = False
    experts: ClassVar[None] = None
    traits: ClassVar[LayerTraits] = USUAL
    num_layers: ClassVar[int] = 1
    block: ClassVar[int] = BLOCK

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    aux_layers: tuple[int, ...]
    target_hidden_size: int
    vocab: int = 0
    has_map: bool = False
    has_embedding: bool = False
    norms: Eagle3Norms = Eagle3Norms()
    rms_norm_eps: float = 1e-6

    def row_facts(self) -> tuple[object, ...]:
        """Return everything besides the weights on which the numbers of a context row depend."""
        norms = (self.norms.before_fc, self.norms.each_layer)
        return (EAGLE3, self.aux_layers, self.rotary, self.rms_norm_eps, self.num_kv_heads, norms)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


def is_eagle3_config(raw: Mapping[str, Any]) -> bool:
    """Return whether config.json names an EAGLE-3 draft."""
    named = f"{raw.get('architectures')} {raw.get('speculators_model_type')}"
    return EAGLE3 in named.lower()


def parse_eagle3_config(raw: Mapping[str, Any], shapes: Eagle3Shapes, target: ModelConfig) -> Eagle3Config:
    """Return the configuration of a draft whose tensors have these shapes, for this target. Raises CheckpointError."""
    nested = _read_object(raw, "eagle_config")
    layer = _read_object(raw, "transformer_layer_config")
    is_speculators = bool(layer) or raw.get("speculators_model_type") is not None
    given = {**layer, **raw, **nested}
    fields = {name: value for name, value in given.items() if value is not None}
    _refuse_other_networks(fields)
    heads = read_size(fields, "num_attention_heads")
    kv_heads = read_size(fields, "num_key_value_heads", heads)
    head_dim = read_size(fields, "head_dim", max(1, shapes.hidden_size // heads))
    _compare_sizes(fields, shapes, heads * head_dim, kv_heads * head_dim)
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"config.json: {heads} query heads for {kv_heads} key heads of {head_dim}; accepted: a multiple, and even"
        )
    _compare_target(fields, shapes, target)
    count, rest = divmod(shapes.fused, target.hidden_size)
    if rest or not 1 <= count <= MOST_LAYERS:
        raise CheckpointError(
            f"tensor fc.weight has {shapes.fused} columns; accepted: a multiple of {target.hidden_size}, the target's "
            f"hidden_size, up to {MOST_LAYERS} times it"
        )
    return Eagle3Config(
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=Rotary(head_dim, *parse_rope(_drop_sections(fields), ("default", "linear", "llama3", "yarn"), THETA)),
        aux_layers=_read_aux_layers(raw, nested, count, target.num_layers),
        target_hidden_size=target.hidden_size,
        vocab=shapes.vocab,
        has_map="d2t" in shapes.names,
        has_embedding="embed_tokens.weight" in shapes.names,
        norms=Eagle3Norms(
            before_residual=read_flag({"norm_before_residual": is_speculators, **fields}, "norm_before_residual"),
            before_fc=read_flag(fields, "norm_before_fc"),
            each_layer=read_flag(fields, "fc_norm"),
            output=read_flag(fields, "norm_output"),
        ),
        rms_norm_eps=read_positive(fields.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
    )


def _read_object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of config.json; an empty one if it is missing or null. Raises CheckpointError."""
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} is not an object")
    return value


def _refuse_other_networks(fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError if config.json describes another network than one Llama layer."""
    if read_size(fields, "num_hidden_layers", 1) != 1:
        raise CheckpointError(f"config.json: num_hidden_layers {fields['num_hidden_layers']}; accepted: 1")
    if fields.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {describe_value(fields['hidden_act'])}; accepted: 'silu'")
    if fields.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            "config.json: use_aux_hidden_state false: a draft that reads only the last hidden state is not supported"
        )
    if fields.get("quantization_config"):
        raise CheckpointError("config.json: quantization_config is not supported; accepted: unquantised weights")
    for name in ("attention_bias", "mlp_bias", "parallel_drafting"):
        if read_flag(fields, name):
            raise CheckpointError(f"config.json: {name} true is not supported; accepted: false")


def _compare_sizes(fields: Mapping[str, Any], shapes: Eagle3Shapes, query_rows: int, key_rows: int) -> None:
    sizes = {"hidden_size": shapes.hidden_size, "intermediate_size": shapes.intermediate_size}
    for name, found in sizes.items():
        if name in fields and read_size(fields, name) != found:
            raise CheckpointError(f"config.json: {name} is {fields[name]}, but the tensors' shapes say {found}")
    for part, rows, found in (("q", query_rows, shapes.query_rows), ("k", key_rows, shapes.key_rows)):
        if rows != found:
            raise CheckpointError(
                f"config.json: heads and head_dim make {rows} rows, but tensor layers.0.self_attn.{part}_proj.weight "
                f"has {found}"
            )


def _compare_target(fields: Mapping[str, Any], shapes: Eagle3Shapes, target: ModelConfig) -> None:
    for name, theirs in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        if fields.get(name, theirs) != theirs:
            raise CheckpointError(
                f"config.json: {name} is {repr(fields[name])[:40]}, but the target has {theirs}: a draft of another "
                "target"
            )
    drafted = fields.get("draft_vocab_size", shapes.vocab)
    if shapes.vocab and drafted != shapes.vocab:
        raise CheckpointError(
            f"config.json: draft_vocab_size is {repr(drafted)[:40]}, but tensor lm_head.weight has {shapes.vocab} rows"
        )
    has_map = "d2t" in shapes.names
    if has_map and not shapes.vocab:
        raise CheckpointError("tensor lm_head.weight is missing, but d2t maps its rows")
    if shapes.vocab not in (0, target.vocab_size) and not has_map:
        raise CheckpointError(
            f"tensor d2t is missing: lm_head.weight has {shapes.vocab} rows, and the target {target.vocab_size} tokens"
        )
    lacks = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in shapes.names]
    if shapes.hidden_size != target.hidden_size and lacks:
        raise CheckpointError(
            f"tensor {lacks[0]} is missing: hidden_size {shapes.hidden_size} is not that of the target, "
            f"{target.hidden_size}, so the target's cannot be used"
        )


def _read_aux_layers(raw: Mapping[str, Any], nested: Mapping[str, Any], count: int, layers: int) -> tuple[int, ...]:
    named = nested.get(LAYER_IDS) or raw.get(LAYER_IDS)
    shift = 0 if nested.get(LAYER_IDS) else 1
    if not named:
        if count != 3:
            raise CheckpointError(f"config.json: {LAYER_IDS} is missing, and fc.weight is as wide as {count} layers")
        named = [1, layers // 2 - 1, layers - 4]
        shift = 0
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise CheckpointError(f"config.json: {LAYER_IDS} {repr(named)[:80]} is not a list of layer numbers")
    if len(named) != count:
        raise CheckpointError(
            f"config.json: {LAYER_IDS} names {len(named)} layers, but fc.weight is as wide as {count} of them"
        )
    found = tuple(layer - shift for layer in named)
    if len(set(found)) != count or not all(0 <= layer < layers for layer in found):
        raise CheckpointError(
            f"config.json: {LAYER_IDS} {named} are the outputs of layers {list(found)}; accepted: different ones of "
            f"0..{layers - 1}"
        )
    return found


def _drop_sections(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields without a rotary scaling by sections, which for texts is none."""
    scaling = fields.get("rope_scaling")
    has_sections = isinstance(scaling, Mapping) and "mrope_section" in scaling
    return {**fields, "rope_scaling": None} if has_sections else fields
