"""Operations on rows that kernels without quicker ways make of others, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.activations import SILU, gate_halves
from adapters.models.kernels.interfaces.experts_interface import Experts
from adapters.models.kernels.interfaces.row_kernels import Delta, NormedRows
from adapters.models.kernels.step_batch import Batch

AddNorm: TypeAlias = Callable[[Tensor, Tensor | None, Tensor, float], Tensor]


class ComposedOperations(ABC):
    """Kernels that have SiLU alone built in, and whose other operations on rows are made of `add_norm`."""

    built_in_gates: Collection[str] = frozenset((SILU,))
    apply_gate = staticmethod(gate_halves)

    @abstractmethod
    def pack(self, weight: Tensor | StackedWeight) -> Any:
        """Do what `Kernels.pack` says."""

    def pack_router(self, weight: Tensor) -> Any:
        return self.pack(weight)

    @abstractmethod
    def _pack_gated(self, weight: Tensor | StackedWeight) -> Any:
        """Do what `Kernels.pack_gated` says, for SiLU."""

    def pack_gated(self, weight: Tensor | StackedWeight, activation: str = SILU) -> Any:
        assert activation in self.built_in_gates
        return self._pack_gated(weight)

    @abstractmethod
    def _add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Do what `RowKernels.add_norm` says, without a bias."""

    def add_norm(
        self, residual: Tensor, delta: Delta | None, weight: Tensor, eps: float, *, bias: Tensor | None = None
    ) -> Tensor:
        assert delta is None or isinstance(delta, Tensor), "these kernels compute no rows late"
        if bias is not None and delta is not None:
            delta.add_(bias)
        return self._add_norm(residual, delta, weight, eps)

    @abstractmethod
    def experts(self, x: Tensor, experts: Experts, batch: Batch, deciding: Tensor | None = None) -> Tensor:
        """Do what `Kernels.experts` says."""

    def experts_late(self, x: Tensor, experts: Experts, batch: Batch) -> Delta:
        return self.experts(x, experts, batch)

    def add_normed(self, residual: Tensor, delta: NormedRows, eps: float, outer: Sequence[Tensor] = ()) -> list[Tensor]:
        return add_normed(self.add_norm, residual, delta, eps, outer)


def add_normed(
    add_norm: AddNorm, residual: Tensor, delta: NormedRows, eps: float, outer: Sequence[Tensor]
) -> list[Tensor]:
    """Do what `RowKernels.add_normed` says. add_norm: that of the kernels."""
    rows = delta.rows
    if delta.parallel is not None:
        parallel, weight, own = delta.parallel
        rows = add_norm(rows, None, own, eps).add_(add_norm(parallel, None, weight, eps))
    residual.add_(add_norm(rows, None, delta.weight, eps))
    if delta.factor != 1:
        residual.mul_(delta.factor)
    return [add_norm(residual, None, one, eps) for one in outer]
