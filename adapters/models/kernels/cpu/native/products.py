"""Products by the compiled library: packing weights, checking tensors, and multiplying.

Theory of operation. A row's bits must not depend on the other rows of its step. Floating-point sums depend on
their order, so the order of every sum is fixed here. An output is one chain of float32 fused multiply-adds over
ascending terms. With weights in bfloat16 the chain runs over pairs of terms, the second term of each pair first.
Where AMX serves, rows and weights in bfloat16 have sums over blocks of 32 terms instead (amx.h), in any product.

Weights are stored in panels of 32 outputs, term after term, so that a vector register holds the same term of
neighbouring outputs. Vectors and threads divide outputs and rows among them, and never the terms of a sum.

Invariant: the order does not depend on the number of rows, their contents or the number of threads. So an output's bits
follow from its row and its weight alone. Packed weights have products of their own (steps.h, fixed.h), of which the
same is true: each group of columns has a chain, and the groups are added in ascending order.

Example: for an output with terms 0 to 3 in bfloat16 the chain adds the products of terms 1, 0, 3 and 2, in this order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import TABLES, PackedMatrix, StepLayout
from adapters.models.kernels.cpu.native.large_pages import LargePages
from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.formats.packed_formats import PANEL
from adapters.models.kernels.formats.row_format import INT3, INT4

WIDEST = 1024  # numbers of a head, at most
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # dtypes of weights and rows
# Formats of keys and values.
ROW_DTYPE_CODES = {**DTYPE_CODES, torch.int8: 2, torch.float8_e4m3fn: 3, INT4: 4, INT3: 5}


@frozen(eq=False)
class NativeWeight:
    """A weight in the order in which the library reads it. panels: `[ceil(outputs / 32), terms, 32]`; in bfloat16
    pairs of terms lie together, and an odd last term is paired with zero.
    """

    panels: Tensor
    outputs: int
    terms: int

    @property
    def kind(self) -> tuple[int, int, torch.dtype]:
        return self.outputs, self.terms, self.panels.dtype


class PackedForm(ctypes.Structure):
    """The layout of a packed weight in the library's structure (`packed_t` of numbers.h).

    kind, scale, least: numbers from KINDS or FIXED, SCALES and LEASTS. inner: whether groups have integer factors.
    raised: what is added to each step, so that none is negative in fixed point. group, per: as in `StepLayout`. record:
    bytes of one span of a panel's 32 outputs. table: the values of the 16 steps of a type of four bits. places: the
    same plus `raised`, as bytes.
    """

    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "scale", "inner", "least", "raised")),
        *((name, ctypes.c_long) for name in ("group", "per", "record")),
        ("table", ctypes.c_float * 16),
        ("places", ctypes.c_uint8 * 16),
    ]


KINDS = {"int8": 0, "e4m3": 2}
SCALES = {"float32": 0, "bfloat16": 1, "float16": 2}
LEASTS = {"": 0, "scale": 1, "own": 2}
FIXED = {"int8": (4, 128), "uint4": (5, 0), "int4": (5, 8), "iq4": (6, 128), "e2m1": (6, 128)}
"""For rows in fixed point: the kind, and by how much steps are raised, so that none is negative."""


@frozen(eq=False)
class NativePacked:
    """A packed weight. panels: bytes `[ceil(outputs / 32), spans, record]`, a record for each span of a panel.

    A span is the columns that share a scale (`StepLayout.span`). fixed: it multiplies rows in fixed point.
    """

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
            (ctypes.c_uint8 * 16)(*(index + raised for index in table)),
        )


@frozen(eq=False)
class NativeProducts:
    """Products at one level of instructions, at most the library's own. Levels below AMX give the same bits.

    to: the dtype that results are rounded to, once; None: they stay float32.
    """

    compiled: NativeLibrary
    level: int
    to: torch.dtype | None = None
    _pages: LargePages = Factory(LargePages)

    def pack(self, weight: Tensor) -> NativeWeight:
        """Pack a weight `[outputs, terms]` in its dtype."""
        _check_matrix(weight, "a weight")
        outputs, terms = weight.shape
        if not outputs or not terms:
            raise ValueError(f"a weight of {outputs} x {terms}; accepted: at least 1 x 1")
        there = terms + terms % 2 if weight.dtype == torch.bfloat16 else terms
        panels = self._pages.allocate((-(-outputs // PANEL), there, PANEL), weight.dtype)
        weight = weight.contiguous()
        form = DTYPE_CODES[weight.dtype]
        threads = torch.get_num_threads()
        self.compiled.code.rekindle_pack(weight.data_ptr(), panels.data_ptr(), outputs, terms, form, threads)
        return NativeWeight(panels, outputs, terms)

    def pack_steps(self, matrix: PackedMatrix) -> NativePacked:
        """Rearrange a packed matrix without unpacking it. Where results and rows are bfloat16, the form for rows in
        fixed point is made.

        Raises ValueError for a layout that products do not support.
        """
        outputs, terms = matrix.shape
        if not outputs or not terms or not matrix.layout.fits(terms):
            raise ValueError(f"a packed weight of {outputs} x {terms} in {matrix.layout}; accepted: whole groups")
        layout = matrix.layout
        fixed = self.to == torch.bfloat16 and matrix.layout.steps in FIXED
        panels = -(-outputs // PANEL)
        spans = terms // layout.span
        room = self._pages.allocate((panels, spans, round(PANEL * layout.span * layout.bits / 8)), torch.uint8)
        found = NativePacked(room, layout, outputs, terms, fixed)
        parts = [None if one is None else one.contiguous() for one in matrix.tensors]
        _check_packed_tensors(parts, layout, outputs, terms)
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
        """Multiply as `multiply` does. out: where the outputs go, columns of a wider tensor."""
        x = self.read_rows(self._readable_rows(x, weight, up), weight)
        if out is None:
            out = self._output(x, weight)
        elif (
            out.shape != (len(x), weight.outputs)
            or out.stride(1) != 1
            or out.dtype not in DTYPE_CODES
            or not out.is_cpu
        ):
            raise ValueError(f"outputs of {len(x)} x {weight.outputs} into {out.dtype} {list(out.shape)}")
        failed = self.compiled.code.rekindle_packed_product(
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            len(x),
            x.stride(0),
            weight.panels.data_ptr(),
            None if up is None else up.panels.data_ptr(),
            ctypes.byref(weight.form),
            weight.outputs,
            weight.panels.shape[1],
            out.data_ptr(),
            out.stride(0),
            DTYPE_CODES[out.dtype],
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {len(x)} rows of {weight.terms}")
        return out

    def read_rows(self, x: Tensor, weight: NativeWeight | NativePacked) -> Tensor:
        """Return x as products of experts read it. Raises TypeError or ValueError for rows that do not fit."""
        x = self._readable_rows(x, weight, None)
        if isinstance(weight, NativePacked) and weight.fixed and x.dtype != torch.bfloat16:
            raise TypeError(f"rows of {x.dtype} with a weight for those of bfloat16 in fixed point")
        return x

    def _readable_rows(
        self, x: Tensor, weight: NativeWeight | NativePacked, up: NativeWeight | NativePacked | None
    ) -> Tensor:
        """Return x as the library reads it. Raises ValueError for operands that do not fit together."""
        _check_matrix(x, "rows")
        terms = x.shape[1]
        if terms != weight.terms:
            raise ValueError(f"rows of {terms} numbers with a weight of {weight.outputs} x {weight.terms}")
        if up is not None and up.kind != weight.kind:
            raise ValueError(f"a gate of {weight.kind}, and what it gates of {up.kind}: they must be alike")
        return x.contiguous() if x.stride(1) != 1 or x.stride(0) < terms else x

    def _output(self, x: Tensor, weight: NativeWeight | NativePacked) -> Tensor:
        return torch.empty(len(x), weight.outputs, dtype=self.to or torch.float32)

    def multiply(self, x: Tensor, weight: NativeWeight, up: NativeWeight | None = None) -> Tensor:
        """Multiply x `[rows, terms]`: x @ weight.T `[rows, outputs]`; with `up`, silu(x @ weight.T) * (x @ up.T)."""
        x = self._readable_rows(x, weight, up)
        (rows, terms) = x.shape
        out = self._output(x, weight)
        failed = self.compiled.code.rekindle_product(
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            rows,
            x.stride(0),
            weight.panels.data_ptr(),
            None if up is None else up.panels.data_ptr(),
            DTYPE_CODES[weight.panels.dtype],
            weight.outputs,
            terms,
            out.data_ptr(),
            weight.outputs,
            DTYPE_CODES[out.dtype],
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {rows} rows of {terms}")
        return out


def check_layout(what: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise TypeError or ValueError unless the library can read a tensor: of this shape and one of these dtypes,
    contiguous, in host memory.
    """
    if tensor.dtype not in dtypes or not tensor.is_cpu:
        raise TypeError(f"{what}: {tensor.dtype} on {tensor.device}; accepted: {', '.join(map(str, dtypes))} on cpu")
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{what}: {list(tensor.shape)}, strides {tensor.stride()}; accepted: contiguous {list(shape)}")


def describe_caches(caches: Sequence[tuple[Tensor, Tensor]]) -> tuple[int, int, int, int, int]:
    """Return the bytes between slots, heads and rows of keys and values, and the codes of their formats.

    Raises TypeError or ValueError unless all caches, keys and values, have their rows at the same distances, all keys
    have one format, and all values.
    """
    keys, values = caches[0]
    places = {
        (one.shape[:3], *(step * one.dtype.itemsize for step in one.stride()[:3]), one.stride(3), one.device.type)
        for pair in caches
        for one in pair
    }
    dtypes = {(k.dtype, v.dtype) for k, v in caches}
    if keys.dtype not in ROW_DTYPE_CODES or values.dtype not in ROW_DTYPE_CODES:
        raise TypeError(f"a cache of keys in {keys.dtype}, of values in {values.dtype}")
    if len(places) > 1 or len(dtypes) > 1 or keys.stride(3) != 1 or not keys.is_cpu:
        raise ValueError(f"caches of {[list(one.shape) for one in caches[0]]}, strides {keys.stride()}: not alike")
    size = keys.dtype.itemsize
    slot, group, apart, _ = (step * size for step in keys.stride())
    if apart < max(keys.shape[3] * size, values.shape[3] * values.dtype.itemsize):
        raise ValueError(f"rows of {list(keys.shape)}, strides {keys.stride()}: too close to each other")
    return slot, group, apart, ROW_DTYPE_CODES[keys.dtype], ROW_DTYPE_CODES[values.dtype]


def _check_packed_tensors(parts: Sequence[Tensor | None], layout: StepLayout, outputs: int, terms: int) -> None:
    """Raise TypeError or ValueError for a packed matrix whose tensors are not those of its layout."""
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
            check_layout(f"{name} of a packed weight in {layout}", part, *how)


def _check_matrix(tensor: Tensor, what: str) -> None:
    if (
        tensor.ndim != 2
        or tensor.dtype not in DTYPE_CODES
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        found = f"{tensor.dtype} {list(tensor.shape)}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"{what}: {found}; accepted: dense float32 or bfloat16 of two dimensions in host memory")
