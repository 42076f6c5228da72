"""Launches the experts of a layer for a step of one row: the router, two products, and a sum with the next norm.

It serves experts in MXFP4 with biases, as gpt-oss has them. Every kernel behind the router chooses the experts itself,
so the choice has no launch. The first product also computes its gate. The sum is left to the next norm
(`ExpertResults`).
"""

from __future__ import annotations

from attrs import define
from torch import Tensor

from adapters.models.kernels.activations import CLAMPED, GATES
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.packed import CudaPackedMatrix, find_only_part
from adapters.models.kernels.cuda.packed_groups import PackedGroupTile, choose_packed_group_tile
from adapters.models.kernels.cuda.rows.expert_choice import ExpertChoice
from adapters.models.kernels.cuda.rows.row_sums import ExpertResults
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    PackedProducts,
    StackedExperts,
)
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton.hopper.rows.row_experts import ROWS, multiply_row
from adapters.models.kernels.triton.hopper.rows.wanted_experts import MOST_EXPERTS
from adapters.models.kernels.triton_launch import launch


@define(eq=False)
class RowExperts:
    """Experts of one row on one device. shared: bytes of shared memory that a program may have. hopper: the compute
    capability is 9.0.
    """

    processors: int
    shared: int
    pdl: bool | None
    hopper: bool

    def are_served(self, x: Tensor, experts: Experts) -> bool:
        """Return whether these experts are served, for a step of such rows."""
        shape = experts.shape
        each = experts.each
        if not self.hopper or len(x) != 1 or not isinstance(each, StackedExperts):
            return False
        has_choice = type(shape) is BiasedExpertsShape and shape.is_normalized and shape.count <= MOST_EXPERTS
        weights = each.weights
        parts = find_only_part(weights.gate_up), find_only_part(weights.down)
        is_known = has_choice and experts.scales is None and weights.activation == CLAMPED
        return is_known and all(self._can_multiply(part, experts) for part in parts)

    def _can_multiply(self, part: CudaPackedMatrix | None, experts: Experts) -> bool:
        """Return whether the kernel multiplies with such weights: all rows of them fill units."""
        if part is None or part.layout.steps != "e2m1" or part.outputs % (2 * ROWS):
            return False
        tile = self._choose_tile(part, experts)
        return tile.is_few and tile.warps == part.pieces and tile.ahead * part.block_form.block == part.piece

    def _choose_tile(self, part: CudaPackedMatrix, experts: Experts) -> PackedGroupTile:
        return choose_packed_group_tile(experts.shape.chosen, experts.shape.count, part, self.shared)

    def run(self, kernels: PackedProducts, x: Tensor, experts: Experts, batch: Batch) -> ExpertResults:
        """Run a row through a layer of experts that `are_served`. The results of the experts must still be added up."""
        shape = experts.shape
        each = experts.each
        correction = experts.correction
        assert isinstance(each, StackedExperts)
        weights = each.weights
        gates = find_only_part(weights.gate_up)
        downs = find_only_part(weights.down)
        assert gates is not None
        assert downs is not None
        assert correction is not None
        assert weights.gate_up_bias is not None
        assert weights.down_bias is not None
        logits = kernels.linear(x, experts.router)
        inner = x.new_empty(shape.chosen, shape.inner)
        made = x.new_empty(shape.chosen, x.shape[1])
        choice = (logits, correction)
        self._multiply(x, gates, weights.gate_up_bias, choice, inner, experts, gate=GATES[CLAMPED])
        self._multiply(inner, downs, weights.down_bias, choice, made, experts, gate=0)
        routed = ExpertChoice(logits, correction, routes=True)
        return ExpertResults(made, shape, routed, None, None, batch.positions, self.pdl)

    def _multiply(
        self,
        x: Tensor,
        weight: CudaPackedMatrix,
        bias: Tensor,
        choice: tuple[Tensor, Tensor],
        out: Tensor,
        experts: Experts,
        *,
        gate: int,
    ) -> None:
        """Multiply a row with the weights of its experts. bias: of all experts. gate: of `GATES`."""
        shape = experts.shape
        tile = self._choose_tile(weight, experts)
        units = shape.chosen * (weight.outputs // ROWS)
        launch(
            multiply_row,
            (min(units, tile.resident * self.processors),),
            *weight.tensors,
            x,
            bias,
            *choice,
            out,
            *(one.stride(0) for one in weight.tensors),
            COLUMNS=weight.outputs,
            DEPTH=weight.columns,
            TILES=shape.chosen,
            EXPERTS=shape.count,
            PIECES=weight.pieces,
            BLOCKS=weight.blocks,
            EACH=tile.ahead,
            FORM=weight.block_form,
            GATE=gate,
            **launch_options(tile.warps, self.pdl),
            maxnreg=tile.registers,
        )
