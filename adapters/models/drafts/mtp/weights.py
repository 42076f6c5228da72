"""Loads a prediction head's weights into its kernels, and lists the products that are computed with them."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from adapters.models.decoder.attention_layer import list_attention_products, load_attention_layer
from adapters.models.decoder.decoder_layer import DecoderLayer
from adapters.models.decoder.latent_layer import load_row_projection
from adapters.models.decoder.weight_reader import WeightReader
from adapters.models.drafts.cached_draft import count_cache_rows
from adapters.models.drafts.mtp.checkpoint import LAYER, HeadConfig
from adapters.models.kernels.interface import HeadPrep, Kernels
from adapters.models.kernels.product_list import TILE, Heads, Products, Weight


@frozen
class LoadedHead:
    """All weights. kv, kv_prep: the part of the layer's projection and preparation that context rows go through."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Any
    layer: DecoderLayer
    kv: Any
    kv_prep: HeadPrep
    norm: Tensor


def load_head(read: WeightReader, kernels: Kernels, config: HeadConfig) -> LoadedHead:
    def norm(name: str) -> Tensor:
        return read.norm(f"mtp.{name}.weight", zero_centred=config.layer.zero_centred)

    shape = config.layer
    layer = load_attention_layer(read, kernels, shape, LAYER)
    if shape.latent is None:
        kv = kernels.pack(read(*(f"{LAYER}self_attn.{part}_proj.weight" for part in "kv")))
    else:
        kv = kernels.pack(load_row_projection(read, shape, LAYER))
    bias = layer.prep.bias
    queries = shape.num_heads * config.head_dim
    fc = read("mtp.fc.weight")
    if config.inputs.hidden_first:
        fc = fc.roll(config.hidden_size, 1)
    return LoadedHead(
        embedding_norm=norm("pre_fc_norm_embedding"),
        hidden_norm=norm("pre_fc_norm_hidden"),
        fc=kernels.pack(fc),
        layer=layer,
        kv=kv,
        kv_prep=evolve(layer.prep, bias=None if bias is None else bias[queries:]),
        norm=norm("norm"),
    )


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
    heads = Heads(shape.num_heads // shape.num_kv_heads, shape.head_dim, count_cache_rows(capacity, config.block, TILE))
    own = tuple(dict.fromkeys(weight for weight in weights if weight != Weight(vocab, hidden)))
    return evolve(target, weights=own, heads=(heads,), deltas=())
