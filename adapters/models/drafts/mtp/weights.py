"""Loads a prediction head's weights into its kernels, and lists the products that are computed with them."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from adapters.models.decoder.family import HeadShape
from adapters.models.decoder.layers.attention_layer import list_attention_products
from adapters.models.decoder.layers.latent_layer import load_latent_layer, load_row_projection
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.drafts.chained_draft import ChainedLayer, list_chained_heads, load_chained_layer
from adapters.models.drafts.mtp.checkpoint import LAYER, HeadConfig
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Kernels
from adapters.models.kernels.interfaces.product_list import Products, Weight


@frozen(eq=False)
class LoadedHead:
    """All weights."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Any
    layer: ChainedLayer
    norm: Tensor


def load_head(read: WeightReader, kernels: Kernels, config: HeadConfig) -> LoadedHead:
    def norm(name: str) -> Tensor:
        return read.norm(f"mtp.{name}.weight", zero_centred=config.layer.zero_centred)

    fc = read("mtp.fc.weight")
    return LoadedHead(
        embedding_norm=norm("pre_fc_norm_embedding"),
        hidden_norm=norm("pre_fc_norm_hidden"),
        fc=kernels.pack(fc.roll(config.hidden_size, 1) if config.inputs.hidden_first else fc),
        layer=load_head_layer(read, kernels, config.layer),
        norm=norm("norm"),
    )


def load_head_layer(read: WeightReader, kernels: Kernels, shape: HeadShape) -> ChainedLayer:
    """Load the layer of a head. It keeps compressed rows if its target does."""
    if shape.latent is None:
        return load_chained_layer(read, kernels, shape, LAYER)
    row = kernels.pack(load_row_projection(read, shape, LAYER))
    return ChainedLayer(load_latent_layer(read, kernels, shape, LAYER), row, HeadPrep())


def list_head_products(config: HeadConfig, target: Products, *, capacity: int, vocab: int) -> Products:
    """Return the products that CPU kernels compute for a head, in steps of the target's sizes.

    capacity: context rows of a slot.
    """
    shape = config.layer
    hidden = config.hidden_size
    weights = (
        Weight(hidden, 2 * hidden),
        *list_attention_products(shape),
        Weight(config.parts * config.num_kv_heads * config.head_dim, hidden),
    )
    own = tuple(dict.fromkeys(weight for weight in weights if weight != Weight(vocab, hidden)))
    return evolve(target, weights=own, heads=list_chained_heads(shape, config.block, capacity), deltas=())
