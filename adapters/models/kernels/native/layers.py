"""Some layers of a decoder in one call of the compiled library: the operations that calls of their own carry out, in
the same order, and so with the same bits, but with no way back to Python in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.batch import Batch
from adapters.models.kernels.interface import Rope
from adapters.models.kernels.native.compiled import NativeCode
from adapters.models.kernels.native.products import FORMS, ROW_FORMS, WIDEST, NativePacked, NativeWeight, PackedForm
from adapters.models.kernels.native.rows import PreparedHeads
from adapters.models.kernels.row_form import form_of

_NUMBER, _POINTER, _SIZE, _REAL = ctypes.c_int, ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_NO_TOKEN = -2


class _Part(ctypes.Structure):  # these as layers.h has them
    _fields_ = [
        *((name, _POINTER) for name in ("panels", "up", "packed")),
        *((name, _SIZE) for name in ("outputs", "terms", "piece")),
        ("form", _NUMBER),
    ]


class _Matrix(ctypes.Structure):
    _fields_ = [("parts", ctypes.POINTER(_Part)), *((name, _SIZE) for name in ("count", "terms", "outputs"))]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "post_norm")),
        *((name, _Matrix) for name in ("projection", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("bias", "heads", "keys", "values", "before")),
        *((name, _NUMBER) for name in ("normed", "weight_brain")),
        *((name, _REAL) for name in ("eps", "head_eps")),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, _SIZE) for name in ("width", "queries", "kv", "head")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _SIZE) for name in ("turned", "slot", "group")),
        *((name, _NUMBER) for name in ("brain", "form")),
    ]


class _Embedding(ctypes.Structure):
    _fields_ = [*((name, _POINTER) for name in ("table", "tokens")), ("vocabulary", _SIZE)]


@frozen(eq=False)
class NativePart:
    """Some outputs of a weight. up: what they gate. piece: rows that are multiplied together."""

    weight: NativeWeight | NativePacked
    up: NativeWeight | NativePacked | None
    piece: int


@frozen(eq=False)
class NativeLayer:
    """A decoder layer whose every operation is the library's: parts of its weights, how heads are prepared, its caches.

    before: `[R, D]`, where the rows are left as they come into the layer, if anybody wants them.
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


@define(eq=False)
class NativeLayers:
    """Layers one after the other, for steps of so many rows of that dtype. level: as `NativeProducts` has it.

    Raises ValueError where what they are made of does not fit together: the library checks nothing.
    """

    compiled: NativeCode
    level: int
    layers: Sequence[NativeLayer]
    rope: Rope
    rows: int
    dtype: torch.dtype
    embedding: Tensor | None = None
    _decoder: _Decoder = field(init=False)
    _described: ctypes.Array[_Layer] = field(init=False)

    def __attrs_post_init__(self) -> None:
        first = self.layers[0]
        slots, kv, capacity, wide = first.k_cache.shape
        head, (width,), dtype = form_of(first.k_cache).head(wide), first.input_norm.shape, self.dtype
        heads = len(first.prep.weight) - kv
        for layer in self.layers:
            _check(layer, first, (self.rows, width, heads, kv, head), dtype)
        turned = self.rope.cos.shape[1]
        if head > WIDEST or 2 * turned > head or heads % kv or min(capacity, len(self.rope.cos)) < 1 or not slots:
            raise ValueError(f"{heads} heads of {head} for {kv} of keys, {turned} pairs of which are rotated")
        table = self.embedding
        if table is not None and (table.shape[1:] != (width,) or table.dtype is not dtype or not table.is_contiguous()):
            raise ValueError(f"an embedding of {table.dtype} {list(table.shape)} for rows of {width}")
        self._decoder = _Decoder(
            *(width, heads, kv, head, self.rope.cos.data_ptr(), self.rope.sin.data_ptr(), turned),
            *(first.k_cache.stride(0), first.k_cache.stride(1), FORMS[dtype], ROW_FORMS[first.k_cache.dtype]),
        )
        self._described = (_Layer * len(self.layers))(*map(_described, self.layers))

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads to a head of keys, and their size."""
        return self._decoder.queries // self._decoder.kv, self._decoder.head

    def run(self, residual: Tensor, batch: Batch, *, stops: bool) -> None:
        """As `LayersAtOnce` has it. Raises IndexError for a token that the embedding does not have."""
        alike = residual.shape == (self.rows, self._decoder.width) and residual.dtype is self.dtype
        if not alike or not residual.is_contiguous() or batch.bucket != self.rows:
            raise ValueError(f"{residual.dtype} {list(residual.shape)} for layers of {self.rows} rows in {self.dtype}")
        batch.plan.check(len(self.layers[0].k_cache), min(self.layers[0].k_cache.shape[2], len(self.rope.cos)))
        embedding = None
        if self.embedding is not None:
            embedding = _Embedding(self.embedding.data_ptr(), batch.tokens.data_ptr(), len(self.embedding))
        failed = self.compiled.code.rekindle_layers(
            ctypes.byref(self._decoder),
            self._described,
            len(self.layers),
            self.rows,
            None if embedding is None else ctypes.byref(embedding),
            residual.data_ptr(),
            batch.slots.data_ptr(),
            batch.positions.data_ptr(),
            batch.lengths.data_ptr(),
            int(stops),
            torch.get_num_threads(),
            self.level,
        )
        if failed == _NO_TOKEN:
            raise IndexError(f"tokens {batch.tokens.tolist()}: the embedding has others")
        if failed:
            raise MemoryError(f"no memory for layers of {self.rows} rows")


@define(eq=False)
class NativeHead:
    """A norm and a head behind it. Raises ValueError where they do not fit together."""

    compiled: NativeCode
    level: int
    norm: Tensor
    eps: float
    parts: tuple[NativePart, ...]
    _described: _Layer = field(init=False)

    def __attrs_post_init__(self) -> None:
        if any(part.weight.terms != len(self.norm) or part.piece < 1 or part.up is not None for part in self.parts):
            raise ValueError(f"a norm of {list(self.norm.shape)} for {[part.weight.kind for part in self.parts]}")
        how = {"weight_brain": int(self.norm.dtype is torch.bfloat16), "eps": self.eps}
        self._described = _Layer(input_norm=self.norm.data_ptr(), projection=_matrix(self.parts), **how)

    def put(self, hidden: Tensor, logits: Tensor) -> None:
        """hidden `[R, D]` -> logits, float32 `[R, V]`: products as the hidden states' dtype rounds them."""
        outputs = sum(part.weight.outputs for part in self.parts)
        fits = hidden.shape == (len(logits), len(self.norm)) and hidden.dtype in FORMS and hidden.is_contiguous()
        if not fits or self.norm.dtype not in {hidden.dtype, torch.float32} or not self.norm.is_contiguous():
            raise ValueError(f"{hidden.dtype} {list(hidden.shape)} for a norm of {list(self.norm.shape)}")
        if logits.shape[1] != outputs or logits.dtype is not torch.float32 or not logits.is_contiguous():
            raise ValueError(f"{outputs} outputs into {logits.dtype} {list(logits.shape)}")
        failed = self.compiled.code.rekindle_logits(
            ctypes.byref(self._described),
            hidden.data_ptr(),
            *hidden.shape,
            FORMS[hidden.dtype],
            logits.data_ptr(),
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for logits of {len(logits)} rows")


def _check(layer: NativeLayer, first: NativeLayer, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    rows, width, heads, kv, head = shape
    inner = sum(part.weight.outputs for part in layer.gate_up)
    wanted = {
        "projection": (layer.projection, (heads + 2 * kv) * head, width),
        "out": (layer.out, width, heads * head),
        "gate_up": (layer.gate_up, inner, width),
        "down": (layer.down, width, inner),
    }
    for name, (parts, outputs, terms) in wanted.items():
        fits = sum(part.weight.outputs for part in parts) == outputs and all(part.piece > 0 for part in parts)
        if not fits or any(part.weight.terms != terms for part in parts):
            raise ValueError(f"{name}: {[part.weight.kind for part in parts]}, not {outputs} x {terms}")
        if any((part.up is None) is (name == "gate_up") for part in parts):
            raise ValueError(f"{name}: only what is gated has two weights")
        if any(part.up is not None and part.up.kind != part.weight.kind for part in parts):
            raise ValueError(f"{name}: a gate, and what it gates, must be alike")
    norms = (layer.input_norm, layer.post_norm)
    if any(norm.shape != (width,) or norm.dtype not in {dtype, torch.float32} for norm in norms):
        raise ValueError(f"norms of {[list(norm.shape) for norm in norms]} numbers for rows of {width} in {dtype}")
    if norms[0].dtype is not norms[1].dtype or not all(norm.is_contiguous() for norm in norms):
        raise ValueError("norms that are not alike")
    caches = (layer.k_cache, layer.v_cache)
    if any(
        (one.shape, one.stride(), one.dtype) != (first.k_cache.shape, first.k_cache.stride(), first.k_cache.dtype)
        for one in caches
    ) or first.k_cache.stride()[2:] != (first.k_cache.shape[3], 1):
        raise ValueError("caches that are not alike")
    bias = layer.prep.bias
    if layer.prep.weight.shape != (heads + kv, head) or (bias is not None and bias.shape != (heads + 2 * kv, head)):
        raise ValueError(f"{list(layer.prep.weight.shape)} for {heads} + {kv} heads of {head}")
    left = layer.before
    if left is not None and (left.shape != (rows, width) or left.dtype is not dtype or not left.is_contiguous()):
        raise ValueError(f"{left.dtype} {list(left.shape)} for rows of {width}")


def _described(layer: NativeLayer) -> _Layer:
    pointers = (layer.prep.bias, layer.prep.weight, layer.k_cache, layer.v_cache, layer.before)
    return _Layer(
        *(layer.input_norm.data_ptr(), layer.post_norm.data_ptr()),
        *map(_matrix, (layer.projection, layer.out, layer.gate_up, layer.down)),
        *(None if one is None else one.data_ptr() for one in pointers),
        *(int(layer.prep.normed), int(layer.input_norm.dtype is torch.bfloat16), layer.eps, layer.prep.eps),
    )


def _matrix(parts: tuple[NativePart, ...]) -> _Matrix:
    described = (_Part * len(parts))(*map(_part, parts))
    return _Matrix(described, len(parts), parts[0].weight.terms, sum(part.weight.outputs for part in parts))


def _part(part: NativePart) -> _Part:
    weight, up = part.weight.panels.data_ptr(), None if part.up is None else part.up.panels.data_ptr()
    if isinstance(part.weight, NativeWeight):
        shape = (part.weight.outputs, part.weight.terms, part.piece, FORMS[part.weight.panels.dtype])
        return _Part(weight, up, None, *shape)
    packed: PackedForm = part.weight.form
    return _Part(weight, up, ctypes.addressof(packed), part.weight.outputs, part.weight.panels.shape[1], part.piece, 0)
