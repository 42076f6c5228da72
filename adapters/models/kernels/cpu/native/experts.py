"""Products of rows with the experts that they chose, of all experts of a layer in one call of the compiled library.

An expert alone has few panels of weights, and a decode step few rows for it. Called one by one, experts would leave
most threads idle and take longer in Python than in C. The bits are those of separate products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, overload

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.models.kernels.activations import SILU
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, NativePacked, NativeProducts, NativeWeight
from adapters.models.kernels.interfaces import experts_interface
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape, GatedWeights, compute_softmax


class TableForm(ctypes.Structure):
    """One weight of every expert of a layer, in the library's structure (`table_t` of experts.h).

    The first three are addresses, whose memory has to outlive the structure. weights: of an array of one address for
    each expert. ups: the same for what the weights gate (`ExpertTable.gated`); NULL: they gate nothing. form: of the
    layout of packed weights (`packed_t`); NULL: they are not packed, and weight_form is the code of their dtype.
    outputs: rows of a weight. terms: numbers of such a row; of a packed one its spans (`StepLayout.span` numbers each).
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "ups", "form")),
        ("weight_form", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("outputs", "terms")),
    ]


@frozen(eq=False)
class ExpertTable:
    """One weight of every expert of a layer. one: the first expert's; the others are of the same kind.

    weights, gated: addresses by expert. gated: what the weights gate; None: nothing.
    """

    one: NativeWeight | NativePacked
    weights: Any
    gated: Any
    form: TableForm = field(init=False)

    @form.default
    def _describe(self) -> TableForm:
        one = self.one
        packed = one if isinstance(one, NativePacked) else None
        return TableForm(
            ctypes.addressof(self.weights),
            None if self.gated is None else ctypes.addressof(self.gated),
            None if packed is None else ctypes.addressof(packed.form),
            DTYPE_CODES.get(one.panels.dtype, 0),
            one.outputs,
            one.terms if packed is None else packed.panels.shape[1],
        )

    @classmethod
    def of(cls, weights: Sequence[tuple[NativeWeight | NativePacked, ...]]) -> ExpertTable | None:
        """Return the table, or None if the experts differ. weights: of each expert its weight, or a gate and what it
        gates.
        """
        kinds = {(type(one), one.kind) for parts in weights for one in parts}
        widths = {len(parts) for parts in weights}
        if len(kinds) > 1 or len(widths) > 1 or not widths <= {1, 2}:
            return None
        first, *rest = (
            (ctypes.c_void_p * len(weights))(*(one.panels.data_ptr() for one in column))
            for column in zip(*weights, strict=True)
        )
        return cls(weights[0][0], first, rest[0] if rest else None)


@frozen(eq=False)
class NativeExperts(Sequence[GatedWeights]):
    """The experts of a layer by number, with tables of their weights in the library's form."""

    each: tuple[GatedWeights, ...]
    gates: ExpertTable
    downs: ExpertTable

    @overload
    def __getitem__(self, number: int) -> GatedWeights: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[GatedWeights, ...]: ...

    def __getitem__(self, number: int | slice) -> GatedWeights | tuple[GatedWeights, ...]:
        return self.each[number]

    def __len__(self) -> int:
        return len(self.each)


def collect_experts(each: tuple[GatedWeights, ...], parts: Sequence[Sequence[Any]]) -> Sequence[GatedWeights]:
    """Return the experts of a layer, with tables where the library can multiply with all of them in one call.

    parts: of each expert what its two products are packed as, if that is the library's form; else None.
    """
    plain = all(one.activation == SILU and one.gate_up_bias is None and one.down_bias is None for one in each)
    if not each or not plain or any(one is None for pair in parts for one in pair):
        return each
    gates, downs = (ExpertTable.of(column) for column in zip(*parts, strict=True))
    if gates is None or downs is None or gates.gated is None or downs.gated is not None:
        return each
    if gates.one.outputs != downs.one.terms:
        raise ValueError(f"experts of {gates.one.outputs} columns, and {downs.one.terms} terms in what follows")
    return NativeExperts(each, gates, downs)


def run_experts(products: NativeProducts, x: Tensor, experts: NativeExperts, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of the first rows of x `[R, D]`, float32 `[n, D]`.

    chosen: int64 `[n, k]`, the experts of each row. weights: float32 `[n, k]`.
    """
    rows, each = chosen.shape
    x = products.read_rows(x, experts.gates.one)
    chosen = chosen.contiguous()
    weights = weights.contiguous()
    out = torch.empty(rows, experts.downs.one.outputs)
    failed = products.compiled.code.rekindle_experts(
        ctypes.byref(experts.gates.form),
        ctypes.byref(experts.downs.form),
        len(experts.each),
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        x.stride(0),
        chosen.data_ptr(),
        weights.data_ptr(),
        rows,
        each,
        DTYPE_CODES[products.to or torch.float32],
        out.data_ptr(),
        torch.get_num_threads(),
        products.level,
    )
    if failed:
        raise MemoryError(f"no memory for {rows} rows with {each} experts each")
    return out


def choose_experts(
    products: NativeProducts, logits: Tensor, shape: ExpertsShape, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `experts_interface.choose_experts` does, with the same bits.

    The plain choice takes one call. One operation after the other takes as long as a layer's weights take to read.
    """
    if type(shape) is not ExpertsShape or correction is not None:
        return experts_interface.choose_experts(logits, shape, correction)
    rows, count = logits.shape
    scores = compute_softmax(logits)
    chosen = torch.empty(rows, shape.chosen, dtype=torch.int64)
    weights = torch.empty(rows, shape.chosen)
    products.compiled.code.rekindle_choose(
        logits.data_ptr(),
        logits.stride(0),
        scores.data_ptr(),
        scores.stride(0),
        rows,
        count,
        shape.chosen,
        shape.is_normalized,
        chosen.data_ptr(),
        weights.data_ptr(),
    )
    return chosen, weights
