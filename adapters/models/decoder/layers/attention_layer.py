"""Layers with attention, of either kind: over keys and values, or over compressed rows.

The shape of a layer says which kind it is. Targets and prediction heads list and load their layers here.
"""

from __future__ import annotations

from collections.abc import Iterator

from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.layers.decoder_layer import (
    DecoderLayer,
    layer_matrices,
    layer_products,
    layer_tensors,
    load_layer,
)
from adapters.models.decoder.layers.feed_forward import Matrix
from adapters.models.decoder.layers.latent_layer import (
    LatentLayerShape,
    latent_layer_matrices,
    latent_layer_products,
    latent_layer_tensors,
    load_latent_layer,
)
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Weight


def list_attention_tensors(shape: LatentLayerShape, prefix: str) -> Shapes:
    """Return the published names of a layer's tensors, which begin with `prefix`, and their shapes."""
    return layer_tensors(shape, prefix) if shape.latent is None else latent_layer_tensors(shape, prefix)


def list_attention_products(shape: LatentLayerShape) -> tuple[Weight, ...]:
    """Return the products of a layer, each as often as a row is multiplied with it."""
    return layer_products(shape) if shape.latent is None else latent_layer_products(shape)


def list_attention_matrices(shape: LatentLayerShape, prefix: str) -> Iterator[Matrix]:
    """Yield every weight of a layer that may be packed, with the tensors that it is made of."""
    return layer_matrices(shape, prefix) if shape.latent is None else latent_layer_matrices(shape, prefix)


def load_attention_layer(read: WeightReader, kernels: Kernels, shape: LatentLayerShape, prefix: str) -> DecoderLayer:
    """Load the weights of a layer into its kernels."""
    load = load_layer if shape.latent is None else load_latent_layer
    return load(read, kernels, shape, prefix)
