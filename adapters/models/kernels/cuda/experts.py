"""Launches of a layer of experts on a CUDA device: six as a rule, however many experts there are.

They are the router's product, the choice, the tiles (`deal`), the gate product, the down product and the sum, which the
next norm may take over. There is one more for each of these: a gate that no product has built in, down tiles of another
height, zeros for a missing correction, and gathering rows for a product of many packed pairs. A shared expert adds its
own products. One row needs no tiles. Nothing waits for the host if all experts are on the device.

Where a layer's experts lie in one piece, an expert's number is also the index of its weights. Of experts in host
memory, those on the device have slots in one piece. They go through the same kernels, in as many turns as it takes to
bring the others. Then the host reads the choice, and each turn launches tiles and both products again. Tiles are free,
as everywhere: no tile cuts a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from attrs import define, evolve
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options, shared_layout
from adapters.models.kernels.cuda.packed import find_only_part
from adapters.models.kernels.cuda.packed_groups import (
    PackedGroupTile,
    PairTiles,
    choose_packed_group_tile,
    deal_pairs,
    multiply_packed_groups,
)
from adapters.models.kernels.cuda.row_launches import apply_gate
from adapters.models.kernels.cuda.rows.expert_choice import choose_experts
from adapters.models.kernels.cuda.rows.row_sums import ExpertResults
from adapters.models.kernels.cuda.tiles import GroupTile, choose_group_tile, choose_tile_of_experts, count_parts
from adapters.models.kernels.interfaces.experts_interface import (
    ChosenExperts,
    Experts,
    GatedWeights,
    PackedProducts,
    run_feed_forward,
)
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton import experts as programs
from adapters.models.kernels.triton.hopper.hopper_experts import multiply_pairs_ahead
from adapters.models.kernels.triton_launch import launch


@define(eq=False)
class CudaExperts:
    """Layers of experts on one device. shared: bytes of shared memory that a program may have. pdl: see
    `launch_options`. plain, hopper: see `CudaProducts`.
    """

    processors: int
    shared: int
    pdl: bool | None
    plain: bool
    hopper: bool

    def run_experts(
        self,
        kernels: PackedProducts,
        x: Tensor,
        experts: Experts,
        weights: GatedWeights,
        batch: Batch,
        deciding: Tensor | None = None,
    ) -> Tensor:
        """Run x through a layer of experts. weights: see `run_late`. deciding: what the router reads in place of x."""
        return self.run_late(kernels, x, experts, weights, batch, deciding).add_up()

    def run_late(
        self,
        kernels: PackedProducts,
        x: Tensor,
        experts: Experts,
        weights: GatedWeights,
        batch: Batch,
        deciding: Tensor | None = None,
    ) -> ExpertResults:
        """Do what `run_experts` does, up to the sum.

        weights: of all slots, one behind the other, in `[slots, N, K]`. Where they have biases, a slot is the number
        of an expert.
        """
        shape = experts.shape
        logits = kernels.linear(x if deciding is None else deciding, experts.router)
        choice = choose_experts(logits, experts, batch.positions, self.pdl)
        chosen = choice.chosen
        gate_tile = self.choose_tile(weights.gate_up, chosen.numel(), shape.count)
        down_tile = self.choose_tile(weights.down, chosen.numel(), shape.count)
        made = x.new_empty(chosen.numel(), x.shape[1])
        has_slots = isinstance(experts.each, ChosenExperts)
        is_alone = len(x) == 1 and gate_tile.is_few and down_tile.is_few and not has_slots
        for slots_by_expert in self._fetch_experts(experts, chosen):
            dealt = (
                PairTiles.of_row(chosen, shape.count)
                if is_alone
                else self.deal_pairs(chosen, slots_by_expert, gate_tile.pairs, shape.count)
            )
            inner = self._run_gates(x, weights, dealt, gate_tile, chosen)
            if is_alone or down_tile.pairs == gate_tile.pairs:
                dealt = evolve(dealt, is_early=True)
            else:
                dealt = self.deal_pairs(chosen, slots_by_expert, down_tile.pairs, shape.count)
            self.multiply_pairs(inner, weights.down, made, dealt, down_tile)
        shared = None if experts.shared is None else run_feed_forward(kernels, x, experts.shared)
        return ExpertResults(made, shape, choice, weights.down_bias, shared, batch.positions, self.pdl)

    def choose_tile(self, weight: Any, pairs: int, count: int) -> GroupTile | PackedGroupTile:
        """Choose the tile of a product with the weights of all experts, packed or not."""
        part = find_only_part(weight)
        if part is None:
            return choose_tile_of_experts(weight.weight, pairs, count, self.shared, hopper=self.hopper)
        return choose_packed_group_tile(pairs, count, part, self.shared, hopper=self.hopper and not weight.gated)

    def multiply_pairs(
        self,
        x: Tensor,
        weight: Any,
        out: Tensor,
        dealt: PairTiles,
        tile: GroupTile | PackedGroupTile,
        share: int = 1,
    ) -> None:
        """Multiply the pairs of each expert with its weight, packed or not. share: see `_multiply_groups`."""
        if isinstance(tile, GroupTile):
            self._multiply_groups(x, weight.weight, out, dealt, tile, share, gated=weight.gated)
            return
        part = find_only_part(weight)
        assert part is not None
        how = {"share": share, "gated": weight.gated, "processors": self.processors, "pdl": self.pdl}
        multiply_packed_groups(x, part, out, dealt, tile, hopper=self.hopper, **how)

    def _run_gates(
        self,
        x: Tensor,
        weights: GatedWeights,
        dealt: PairTiles,
        tile: GroupTile | PackedGroupTile,
        chosen: Tensor,
    ) -> Tensor:
        """Return what the gates let through, `[pairs, I]`. chosen: the experts of each row.

        Where the gate is no part of the product, every number is rounded where it is if experts are computed one by
        one, so the bits are the same.
        """
        part = find_only_part(weights.gate_up)
        columns = weights.gate_up.weight.shape[1] if part is None else part.outputs
        gated = weights.gate_up.gated
        both = x.new_empty(chosen.numel(), columns // 2 if gated else columns)
        self.multiply_pairs(x, weights.gate_up, both, dealt, tile, share=chosen.shape[1])
        return both if gated else apply_gate(weights.activation, both, weights.gate_up_bias, chosen, self.pdl)

    def multiply_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply the heads of x `[R, H, K]`, each with its own weight of `[H, N, K]`: each row chose every one."""
        rows, heads, depth = x.shape
        chosen = torch.arange(heads, dtype=torch.int32, device=x.device).repeat(rows, 1)
        tile = choose_group_tile(rows * heads, heads, x.dtype, self.shared)
        out = x.new_empty(rows, heads, weight.shape[1])
        dealt = self.deal_pairs(chosen, None, tile.pairs, heads)
        self._multiply_groups(x.contiguous().view(-1, depth), weight, out.view(rows * heads, -1), dealt, tile)
        return out

    def _fetch_experts(self, experts: Experts, chosen: Tensor) -> Iterator[Tensor | None]:
        """Yield where the weights of each turn's experts are, int32 `[E]`, -1 for experts of other turns; None: all
        are in place.
        """
        if not isinstance(experts.each, ChosenExperts):
            yield None
            return
        count = experts.shape.count
        uses = torch.bincount(chosen.flatten(), minlength=count)[:count].tolist()
        for turn in experts.each.fetch_in_turns([number for number, used in enumerate(uses) if used]):
            slots_by_expert = [turn.get(number, -1) for number in range(count)]
            yield torch.tensor(slots_by_expert, dtype=torch.int32).to(chosen.device, non_blocking=True)

    def deal_pairs(self, chosen: Tensor, slots_by_expert: Tensor | None, height: int, count: int) -> PairTiles:
        """Collect the pairs of each expert in tiles of up to `height`. slots_by_expert: see `_fetch_experts`."""
        return deal_pairs(chosen, slots_by_expert, height, count, self.pdl)

    def _multiply_groups(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        dealt: PairTiles,
        tile: GroupTile,
        share: int = 1,
        *,
        gated: int = 0,
    ) -> None:
        """Multiply the pairs of each expert with its weight. share: pairs that have one row of x in common; 1: each
        has its own. gated: see `CudaWeight`.
        """
        _, columns, depth = weight.shape
        if tile.is_ahead:
            self._multiply_ahead(x, weight, out, dealt, tile, share, gated=gated)
            return
        source = weight if self.plain else TensorDescriptor.from_tensor(weight, [1, tile.columns, tile.depth])
        launch(
            programs.multiply_groups,
            (len(dealt.tiles) * triton.cdiv(columns, tile.columns),),
            x,
            source,
            out,
            dealt.pairs,
            dealt.tiles,
            dealt.total,
            columns,
            depth,
            weight.stride(0),
            SHARE=share,
            BLOCK_M=tile.pairs,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            STAGES=tile.stages,
            TALL=tile.has_tall_weights,
            GATED=gated,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            PLAIN=self.plain,
            **launch_options(tile.warps, self.pdl),
        )

    def _multiply_ahead(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        dealt: PairTiles,
        tile: GroupTile,
        share: int,
        *,
        gated: int,
    ) -> None:
        """Do what `_multiply_groups` does, with a kernel for few pairs that requests weights ahead."""
        slots, columns, depth = weight.shape
        units = len(dealt.tiles) * count_parts(columns, tile.columns)
        launch(
            multiply_pairs_ahead,
            (min(units, self.processors),),
            describe_blocks(weight.view(slots * columns, depth), tile.columns, tile.depth),
            x,
            out,
            dealt.pairs,
            dealt.tiles,
            dealt.total,
            columns,
            depth,
            SHARE=share,
            STEPS=count_parts(depth, tile.depth),
            STAGES=tile.stages,
            BLOCK_M=tile.pairs,
            X_LAYOUT=shared_layout((tile.pairs, tile.depth), x.dtype),
            GATED=gated,
            **dealt.constants,
            **launch_options(tile.warps, self.pdl),
        )
