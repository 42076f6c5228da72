"""Attention over compressed keys and values (MLA): a layer's tensors, products and weights, and how its heads are made.

The problem: every token has a key and a value for each of many heads, which would take much memory.

The idea: keys and values of all heads are projected from one short row, the latent, so only that is kept. A key has one
more part, which is rotated and which all heads share. So a kept row is `rotated part | latent`.

Keys and values are never expanded. For head h, let `K_h` and `V_h` be the projections of the latent c to a key and to a
value. The score of a query q is `q K_h c = (K_h^T q) c`, so the query is projected instead, to the size of the latent.
What is attended is a weighted sum of latents, and `V_h` is applied to that sum. So this is attention with one key head:
a row is the key, and its latent is the value.

Example: GLM-4.7-Flash has 20 heads, a latent of 512 numbers and a rotated part of 64. It keeps 576 numbers of a token
in each layer. Keys and values of all heads would be 10,240 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight, select_rows
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.layers.decoder_layer import (
    DecoderLayer,
    LayerShape,
    frame_products,
    frame_tensors,
    load_frame,
)
from adapters.models.decoder.layers.feed_forward import Matrix, feed_matrices
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Kernels
from adapters.models.kernels.interfaces.product_list import Weight

EPS = 1e-6  # of the norms of compressed rows, whatever config.json says of the others


@frozen
class LatentShape:
    """The sizes of attention over compressed rows.

    queries: numbers of a compressed query; 0: queries are projected from the hidden state. latent: numbers of the
    compressed key and value. rotated: of the part of a query and a key that is rotated. plain: of the rest of a query
    head. values: of a value head. scale: of scores. interleaved: in published weights the numbers of a rotated pair are
    neighbours.
    """

    queries: int
    latent: int
    rotated: int
    plain: int
    values: int
    scale: float
    interleaved: bool

    @property
    def row(self) -> int:
        """Return the numbers of a kept row."""
        return self.rotated + self.latent

    @property
    def query(self) -> int:
        """Return the numbers of a query head as it is projected."""
        return self.plain + self.rotated


class LatentLayerShape(LayerShape, Protocol):
    @property
    def latent(self) -> LatentShape | None:
        """The sizes of attention over compressed rows; None if the layers have other attention."""
        ...


def latent_of(shape: LatentLayerShape) -> LatentShape:
    assert shape.latent is not None, "the layers have other attention"
    return shape.latent


@frozen
class LatentLayer(DecoderLayer):
    """The weights of one layer.

    query_norm, queries: norm and projection of the compressed query; None if there is no such query. latent_norm: of
    the latent. to_latent: projects each head of queries to the size of the latent. to_values: projects what a head
    attends to into its value.
    """

    shape: LatentShape = field(kw_only=True)
    query_norm: Tensor | None = field(kw_only=True)
    queries: Any = field(kw_only=True)
    latent_norm: Tensor = field(kw_only=True)
    to_latent: Any = field(kw_only=True)
    to_values: Any = field(kw_only=True)

    @property
    def is_plain(self) -> bool:
        return False

    def project_heads(self, kernels: Kernels, projected: Tensor) -> Tensor:
        """Return heads of queries and the row that is kept, `[R, (H + 1) * row]`, before they are rotated."""
        shape = self.shape
        query, row = torch.split(projected, [self.width - shape.row, shape.row], 1)
        if self.query_norm is not None:
            query = kernels.linear(kernels.add_norm(query.contiguous(), None, self.query_norm, EPS), self.queries)
        heads = query.reshape(len(query), -1, shape.query)
        found = projected.new_empty(len(projected), heads.shape[1] + 1, shape.row)
        found[:, :-1, : shape.rotated] = heads[..., shape.plain :]
        found[:, :-1, shape.rotated :] = kernels.multiply_heads(heads[..., : shape.plain], self.to_latent)
        # Attention scales with row ** -0.5.
        found[:, :-1].mul_(shape.scale * shape.row**0.5)
        found[:, -1] = self.make_row(kernels, row)
        return found.flatten(1)

    def make_row(self, kernels: Kernels, projected: Tensor) -> Tensor:
        """Return the row that is kept, `[R, row]`, before it is rotated, of its projection `[R, row]`."""
        latent, rotated = torch.split(projected, [self.shape.latent, self.shape.rotated], 1)
        return torch.cat((rotated, kernels.add_norm(latent.contiguous(), None, self.latent_norm, EPS)), 1)

    def project_values(self, kernels: Kernels, attended: Tensor) -> Tensor:
        """Return the values of all heads, `[R, H * values]`, of attended latents `[R, H * latent]`."""
        return kernels.multiply_heads(attended.view(len(attended), -1, self.shape.latent), self.to_values).flatten(1)


def latent_layer_tensors(shape: LatentLayerShape, prefix: str) -> Shapes:
    """Return the published names of the tensors, which begin with `prefix`, and their shapes."""
    hidden = shape.hidden_size
    own = latent_of(shape)
    queries = shape.num_heads * own.query
    found: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
    if own.queries:
        found = {
            "q_a_proj.weight": (own.queries, hidden),
            "q_a_layernorm.weight": (own.queries,),
            "q_b_proj.weight": (queries, own.queries),
        }
    found |= {
        "kv_a_proj_with_mqa.weight": (own.row, hidden),
        "kv_a_layernorm.weight": (own.latent,),
        "kv_b_proj.weight": (shape.num_heads * (own.plain + own.values), own.latent),
        "o_proj.weight": (hidden, shape.num_heads * own.values),
    }
    named = frame_tensors(shape) | {f"self_attn.{name}": size for name, size in found.items()}
    return {prefix + name: size for name, size in named.items()}


def latent_layer_products(shape: LatentLayerShape) -> tuple[Weight, ...]:
    """Return the matrices that each row is multiplied with. One that is used several times is listed as often.

    First come those of the frame (`frame_products`): the projection, the matrix behind the mixing, and the
    feed-forward. Where queries are compressed, the matrix that makes queries of them follows. Then each head has two:
    one takes its query to the latent, the other its weighted sum of latents to a value.
    """
    own = latent_of(shape)
    heads = shape.num_heads
    first = own.queries or heads * own.query
    queries = (Weight(heads * own.query, own.queries),) if own.queries else ()
    both = (Weight(own.latent, own.plain), Weight(own.values, own.latent))
    return (*frame_products(shape, first + own.row, heads * own.values), *queries, *both * heads)


def latent_layer_matrices(shape: LatentLayerShape, prefix: str) -> Iterator[Matrix]:
    """Yield every weight that may be packed with the tensors that it is made of. `kv_b_proj` never stays packed."""
    projection, out = latent_layer_products(shape)[:2]
    own = latent_of(shape)
    attention = prefix + "self_attn."
    name = "q_a_proj" if own.queries else "q_proj"
    rows = projection.outputs - own.row
    yield projection, ((f"{attention}{name}.weight", rows), (f"{attention}kv_a_proj_with_mqa.weight", own.row))
    yield out, ((f"{attention}o_proj.weight", out.outputs),)
    if own.queries:
        queries = Weight(shape.num_heads * own.query, own.queries)
        yield queries, ((f"{attention}q_b_proj.weight", queries.outputs),)
    yield from feed_matrices(shape, prefix)


def load_latent_layer(read: WeightReader, kernels: Kernels, shape: LatentLayerShape, prefix: str) -> LatentLayer:
    own = latent_of(shape)
    attention = prefix + "self_attn."
    heads = shape.num_heads
    name = "q_a_proj" if own.queries else "q_proj"
    projection = read.matrix(f"{attention}{name}.weight", f"{attention}kv_a_proj_with_mqa.weight")
    orders = {1: _order_rows(1, own.latent, own)} | ({} if own.queries else {0: _order_rows(heads, own.plain, own)})
    queries = None
    if own.queries:
        plain = read.matrix(f"{attention}q_b_proj.weight")
        queries = kernels.pack(_reorder(plain, {0: _order_rows(heads, own.plain, own)}))
    both = read(f"{attention}kv_b_proj.weight").view(heads, own.plain + own.values, own.latent)
    keys, values = torch.split(both, [own.plain, own.values], 1)
    frame = load_frame(
        read, kernels, shape, prefix, projection=_reorder(projection, orders), out="self_attn.o_proj.weight"
    )
    return LatentLayer(
        frame,
        HeadPrep(),
        width=(own.queries or heads * own.query) + own.row,
        rule=AttentionRule(latent=own.latent),
        shape=own,
        query_norm=read(f"{attention}q_a_layernorm.weight") if own.queries else None,
        queries=queries,
        latent_norm=read(f"{attention}kv_a_layernorm.weight"),
        to_latent=kernels.pack_heads(keys.transpose(1, 2).contiguous()),
        to_values=kernels.pack_heads(values.contiguous()),
    )


def load_row_projection(read: WeightReader, shape: LatentLayerShape, prefix: str) -> StackedWeight:
    """Return the part of a layer's projection that makes the row that is kept."""
    own = latent_of(shape)
    stored = read.matrix(f"{prefix}self_attn.kv_a_proj_with_mqa.weight")
    return _reorder(stored, {0: _order_rows(1, own.latent, own)})


def _order_rows(heads: int, first: int, shape: LatentShape) -> Tensor | None:
    """Return the order of a projection's rows in which rotated pairs are half a part apart; None: they are already.

    first: rows of a head that stand before those that are rotated.
    """
    if not shape.interleaved:
        return None
    pairs = torch.arange(shape.rotated).view(-1, 2).T.flatten() + first
    of_head = torch.cat((torch.arange(first), pairs))
    return (torch.arange(heads).unsqueeze(1) * (first + shape.rotated) + of_head).flatten()


def _reorder(stack: StackedWeight, orders: Mapping[int, Tensor | None]) -> StackedWeight:
    """Return a stack with the rows of some parts in another order. orders: by the number of the part."""
    parts = list(stack.parts)
    for number, order in orders.items():
        if order is not None:
            parts[number] = select_rows(parts[number], order)
    return evolve(stack, parts=tuple(parts))
