"""The results of the experts of rows, which the next norm adds up."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.rows.expert_choice import ExpertChoice
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.triton.experts import add_up
from adapters.models.kernels.triton.hopper.rows.row_sums import add_up_norm
from adapters.models.kernels.triton_launch import launch


@frozen(eq=False)
class ExpertResults:
    """Results of the experts of rows, `made` `[R k, D]`, and what belongs to their weighted sums.

    bias: of all experts, `[E, D]`, is added to their results. shared: results of the shared expert, `[R, D]`.
    positions: those of padded rows are negative.
    """

    made: Tensor
    shape: ExpertsShape
    choice: ExpertChoice
    bias: Tensor | None
    shared: Tensor | None
    positions: Tensor
    pdl: bool | None

    def add_up(self) -> Tensor:
        """Return the sums, `[R, D]`. Padded rows are zeros."""
        assert not self.choice.routes
        pairs, width = self.made.shape
        rows = pairs // self.shape.chosen
        out = self.made.new_empty(rows, width)
        block = min(1024, round_up_to_power(width))
        launch(
            add_up,
            (rows, count_parts(width, block)),
            self.made,
            self.made if self.bias is None else self.bias,
            self.choice.chosen,
            self.choice.weights,
            self.made if self.shared is None else self.shared,  # never read without
            self.positions,
            out,
            width,
            ACTIVE=self.shape.chosen,
            RANKS=self.choice.weights.shape[1],
            SHARED=self.shared is not None,
            BIASED=self.bias is not None,
            BLOCK=block,
            enable_fp_fusion=False,
            **launch_options(4, self.pdl),
        )
        return out

    def add_to(self, residual: Tensor) -> None:
        """Add the sums to the residual stream in place."""
        self._launch(residual, None, 0.0, residual)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Do what `RowKernels.add_norm` does with the sums."""
        out = residual.new_empty(residual.shape)
        self._launch(residual, weight, eps, out)
        return out

    def _launch(self, residual: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
        rows, width = residual.shape
        block = round_up_to_power(width)
        shape = self.shape
        choice = self.choice
        unused = self.made  # in place of what there is not, and never read
        ranks = shape.chosen if choice.routes else choice.weights.shape[1]
        launch(
            add_up_norm,
            (rows,),
            self.made,
            unused if self.bias is None else self.bias,
            choice.chosen,
            choice.weights,
            unused if self.shared is None else self.shared,
            self.positions,
            residual,
            unused if weight is None else weight,
            out,
            width,
            eps,
            COUNT=shape.count,
            ACTIVE=shape.chosen,
            EXPERTS=round_up_to_power(shape.count),
            RANKS=round_up_to_power(ranks),
            ROUTES=choice.routes,
            NORMED=shape.is_normalized,
            SHARED=self.shared is not None,
            BIASED=self.bias is not None,
            NORMS=weight is not None,
            WIDE=weight is not None and weight.dtype != residual.dtype,
            BLOCK=block,
            **launch_options(4 if block <= 2048 else 8, self.pdl),
        )
