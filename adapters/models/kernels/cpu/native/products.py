"""Products by the compiled library, on tensors: packs weights, checks what it is given, multiplies.

An output is one chain of float32 fused multiply-adds over ascending terms (of weights in bfloat16 over pairs of terms,
the second of each first), however many rows there are, whatever they are, and on however many threads: its bits follow
from its row and its weight alone. Packed weights have products of their own (steps.h, fixed.h), of which the same is
true.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import TABLES, PackedMatrix, StepLayout
from adapters.models.kernels.cpu.native.large_pages import LargePages
from adapters.models.kernels.cpu.native.library import NativeCode

PANEL = 32  # outputs whose weights lie together
WIDEST = 1024  # numbers of a head that rows go through
FORMS = {torch.float32: 0, torch.bfloat16: 1}  # what weights can be kept in, and rows come and go in
ROW_FORMS = {**FORMS, torch.int8: 2, torch.float8_e4m3fn: 3}  # what keys and values can be kept in


@frozen(eq=False)
class NativeWeight:
    """panels: `[ceil(outputs / 32), terms, 32]`, in the order in which the library reads them; in bfloat16 pairs of
    terms lie together, and an odd last one has a zero beside it.
    """

    panels: Tensor
    outputs: int
    terms: int

    @property
    def kind(self) -> tuple[int, int, torch.dtype]:
        return self.outputs, self.terms, self.panels.dtype


class PackedForm(ctypes.Structure):
    """As the library has it (`packed_t` in numbers.h)."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "scale", "inner", "least", "raised")),
        *((name, ctypes.c_long) for name in ("group", "per", "record")),
        ("table", ctypes.c_float * 16),
        ("places", ctypes.c_uint8 * 16),
    ]


KINDS, SCALES, LEASTS = (
    {"int8": 0, "e4m3": 2},
    {"float32": 0, "bfloat16": 1, "float16": 2},
    {"": 0, "scale": 1, "own": 2},
)
FIXED = {"int8": (4, 128), "uint4": (5, 0), "int4": (5, 8), "iq4": (6, 128)}
"""For rows in fixed point: the kind, and by how much steps are raised, so that none is negative."""


@frozen(eq=False)
class NativePacked:
    """A weight as it is packed. panels: bytes `[ceil(outputs / 32), spans, record]`. fixed: for rows in fixed point."""

    panels: Tensor
    layout: StepLayout
    outputs: int
    terms: int
    fixed: bool
    form: PackedForm = field(init=False)

    @property
    def kind(self) -> tuple[int, int, StepLayout]:
        return self.outputs, self.terms, self.layout

    @form.default
    def _form(self) -> PackedForm:
        layout = self.layout
        table = TABLES.get(layout.steps, ())
        kind, raised = FIXED[layout.steps] if self.fixed else (KINDS.get(layout.steps, 1), 0)
        return PackedForm(
            *(kind, SCALES[layout.scale], layout.inner, LEASTS[layout.least], raised),
            *(layout.group, layout.per, self.panels.shape[2]),
            (ctypes.c_float * 16)(*table),
            (ctypes.c_uint8 * 16)(*(place + raised for place in table)),
        )


@frozen(eq=False)
class NativeProducts:
    """level: of instructions, at most the library's own; all give the same bits. to: what results are rounded to, once;
    None: they stay float32.
    """

    compiled: NativeCode
    level: int
    to: torch.dtype | None = None
    _pages: LargePages = Factory(LargePages)

    def pack(self, weight: Tensor) -> NativeWeight:
        """`[outputs, terms]`, kept in its dtype."""
        _check(weight, "a weight")
        outputs, terms = weight.shape
        if not outputs or not terms:
            raise ValueError(f"a weight of {outputs} x {terms}; accepted: at least 1 x 1")
        there = terms + terms % 2 if weight.dtype == torch.bfloat16 else terms
        panels, weight = self._pages.empty((-(-outputs // PANEL), there, PANEL), weight.dtype), weight.contiguous()
        form, threads = FORMS[weight.dtype], torch.get_num_threads()
        self.compiled.code.rekindle_pack(weight.data_ptr(), panels.data_ptr(), outputs, terms, form, threads)
        return NativeWeight(panels, outputs, terms)

    def pack_steps(self, matrix: PackedMatrix) -> NativePacked:
        """Rearranged, and nothing unpacked: for rows in fixed point where results are bfloat16, as rows are there, too.

        Raises ValueError for a layout that products do not go through.
        """
        outputs, terms = matrix.shape
        if not outputs or not terms or not matrix.layout.fits(terms):
            raise ValueError(f"a packed weight of {outputs} x {terms} in {matrix.layout}; accepted: whole groups")
        layout, fixed = matrix.layout, self.to == torch.bfloat16 and matrix.layout.steps in FIXED
        panels, spans = -(-outputs // PANEL), terms // layout.span
        room = self._pages.empty((panels, spans, round(PANEL * layout.span * layout.bits / 8)), torch.uint8)
        found = NativePacked(room, layout, outputs, terms, fixed)
        parts = [None if one is None else one.contiguous() for one in matrix.tensors]
        _check_parts(parts, layout, outputs, terms)
        self.compiled.code.rekindle_pack_steps(
            *(None if one is None else one.data_ptr() for one in parts),
            ctypes.byref(found.form),
            outputs,
            spans,
            room.data_ptr(),
            torch.get_num_threads(),
        )
        return found

    def multiply_packed(
        self, x: Tensor, weight: NativePacked, up: NativePacked | None = None, out: Tensor | None = None
    ) -> Tensor:
        """As `multiply`. out: where the outputs go, columns of a wider tensor."""
        x = self._rows(x, weight, up)
        if weight.fixed and x.dtype != torch.bfloat16:
            raise TypeError(f"rows of {x.dtype} with a weight for those of bfloat16 in fixed point")
        if out is None:
            out = self._out(x, weight)
        elif out.shape != (len(x), weight.outputs) or out.stride(1) != 1 or out.dtype not in FORMS or not out.is_cpu:
            raise ValueError(f"outputs of {len(x)} x {weight.outputs} into {out.dtype} {list(out.shape)}")
        failed = self.compiled.code.rekindle_packed_product(
            x.data_ptr(),
            FORMS[x.dtype],
            len(x),
            x.stride(0),
            weight.panels.data_ptr(),
            None if up is None else up.panels.data_ptr(),
            ctypes.byref(weight.form),
            weight.outputs,
            weight.panels.shape[1],
            out.data_ptr(),
            out.stride(0),
            FORMS[out.dtype],
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {len(x)} rows of {weight.terms}")
        return out

    def _rows(self, x: Tensor, weight: NativeWeight | NativePacked, up: NativeWeight | NativePacked | None) -> Tensor:
        """x as the library reads it. Raises ValueError for what does not fit together."""
        _check(x, "rows")
        terms = x.shape[1]
        if terms != weight.terms:
            raise ValueError(f"rows of {terms} numbers with a weight of {weight.outputs} x {weight.terms}")
        if up is not None and up.kind != weight.kind:
            raise ValueError(f"a gate of {weight.kind}, and what it gates of {up.kind}: they must be alike")
        return x.contiguous() if x.stride(1) != 1 or x.stride(0) < terms else x

    def _out(self, x: Tensor, weight: NativeWeight | NativePacked) -> Tensor:
        return torch.empty(len(x), weight.outputs, dtype=self.to or torch.float32)

    def multiply(self, x: Tensor, weight: NativeWeight, up: NativeWeight | None = None) -> Tensor:
        """x `[rows, terms]` -> x @ weight.T `[rows, outputs]`; with `up`, silu(x @ weight.T) * (x @ up.T)."""
        x = self._rows(x, weight, up)
        (rows, terms), out = x.shape, self._out(x, weight)
        failed = self.compiled.code.rekindle_product(
            x.data_ptr(),
            FORMS[x.dtype],
            rows,
            x.stride(0),
            weight.panels.data_ptr(),
            None if up is None else up.panels.data_ptr(),
            FORMS[weight.panels.dtype],
            weight.outputs,
            terms,
            out.data_ptr(),
            weight.outputs,
            FORMS[out.dtype],
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {rows} rows of {terms}")
        return out


def check_lies(what: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises TypeError or ValueError unless the library can read it as it lies: of that shape and one of these dtypes,
    each number behind the one before it, in host memory.
    """
    if tensor.dtype not in dtypes or not tensor.is_cpu:
        raise TypeError(f"{what}: {tensor.dtype} on {tensor.device}; accepted: {', '.join(map(str, dtypes))} on cpu")
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{what}: {list(tensor.shape)}, strides {tensor.stride()}; accepted: contiguous {list(shape)}")


def check_caches(caches: Sequence[Tensor]) -> None:
    """Raises ValueError unless all are alike, and of one slot's rows those of a head lie behind each other."""
    first = caches[0]
    alike = all((one.shape, one.stride(), one.dtype) == (first.shape, first.stride(), first.dtype) for one in caches)
    if not alike or first.stride()[2:] != (first.shape[3], 1) or not all(one.is_cpu for one in caches):
        raise ValueError(f"caches of {[list(one.shape) for one in caches]}, strides {first.stride()}: not alike")


def _check_parts(parts: Sequence[Tensor | None], layout: StepLayout, outputs: int, terms: int) -> None:
    """Raises TypeError or ValueError for a packed matrix whose tensors are not those of its layout."""
    scale = getattr(torch, layout.scale)
    spans, groups = ((outputs, terms // each) for each in (layout.span, layout.group))
    expected = {
        "steps": ((outputs, terms), torch.int8, torch.uint8),
        "scale": (spans, scale),
        "inner": (groups, torch.int8) if layout.inner else None,
        "least": (groups, torch.int8) if layout.least else None,
        "own": (spans, scale) if layout.least == "own" else None,
    }
    for (name, how), part in zip(expected.items(), parts, strict=True):
        if (how is None) is not (part is None):
            raise TypeError(f"{name} of a packed weight in {layout}: {'missing' if part is None else 'unexpected'}")
        if how is not None and part is not None:
            check_lies(f"{name} of a packed weight in {layout}", part, *how)


def _check(tensor: Tensor, what: str) -> None:
    if (
        tensor.ndim != 2
        or tensor.dtype not in FORMS
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        found = f"{tensor.dtype} {list(tensor.shape)}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"{what}: {found}; accepted: dense float32 or bfloat16 of two dimensions in host memory")
