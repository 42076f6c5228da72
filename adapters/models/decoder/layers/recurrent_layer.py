"""A layer with the gated delta rule instead of attention: its tensors, its products, its weights, and how it runs.

One product projects the normed input to the columns `q | k | v | z | b | a`. q, k and v are convolved, z gates the
output of the layer, and b and a are the gates of the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.layers.decoder_layer import Frame, LayerShape, frame_products, frame_tensors, load_frame
from adapters.models.decoder.layers.feed_forward import Matrix, feed_matrices
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.kernels.interfaces.delta_interface import TAPS, DeltaKernels, DeltaShape, DeltaState, DeltaWeights
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.step_batch import StateBatch


class RecurrentShape(LayerShape, Protocol):
    @property
    def delta(self) -> DeltaShape | None:
        """The shape of the recurrent layers; None if there are none."""
        ...

    @property
    def by_key_head(self) -> bool:
        """Is the projection published as two tensors, with the rows of one key head after the other?"""
        ...


def delta_of(shape: RecurrentShape) -> DeltaShape:
    assert shape.delta is not None, "no layer is recurrent"
    return shape.delta


@frozen
class DeltaLayer:
    """The weights of one recurrent layer. norm: the factors for each head of the output, `[dv]`, float32."""

    frame: Frame
    weights: DeltaWeights
    norm: Tensor

    def mix(self, kernels: DeltaKernels, projected: Tensor, state: DeltaState, batch: StateBatch) -> Tensor:
        """Mix rows by the delta rule and return `[R, Nv dv]`. projected: `[R, channels + Nv dv + 2 Nv]`."""
        shape = self.weights.shape
        mixed, z, gates = torch.split(projected, [shape.channels, shape.values, 2 * shape.value_heads], 1)
        convolved = kernels.convolve(mixed, self.weights, state, batch)
        read = kernels.delta_rule(convolved, gates, self.weights, state, batch)
        return kernels.gated_norm(read, z, self.norm, self.frame.eps)


def delta_layer_tensors(shape: RecurrentShape, prefix: str) -> Shapes:
    """Published names, which begin with `prefix`, and shapes."""
    hidden = shape.hidden_size
    delta = delta_of(shape)
    heads = delta.value_heads
    parts = {"qkv": delta.channels, "z": delta.values, "b": heads, "a": heads}
    if shape.by_key_head:
        parts = {"qkvz": delta.channels + delta.values, "ba": 2 * heads}
    shapes = frame_tensors(shape) | {
        **{f"linear_attn.in_proj_{part}.weight": (rows, hidden) for part, rows in parts.items()},
        "linear_attn.conv1d.weight": (delta.channels, 1, TAPS),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (delta.value_size,),
        "linear_attn.out_proj.weight": (hidden, delta.values),
    }
    return {prefix + name: size for name, size in shapes.items()}


def delta_layer_products(shape: RecurrentShape) -> tuple[Weight, ...]:
    delta = delta_of(shape)
    return frame_products(shape, delta.channels + delta.values + 2 * delta.value_heads, delta.values)


def delta_layer_matrices(shape: RecurrentShape, prefix: str) -> Iterator[Matrix]:
    """Every weight of the layer with the tensors that it is made of."""
    projection, out = delta_layer_products(shape)[:2]
    own = prefix + "linear_attn."
    if not shape.by_key_head:
        sizes = {name: size for name, size in delta_layer_tensors(shape, prefix).items() if ".in_proj_" in name}
        yield projection, tuple((name, size[0]) for name, size in sizes.items())
    yield out, ((f"{own}out_proj.weight", out.outputs),)
    yield from feed_matrices(shape, prefix)


def key_heads_apart(rows: Tensor, delta: DeltaShape) -> list[Tensor]:
    """Rows laid out `q | k | v | z`, or `b | a`, of each key head and the value heads that share it: q of all, ..."""
    group = delta.value_heads // delta.key_heads
    values = group * delta.value_size
    sizes = [delta.key_size] * 2 + [values] * 2 if len(rows) > 2 * delta.value_heads else [group] * 2
    parts = torch.split(rows.view(delta.key_heads, -1, rows.shape[1]), sizes, 1)
    return [part.flatten(0, 1) for part in parts]


def load_delta_layer(read: WeightReader, kernels: Kernels, shape: RecurrentShape, prefix: str) -> DeltaLayer:
    own = prefix + "linear_attn."
    if shape.by_key_head:
        parts = (read(f"{own}in_proj_{part}.weight") for part in ("qkvz", "ba"))
        rows = torch.cat([rows for part in parts for rows in key_heads_apart(part, delta_of(shape))])
        projection = StackedWeight((rows,), read.dtype, read.device)
    else:
        projection = read.matrix(*(f"{own}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))
    return DeltaLayer(
        frame=load_frame(read, kernels, shape, prefix, projection=projection, out="linear_attn.out_proj.weight"),
        weights=DeltaWeights(
            shape=delta_of(shape),
            taps=read.wide(own + "conv1d.weight").squeeze(1),
            rate=-read.wide(own + "A_log").exp(),
            dt_bias=read.wide(own + "dt_bias"),
        ),
        norm=read.wide(own + "norm.weight"),
    )
