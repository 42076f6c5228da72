"""A decoder layer: its tensors by their published names, its products, its packed weights, and how it runs.

Pre-norm, grouped-query attention with rotary embedding, gated SiLU: targets and drafts share it. `LayerShape` says how
a family differs. It may have norms of query and key heads, biases of their projections, and a gate on the output of
attention. Norms may multiply with 1 + weight. The feed-forward is dense or has experts (`feed_forward.py`).
`LayerTraits` has what layers of a few families have in addition.

Recurrent layers (`recurrent_layer.py`) have the same norms and feed-forward around them; `Frame` holds these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight, select_rows
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.models.decoder.layers.feed_forward import (
    Feed,
    FeedShape,
    Matrix,
    feed_matrices,
    feed_products,
    feed_tensors,
    load_feed,
    run_feed,
)
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionRule
from adapters.models.kernels.interfaces.experts_interface import Experts
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Kernels
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.interfaces.row_kernels import Delta, NormedRows
from adapters.models.kernels.step_batch import Batch


class LayerShape(FeedShape, Protocol):
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

    @property
    def output_gate(self) -> bool:
        """Is a gate projected for each query head? Its sigmoid is multiplied with the output of attention."""
        ...

    @property
    def zero_centred(self) -> bool:
        """Do norms multiply with 1 + weight, in float32?"""
        ...

    @property
    def traits(self) -> LayerTraits: ...


@frozen
class Frame:
    """The weights that every layer has around the mixing of rows, which is attention or a recurrence.

    projection: one matrix for everything that is projected from the normed input. out: the matrix behind the mixing.
    out_bias: is added to what `out` returns. post_norm: the norm before the feed-forward. after_mixing, after_feed:
    norms of what comes out of `out`, and of the feed-forward; most families have none.
    """

    input_norm: Tensor
    projection: Any
    out: Any
    post_norm: Tensor
    feed: Feed
    eps: float
    after_mixing: Tensor | None = None
    after_feed: Tensor | None = None
    out_bias: Tensor | None = field(kw_only=True, default=None)


class LayerEnding(Protocol):
    """A family's own steps around the feed-forward of a layer, and with the residual stream behind it."""

    @property
    def parallel_norms(self) -> Sequence[Tensor]:
        """The norms of the residual stream for what is parallel to the feed-forward; empty if nothing is."""
        ...

    def end(self, kernels: Kernels, frame: Frame, residual: Tensor, fed: FedRows, batch: Batch) -> None:
        """Add the layer's result to the residual stream in place, and change that as the family does."""
        ...


@frozen(eq=False)
class FedRows:
    """The rows of a layer behind its feed-forward.

    found: what the feed-forward returned. parallel: the residual stream as it entered the feed-forward, by
    `LayerEnding.parallel_norms`. inputs: `[R, P]`, the layer's own; None: it has none.
    """

    found: Tensor
    parallel: Sequence[Tensor]
    inputs: Tensor | None


@frozen
class DecoderLayer:
    """The weights of one layer with attention, fused and packed.

    width: columns of queries, keys and values in the projection. Gates may follow them. source: the layer whose keys
    and values it reads; None: it has its own. norms: the factors of norms over all query heads and over all key heads;
    None where each head has its own, or none. gates: as in `LayerTraits`.
    """

    frame: Frame
    prep: HeadPrep
    width: int
    rule: AttentionRule = PLAIN
    source: int | None = None
    ending: LayerEnding | None = None
    norms: tuple[Tensor, Tensor] | None = None
    gates: int = 0

    @property
    def is_plain(self) -> bool:
        """Does the layer consist of operations that `Kernels.fuse_layers` can put together?"""
        return self.norms is None and self.frame.out_bias is None and not self.gates


def frame_tensors(shape: LayerShape) -> dict[str, tuple[int, ...]]:
    positions = ("input", *list_norm_positions(shape))
    return {f"{position}_layernorm.weight": (shape.hidden_size,) for position in positions} | feed_tensors(shape)


def list_norm_positions(shape: LayerShape) -> tuple[str, ...]:
    """Return the published places of norms: before the feed-forward, and, if there are more, after mixing and after
    the feed-forward.
    """
    return ("pre_feedforward", "post_attention", "post_feedforward") if shape.traits.post_norms else ("post_attention",)


def layer_tensors(shape: LayerShape, prefix: str) -> Shapes:
    """Return the published names of the tensors, which begin with `prefix`, and their shapes."""
    hidden = shape.hidden_size
    head = shape.head_dim
    q = shape.num_heads * head
    kv = shape.num_kv_heads * head
    parts = projected_parts(shape)
    shapes = frame_tensors(shape) | {f"self_attn.{part}_proj.weight": (kv, hidden) for part in parts}
    shapes |= {
        "self_attn.q_proj.weight": (2 * q if shape.output_gate else q, hidden),
        "self_attn.o_proj.weight": (hidden, q),
    }
    if shape.qk_norm:
        sizes = (q, kv) if shape.traits.norms_all_heads else (head, head)
        both = zip("qk", sizes, strict=True)
        shapes |= {f"self_attn.{part}_norm.weight": (size,) for part, size in [*both][: len(parts)]}
    if shape.qkv_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (q if part == "q" else kv,) for part in parts}
    if shape.traits.gates:
        shapes["self_attn.g_proj.weight"] = (shape.num_heads * shape.traits.gates, hidden)
    if shape.traits.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if shape.traits.sinks:
        shapes["self_attn.sinks"] = (shape.num_heads,)
    return {prefix + name: size for name, size in shapes.items()}


def projected_parts(shape: LayerShape) -> str:
    """Return which of queries, keys and values the layer projects, one letter each; values may be those of keys."""
    if shape.traits.source is not None:
        return "q"
    return "qkk" if shape.traits.shares_projection else "qkv"


def layer_products(shape: LayerShape) -> tuple[Weight, ...]:
    """Return the products of a layer. A bias needs no proof: every device rounds the sum of two numbers alike."""
    head = shape.head_dim
    q = shape.num_heads * head
    kv = shape.num_kv_heads * head
    own = kv * (len(projected_parts(shape)) - 1) + shape.num_heads * shape.traits.gates
    return frame_products(shape, (2 * q if shape.output_gate else q) + own, q)


def frame_products(shape: LayerShape, projected: int, mixed: int) -> tuple[Weight, ...]:
    """Return the products of a frame.

    projected: columns of a row before it is mixed with other rows. mixed: columns that come out of the mixing.
    """
    hidden = shape.hidden_size
    return (Weight(projected, hidden), Weight(hidden, mixed), *feed_products(shape))


def layer_matrices(shape: LayerShape, prefix: str) -> Iterator[Matrix]:
    """Yield every weight of the layer with the tensors that it is made of."""
    projection, out = layer_products(shape)[:2]
    head = shape.head_dim
    own = prefix + "self_attn."
    q = shape.num_heads * head
    kv = shape.num_kv_heads * head
    parts = [(f"{own}{part}_proj.weight", q if part == "q" else kv) for part in projected_parts(shape)]
    gates = shape.num_heads * shape.traits.gates
    parts += [(f"{own}g_proj.weight", gates)] if gates else parts[:1] if shape.output_gate else []
    yield projection, tuple(parts)
    yield out, ((f"{own}o_proj.weight", out.outputs),)
    yield from feed_matrices(shape, prefix)


def load_frame(
    read: WeightReader, kernels: Kernels, shape: LayerShape, prefix: str, *, projection: StackedWeight, out: str
) -> Frame:
    """Load a frame. projection: its weight before packing. out: the name of the matrix behind the mixing."""
    input_norm, post_norm, *more = (
        read.norm(f"{prefix}{position}_layernorm.weight", zero_centred=shape.zero_centred)
        for position in ("input", *list_norm_positions(shape))
    )
    return Frame(
        input_norm,
        kernels.pack(projection),
        kernels.pack(read.matrix(prefix + out)),
        post_norm,
        load_feed(read, kernels, shape, prefix),
        shape.rms_norm_eps,
        *more,
        out_bias=read(prefix + out.replace("weight", "bias")) if shape.traits.out_bias else None,
    )


def load_layer(read: WeightReader, kernels: Kernels, shape: LayerShape, prefix: str) -> DecoderLayer:
    attention = prefix + "self_attn."
    head = shape.head_dim
    traits = shape.traits
    parts_read = projected_parts(shape)
    gates = "g" if traits.gates else ""
    projection = read.matrix(*(f"{attention}{part}_proj.weight" for part in parts_read + gates))
    width = (shape.num_heads + (len(parts_read) - 1) * shape.num_kv_heads) * head
    if shape.output_gate:  # published for each head as `q | gate`; here all gates follow the values
        both, *rest = projection.parts
        q, gate = torch.arange(2 * shape.num_heads * head).view(shape.num_heads, 2, head).unbind(1)
        parts = (select_rows(both, q.flatten()), *rest, select_rows(both, gate.flatten()))
        projection = evolve(projection, parts=parts)

    def head_norm(part: str) -> Tensor | None:
        if not shape.qk_norm or part not in parts_read:
            return None
        return read.norm(f"{attention}{part}_norm.weight", zero_centred=shape.zero_centred)

    q_norm = head_norm("q")
    k_norm = head_norm("k")
    if traits.query_scale != 1:
        assert q_norm is not None
        q_norm = q_norm.float() * traits.query_scale
    norms = (q_norm, k_norm) if traits.norms_all_heads and q_norm is not None and k_norm is not None else None
    prep = HeadPrep(
        bias=read(*(f"{attention}{part}_proj.bias" for part in parts_read)) if shape.qkv_bias else None,
        q_norm=None if norms else q_norm,
        k_norm=None if norms else k_norm,
        eps=shape.rms_norm_eps,
        v_norm=traits.v_norm,
    )
    sinks = read.wide(f"{attention}sinks") if traits.sinks else None
    frame = load_frame(read, kernels, shape, prefix, projection=projection, out="self_attn.o_proj.weight")
    rule = AttentionRule(traits.window, traits.cap, sinks)
    return DecoderLayer(frame, prep, width, rule, traits.source, norms=norms, gates=traits.gates)


def project_inputs(kernels: Kernels, frame: Frame, residual: Tensor, delta: Delta | None) -> Tensor:
    """Run a layer up to the mixing of rows: add `delta` to the residual stream in place, and return its projection.

    delta: the result of the layer before.
    """
    return kernels.linear(kernels.add_norm(residual, delta, frame.input_norm, frame.eps), frame.projection)


def finish_layer(
    kernels: Kernels,
    frame: Frame,
    residual: Tensor,
    mixed: Tensor,
    batch: Batch,
) -> Tensor:
    """Run a layer from the mixing of rows on. The result must still be added to the residual stream."""
    return end_feed(kernels, frame, run_feed(kernels, frame.feed, begin_feed(kernels, frame, residual, mixed), batch))


def finish_layer_late(kernels: Kernels, frame: Frame, residual: Tensor, mixed: Tensor, batch: Batch) -> Delta:
    """Do what `finish_layer` does; the sum over experts may be left to `project_inputs` of the next layer."""
    if frame.after_feed is None and isinstance(frame.feed, Experts):
        return kernels.experts_late(begin_feed(kernels, frame, residual, mixed), frame.feed, batch)
    return finish_layer(kernels, frame, residual, mixed, batch)


def end_layer(
    kernels: Kernels,
    layer: DecoderLayer,
    residual: Tensor,
    mixed: Tensor,
    batch: Batch,
    *,
    inputs: Tensor | None,
) -> None:
    """Run a layer that has an ending from the mixing of rows on. inputs: as in `FedRows`."""
    ending = layer.ending
    assert ending is not None
    found = kernels.linear(mixed, layer.frame.out)
    x, *parallel = enter_feed(kernels, layer.frame, residual, found, ending.parallel_norms)
    found = run_feed(kernels, layer.frame.feed, x, batch)
    ending.end(kernels, layer.frame, residual, FedRows(found, parallel, inputs), batch)


def begin_feed(kernels: Kernels, frame: Frame, residual: Tensor, mixed: Tensor) -> Tensor:
    """Run a layer from the mixing of rows up to what its feed-forward reads."""
    return enter_feed(kernels, frame, residual, kernels.linear(mixed, frame.out), ())[0]


def enter_feed(
    kernels: Kernels, frame: Frame, residual: Tensor, found: Tensor, parallel: Sequence[Tensor]
) -> list[Tensor]:
    """Add what the matrix behind the mixing returned to the residual stream, and norm that by the frame's norm and by
    the `parallel` ones.
    """
    eps = frame.eps
    if frame.after_mixing is None:
        x = kernels.add_norm(residual, found, frame.post_norm, eps, bias=frame.out_bias)
        return [x, *(kernels.add_norm(residual, None, norm, eps) for norm in parallel)]
    if frame.out_bias is not None:
        found.add_(frame.out_bias)
    return kernels.add_normed(residual, NormedRows(found, frame.after_mixing), eps, (frame.post_norm, *parallel))


def end_feed(kernels: Kernels, frame: Frame, fed: Tensor) -> Tensor:
    """Return what must be added to the residual stream. fed: what the feed-forward returned."""
    return fed if frame.after_feed is None else kernels.add_norm(fed, None, frame.after_feed, frame.eps)
