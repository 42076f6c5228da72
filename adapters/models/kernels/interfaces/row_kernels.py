"""Operations of a decoder layer on single rows, between its products: norms, sums and gates. A part of `Kernels`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

from attrs import frozen
from torch import Tensor


class LateRows(Protocol):
    """Rows `[R, D]` that kernels compute only when they add them to the residual stream."""

    def add_to(self, residual: Tensor) -> None:
        """Add the rows to residual `[R, D]` in place."""
        ...


Delta: TypeAlias = Tensor | LateRows  # what must be added to the residual stream


def add_delta(residual: Tensor, delta: Delta) -> None:
    """Add delta to residual `[R, D]` in place."""
    if isinstance(delta, Tensor):
        residual.add_(delta)
    else:
        delta.add_to(residual)


@frozen(eq=False)
class NormedRows:
    """Rows `[R, D]` whose RMSNorm, times `weight` `[D]`, is added to the residual stream.

    parallel: other rows, the weight of their norm, and the weight of a first norm of `rows`. The sum of both norms then
    takes the place of `rows`. factor: what the residual stream is multiplied with at last. Every step is rounded.
    """

    rows: Tensor
    weight: Tensor
    parallel: tuple[Tensor, Tensor, Tensor] | None = None
    factor: float = 1.0


class RowKernels(Protocol):
    """Operations on rows in the model's dtype. Each gives a row the same bits wherever it stands."""

    @property
    def built_in_gates(self) -> Collection[str]:
        """The activations (`activations.py`) that `gated_linear` has. SILU is among them."""
        ...

    def add_norm(
        self, residual: Tensor, delta: Delta | None, weight: Tensor, eps: float, *, bias: Tensor | None = None
    ) -> Tensor:
        """Add delta to residual `[R, D]` in place and return the RMSNorm of the sum, a new `[R, D]`.

        The sum is rounded to the model's dtype and the norm is computed in float32. It is multiplied by weight `[D]`
        in the model's dtype, or in float32 and rounded once, as the weight's dtype says. bias: `[D]`, is added to delta
        first, and this sum is rounded as well. Delta may be changed.
        """
        ...

    def add_normed(self, residual: Tensor, delta: NormedRows, eps: float, outer: Sequence[Tensor] = ()) -> list[Tensor]:
        """Add normed rows to residual `[R, D]` in place, and return the RMSNorm of the sum for each weight of `outer`.

        All of it is rounded as separate calls of `add_norm` round it.
        """
        ...

    def apply_gate(self, activation: str, both: Tensor, bias: Tensor | None) -> Tensor:
        """Return what gates let through, `[R, I]`, of `both` `[R, 2 I]`, rows laid out `gate | up`.

        bias: `[2 I]`, is added first, and the sum is rounded. `both` may be changed.
        """
        ...
