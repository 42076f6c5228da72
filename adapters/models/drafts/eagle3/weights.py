"""Loads an EAGLE-3 draft's weights into its kernels, and lists the products that are computed with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.models.decoder.config.dense_config import HEAD_ROWS
from adapters.models.decoder.layers.decoder_layer import layer_products
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.chained_draft import ChainedLayer, list_chained_heads, load_chained_layer
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.drafts.eagle3.checkpoint import LAYER, TOKEN_MAP
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.drafts.feature_projection import TapFusion, TapShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Products, Weight


@frozen(eq=False)
class LoadedEagle3:
    """All weights. The norm of embeddings is the layer's input norm.

    embedding: `[V, D]`. head: packed. None: the target's are used. tokens: int64 `[rows of the head]`, the target's
    token for each of them; None: they are the target's tokens in order.
    """

    fusion: TapFusion
    hidden_norm: Tensor
    layer: ChainedLayer
    norm: Tensor
    embedding: Tensor | None
    head: Any | None
    tokens: Tensor | None


def load_eagle3(
    read: WeightReader, weights: DraftWeights, kernels: Kernels, config: Eagle3Config, head: TargetHead
) -> LoadedEagle3:
    """Load a draft. head: of the target. An own embedding that is the target's is not kept twice."""
    embedding = read("embed_tokens.weight") if config.has_embedding else None
    return LoadedEagle3(
        fusion=load_fusion(config, read, kernels),
        hidden_norm=read(f"{LAYER}hidden_norm.weight"),
        layer=load_chained_layer(read, kernels, config, LAYER),
        norm=read("norm.weight"),
        embedding=None if embedding is None or are_equal(embedding, head.embedding) else embedding,
        head=kernels.pack(read("lm_head.weight")) if config.vocab else None,
        tokens=weights.read(TOKEN_MAP).to(read.device) if config.has_map else None,
    )


def are_equal(own: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors have the same shape and numbers, wherever they are."""
    return own.shape == theirs.shape and torch.equal(own.to(theirs.device), theirs)


def load_fusion(config: Eagle3Config, read: WeightReader, kernels: Kernels) -> TapFusion:
    layers = range(len(config.aux_layers) if config.norms.each_layer else 0)
    return TapFusion(
        kernels.pack(read("fc.weight")),
        config.rms_norm_eps,
        layer_norms=tuple(read(f"fc_norm.{number}.weight") for number in layers),
        joint_norm=read("input_norm.weight") if config.norms.before_fc else None,
    )


def describe_taps(config: Eagle3Config) -> TapShape:
    """Return the shape of the first step, for a draft in another process than its target."""
    return TapShape(config.aux_layers, config.target_hidden_size, config.hidden_size, partial(load_fusion, config))


def list_eagle3_products(config: Eagle3Config, target: Products, *, capacity: int, vocab: int) -> Products:  # noqa: ARG001
    """Return the products that CPU kernels compute for a draft, in steps of the target's sizes.

    capacity: context rows of a slot. The draft's own head is listed even if it has the shape of the target's head,
    which other kernels have packed.
    """
    hidden = config.hidden_size
    projection, *others = layer_products(config)
    weights = (
        Weight(hidden, len(config.aux_layers) * config.target_hidden_size),
        evolve(projection, inputs=2 * hidden),
        *others,
        Weight(2 * config.num_kv_heads * config.head_dim, 2 * hidden),
        *([Weight(config.vocab, hidden, most=HEAD_ROWS)] if config.vocab else []),
    )
    own = tuple(dict.fromkeys(weights))
    return evolve(target, weights=own, heads=list_chained_heads(config, config.block, capacity), deltas=())
