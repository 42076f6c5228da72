"""The results of one row's experts, which the next norm adds up."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.tiles import round_up_to_power
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.triton.hopper.rows.row_sums import add_up_row
from adapters.models.kernels.triton_launch import launch


@frozen(eq=False)
class RowSums:
    """Results of the experts of one row, `made` `[k, D]`, and what belongs to their weighted sum.

    logits: `[1, E]`. correction: float32 `[E]`, is added to them. bias: of all experts, `[E, D]`. positions: that of a
    padded row is negative.
    """

    made: Tensor
    shape: ExpertsShape
    logits: Tensor
    correction: Tensor
    bias: Tensor
    positions: Tensor
    pdl: bool | None

    def add_to(self, residual: Tensor) -> None:
        """Add the sum to the residual stream in place."""
        self._launch(residual, None, 0.0, residual)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Do what `RowKernels.add_norm` does with the sum."""
        out = residual.new_empty(residual.shape)
        self._launch(residual, weight, eps, out)
        return out

    def _launch(self, residual: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
        width = residual.shape[1]
        block = round_up_to_power(width)
        launch(
            add_up_row,
            (1,),
            self.made,
            self.bias,
            self.logits,
            self.correction,
            self.positions,
            residual,
            residual if weight is None else weight,  # without a norm, never read
            out,
            width,
            eps,
            COUNT=self.shape.count,
            ACTIVE=self.shape.chosen,
            EXPERTS=round_up_to_power(self.shape.count),
            RANKS=round_up_to_power(self.shape.chosen),
            NORMS=weight is not None,
            WIDE=weight is not None and weight.dtype != residual.dtype,
            BLOCK=block,
            **launch_options(4 if block <= 2048 else 8, self.pdl),
        )
