"""gpt-oss: every other layer has a window, attention has sinks, and all products have biases.

Published experts are in MXFP4, all of a layer in one tensor. Rows of gates and rows of what they let through alternate.
They stay packed where kernels multiply them so. Otherwise they are unpacked exactly, to bfloat16, when they are read.
Checkpoints that are not quantised have such a tensor transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.arranged_tensor import ArrangedTensor
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import LIMITS, check_field, read_flag, read_size
from adapters.checkpoint.safetensors_folder import StoredTensor, TensorEntry
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.dense_fields import read_dense_fields
from adapters.models.decoder.config.experts_config import read_experts
from adapters.models.decoder.config.layered_config import FULL, SLIDING, LayeredConfig, LayerKind, read_layer_types
from adapters.models.decoder.config.rope import Rotary, parse_rope
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.family import Family
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.kernels.activations import ALPHA, CLAMPED, LIMIT
from adapters.models.kernels.interfaces.experts_interface import BiasedExpertsShape

T = TypeVar("T")

HEAD_DIM = 64  # the default of transformers, for files without head_dim
WINDOW = 128  # likewise
STACKED = re.compile(r"(.*\bmlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")


@frozen
class GptOssConfig(LayeredConfig):
    qkv_bias: ClassVar[bool] = True
    wide_norms: ClassVar[bool] = True

    experts: BiasedExpertsShape = field(kw_only=True)

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer of each kind, with few experts."""
        few = evolve(self, experts=self.experts.shrink_for_probe())
        return super(GptOssConfig, few).list_probed_layers()


def parse(raw: Mapping[str, Any]) -> GptOssConfig:
    """Return the configuration that this config.json describes. Raises CheckpointError."""
    if not read_flag({"attention_bias": True, **raw}, "attention_bias"):
        raise CheckpointError("config.json: attention_bias false is not supported; accepted: true")
    check_field(raw, "swiglu_alpha", (ALPHA,))
    check_field(raw, "swiglu_limit", (LIMIT,))
    kinds = read_layer_types(raw, 2)
    inner = read_size(raw, "intermediate_size")
    # The weights of the chosen experts are a softmax of their own logits: they add up to one.
    own = {**raw, "moe_intermediate_size": inner, "norm_topk_prob": True}
    found = read_experts(own, default_normalized=True, shared=False)
    experts = BiasedExpertsShape(found.count, found.chosen, found.inner, is_normalized=True)
    head = read_size(raw, "head_dim", HEAD_DIM)
    theta, scaling = parse_rope(raw, ("default", "yarn"))
    window = read_size({"max_position_embeddings": raw.get("sliding_window")}, "max_position_embeddings", WINDOW)
    plain = LayerTraits(sinks=True, out_bias=True, activation=CLAMPED)
    traits = {FULL: plain, SLIDING: evolve(plain, window=window)}
    heads = read_size(raw, "num_attention_heads")
    shape = (heads, read_size(raw, "num_key_value_heads", heads), head, inner, Rotary(head, theta, scaling))
    of_kind = {kind: LayerKind(*shape, traits[kind]) for kind in (FULL, SLIDING)}
    return GptOssConfig(
        **read_dense_fields(raw, head_dim=HEAD_DIM, has_layer_kinds=True),
        rope_theta=theta,
        kinds=tuple(of_kind[kind] for kind in kinds),
        experts=experts,
    )


def find_name(published: str, config: DenseConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    return published.replace(".mlp.router.", ".mlp.gate.", 1)


def cut_up(name: str, entry: StoredTensor, wanted: Container[str]) -> Mapping[str, StoredTensor]:
    """Cut a tensor of all experts into the tensors of each, by name. Others are returned as they are."""
    stack = STACKED.fullmatch(name)
    part = "" if stack is None else "gate_proj" if stack[2] == "gate_up_proj" else "down_proj"
    kind = "bias" if stack is not None and stack[3] else "weight"
    known = stack is not None and f"{stack[1]}0.{part}.{kind}" in wanted
    if stack is None or not known or not 1 <= entry.shape[0] <= LIMITS["num_experts"]:
        return {name: entry}
    rows = (
        {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)} if part == "gate_proj" else {part: slice(None)}
    )
    return {
        f"{stack[1]}{number}.{own}.{kind}": _select(entry, number, which, is_bias=kind == "bias")
        for number in range(entry.shape[0])
        for own, which in rows.items()
    }


def _select(entry: StoredTensor, number: int, rows: slice, *, is_bias: bool) -> ArrangedTensor:
    """Return some rows of one expert's tensor."""
    if isinstance(entry, ArrangedTensor):  # MXFP4, with the rows of all experts in its parts
        count = len(range(entry.shape[1])[rows])
        parts = tuple(part.select(number) for part in entry.parts)
        return evolve(
            entry,
            parts=parts,
            shape=(count, entry.shape[2]),
            arrange=partial(_take_rows, entry.arrange, rows),
            pack=None if entry.pack is None else partial(_take_rows, entry.pack, rows),
        )
    assert isinstance(entry, TensorEntry)
    own = entry.select(number)
    if is_bias:
        return ArrangedTensor((own,), (len(range(own.shape[0])[rows]),), own.dtype, partial(_take, rows))
    shape = (len(range(own.shape[1])[rows]), own.shape[0])
    return ArrangedTensor((own,), shape, own.dtype, partial(_transpose, rows))


def _take_rows(make: Callable[[Sequence[Tensor]], T], rows: slice, parts: Sequence[Tensor]) -> T:
    """Make some rows of a matrix from the rows of its parts."""
    return make([part[rows] for part in parts])


def _take(rows: slice, parts: Sequence[Tensor]) -> Tensor:
    return parts[0][rows]


def _transpose(rows: slice, parts: Sequence[Tensor]) -> Tensor:
    return parts[0].T[rows]


FAMILY = Family("gpt_oss", parse, DenseShard, find_name, cut_up)
