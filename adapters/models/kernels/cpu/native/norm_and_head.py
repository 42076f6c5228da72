"""A draft's context projection, and a decoder's final norm and head, each in one call of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.layer_description import (
    DecoderOf,
    LayerOf,
    NativePart,
    check_fixed_point,
    check_parts,
    describe_matrix,
)
from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, WIDEST, describe_caches
from adapters.models.kernels.cpu.native.rows import PreparedHeads, check_heads, check_rope
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.layer_interface import Rope
from adapters.models.kernels.step_batch import Batch


@frozen(eq=False)
class NativeContextLayer:
    """A draft layer's keys and values of context rows: parts of the weight, the preparation of heads, the caches."""

    kv: tuple[NativePart, ...]
    prep: PreparedHeads
    k_cache: Tensor
    v_cache: Tensor


@define(eq=False)
class NativeContext:
    """Implements `FusedContext` for steps of one row count, in the dtype of its norm.

    Raises ValueError where its parts do not fit together: the library checks nothing.
    """

    compiled: NativeLibrary
    level: int
    fc: tuple[NativePart, ...]
    norm: Tensor
    eps: float
    layers: Sequence[NativeContextLayer]
    rope: Rope
    rows: int
    room: tuple[int, int] = field(init=False)  # slots, and rows of one
    _decoder: DecoderOf = field(init=False)
    _described: ctypes.Array[LayerOf] = field(init=False)
    _given: tuple[Tensor, Batch, tuple[Any, ...]] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        first = self.layers[0].k_cache
        (width,) = self.norm.shape
        dtype = self.norm.dtype
        kv = first.shape[1]
        head = format_of(first).head_size(first.shape[3])
        turned = self.rope.cos.shape[1]
        weights = [(self.fc, width, self.fc[0].weight.terms), *((one.kv, 2 * kv * head, width) for one in self.layers)]
        for parts, outputs, terms in weights:
            check_parts("a context's weight", parts, outputs, terms, dtype, gated=False)
        check_rope(self.rope)
        if dtype not in DTYPE_CODES or not self.norm.is_contiguous() or head > WIDEST or 2 * turned > head:
            raise ValueError(f"a norm of {dtype} {list(self.norm.shape)} for heads of {head}")
        slot, group, apart, *forms = describe_caches([(layer.k_cache, layer.v_cache) for layer in self.layers])
        for layer in self.layers:
            check_heads(layer.prep, 0, kv, head)
        self.room = len(first), min(first.shape[2], len(self.rope.cos))
        self._decoder = DecoderOf(
            *(width, 0, kv, head, self.rope.cos.data_ptr(), self.rope.sin.data_ptr(), turned),
            *(slot, group, apart, DTYPE_CODES[dtype], *forms),
        )
        how = {"weight_brain": int(dtype is torch.bfloat16), "eps": self.eps}
        before = LayerOf(input_norm=self.norm.data_ptr(), projection=describe_matrix(self.fc), **how)
        self._described = (LayerOf * (1 + len(self.layers)))(before, *map(_describe_layer, self.layers))

    def run(self, given: Tensor, batch: Batch) -> None:
        """Run as `FusedContext.run` says."""
        known = self._given
        if known is None or known[0] is not given or known[1] is not batch:
            known = self._given = given, batch, self.call_arguments(given, batch)
        batch.plan.check_caches(*self.room)
        failed = self.compiled.code.rekindle_context(*known[2], torch.get_num_threads(), self.level)
        if failed:
            raise MemoryError(f"no memory for {self.rows} rows of context")

    def call_arguments(self, given: Tensor, batch: Batch) -> tuple[Any, ...]:
        """Return arguments as `NativeLayers.call_arguments` does."""
        shape = (self.rows, self.fc[0].weight.terms)
        if given.shape != shape or given.dtype is not self.norm.dtype or not given.is_contiguous():
            raise ValueError(f"{given.dtype} {list(given.shape)} for {list(shape)} in {self.norm.dtype}")
        if batch.bucket != self.rows:
            raise ValueError(f"a step of {batch.bucket} rows where there are {self.rows}")
        return (
            ctypes.byref(self._decoder),
            self._described,
            len(self._described),
            self.rows,
            given.data_ptr(),
            batch.slots.data_ptr(),
            batch.positions.data_ptr(),
        )


def _describe_layer(layer: NativeContextLayer) -> LayerOf:
    bias = None if layer.prep.bias is None else layer.prep.bias.data_ptr()
    addresses = {"keys": layer.k_cache.data_ptr(), "values": layer.v_cache.data_ptr()}
    how = {"normed": layer.prep.norm_code, "head_eps": layer.prep.eps}
    return LayerOf(
        projection=describe_matrix(layer.kv), bias=bias, heads=layer.prep.weight.data_ptr(), **addresses, **how
    )


@define(eq=False)
class NativeHead:
    """A norm and a head behind it. Raises ValueError where they do not fit together."""

    compiled: NativeLibrary
    level: int
    norm: Tensor
    eps: float
    parts: tuple[NativePart, ...]
    _described: LayerOf = field(init=False)
    _given: tuple[Tensor, Tensor, tuple[Any, ...]] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if any(part.weight.terms != len(self.norm) or part.piece < 1 or part.up is not None for part in self.parts):
            raise ValueError(f"a norm of {list(self.norm.shape)} for {[part.weight.kind for part in self.parts]}")
        how = {"weight_brain": int(self.norm.dtype is torch.bfloat16), "eps": self.eps}
        self._described = LayerOf(input_norm=self.norm.data_ptr(), projection=describe_matrix(self.parts), **how)

    def write_logits(self, hidden: Tensor, logits: Tensor) -> None:
        """Compute logits, float32 `[R, V]`, of hidden `[R, D]`; products are rounded as the hidden states' dtype
        says.
        """
        known = self._given
        if known is None or known[0] is not hidden or known[1] is not logits:
            known = self._given = hidden, logits, self.call_arguments(hidden, logits)
        failed = self.compiled.code.rekindle_logits(*known[2], torch.get_num_threads(), self.level)
        if failed:
            raise MemoryError(f"no memory for logits of {len(logits)} rows")

    def call_arguments(self, hidden: Tensor, logits: Tensor) -> tuple[Any, ...]:
        """Return arguments as `NativeLayers.call_arguments` does."""
        outputs = sum(part.weight.outputs for part in self.parts)
        fits = hidden.shape == (len(logits), len(self.norm)) and hidden.dtype in DTYPE_CODES and hidden.is_contiguous()
        if not fits or self.norm.dtype not in {hidden.dtype, torch.float32} or not self.norm.is_contiguous():
            raise ValueError(f"{hidden.dtype} {list(hidden.shape)} for a norm of {list(self.norm.shape)}")
        check_fixed_point(self.parts, hidden.dtype)
        if logits.shape[1] != outputs or logits.dtype is not torch.float32 or not logits.is_contiguous():
            raise ValueError(f"{outputs} outputs into {logits.dtype} {list(logits.shape)}")
        return (
            ctypes.byref(self._described),
            hidden.data_ptr(),
            *hidden.shape,
            DTYPE_CODES[hidden.dtype],
            logits.data_ptr(),
        )
