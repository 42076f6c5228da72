"""Fused layers, contexts and heads on a CPU, where the compiled library serves every operation of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.models.kernels.cpu.native.layer_description import NativePart
from adapters.models.kernels.cpu.native.layers import NativeLayer, NativeLayers
from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.cpu.native.native_passes import Launch, NativeContextPass, NativeDraft, NativePass
from adapters.models.kernels.cpu.native.norm_and_head import NativeContext, NativeContextLayer, NativeHead
from adapters.models.kernels.cpu.native.products import NativePacked, NativeWeight
from adapters.models.kernels.cpu.native.rows import PreparedHeads
from adapters.models.kernels.cpu.packed import CpuStack, CpuWeight
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.decode_pass import MOST_ROWS, DecodePass
from adapters.models.kernels.interfaces.fused_layers import Embedding, FusedLayers
from adapters.models.kernels.interfaces.layer_interface import ContextLayer, ContextPass, HeadPrep, Rope, WholeLayer
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import Batch


def fuse_layers(
    native: NativeLibrary,
    layers: Sequence[WholeLayer],
    rope: Rope,
    rows: int,
    dtype: torch.dtype,
    embedding: Embedding | None,
    prepared: Callable[[HeadPrep, tuple[int, int, int]], PreparedHeads],
) -> NativeLayers | None:
    """Return layers that one call carries out, for steps of `rows` rows.

    Returns None if the library cannot multiply every weight in steps of this many rows. Returns None as well if a
    projection has outputs besides the heads of queries, keys and values, such as a gate.

    rope: the rotary tables of all layers. dtype: of the residual stream. embedding: as in `Kernels.fuse_layers`.
    prepared: returns the preparation of heads for query heads, key heads and their size.
    """
    found = []
    for layer in layers:
        projection, out, down = (native_parts(one, rows) for one in (layer.projection, layer.out, layer.feed.down))
        gate_up = _gated_parts(layer.feed.gate_up, rows)
        if projection is None or out is None or gate_up is None or down is None:
            return None
        kv = layer.k_cache.shape[1]
        head = format_of(layer.k_cache).head_size(layer.k_cache.shape[3])
        if sum(part.weight.outputs for part in projection) != layer.width:
            return None
        prep = prepared(layer.prep, (layer.width // head - 2 * kv, kv, head))
        norms = (layer.input_norm.contiguous(), layer.post_norm.contiguous())
        rest = (layer.k_cache, layer.v_cache, layer.before, layer.mask)
        found.append(NativeLayer(norms[0], projection, out, norms[1], gate_up, down, prep, layer.eps, *rest))
    return NativeLayers(native, native.find_level(dtype), found, rope, rows, dtype, embedding)


def fuse_context(
    native: NativeLibrary,
    joining: tuple[CpuWeight | CpuStack, Tensor, float],
    layers: Sequence[ContextLayer],
    rope: Rope,
    rows: int,
    prepared: Callable[[HeadPrep, tuple[int, int, int]], PreparedHeads],
) -> NativeContext | None:
    """Return a draft's context in one call, or None as in `fuse_layers`. joining: the projection of the hidden
    states, the norm behind it, and its eps.
    """
    fc = native_parts(joining[0], rows)
    found = list[NativeContextLayer]()
    for layer in layers:
        if (kv := native_parts(layer.kv, rows)) is None:
            return None
        size = (0, layer.k_cache.shape[1], format_of(layer.k_cache).head_size(layer.k_cache.shape[3]))
        found.append(NativeContextLayer(kv, prepared(layer.prep, size), layer.k_cache, layer.v_cache))
    if fc is None:
        return None
    return NativeContext(native, native.serving, fc, joining[1].contiguous(), joining[2], found, rope, rows)


def fuse_head(
    native: NativeLibrary, norm: Tensor, eps: float, packed: CpuWeight | CpuStack, rows: int
) -> NativeHead | None:
    """Return a norm and a head in one call, or None where the library does not multiply the head."""
    parts = native_parts(packed, rows)
    return None if parts is None else NativeHead(native, native.serving, norm, eps, parts)


def build_pass(
    layers: FusedLayers,
    ending: tuple[Tensor, float, Any],
    batch: Batch,
    forward: Forward,
    logits: Tensor,
    launch: Launch,
) -> NativePass | None:
    """Return layers and the head behind them. ending: the norm, its eps, and the packed head."""
    if not isinstance(layers, NativeLayers) or layers.embedding is None or layers.rows > MOST_ROWS:
        return None
    head = fuse_head(layers.compiled, *ending, layers.rows)
    return None if head is None else NativePass(layers, head, batch, forward, logits, launch)


def build_draft_pass(
    block: DecodePass, contexts: Sequence[ContextPass], left: Sequence[Tensor], mask: int
) -> NativeDraft | None:
    """Return a draft's part of decode steps, or None where some part of it is not the library's."""
    following = list[NativeContextPass]()
    for one in contexts:
        if not isinstance(one.context, NativeContext):
            return None
        following.append(NativeContextPass(one.context, one.batch, one.given))
    if not isinstance(block, NativePass):
        return None
    return NativeDraft(block, tuple(following), tuple(left), mask)


def native_parts(weight: CpuWeight | CpuStack, rows: int) -> tuple[NativePart, ...] | None:
    """Return a weight's parts, one below the other, for steps of this many rows; None where the library does not
    multiply some part.
    """
    if isinstance(weight, CpuWeight):
        return _single_part(weight, rows)
    parts = list[NativePart]()
    for one in weight.parts:
        if isinstance(one, NativePacked):
            parts.append(NativePart(one, None, rows))
        elif (plain := _single_part(one[0], rows)) is not None:
            parts += plain
        else:
            return None
    return tuple(parts) if weight.steps is None or rows in weight.steps else None


def _gated_parts(weight: CpuWeight | CpuStack, rows: int) -> tuple[NativePart, ...] | None:
    if isinstance(weight, CpuWeight):
        return _single_part(weight, rows)
    gate, up = weight.parts
    assert isinstance(gate, NativePacked)
    assert isinstance(up, NativePacked)
    return (NativePart(gate, up, rows),) if weight.steps is None or rows in weight.steps else None


def _single_part(weight: CpuWeight, rows: int) -> tuple[NativePart, ...] | None:
    """Return the one part of a weight, in as many rows as the plan says. None where it is not the library's, or not
    proven.
    """
    piece = rows if weight.pieces is None else weight.pieces.get(rows, 0)
    own = [one for one in weight.weights if isinstance(one, NativeWeight)]
    if not piece or len(own) < len(weight.weights):
        return None
    return (NativePart(own[0], own[1] if len(own) > 1 else None, piece),)
