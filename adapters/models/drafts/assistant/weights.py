"""Loads an assistant's weights into its kernels, and lists the products that are computed with them."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from adapters.models.decoder.layers.decoder_layer import DecoderLayer, load_layer
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.drafts.assistant.config import AssistantConfig
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Products, Weight


@frozen(eq=False)
class LoadedAssistant:
    """All weights. before, after: the projections from the target's sizes and back. head: of all tokens."""

    before: Any
    after: Any
    head: Any
    norm: Tensor
    layers: tuple[DecoderLayer, ...]


def load_assistant(read: WeightReader, kernels: Kernels, config: AssistantConfig) -> LoadedAssistant:
    layers = list[DecoderLayer]()
    for layer in range(config.layers.num_layers):
        found = load_layer(read, kernels, config.layers.shape_of(layer), f"model.layers.{layer}.")
        layers.append(evolve(found, ending=config.layers.load_ending(read, kernels, layer)))
    return LoadedAssistant(
        before=kernels.pack(read("pre_projection.weight")),
        after=kernels.pack(read("post_projection.weight")),
        head=kernels.pack(read("model.embed_tokens.weight")),
        norm=read.norm("model.norm.weight", zero_centred=False),
        layers=tuple(layers),
    )


def list_assistant_products(config: AssistantConfig, target: Products, *, capacity: int, vocab: int) -> Products:
    """Return the products that CPU kernels compute for an assistant, in steps of the target's sizes.

    capacity: rows of a slot of the target.
    """
    layers = config.layers
    hidden = layers.hidden_size
    around = (Weight(hidden, 2 * config.hidden_size), Weight(config.hidden_size, hidden), Weight(vocab, hidden))
    listed = [part for layer in range(layers.num_layers) for part in layers.layer_products(layer)]
    return evolve(
        target, weights=tuple(dict.fromkeys((*listed, *around))), heads=layers.list_heads(capacity), deltas=()
    )
