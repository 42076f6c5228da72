"""A decoder layer: its tensors by their published names, its products, its packed weights, and how it runs.

Pre-norm, grouped-query attention with rotary embedding, gated SiLU: targets and drafts share it. What families differ
in is in the shape: whether heads of queries and keys are normed, and whether their projections have a bias.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.weights import Shapes, WeightSource
from adapters.models.kernels.interface import HeadPrep, Kernels
from adapters.models.kernels.products import Weight


class LayerShape(Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def qkv_bias(self) -> bool: ...


@frozen
class DecoderLayer:
    """One layer's weights, fused and packed."""

    input_norm: Tensor
    qkv: Any
    prep: HeadPrep
    out: Any
    post_norm: Tensor
    gate_up: Any
    down: Any


def layer_tensors(shape: LayerShape, prefix: str) -> Shapes:
    """Published names, which begin with `prefix`, and shapes."""
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * head, shape.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if shape.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if shape.qkv_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (q if part == "q" else kv,) for part in "qkv"}
    return {prefix + name: size for name, size in shapes.items()}


def layer_products(shape: LayerShape) -> tuple[Weight, ...]:
    """A bias is no product: it is added where heads are prepared, and a sum of two rounds alike everywhere."""
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * head, shape.num_kv_heads * head
    return (
        Weight(q + 2 * kv, hidden),
        Weight(hidden, q),
        Weight(inner, hidden, gated=True),
        Weight(hidden, inner),
    )


@frozen
class WeightReader:
    """Reads weights onto a device, in the model's dtype."""

    weights: WeightSource
    device: torch.device
    dtype: torch.dtype

    def __call__(self, *names: str) -> Tensor:
        """The named tensors, stacked along their rows."""
        parts = [self.weights.read(name).to(self.device, self.dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def load_layer(read: WeightReader, kernels: Kernels, shape: LayerShape, prefix: str) -> DecoderLayer:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return DecoderLayer(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=kernels.pack(read(*(f"{attention}{part}_proj.weight" for part in "qkv"))),
        prep=HeadPrep(
            bias=read(*(f"{attention}{part}_proj.bias" for part in "qkv")) if shape.qkv_bias else None,
            q_norm=read(attention + "q_norm.weight") if shape.qk_norm else None,
            k_norm=read(attention + "k_norm.weight") if shape.qk_norm else None,
            eps=shape.rms_norm_eps,
        ),
        out=kernels.pack(read(attention + "o_proj.weight")),
        post_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=kernels.pack_gated(read(mlp + "gate_proj.weight", mlp + "up_proj.weight")),
        down=kernels.pack(read(mlp + "down_proj.weight")),
    )


def projected(kernels: Kernels, layer: DecoderLayer, residual: Tensor, delta: Tensor | None) -> Tensor:
    """Up to attention: residual += delta, and queries, keys and values of it. delta: what the layer before returned."""
    return kernels.linear(kernels.add_norm(residual, delta, layer.input_norm, layer.prep.eps), layer.qkv)


def finished(kernels: Kernels, layer: DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
    """From attention on; what is returned is still to be added to the residual stream."""
    x = kernels.add_norm(residual, kernels.linear(attended, layer.out), layer.post_norm, layer.prep.eps)
    return kernels.linear(kernels.gated(x, layer.gate_up), layer.down)
