"""The treatment of heads before and after attention: norms over all heads, factors of queries, and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.decoder.layers.decoder_layer import DecoderLayer
from adapters.models.decoder.layers.latent_layer import LatentLayer
from adapters.models.kernels.activations import gate_by_softplus
from adapters.models.kernels.interfaces.layer_interface import Kernels, Rope
from adapters.models.kernels.step_batch import Batch


def select_heads(kernels: Kernels, layer: DecoderLayer, projected: Tensor) -> Tensor:
    """Return the columns of queries, keys and values in a layer's projection, normed if all heads share a norm.

    A layer over compressed rows has no such columns: its queries and its row are made of them.
    """
    if isinstance(layer, LatentLayer):
        return layer.project_heads(kernels, projected)
    heads = projected[:, : layer.width]
    if layer.norms is None:
        return heads
    sizes = [len(norm) for norm in layer.norms]
    q, k, v = torch.split(heads, [*sizes, layer.width - sum(sizes)], 1)
    eps = layer.frame.eps
    parts = [
        kernels.add_norm(part.contiguous(), None, norm, eps) for part, norm in zip((q, k), layer.norms, strict=True)
    ]
    return torch.cat((*parts, v), 1)


def scale_queries(q: Tensor, rope: Rope, batch: Batch) -> Tensor:
    """Return rotated queries, multiplied with the factors of their positions if the model has such factors."""
    if rope.query_scale is None:
        return q
    factors = rope.query_scale[batch.positions.clamp(min=0)]
    return q.mul_(factors.view(-1, *[1] * (q.dim() - 1)))


def finish_attention(kernels: Kernels, layer: DecoderLayer, attended: Tensor, projected: Tensor) -> Tensor:
    """Return the output of attention, multiplied with the sigmoid or the softplus of its gate if the layer has one.

    projected: the projection of the layer, which contains the gate. Of compressed rows it returns the values.
    """
    if isinstance(layer, LatentLayer):
        return layer.project_values(kernels, attended)
    if projected.shape[1] == layer.width:
        return attended
    gate = projected[:, layer.width :]
    if layer.gates:
        return gate_by_softplus(attended, gate, layer.gates)
    assert kernels.delta is not None
    return kernels.delta.apply_gate(attended, gate)
