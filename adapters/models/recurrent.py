"""A layer with the gated delta rule in the place of attention: its tensors, its products, its weights, how it runs.

All that it makes of its normed input is one product, whose columns are `q | k | v | z | b | a`: what is convolved, the
gate of the layer's output, and the gates of the rule.
"""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.weights import Shapes
from adapters.models.decoder import Frame, LayerShape, WeightReader, frame_products, frame_tensors, load_frame
from adapters.models.kernels.batch import StateBatch
from adapters.models.kernels.delta import TAPS, DeltaKernels, DeltaShape, DeltaState, DeltaWeights
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.products import Weight


class RecurrentShape(LayerShape, Protocol):
    @property
    def delta(self) -> DeltaShape | None:
        """Of the layers that are recurrent."""
        ...


def delta_of(shape: RecurrentShape) -> DeltaShape:
    assert shape.delta is not None, "no layer is recurrent"
    return shape.delta


@frozen
class DeltaLayer:
    """One layer's weights. norm: of each head of the output, `[dv]`, float32."""

    frame: Frame
    weights: DeltaWeights
    norm: Tensor

    def mix(self, kernels: DeltaKernels, own: Tensor, state: DeltaState, batch: StateBatch) -> Tensor:
        """own: what was projected, `[R, channels + Nv dv + 2 Nv]` -> `[R, Nv dv]`."""
        shape = self.weights.shape
        mixed, z, gates = torch.split(own, [shape.channels, shape.values, 2 * shape.value_heads], 1)
        convolved = kernels.convolve(mixed, self.weights, state, batch)
        read = kernels.delta_rule(convolved, gates, self.weights, state, batch)
        return kernels.gated_norm(read, z, self.norm, self.frame.eps)


def delta_layer_tensors(shape: RecurrentShape, prefix: str) -> Shapes:
    """Published names, which begin with `prefix`, and shapes."""
    hidden, delta = shape.hidden_size, delta_of(shape)
    heads = delta.value_heads
    shapes = frame_tensors(shape) | {
        "linear_attn.in_proj_qkv.weight": (delta.channels, hidden),
        "linear_attn.in_proj_z.weight": (delta.values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
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


def load_delta_layer(read: WeightReader, kernels: Kernels, shape: RecurrentShape, prefix: str) -> DeltaLayer:
    own = prefix + "linear_attn."
    projection = read(*(f"{own}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))
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
