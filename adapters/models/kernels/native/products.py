"""Products by the compiled library, on tensors: packs weights, checks what it is given, multiplies.

An output is one chain of float32 fused multiply-adds over ascending terms, however many rows there are, whatever they
are, and on however many threads: its bits follow from its row and its weight alone.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.native.compiled import NativeCode

PANEL = 32  # outputs whose weights lie together
WIDEST = 1024  # numbers of a head that rows go through
FORMS = {torch.float32: 0, torch.bfloat16: 1}  # what weights can be kept in, and rows come and go in
ROW_FORMS = {**FORMS, torch.int8: 2, torch.float8_e4m3fn: 3}  # what keys and values can be kept in


@frozen(eq=False)
class NativeWeight:
    """panels: `[ceil(outputs / 32), terms, 32]`, in the order in which the library reads them."""

    panels: Tensor
    outputs: int
    terms: int

    @property
    def kind(self) -> tuple[int, int, torch.dtype]:
        return self.outputs, self.terms, self.panels.dtype


@frozen(eq=False)
class NativeProducts:
    """level: of instructions, at most the library's own; all give the same bits. to: what results are rounded to, once;
    None: they stay float32.
    """

    compiled: NativeCode
    level: int
    to: torch.dtype | None = None

    def pack(self, weight: Tensor) -> NativeWeight:
        """`[outputs, terms]`, kept in its dtype."""
        _check(weight, "a weight")
        outputs, terms = weight.shape
        if not outputs or not terms:
            raise ValueError(f"a weight of {outputs} x {terms}; accepted: at least 1 x 1")
        panels, weight = torch.empty(-(-outputs // PANEL), terms, PANEL, dtype=weight.dtype), weight.contiguous()
        form, threads = FORMS[weight.dtype], torch.get_num_threads()
        self.compiled.code.rekindle_pack(weight.data_ptr(), panels.data_ptr(), outputs, terms, form, threads)
        return NativeWeight(panels, outputs, terms)

    def multiply(self, x: Tensor, weight: NativeWeight, up: NativeWeight | None = None) -> Tensor:
        """x `[rows, terms]` -> x @ weight.T `[rows, outputs]`; with `up`, silu(x @ weight.T) * (x @ up.T)."""
        _check(x, "rows")
        rows, terms = x.shape
        if terms != weight.terms:
            raise ValueError(f"rows of {terms} numbers with a weight of {weight.outputs} x {weight.terms}")
        if up is not None and up.kind != weight.kind:
            raise ValueError(f"a gate of {weight.kind}, and what it gates of {up.kind}: they must be alike")
        if x.stride(1) != 1 or x.stride(0) < terms:
            x = x.contiguous()
        out = torch.empty(rows, weight.outputs, dtype=self.to or torch.float32)
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
            FORMS[out.dtype],
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for a product of {rows} rows of {terms}")
        return out


def _check(tensor: Tensor, what: str) -> None:
    if (
        tensor.ndim != 2
        or tensor.dtype not in FORMS
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        found = f"{tensor.dtype} {list(tensor.shape)}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"{what}: {found}; accepted: dense float32 or bfloat16 of two dimensions in host memory")
