"""Weights in the forms that CPU products read: which packed weights stay packed by the plan, and how weights of
several parts are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, StackedWeight
from adapters.models.kernels.cpu.native.products import NativePacked, NativeProducts, NativeWeight
from adapters.models.kernels.interfaces.product_list import ProductPlan, UnprovenProductError, Weight


@frozen(eq=False)
class CpuWeight:
    """A weight in the form that its product reads fastest (two of them where one gates the other), and how it is
    multiplied.

    dtype: of rows. columns: K with padding. pieces: the row count of a product for every row count of a step; None:
    any.
    """

    weights: tuple[Tensor | NativeWeight, ...]
    dtype: torch.dtype
    columns: int
    pieces: Mapping[int, int] | None


@frozen(eq=False)
class CpuStack:
    """A weight made of parts, one below the other, packed parts as they are; or of two parts, the first of which
    gates.

    parts: a part that is not packed comes with its number of outputs. steps: row counts that are proven; None: any.
    """

    products: NativeProducts
    parts: tuple[NativePacked | tuple[Any, int], ...]
    steps: frozenset[int] | None

    def linear(self, x: Tensor, plain: Callable[[Any], Tensor]) -> Tensor:
        """Multiply x with all parts. plain: multiplies with a part that is not packed."""
        if len(self.parts) == 1 and isinstance(self.parts[0], NativePacked):
            return self.products.multiply_packed(x, self.parts[0])
        widths = [part.outputs if isinstance(part, NativePacked) else part[1] for part in self.parts]
        found = torch.empty(len(x), sum(widths), dtype=self.products.to or torch.float32)
        at = 0
        for part, width in zip(self.parts, widths, strict=True):
            columns = found[:, at : at + width]
            if isinstance(part, NativePacked):
                self.products.multiply_packed(x, part, out=columns)
            else:
                columns.copy_(plain(part[0]))
            at += width
        return found

    def gated_linear(self, x: Tensor) -> Tensor:
        gate, up = self.parts
        assert isinstance(gate, NativePacked)
        assert isinstance(up, NativePacked)
        return self.products.multiply_packed(x, gate, up)


@frozen(eq=False)
class CpuPacking:
    """Decides which packed weights stay packed. plan: which were proven; None: all serve."""

    products: NativeProducts
    plan: ProductPlan | None

    def pack_matrix(self, matrix: PackedMatrix) -> NativePacked | None:
        return self.products.pack_steps(matrix) if matrix.layout.fits(matrix.shape[1]) else None

    def pack_stack(self, stack: StackedWeight, plain: Callable[[Tensor], Any]) -> CpuStack | None:
        """Return the packed stack, or None where it is to be unpacked. plain: packs a part that is not packed."""
        joined = stack.merge_parts()
        if not any(isinstance(part, PackedMatrix) for part in joined.parts):
            return None
        if not all(
            self._is_proven(joined.unpack_part(part))
            if isinstance(part, Tensor)
            else self._stays_packed(part, gated=False)
            for part in joined.parts
        ):
            return None
        parts = [
            self.products.pack_steps(part)
            if isinstance(part, PackedMatrix)
            else (plain(joined.unpack_part(part)), part.shape[0])
            for part in joined.parts
        ]
        return CpuStack(self.products, tuple(parts), self._proven_rows)

    def pack_gated(self, stack: StackedWeight) -> CpuStack | None:
        """Return a gate and what it gates, packed alike, or None where they are to be unpacked."""
        parts = [
            part for part in stack.parts if isinstance(part, PackedMatrix) and self._stays_packed(part, gated=True)
        ]
        if len(parts) != 2 or len(stack.parts) != 2 or parts[0].layout != parts[1].layout:
            return None
        return CpuStack(self.products, tuple(self.products.pack_steps(part) for part in parts), self._proven_rows)

    def _is_proven(self, part: Tensor) -> bool:
        """Return whether a part that is not packed was proven by itself."""
        outputs, inputs = part.shape
        return self.plan is None or any(one.weight == Weight(outputs, inputs) for one in self.plan.weights)

    def _stays_packed(self, part: PackedMatrix, *, gated: bool) -> bool:
        """Return whether a part is multiplied in its packed form."""
        if not part.layout.fits(part.shape[1]):
            return False
        return self.plan is None or self.plan.multiplies_packed(*part.shape, part.layout, gated=gated)

    @property
    def _proven_rows(self) -> frozenset[int] | None:
        return None if self.plan is None or not self.plan.steps else frozenset(self.plan.steps)


def list_native(packed: Any) -> tuple[NativeWeight | NativePacked, ...] | None:
    """Return a weight in the library's form, or a gate and what it gates; None if a part of it has another form."""
    if isinstance(packed, CpuWeight):
        own = [one for one in packed.weights if isinstance(one, NativeWeight)]
        return tuple(own) if len(own) == len(packed.weights) else None
    own_packed = [one for one in packed.parts if isinstance(one, NativePacked)] if isinstance(packed, CpuStack) else []
    return tuple(own_packed) if own_packed and len(own_packed) == len(packed.parts) else None


def check_rows(x: Tensor, proven: Collection[int] | None) -> None:
    """Raise UnprovenProductError for a row count that is not proven."""
    if proven is not None and len(x) not in proven:
        raise UnprovenProductError(f"a product of {len(x)} rows; proven: steps of {sorted(proven)}")
