"""Experts: many feed-forwards, of which a row goes through a few, and what these make of it added up.

What keeps a row's bits its own: its experts follow from its own logits, of equal ones the lowest number is taken; the
rows of an expert are multiplied in a number that is proven, where neighbours never matter; and what its experts made of
a row is added up one after the other, in float32, the most wanted first, however many rows there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.models.kernels.offload import rebuilt
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.vector_functions import by_vectors

_VECTOR = 64  # logits in a row of whole vectors, however wide the processor's are
_PROBED = 6  # experts of a probed layer, two of which a row goes through: what differs with their number is the router


@frozen
class ExpertsShape:
    """So many experts with `inner` columns each; a row goes through `active` of them.

    normed: the weights of those that were chosen add up to one. shared: columns of one more expert, which all rows go
    through, by a gate of its own; 0: there is none.
    """

    count: int
    active: int
    inner: int
    normed: bool
    shared: int = 0

    @property
    def routed(self) -> int:
        """Outputs of the router: a logit of each expert, and the gate of the shared one."""
        return self.count + (1 if self.shared else 0)

    def small(self) -> ExpertsShape:
        """Few of them, whose products are those of all."""
        return evolve(self, count=min(self.count, _PROBED), active=min(self.active, 2))


@frozen(eq=False)
class GatedWeights:
    """Packed weights of a gated feed-forward: `down @ (silu(gate @ x) * (up @ x))`."""

    gate_up: Any
    down: Any


@frozen(eq=False)
class StackedExperts:
    """Experts of one layer in one piece: every tensor of `weights` has those of all of them, by number."""

    weights: GatedWeights

    def __getitem__(self, number: int) -> GatedWeights:
        found = rebuilt(self.weights, lambda stack: stack[number])
        assert isinstance(found, GatedWeights)
        return found


EveryExpert: TypeAlias = Sequence[GatedWeights] | StackedExperts


class ChosenExperts(ABC):
    """Experts of one layer whose weights are brought from elsewhere once it is known who was chosen.

    places: the memory that they are brought to, of which each is given a part.
    """

    places: StackedExperts

    @abstractmethod
    def chosen(self, numbers: Sequence[int]) -> Iterable[GatedWeights]:
        """In this order, each read before the next is asked for."""

    @abstractmethod
    def turns(self, numbers: Sequence[int]) -> Iterable[Mapping[int, int]]:
        """All of them, some in each turn, by their places; what reads them is launched before the next is asked for."""


@frozen(eq=False)
class Experts:
    """router: packed, `[E, D]`; the shared expert's gate is one more row.

    each: by number. Only those are asked for that some row goes through, once a step and in ascending order.
    """

    shape: ExpertsShape
    router: Any
    each: EveryExpert | ChosenExperts
    shared: GatedWeights | None

    def of(self, numbers: Sequence[int]) -> Iterable[GatedWeights]:
        each = self.each
        return each.chosen(numbers) if isinstance(each, ChosenExperts) else (each[number] for number in numbers)


class PackedProducts(Protocol):
    def linear(self, x: Tensor, packed: Any) -> Tensor: ...

    def gated(self, x: Tensor, packed: Any) -> Tensor: ...


@frozen(eq=False)
class Dispatch:
    """The rows of each expert side by side, behind those of lower numbers, and padded.

    experts, sizes: those with rows, and how many, padding included. sources: the row of x for each of these rows.
    places: where a row's experts are among them, row by row, the most wanted first.
    """

    experts: tuple[int, ...]
    sizes: list[int]
    sources: Tensor
    places: Tensor


def one_by_one(each: Iterable[GatedWeights], count: int) -> EveryExpert:  # noqa: ARG001
    """The experts of a layer for kernels that ask for one after the other: as they are."""
    return tuple(each)


def gated_feed(kernels: PackedProducts, x: Tensor, weights: GatedWeights) -> Tensor:
    return kernels.linear(kernels.gated(x, weights.gate_up), weights.down)


def experts_feed(
    kernels: PackedProducts, x: Tensor, experts: Experts, batch: Batch, padded: Callable[[int], int] = int
) -> Tensor:
    """x `[R, D]` -> `[R, D]`. Padded rows go through no expert, and are zeros.

    padded: how many rows a product is to have, to be one that is proven, where there are so many.
    """
    shape, rows = experts.shape, sum(segment.count for segment in batch.segments)
    logits = kernels.linear(x, experts.router)[:rows].float()
    chosen, weights = choose(logits[:, : shape.count], shape)
    where = dispatched(chosen, shape.count, padded)
    parts = torch.split(x.index_select(0, where.sources), where.sizes)
    weighted = zip(parts, experts.of(where.experts), strict=True)
    made = torch.cat([gated_feed(kernels, part, weights) for part, weights in weighted])
    by_rank = made.index_select(0, where.places).view(rows, shape.active, -1)
    total = added(by_rank.float() * weights.unsqueeze(2))
    if experts.shared is not None:
        own = gated_feed(kernels, x, experts.shared)[:rows]
        total = total + own.float() * by_vectors(torch.sigmoid, logits[:, shape.count :].contiguous())
    out = torch.zeros_like(x)
    out[:rows] = total
    return out


def choose(logits: Tensor, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """logits float32 `[n, E]` -> numbers of experts, int64 `[n, k]`, and their weights, float32.

    The greatest logit first, of equal ones that of the lower number: integers that compare as the logits do, each less
    its expert's number, are all different, so there is one way to sort them.
    """
    bits = (logits + 0.0).view(torch.int32)  # of two zeros none is less
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    numbers = torch.arange(shape.count, device=logits.device)
    chosen = ((ordered << 16) - numbers).topk(shape.active).indices
    whole = torch.nn.functional.pad(logits, (0, -shape.count % _VECTOR), value=-torch.inf)
    weights = whole.softmax(1).gather(1, chosen)
    return chosen, weights / added(weights).unsqueeze(1) if shape.normed else weights


def dispatched(chosen: Tensor, count: int, padded: Callable[[int], int]) -> Dispatch:
    """Waits for the device, since how many rows an expert has is known there."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    experts, sizes, shifts = list[int](), list[int](), [0] * count
    before = first = 0
    for number, rows in enumerate(torch.bincount(flat, minlength=count).tolist()):
        if rows:
            shifts[number] = first - before
            experts.append(number)
            sizes.append(padded(rows))
            first, before = first + sizes[-1], before + rows
    shift = torch.tensor(shifts, device=flat.device)
    at = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    sources, places = flat.new_zeros(first), torch.empty_like(flat)
    sources[at] = order // chosen.shape[1]
    places[order] = at
    return Dispatch(tuple(experts), sizes, sources, places)


def added(parts: Tensor) -> Tensor:
    """`[n, k, ...]` -> `[n, ...]`, one after the other."""
    return reduce(torch.add, parts.unbind(1))
