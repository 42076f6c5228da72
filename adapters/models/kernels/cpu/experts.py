"""Experts on a CPU: all of a layer in one call of the compiled library where it has their form, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from adapters.models.kernels.cpu.native.experts import (
    NativeExperts,
    choose_experts,
    collect_experts,
    run_experts,
)
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.cpu.packed import list_native
from adapters.models.kernels.expert_sums import route_rows, sum_experts
from adapters.models.kernels.interfaces.experts_interface import (
    EveryExpert,
    Experts,
    GatedWeights,
    PackedProducts,
)

EXPECTED_NS = 1_000_000  # that threads spin which expect experts: longer than a GPU takes for the layer before


def expect_experts(native: NativeProducts | None) -> None:
    """Wake the library's threads, because experts are computed soon."""
    if native is not None:
        native.compiled.code.rekindle_expect_loop(EXPECTED_NS)


def stack_experts(experts: Iterable[GatedWeights], count: int) -> EveryExpert:  # noqa: ARG001
    """Return the experts of a layer as they are, with tables of their weights if the library can use them."""
    each = tuple(experts)
    return collect_experts(each, [(list_native(one.gate_up), list_native(one.down)) for one in each])


def sum_cpu_experts(
    kernels: PackedProducts,
    native: NativeProducts | None,
    x: Tensor,
    experts: Experts,
    rows: int,
    padded: Callable[[int], int],
    *,
    deciding: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `sum_experts` does. Products of the library have the same bits for any number of rows, so nothing is
    padded there. padded: for other products.
    """
    each = experts.each
    if native is None or native.to is None or not isinstance(each, NativeExperts):
        return sum_experts(kernels, x, experts, rows, padded, deciding=deciding)
    decided = x if deciding is None else deciding
    chosen, weights, gates = route_rows(kernels, decided, experts, rows, partial(choose_experts, native))
    return run_experts(native, x, each, chosen, weights), gates
