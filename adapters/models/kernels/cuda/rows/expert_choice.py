"""The choice of experts on a CUDA device, and its launch."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.tiles import round_up_to_power
from adapters.models.kernels.interfaces.experts_interface import Experts, GroupedExpertsShape, SigmoidExpertsShape
from adapters.models.kernels.triton.experts import choose
from adapters.models.kernels.triton.grouped_choice import choose_in_groups
from adapters.models.kernels.triton_launch import launch


@frozen(eq=False)
class ExpertChoice:
    """The experts of rows, int32 `[R, k]`, and their weights, float32 `[R, n]`, as `choose_experts` returns them.

    routes: the kernels behind the router choose the experts of a step's one row themselves (`row_experts`). Then
    `chosen` are its logits `[1, E]`, and `weights` their correction, float32 `[E]`.
    """

    chosen: Tensor
    weights: Tensor
    routes: bool = False


def choose_experts(logits: Tensor, experts: Experts, positions: Tensor, pdl: bool | None) -> ExpertChoice:
    """Choose the experts of each row, int32 `[R, k]`, E in padded rows; and their weights, float32 `[R, n]`.

    n: the smallest power of two that holds k weights, and the shared expert's behind them if there is one. Further
    places are not read.
    """
    shape = experts.shape
    correction = experts.correction
    scales = experts.scales
    assert scales is None or not isinstance(shape, GroupedExpertsShape), "no family has scales and groups"
    rows = len(logits)
    ranks = round_up_to_power(shape.chosen + bool(shape.shared))
    chosen = torch.empty(rows, shape.chosen, dtype=torch.int32, device=logits.device)
    shares = torch.empty(rows, ranks, dtype=torch.float32, device=logits.device)
    if isinstance(shape, GroupedExpertsShape):
        launch(
            choose_in_groups,
            (rows,),
            logits,
            logits.new_zeros(shape.count, dtype=torch.float32) if correction is None else correction,
            positions,
            chosen,
            shares,
            shape.factor,
            COUNT=shape.count,
            ACTIVE=shape.chosen,
            EXPERTS=round_up_to_power(shape.count),
            RANKS=ranks,
            GROUPS=shape.groups,
            CHOSEN_GROUPS=shape.chosen_groups,
            INDICES=round_up_to_power(shape.groups),
            NORMED=shape.is_normalized,
            SIGMOID=isinstance(shape, SigmoidExpertsShape),
            **launch_options(1, pdl),
        )
        return ExpertChoice(chosen, shares)
    launch(
        choose,
        (rows,),
        logits,
        positions,
        chosen,
        shares,
        shares if correction is None else correction,  # never read without
        shares if scales is None else scales,
        COUNT=shape.count,
        ACTIVE=shape.chosen,
        EXPERTS=round_up_to_power(shape.count),
        RANKS=ranks,
        NORMED=shape.is_normalized,
        SHARED=shape.gates_shared,
        BIASED=correction is not None,
        SCALED=scales is not None,
        SHORT=logits.dtype == torch.bfloat16 and correction is None,
        **launch_options(1, pdl),
    )
    return ExpertChoice(chosen, shares)
