"""Weights on a CPU as products take them; which packed ones stay so, by the plan, and how those of several parts are
multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix, Stack
from adapters.models.kernels.cpu.native.products import NativePacked, NativeProducts, NativeWeight
from adapters.models.kernels.product_list import ProductPlan, Unproven, Weight


@frozen(eq=False)
class CpuWeight:
    """A weight as what multiplies with it likes it best (gated: two), and how that is done.

    dtype: of rows. columns: K, zeros included that were put behind it. pieces: the row count of a product for every row
    count of a step; None: whatever comes.
    """

    weights: tuple[Tensor | NativeWeight, ...]
    dtype: torch.dtype
    columns: int
    pieces: Mapping[int, int] | None


@frozen(eq=False)
class CpuStack:
    """A weight of parts, one below the other, packed ones as they are; or of two, the first of which gates.

    parts: those that are not packed with how many outputs each has. steps: the row counts that are
    proven; None: any.
    """

    own: NativeProducts
    parts: tuple[NativePacked | tuple[Any, int], ...]
    steps: frozenset[int] | None

    def linear(self, x: Tensor, plain: Callable[[Any], Tensor]) -> Tensor:
        """plain: multiplies with a part that is not packed."""
        if len(self.parts) == 1 and isinstance(self.parts[0], NativePacked):
            return self.own.multiply_packed(x, self.parts[0])
        widths = [part.outputs if isinstance(part, NativePacked) else part[1] for part in self.parts]
        found, at = torch.empty(len(x), sum(widths), dtype=self.own.to or torch.float32), 0
        for part, width in zip(self.parts, widths, strict=True):
            columns = found[:, at : at + width]
            if isinstance(part, NativePacked):
                self.own.multiply_packed(x, part, out=columns)
            else:
                columns.copy_(plain(part[0]))
            at += width
        return found

    def gated(self, x: Tensor) -> Tensor:
        gate, up = self.parts
        assert isinstance(gate, NativePacked)
        assert isinstance(up, NativePacked)
        return self.own.multiply_packed(x, gate, up)


@frozen(eq=False)
class CpuPacking:
    """plan: which packed weights were proven; None: all serve."""

    own: NativeProducts
    plan: ProductPlan | None

    def one(self, matrix: PackedMatrix) -> NativePacked | None:
        return self.own.pack_steps(matrix) if matrix.layout.fits(matrix.shape[1]) else None

    def stacked(self, stack: Stack, plain: Callable[[Tensor], Any]) -> CpuStack | None:
        """None where it is to be unpacked. plain: packs a part that is not packed."""
        joined = stack.joined()
        if not any(isinstance(part, PackedMatrix) for part in joined.parts):
            return None
        if not all(
            self._listed(joined.plain(part)) if isinstance(part, Tensor) else self._stays(part, gated=False)
            for part in joined.parts
        ):
            return None
        parts = [
            self.own.pack_steps(part) if isinstance(part, PackedMatrix) else (plain(joined.plain(part)), part.shape[0])
            for part in joined.parts
        ]
        return CpuStack(self.own, tuple(parts), self._steps)

    def gating(self, stack: Stack) -> CpuStack | None:
        """The same of what gates, and what is gated: both packed alike."""
        parts = [part for part in stack.parts if isinstance(part, PackedMatrix) and self._stays(part, gated=True)]
        if len(parts) != 2 or len(stack.parts) != 2 or parts[0].layout != parts[1].layout:
            return None
        return CpuStack(self.own, tuple(self.own.pack_steps(part) for part in parts), self._steps)

    def _listed(self, part: Tensor) -> bool:
        """Whether a part that is not packed was proven by itself."""
        outputs, inputs = part.shape
        return self.plan is None or any(one.weight == Weight(outputs, inputs) for one in self.plan.weights)

    def _stays(self, part: PackedMatrix, *, gated: bool) -> bool:
        """Whether it is multiplied as it is."""
        if not part.layout.fits(part.shape[1]):
            return False
        return self.plan is None or self.plan.as_packed(*part.shape, part.layout, gated=gated)

    @property
    def _steps(self) -> frozenset[int] | None:
        return None if self.plan is None or not self.plan.steps else frozenset(self.plan.steps)


def check_rows(x: Tensor, proven: Collection[int] | None) -> None:
    """Raises Unproven."""
    if proven is not None and len(x) not in proven:
        raise Unproven(f"a product of {len(x)} rows; proven: steps of {sorted(proven)}")
