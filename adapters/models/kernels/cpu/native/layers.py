"""Several decoder layers in one call of the compiled library (layers.h).

The operations are those of separate calls in the same order, and so have the same bits. What is saved are the ways
back to Python in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.layer_description import (
    DecoderOf,
    EmbeddingOf,
    LayerOf,
    NativePart,
    check_parts,
    describe_matrix,
)
from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, WIDEST, describe_caches
from adapters.models.kernels.cpu.native.rows import PreparedHeads, check_heads, check_rope
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.fused_layers import Embedding
from adapters.models.kernels.interfaces.layer_interface import Rope
from adapters.models.kernels.step_batch import Batch, BlockBatch

_NO_TOKEN = -2


@frozen(eq=False)
class NativeLayer:
    """A decoder layer whose every operation is the library's: parts of its weights, the preparation of heads, its
    caches.

    before: `[R, D]`, where the rows are left as they enter the layer, or None. mask: what rows of blocks see.
    """

    input_norm: Tensor
    projection: tuple[NativePart, ...]
    out: tuple[NativePart, ...]
    post_norm: Tensor
    gate_up: tuple[NativePart, ...]
    down: tuple[NativePart, ...]
    prep: PreparedHeads
    eps: float
    k_cache: Tensor
    v_cache: Tensor
    before: Tensor | None
    mask: AttentionMask


@define(eq=False)
class NativeLayers:
    """Implements `FusedLayers` for steps of one row count and dtype, at one level of instructions.

    Raises ValueError where its parts do not fit together: the library checks nothing.
    """

    compiled: NativeLibrary
    level: int
    layers: Sequence[NativeLayer]
    rope: Rope
    rows: int
    dtype: torch.dtype
    embedding: Embedding | None = None
    room: tuple[int, int] = field(init=False)  # slots, and rows of one
    _decoder: DecoderOf = field(init=False)
    _described: ctypes.Array[LayerOf] = field(init=False)
    _given: tuple[Tensor, Batch, tuple[Any, ...]] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        first = self.layers[0]
        slots, kv, capacity, wide = first.k_cache.shape
        head = format_of(first.k_cache).head_size(wide)
        (width,) = first.input_norm.shape
        dtype = self.dtype
        heads = len(first.prep.weight) - kv
        for layer in self.layers:
            _check_layer(layer, (self.rows, width, heads, kv, head), dtype)
        check_rope(self.rope)
        turned = self.rope.cos.shape[1]
        self.room = slots, min(capacity, len(self.rope.cos))
        if head > WIDEST or 2 * turned > head or heads % kv or min(self.room) < 1:
            raise ValueError(f"{heads} heads of {head} for {kv} of keys, {turned} pairs of which are rotated")
        given = () if self.embedding is None else (self.embedding.table, self.embedding.masked)
        for one in given:
            if one is not None and (one.shape[-1] != width or one.dtype is not dtype or not one.is_contiguous()):
                raise ValueError(f"an embedding of {one.dtype} {list(one.shape)} for rows of {width}")
        slot, group, apart, *forms = describe_caches([(layer.k_cache, layer.v_cache) for layer in self.layers])
        self._decoder = DecoderOf(
            *(width, heads, kv, head, self.rope.cos.data_ptr(), self.rope.sin.data_ptr(), turned),
            *(slot, group, apart, DTYPE_CODES[dtype], *forms),
        )
        self._described = (LayerOf * len(self.layers))(*map(_describe_layer, self.layers))

    @property
    def attention_heads(self) -> tuple[int, int]:
        """Query heads for each key head, and their size."""
        return self._decoder.queries // self._decoder.kv, self._decoder.head

    def run(self, residual: Tensor, batch: Batch, *, stops: bool) -> None:
        """Run the layers as `FusedLayers.run` says. Raises IndexError for a token that the embedding does not have."""
        known = self._given
        if known is None or known[0] is not residual or known[1] is not batch:
            known = self._given = residual, batch, self.call_arguments(residual, batch)
        batch.plan.check_caches(*self.room)
        failed = self.compiled.code.rekindle_layers(*known[2], int(stops), torch.get_num_threads(), self.level)
        if failed == _NO_TOKEN:
            raise IndexError(f"tokens {batch.tokens.tolist()}: the embedding has others")
        if failed:
            raise MemoryError(f"no memory for layers of {self.rows} rows")

    def call_arguments(self, residual: Tensor, batch: Batch) -> tuple[Any, ...]:
        """Return arguments of the library's function for these static tensors, which the caller keeps for the next
        step.
        """
        alike = residual.shape == (self.rows, self._decoder.width) and residual.dtype is self.dtype
        if not alike or not residual.is_contiguous() or batch.bucket != self.rows:
            raise ValueError(f"{residual.dtype} {list(residual.shape)} for layers of {self.rows} rows in {self.dtype}")
        return (
            ctypes.byref(self._decoder),
            self._described,
            len(self.layers),
            self.rows,
            None if self.embedding is None else ctypes.byref(_describe_embedding(self.embedding, batch)),
            residual.data_ptr(),
            batch.slots.data_ptr(),
            batch.positions.data_ptr(),
            batch.lengths.data_ptr(),
            batch.firsts.data_ptr() if isinstance(batch, BlockBatch) else None,
        )


def _check_layer(layer: NativeLayer, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    rows, width, heads, kv, head = shape
    inner = sum(part.weight.outputs for part in layer.gate_up)
    wanted = {
        "projection": (layer.projection, (heads + 2 * kv) * head, width),
        "out": (layer.out, width, heads * head),
        "gate_up": (layer.gate_up, inner, width),
        "down": (layer.down, width, inner),
    }
    for name, (parts, outputs, terms) in wanted.items():
        check_parts(name, parts, outputs, terms, dtype, gated=name == "gate_up")
    norms = (layer.input_norm, layer.post_norm)
    if any(norm.shape != (width,) or norm.dtype not in {dtype, torch.float32} for norm in norms):
        raise ValueError(f"norms of {[list(norm.shape) for norm in norms]} numbers for rows of {width} in {dtype}")
    if norms[0].dtype is not norms[1].dtype or not all(norm.is_contiguous() for norm in norms):
        raise ValueError("norms that are not alike")
    check_heads(layer.prep, heads, kv, head)
    left = layer.before
    if left is not None and (left.shape != (rows, width) or left.dtype is not dtype or not left.is_contiguous()):
        raise ValueError(f"{left.dtype} {list(left.shape)} for rows of {width}")


def _describe_layer(layer: NativeLayer) -> LayerOf:
    pointers = (layer.prep.bias, layer.prep.weight, layer.k_cache, layer.v_cache, layer.before)
    return LayerOf(
        *(layer.input_norm.data_ptr(), layer.post_norm.data_ptr()),
        *map(describe_matrix, (layer.projection, layer.out, layer.gate_up, layer.down)),
        *(None if one is None else one.data_ptr() for one in pointers),
        *(layer.prep.norm_code, int(layer.input_norm.dtype is torch.bfloat16), layer.eps, layer.prep.eps),
        *(layer.mask.window, int(layer.mask.causal)),
    )


def _describe_embedding(given: Embedding, batch: Batch) -> EmbeddingOf:
    masked = None if given.masked is None else given.masked.data_ptr()
    return EmbeddingOf(given.table.data_ptr(), batch.tokens.data_ptr(), len(given.table), masked, given.mask)
