"""Descriptions of weights and layers in the structures of layers.h, and checks before they are passed.

The library checks nothing itself.
"""

from __future__ import annotations

import ctypes

import torch
from attrs import frozen

from adapters.models.kernels.cpu.native.products import DTYPE_CODES, NativePacked, NativeWeight, PackedForm

_NUMBER = ctypes.c_int
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_long
_REAL = ctypes.c_float


# The structures of layers.h, field by field.
class PartOf(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("panels", "up", "packed")),
        *((name, _SIZE) for name in ("outputs", "terms", "piece")),
        ("form", _NUMBER),
    ]


class MatrixOf(ctypes.Structure):
    _fields_ = [("parts", ctypes.POINTER(PartOf)), *((name, _SIZE) for name in ("count", "terms", "outputs"))]


class LayerOf(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "post_norm")),
        *((name, MatrixOf) for name in ("projection", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("bias", "heads", "keys", "values", "before")),
        *((name, _NUMBER) for name in ("normed", "weight_brain")),
        *((name, _REAL) for name in ("eps", "head_eps")),
        *(("window", _SIZE), ("causal", _NUMBER)),
    ]


class DecoderOf(ctypes.Structure):
    _fields_ = [
        *((name, _SIZE) for name in ("width", "queries", "kv", "head")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _SIZE) for name in ("turned", "slot", "group", "apart")),
        *((name, _NUMBER) for name in ("brain", "key_form", "value_form")),
    ]


class EmbeddingOf(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("table", "tokens")),
        *(("vocabulary", _SIZE), ("instead", _POINTER), ("mask", ctypes.c_int64)),
    ]


@frozen(eq=False)
class NativePart:
    """Some outputs of a weight. up: the weight that these outputs gate. piece: rows that are multiplied together."""

    weight: NativeWeight | NativePacked
    up: NativeWeight | NativePacked | None
    piece: int


def describe_matrix(parts: tuple[NativePart, ...]) -> MatrixOf:
    described = (PartOf * len(parts))(*map(_describe_part, parts))
    return MatrixOf(described, len(parts), parts[0].weight.terms, sum(part.weight.outputs for part in parts))


def _describe_part(part: NativePart) -> PartOf:
    weight = part.weight.panels.data_ptr()
    up = None if part.up is None else part.up.panels.data_ptr()
    if isinstance(part.weight, NativeWeight):
        shape = (part.weight.outputs, part.weight.terms, part.piece, DTYPE_CODES[part.weight.panels.dtype])
        return PartOf(weight, up, None, *shape)
    packed: PackedForm = part.weight.form
    return PartOf(weight, up, ctypes.addressof(packed), part.weight.outputs, part.weight.panels.shape[1], part.piece, 0)


def check_parts(
    name: str, parts: tuple[NativePart, ...], outputs: int, terms: int, dtype: torch.dtype, *, gated: bool
) -> None:
    """Raise ValueError where parts do not form a weight of this many outputs and terms. dtype: of rows."""
    check_fixed_point(parts, dtype)
    fits = sum(part.weight.outputs for part in parts) == outputs and all(part.piece > 0 for part in parts)
    if not fits or any(part.weight.terms != terms for part in parts):
        raise ValueError(f"{name}: {[part.weight.kind for part in parts]}, not {outputs} x {terms}")
    if any((part.up is None) is gated for part in parts):
        raise ValueError(f"{name}: only what is gated has two weights")
    if any(part.up is not None and part.up.kind != part.weight.kind for part in parts):
        raise ValueError(f"{name}: a gate, and what it gates, must be alike")


def check_fixed_point(parts: tuple[NativePart, ...], dtype: torch.dtype) -> None:
    """Raise TypeError for fixed-point weights with rows that are not bfloat16."""
    if dtype is not torch.bfloat16 and any(isinstance(one.weight, NativePacked) and one.weight.fixed for one in parts):
        raise TypeError(f"rows of {dtype} with a weight for those of bfloat16 in fixed point")
