"""Loads a DFlash draft's weights into its kernels, and lists the products that are computed with them."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from adapters.models.decoder.layers.decoder_layer import DecoderLayer, layer_products, load_layer
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.drafts.cached_draft import count_cache_rows
from adapters.models.drafts.dflash.checkpoint import MASK_EMBEDDING
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.convolution import Convolution, load_convolution
from adapters.models.drafts.dflash.correction import Correction, load_correction
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.drafts.feature_projection import TapFusion, TapShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import TILE, Heads, Products, Weight


@frozen
class DraftLayer:
    """One draft layer. kv: the part of its qkv projection that context rows go through. convolutions: around attention
    and around the feed-forward, in DFlash 2.
    """

    decoder: DecoderLayer
    kv: Any
    convolutions: tuple[Convolution, Convolution] | None = None


@frozen
class LoadedDraft:
    """All weights. mask: `[D]`, the replacement for the target's embedding of the mask token, if there is one."""

    fc: Any
    hidden_norm: Tensor
    norm: Tensor
    mask: Tensor | None
    layers: tuple[DraftLayer, ...]
    correction: Correction | None = None


def load_draft(read: WeightReader, weights: DraftWeights, kernels: Kernels, config: DFlashConfig) -> LoadedDraft:
    def layer(prefix: str) -> DraftLayer:
        kv = read(*(f"{prefix}self_attn.{part}_proj.weight" for part in "kv"))
        shape = config.parts.convolution
        convolutions = None
        if shape is not None:
            around_attention = load_convolution(read, kernels, shape, f"{prefix}attention_conv.")
            convolutions = (around_attention, load_convolution(read, kernels, shape, f"{prefix}mlp_conv."))
        return DraftLayer(load_layer(read, kernels, config, prefix), kernels.pack(kv), convolutions)

    return LoadedDraft(
        fc=kernels.pack(read("fc.weight")),
        hidden_norm=read("hidden_norm.weight"),
        norm=read("norm.weight"),
        mask=read(MASK_EMBEDDING).flatten() if weights.has_tensor(MASK_EMBEDDING) else None,
        layers=tuple(layer(f"layers.{index}.") for index in range(config.num_layers)),
        correction=load_correction(read, kernels, config.parts),
    )


def describe_taps(config: DFlashConfig) -> TapShape:
    """Return the shape of the first step, for a draft in another process than its target."""

    def load(read: WeightReader, kernels: Kernels) -> TapFusion:
        fc = kernels.pack(read("fc.weight"))
        return TapFusion(fc, config.rms_norm_eps, out_norm=read("hidden_norm.weight"))

    return TapShape(config.aux_layers, config.hidden_size, config.hidden_size, load)


def list_draft_products(config: DFlashConfig, target: Products, *, capacity: int, vocab: int) -> Products:
    """Return the products that CPU kernels compute for a draft, in steps of the target's sizes.

    capacity: context rows of a slot.
    """
    hidden = config.hidden_size
    size = config.head_dim
    weights = (
        Weight(hidden, len(config.aux_layers) * hidden),
        *layer_products(config),
        Weight(2 * config.num_kv_heads * size, hidden),
        *_list_part_products(config),
    )
    head = Weight(vocab, hidden)
    heads = Heads(config.num_heads // config.num_kv_heads, size, count_cache_rows(capacity, config.block, TILE))
    own = tuple(dict.fromkeys(weight for weight in weights if weight != head))
    return evolve(target, weights=own, heads=(heads,), deltas=())


def _list_part_products(config: DFlashConfig) -> tuple[Weight, ...]:
    """Return the products of DFlash 2 and of DSpark that plain DFlash does not have."""
    hidden = config.hidden_size
    parts = config.parts
    found = list[Weight]()
    if parts.convolution is not None:
        found.append(Weight(parts.convolution.count_factors(hidden), hidden))
    if parts.selector is not None:
        found.append(Weight(parts.selector.rank, hidden))
    if parts.markov is not None:
        rank = parts.markov.rank
        found.append(Weight(parts.markov.vocab, rank))
        if parts.markov.inner is not None:
            _, outputs, embeddings = parts.markov.inner
            found.append(Weight(outputs * rank, embeddings * rank + hidden))
    return tuple(found)
