"""Parses the configuration of a DFlash draft and compares it with the tensors' shapes and the target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_flag, read_positive, read_size
from adapters.models.decoder.config.rope import Rotary, parse_rope
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.layer_traits import USUAL, LayerTraits
from adapters.models.drafts.dflash.parts import PLAIN_PARTS, DraftParts, read_integer, read_parts, read_switch
from adapters.models.kernels.interfaces.attention_rule import AttentionMask

DEFAULT_BLOCK = 16
LARGEST_BLOCK = 128
NATIVE = "muse_glimmer_assistant"  # what transformers calls its own DFlash draft
_KINDS = ("full_attention", "sliding_attention")


@frozen
class DraftShapes:
    """The sizes that the tensors show: D, I, layers, H, KV, hd and K, the number of auxiliary target layers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_aux_layers: int


@frozen
class DFlashConfig:
    """A DFlash draft: Qwen3 layers over a block `[seed, MASK, ...]` after context rows from the target's layers.

    aux_layers: the target's layers whose outputs are fused into the context, in the order of `fc`.
    block: B, the seed and at most B - 1 proposals.
    masks: for each layer, the rows that a row of the block attends to.
    parts: what the draft has besides the layers of DFlash.
    """

    qk_norm: ClassVar[bool] = True
    qkv_bias: ClassVar[bool] = False
    output_gate: ClassVar[bool] = False
    zero_centred: ClassVar[bool] = False
    experts: ClassVar[None] = None
    traits: ClassVar[LayerTraits] = USUAL

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    masks: tuple[AttentionMask, ...]
    aux_layers: tuple[int, ...]
    block: int
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    parts: DraftParts = PLAIN_PARTS

    @property
    def lead(self) -> int:
        """The rows of a block before the one that gives the first proposal: the seed's, or none."""
        return 0 if self.parts.from_anchor else 1

    @property
    def rows(self) -> int:
        """The most rows of a block."""
        return self.block - 1 + self.lead

    def row_facts(self) -> tuple[object, ...]:
        """Return everything besides the weights on which the numbers of a context row depend."""
        return (self.aux_layers, self.rotary, self.rms_norm_eps, self.num_kv_heads)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def parse_draft_config(
    raw: Mapping[str, Any], shapes: DraftShapes, target: ModelConfig, names: Collection[str] = ()
) -> DFlashConfig:
    """Return the configuration of a draft whose tensors have these shapes, for this target. Raises CheckpointError.

    names: of the tensors, which show the parts that plain DFlash does not have.

    DFlash's own fields are searched for in `dflash_config`, then at the top level. A size that config.json lacks is
    taken from the tensors. A size that it has must agree with them.
    """
    refuse_other_formats(raw)
    own = raw.get("dflash_config", {})
    if not isinstance(own, Mapping):
        raise CheckpointError("config.json: dflash_config is not an object")
    fields = {**raw, **{name: value for name, value in own.items() if value is not None}}
    if shapes.head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {shapes.head_dim} is odd; rotary embedding needs an even one")
    _compare_sizes(raw, shapes)
    _compare_target(fields, shapes, target)
    rows = read_integer({"block_size": DEFAULT_BLOCK, **fields}, "block_size", 2, LARGEST_BLOCK)
    parts = read_parts(fields, names, shapes.hidden_size, target.vocab_size)
    return DFlashConfig(
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.intermediate_size,
        num_layers=shapes.num_layers,
        num_heads=shapes.num_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        rotary=Rotary(shapes.head_dim, *parse_rope(raw, ("default", "yarn"))),
        masks=_read_masks(fields, shapes.num_layers, rows),
        aux_layers=_read_aux_layers(fields, shapes.num_aux_layers, target.num_layers),
        block=rows + parts.from_anchor,
        mask_token_id=_read_mask_token_id(fields, target.vocab_size),
        rms_norm_eps=read_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        parts=parts,
    )


def refuse_other_formats(raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError if config.json describes a draft of another kind."""
    for name in ("speculators_model_type", "speculators_config", "transformer_layer_config", "draft_vocab_size"):
        if raw.get(name) is not None:
            raise CheckpointError(
                f"config.json: {name} {repr(raw[name])[:40]}: drafts in Speculators format are not supported; "
                "accepted: flat DFlash checkpoints (fc, hidden_norm, norm, layers.N.*)"
            )
    kind = raw.get("model_type", "qwen3")
    if kind not in ("qwen3", NATIVE):
        raise CheckpointError(
            f"config.json: model_type {repr(kind)[:80]} is not a supported draft; accepted: 'qwen3', {NATIVE!r}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json: hidden_act {repr(raw['hidden_act'])[:80]} is not supported; accepted: 'silu'"
        )
    if raw.get("quantization_config") is not None:
        raise CheckpointError("config.json: quantization_config is not supported; accepted: unquantised weights")
    if read_flag(raw, "attention_bias"):
        raise CheckpointError("config.json: attention_bias true is not supported; accepted: false")


def spread_aux_layers(layers: int, count: int) -> tuple[int, ...]:
    """Return the auxiliary layers of a draft whose config.json names none.

    They are spread evenly from layer 1 to the third layer from the end.
    """
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def _compare_sizes(raw: Mapping[str, Any], shapes: DraftShapes) -> None:
    sizes = {
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "num_hidden_layers": shapes.num_layers,
        "num_attention_heads": shapes.num_heads,
        "num_key_value_heads": shapes.num_kv_heads,
        "head_dim": shapes.head_dim,
    }
    for name, found in sizes.items():
        if raw.get(name) is not None and read_size(raw, name) != found:
            raise CheckpointError(f"config.json: {name} is {raw[name]}, but the tensors' shapes say {found}")


def _compare_target(fields: Mapping[str, Any], shapes: DraftShapes, target: ModelConfig) -> None:
    facts = (
        ("hidden_size", shapes.hidden_size, target.hidden_size),
        ("num_target_layers", fields.get("num_target_layers"), target.num_layers),
        ("vocab_size", fields.get("vocab_size"), target.vocab_size),
        ("target_hidden_size", fields.get("target_hidden_size"), target.hidden_size),
        ("selector_vocab_size", fields.get("selector_vocab_size"), target.vocab_size),
    )
    for name, ours, theirs in facts:
        if ours is not None and ours != theirs:
            raise CheckpointError(
                f"config.json: {name} is {repr(ours)[:40]}, but the target has {theirs}: a draft of another target"
            )


def _read_aux_layers(fields: Mapping[str, Any], count: int, layers: int) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    named = ids is not None
    aux_layers = ids if named else list(spread_aux_layers(layers, count))
    if not isinstance(aux_layers, list) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in aux_layers
    ):
        raise CheckpointError(f"config.json: target_layer_ids {repr(aux_layers)[:80]} is not a list of layer numbers")
    if len(aux_layers) != count:
        raise CheckpointError(
            f"config.json: target_layer_ids names {len(aux_layers)} layers, but fc.weight is as wide as {count} of them"
        )
    if len(set(aux_layers)) != count or not all(0 <= layer < layers for layer in aux_layers):
        how = "are" if named else "are missing, and those derived from the number of layers are"
        raise CheckpointError(
            f"config.json: target_layer_ids {how} {repr(aux_layers)[:80]}; accepted: different ones of 0..{layers - 1}"
        )
    return tuple(aux_layers)


def _read_masks(fields: Mapping[str, Any], layers: int, block: int) -> tuple[AttentionMask, ...]:
    """Return the attention mask of each layer. Raises CheckpointError.

    Layers with a sliding window are causal within the block, and other layers see the whole block. A field `causal` of
    config.json overrides this, and so does `is_causal`, as DFlash 2 calls it. In transformers' own drafts no layer is
    causal, and windows do not count the row itself.
    """
    native = fields.get("model_type") == NATIVE
    kinds = _read_layer_kinds(fields, layers)
    name = "causal" if fields.get("causal") is not None else "is_causal"
    said = native or fields.get(name) is not None
    causal = (not native and read_switch(fields, name, default=True)) if said else None
    window = 0
    if "sliding_attention" in kinds:
        if fields.get("use_sliding_window") is False:
            raise CheckpointError("config.json: layer_types has sliding_attention, but use_sliding_window is false")
        window = read_integer(fields, "sliding_window", 1, 1 << 24) + native
    masks = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        mask = AttentionMask(causal=sliding if causal is None else causal, window=window if sliding else 0)
        if sliding and not mask.causal and window < block:
            raise CheckpointError(
                f"config.json: sliding_window {window} is smaller than block_size {block} in a layer that is not causal"
            )
        masks.append(mask)
    return tuple(masks)


def _read_layer_kinds(fields: Mapping[str, Any], layers: int) -> Sequence[str]:
    kinds = fields.get("layer_types")
    if kinds is None:
        if not read_flag(fields, "use_sliding_window"):
            return ["full_attention"] * layers
        first = read_integer({"max_window_layers": 28, **fields}, "max_window_layers", 0, 1 << 16)
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise CheckpointError(
            f"config.json: layer_types {repr(kinds)[:80]} is not {layers} times one of {', '.join(_KINDS)}"
        )
    return kinds


def _read_mask_token_id(fields: Mapping[str, Any], vocab: int) -> int:
    if fields.get("mask_token_id") is None:
        raise CheckpointError("config.json: mask_token_id is missing")
    return read_integer(fields, "mask_token_id", 0, vocab - 1)
