"""Runs rows through their experts, one expert after the other, and adds up what comes out.

Kernels that have no quicker way for a layer of experts use these functions; the rules of bits are those of
`experts_interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.functions.vector_functions import apply_in_vectors
from adapters.models.kernels.interfaces.experts_interface import (
    Experts,
    ExpertsShape,
    PackedProducts,
    add_in_order,
    choose_experts,
    run_feed_forward,
)
from adapters.models.kernels.step_batch import Batch

ChooseExperts: TypeAlias = Callable[[Tensor, ExpertsShape, Tensor | None], tuple[Tensor, Tensor]]


@frozen(eq=False)
class Dispatch:
    """The rows of a step sorted by expert: one run of rows for each expert that has any, padded at its end.

    experts, sizes: the experts in ascending order, and the lengths of their runs with padding. sources: for each row
    in the runs the row of x that stands there; padding has row 0. indices: for each row and each of its experts, from
    the largest weight on, the index of that pair in the runs.
    """

    experts: tuple[int, ...]
    sizes: list[int]
    sources: Tensor
    indices: Tensor


def run_experts(
    kernels: PackedProducts,
    x: Tensor,
    experts: Experts,
    batch: Batch,
    padded: Callable[[int], int] = int,
    *,
    deciding: Tensor | None = None,
) -> Tensor:
    """Run x `[R, D]` through its experts: `[R, D]`. Padded rows go through no expert and become zeros.

    padded: returns the row count to which this many rows of an expert are padded, so that the product is a proven one.
    deciding: what the router reads in place of x.
    """
    rows = sum(segment.count for segment in batch.segments)
    total, gates = sum_experts(kernels, x, experts, rows, padded, deciding=deciding)
    return finish_experts(kernels, x, experts, total, gates)


def finish_experts(kernels: PackedProducts, x: Tensor, experts: Experts, total: Tensor, gates: Tensor) -> Tensor:
    """Return `[R, D]`: the sums of the first rows with the shared expert's result, if there is one, and zeros.

    total, gates: as `sum_experts` returns them.
    """
    rows = len(total)
    if experts.shared is not None:
        total = add_shared(total, run_feed_forward(kernels, x, experts.shared)[:rows], compute_shares(gates))
    out = torch.zeros_like(x)
    out[:rows] = total
    return out


def sum_experts(
    kernels: PackedProducts,
    x: Tensor,
    experts: Experts,
    rows: int,
    padded: Callable[[int], int],
    *,
    deciding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sums of the first rows, float32 `[rows, D]`, without the shared expert's.

    Also returns the logits behind those of the experts, float32 `[rows, 0 or 1]`: those of the shared expert's gate.
    padded, deciding: as in `run_experts`.
    """
    shape = experts.shape
    chosen, weights, gates = route_rows(kernels, x if deciding is None else deciding, experts, rows)
    where = dispatch_rows(chosen, shape.count, padded)
    parts = torch.split(x.index_select(0, where.sources), where.sizes)
    weighted = zip(parts, experts.weights_of(where.experts), strict=True)
    made = torch.cat([run_feed_forward(kernels, part, weights) for part, weights in weighted])
    by_rank = made.index_select(0, where.indices).view(rows, shape.chosen, -1)
    return add_in_order(by_rank.float() * weights.unsqueeze(2)), gates


def route_rows(
    kernels: PackedProducts, x: Tensor, experts: Experts, rows: int, choose: ChooseExperts = choose_experts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of the first rows of x, int64 `[rows, k]`, their weights, and the logits behind those of the
    experts.

    choose: in place of `choose_experts`, with the same bits.
    """
    shape = experts.shape
    logits = kernels.linear(x, experts.router)[:rows].float()
    chosen, weights = choose(logits[:, : shape.count], shape, experts.correction)
    if experts.scales is not None:
        weights = weights * experts.scales[chosen]
    return chosen, weights, logits[:, shape.count :]


def compute_shares(gates: Tensor) -> Tensor | None:
    """Return what the shared expert's result is multiplied with, float32 `[rows, 1]`; None: with nothing.

    gates: as `sum_experts` returns them.
    """
    return apply_in_vectors(torch.sigmoid, gates.contiguous()) if gates.shape[1] else None


def add_shared(total: Tensor, own: Tensor, shares: Tensor | None) -> Tensor:
    """Add the shared expert's result to the sum of the chosen ones, in float32."""
    return total + (own.float() if shares is None else own.float() * shares)


def dispatch_rows(chosen: Tensor, count: int, padded: Callable[[int], int]) -> Dispatch:
    """Sort rows by expert. Waits for the device, because only the device knows how many rows an expert has.

    chosen: int64 `[n, k]`. count: experts of the layer. padded: returns the padded number for a number of rows.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    experts = list[int]()
    sizes = list[int]()
    shifts = [0] * count
    before = first = 0
    for number, rows in enumerate(torch.bincount(flat, minlength=count).tolist()):
        if rows:
            shifts[number] = first - before
            experts.append(number)
            sizes.append(padded(rows))
            first = first + sizes[-1]
            before = before + rows
    shift = torch.tensor(shifts, device=flat.device)
    at = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    sources = flat.new_zeros(first)
    indices = torch.empty_like(flat)
    sources[at] = order // chosen.shape[1]
    indices[order] = at
    return Dispatch(tuple(experts), sizes, sources, indices)
