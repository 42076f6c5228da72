"""Mixture of experts: many feed-forwards, of which each row goes through a few, and the weighted sum of their
results.

Three rules keep a row's bits independent of its neighbours:
* A row's experts follow from its own logits alone; of equal logits the expert with the lower number is taken.
* The rows of an expert are multiplied in a row count that is proven, where neighbours never matter.
* The results of a row's experts are added one after the other in float32, the most wanted expert first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol, Self, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.models.kernels.activations import SILU
from adapters.models.kernels.functions.vector_functions import apply_in_vectors
from adapters.models.kernels.offload import map_tensors

_VECTOR = 64  # a row of logits is padded to a multiple of this, whole vectors on every processor
_LEAST = 1e-20  # added to the sum of the chosen experts' scores, as published models do
_PROBED = 6  # experts of a probed layer, of which a row goes through two; only the router depends on their number


@frozen
class ExpertsShape:
    """The experts of a layer: `count` of them with `inner` columns each, of which a row goes through `chosen`.

    is_normalized: the weights of the chosen experts add up to one. shared: columns of one more expert that all rows
    go through, with a gate of its own; 0: there is none.
    """

    count: int
    chosen: int
    inner: int
    is_normalized: bool
    shared: int = 0

    @property
    def gates_shared(self) -> bool:
        """Has the shared expert a gate? Otherwise its result is added as it is."""
        return self.shared > 0

    @property
    def router_outputs(self) -> int:
        """Outputs of the router: a logit for each expert, and the gate of the shared one."""
        return self.count + self.gates_shared

    def shrink_for_probe(self) -> Self:
        """Return a layer with few experts, whose products are the same ones as those of all."""
        return evolve(self, count=min(self.count, _PROBED), chosen=min(self.chosen, 2))


@frozen
class BiasedExpertsShape(ExpertsShape):
    """Experts whose products, the router's included, have biases. Their gates are CLAMPED."""


@frozen
class GroupedExpertsShape(ExpertsShape):
    """Experts in groups, whose scores are a softmax of their logits. The shared expert has no gate.

    groups: experts are in so many groups of equal size, in the order of their numbers. A row goes through experts of
    `chosen_groups` groups: those whose best expert has the greatest score. factor: of all weights.
    """

    groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0

    @property
    def gates_shared(self) -> bool:
        return False

    def shrink_for_probe(self) -> Self:
        return evolve(super().shrink_for_probe(), groups=1, chosen_groups=1)


@frozen
class SigmoidExpertsShape(GroupedExpertsShape):
    """Experts whose scores are the sigmoids of their logits. A correction is added to a score for the choice only.

    A group counts by the sum of the scores of its two best experts.
    """


@frozen(eq=False)
class GatedWeights:
    """Packed weights of a gated feed-forward: `down @ (silu(gate @ x) * (up @ x))`.

    activation: in place of SiLU. Where the kernels do not have it built in, `gate_up` is packed as a plain weight.
    gate_up_bias, down_bias: are added to what the products return; only with such an activation.
    """

    gate_up: Any
    down: Any
    activation: str = SILU
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@frozen(eq=False)
class StackedExperts:
    """The experts of one layer in one piece: every tensor of `weights` holds those of all experts, by number."""

    weights: GatedWeights

    def __getitem__(self, number: int) -> GatedWeights:
        found = map_tensors(self.weights, lambda stack: stack[number])
        assert isinstance(found, GatedWeights)
        return found


EveryExpert: TypeAlias = Sequence[GatedWeights] | StackedExperts


class ChosenExperts(ABC):
    """The experts of one layer whose weights are brought to the device once it is known which are chosen.

    stacked: the device memory that they are brought to; each expert gets a part of it.
    """

    stacked: StackedExperts

    @abstractmethod
    def fetch(self, numbers: Sequence[int]) -> Iterable[GatedWeights]:
        """Return the weights of these experts in this order. Each is read before the next one is asked for."""

    @abstractmethod
    def fetch_in_turns(self, numbers: Sequence[int]) -> Iterable[Mapping[int, int]]:
        """Bring all of these experts, some in each turn, and return their slots by number. The launches that read a
        turn are made before the next turn is asked for.
        """


@frozen(eq=False)
class Experts:
    """The weights of a layer of experts. router: packed, `[E, D]`, with one more row for the shared expert's gate.

    correction: float32 `[E]`, added to the scores of a `SigmoidExpertsShape` for the choice of experts, and to the
    logits of a `BiasedExpertsShape`.
    each: the experts by number. Only those that some row goes through are asked for, once a step and in ascending
    order. scales: float32 `[E]`, what each expert's weight is multiplied with at last; None: with nothing.
    """

    shape: ExpertsShape
    router: Any
    each: EveryExpert | ChosenExperts
    shared: GatedWeights | None
    scales: Tensor | None = None
    correction: Tensor | None = None

    def weights_of(self, numbers: Sequence[int]) -> Iterable[GatedWeights]:
        each = self.each
        return each.fetch(numbers) if isinstance(each, ChosenExperts) else (each[number] for number in numbers)


class PackedProducts(Protocol):
    @property
    def built_in_gates(self) -> Collection[str]: ...

    def linear(self, x: Tensor, packed: Any) -> Tensor: ...

    def gated_linear(self, x: Tensor, packed: Any) -> Tensor: ...

    def apply_gate(self, activation: str, both: Tensor, bias: Tensor | None) -> Tensor: ...


def list_experts(experts: Iterable[GatedWeights], count: int) -> EveryExpert:  # noqa: ARG001
    """Return the experts of a layer as they are, for kernels that compute one expert after the other."""
    return tuple(experts)


def run_feed_forward(kernels: PackedProducts, x: Tensor, weights: GatedWeights) -> Tensor:
    if weights.activation in kernels.built_in_gates:
        return kernels.linear(kernels.gated_linear(x, weights.gate_up), weights.down)
    both = kernels.linear(x, weights.gate_up)
    out = kernels.linear(kernels.apply_gate(weights.activation, both, weights.gate_up_bias), weights.down)
    return out if weights.down_bias is None else out.add_(weights.down_bias)


def choose_experts(logits: Tensor, shape: ExpertsShape, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row's experts, int64 `[n, k]`, and their weights in float32.

    logits: float32 `[n, E]`. The greatest logit comes first, and of equal logits the lower number. correction: see
    `Experts`.
    """
    if isinstance(shape, SigmoidExpertsShape):
        return _choose_by_sigmoid(logits, shape, correction)
    if correction is not None:
        logits = logits + correction
    grouped = shape if isinstance(shape, GroupedExpertsShape) else None
    chosen = _find_greatest(logits if grouped is None else _hide_groups(logits, grouped, 1), shape.chosen)
    weights = compute_softmax(logits).gather(1, chosen)
    if shape.is_normalized:
        weights = weights / add_in_order(weights).unsqueeze(1)
    return chosen, weights if grouped is None else weights * grouped.factor


def compute_softmax(logits: Tensor) -> Tensor:
    """Return the softmax of each row, perhaps with columns of zeros behind it.

    Rows are padded to whole vectors of any processor. A logit of -inf adds nothing to the sum of a softmax.
    """
    padding = -logits.shape[1] % _VECTOR
    return (torch.nn.functional.pad(logits, (0, padding), value=-torch.inf) if padding else logits).softmax(1)


def _choose_by_sigmoid(logits: Tensor, shape: SigmoidExpertsShape, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = apply_in_vectors(torch.sigmoid, logits.contiguous())
    wanted = scores if correction is None else scores + correction
    chosen = _find_greatest(_hide_groups(wanted, shape, 2), shape.chosen)
    weights = scores.gather(1, chosen)
    if shape.is_normalized:
        weights = weights / (add_in_order(weights) + _LEAST).unsqueeze(1)
    return chosen, weights * shape.factor


def _hide_groups(wanted: Tensor, shape: GroupedExpertsShape, best: int) -> Tensor:
    """Return how much each expert is wanted, `[n, E]`, with -inf in all groups that are not chosen.

    best: experts of a group by the sum of which it is chosen.
    """
    if shape.groups == 1:
        return wanted
    grouped = wanted.view(len(wanted), shape.groups, -1)
    sums = add_in_order(grouped.topk(best).values.transpose(1, 2))
    hidden = torch.ones_like(sums, dtype=torch.bool)
    hidden.scatter_(1, _find_greatest(sums, shape.chosen_groups), False)
    return grouped.masked_fill(hidden.unsqueeze(2), -torch.inf).flatten(1)


def _find_greatest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the greatest values of each row, the greatest first, and of equal ones the lower index.

    For that the values become integers that compare alike, from which each index is subtracted. All of them differ, so
    there is one way to sort them.
    """
    bits = (values + 0.0).view(torch.int32)  # makes -0 equal to 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    indices = torch.arange(values.shape[1], device=values.device)
    return ((ordered << 16) - indices).topk(count).indices


def add_in_order(parts: Tensor) -> Tensor:
    """Add up the second dimension one after the other: `[n, k, ...]` becomes `[n, ...]`."""
    return reduce(torch.add, parts.unbind(1))
