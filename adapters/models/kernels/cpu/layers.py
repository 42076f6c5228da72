"""Layers of a decoder as the compiled library carries them out at once, where it serves every operation of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.models.kernels.cpu.native.layer_description import NativePart
from adapters.models.kernels.cpu.native.layers import NativeLayer, NativeLayers
from adapters.models.kernels.cpu.native.library import NativeCode
from adapters.models.kernels.cpu.native.native_decode import MOST_FED, Launch, NativePass
from adapters.models.kernels.cpu.native.norm_and_head import NativeContext, NativeContextLayer, NativeHead
from adapters.models.kernels.cpu.native.products import NativePacked, NativeWeight
from adapters.models.kernels.cpu.native.rows import PreparedHeads
from adapters.models.kernels.cpu.packed import CpuStack, CpuWeight
from adapters.models.kernels.interface import ContextLayer, Embedding, HeadPrep, LayersAtOnce, Rope, WholeLayer
from adapters.models.kernels.row_format import form_of
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import Batch


def layers_at_once(
    native: NativeCode,
    layers: Sequence[WholeLayer],
    rope: Rope,
    rows: int,
    dtype: torch.dtype,
    embedding: Embedding | None,
    prepared: Callable[[HeadPrep, tuple[int, int, int]], PreparedHeads],
) -> NativeLayers | None:
    """None where some weight is not the library's to multiply with, or what is projected is not heads alone.

    prepared: of heads of queries, of keys, and their size.
    """
    found = []
    for layer in layers:
        projection, out, down = (parts_of(one, rows) for one in (layer.projection, layer.out, layer.feed.down))
        gate_up = _gated(layer.feed.gate_up, rows)
        if projection is None or out is None or gate_up is None or down is None:
            return None
        kv, head = layer.k_cache.shape[1], form_of(layer.k_cache).head(layer.k_cache.shape[3])
        if sum(part.weight.outputs for part in projection) != layer.width:
            return None
        prep = prepared(layer.prep, (layer.width // head - 2 * kv, kv, head))
        norms = (layer.input_norm.contiguous(), layer.post_norm.contiguous())
        rest = (layer.k_cache, layer.v_cache, layer.before, layer.mask)
        found.append(NativeLayer(norms[0], projection, out, norms[1], gate_up, down, prep, layer.eps, *rest))
    return NativeLayers(native, native.serving, found, rope, rows, dtype, embedding)


def context_at_once(
    native: NativeCode,
    joining: tuple[CpuWeight | CpuStack, Tensor, float],
    layers: Sequence[ContextLayer],
    rope: Rope,
    rows: int,
    prepared: Callable[[HeadPrep, tuple[int, int, int]], PreparedHeads],
) -> NativeContext | None:
    """The same of a draft's context. joining: what all of it goes through first, the norm behind that and its eps."""
    fc, found = parts_of(joining[0], rows), list[NativeContextLayer]()
    for layer in layers:
        if (kv := parts_of(layer.kv, rows)) is None:
            return None
        size = (0, layer.k_cache.shape[1], form_of(layer.k_cache).head(layer.k_cache.shape[3]))
        found.append(NativeContextLayer(kv, prepared(layer.prep, size), layer.k_cache, layer.v_cache))
    if fc is None:
        return None
    return NativeContext(native, native.serving, fc, joining[1].contiguous(), joining[2], found, rope, rows)


def head_at_once(
    native: NativeCode, norm: Tensor, eps: float, packed: CpuWeight | CpuStack, rows: int
) -> NativeHead | None:
    parts = parts_of(packed, rows)
    return None if parts is None else NativeHead(native, native.serving, norm, eps, parts)


def pass_of(
    layers: LayersAtOnce,
    ending: tuple[Tensor, float, Any],
    batch: Batch,
    forward: Forward,
    logits: Tensor,
    launch: Launch,
) -> NativePass | None:
    """Layers and the head behind them. ending: the norm, its eps, and the head as it is packed."""
    if not isinstance(layers, NativeLayers) or layers.embedding is None or layers.rows > MOST_FED:
        return None
    head = head_at_once(layers.compiled, *ending, layers.rows)
    return None if head is None else NativePass(layers, head, batch, forward, logits, launch)


def parts_of(weight: CpuWeight | CpuStack, rows: int) -> tuple[NativePart, ...] | None:
    """One below the other, for steps of so many rows. None where some are not the library's to multiply with."""
    if isinstance(weight, CpuWeight):
        return _whole(weight, rows)
    parts = list[NativePart]()
    for one in weight.parts:
        if isinstance(one, NativePacked):
            parts.append(NativePart(one, None, rows))
        elif (plain := _whole(one[0], rows)) is not None:
            parts += plain
        else:
            return None
    return tuple(parts) if weight.steps is None or rows in weight.steps else None


def _gated(weight: CpuWeight | CpuStack, rows: int) -> tuple[NativePart, ...] | None:
    if isinstance(weight, CpuWeight):
        return _whole(weight, rows)
    gate, up = weight.parts
    assert isinstance(gate, NativePacked)
    assert isinstance(up, NativePacked)
    return (NativePart(gate, up, rows),) if weight.steps is None or rows in weight.steps else None


def _whole(weight: CpuWeight, rows: int) -> tuple[NativePart, ...] | None:
    """Of one part, as many rows at once as the plan says. None where it is not the library's, or never proven."""
    piece = rows if weight.pieces is None else weight.pieces.get(rows, 0)
    own = [one for one in weight.weights if isinstance(one, NativeWeight)]
    if not piece or len(own) < len(weight.weights):
        return None
    return (NativePart(own[0], own[1] if len(own) > 1 else None, piece),)
