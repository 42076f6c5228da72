"""Measured times never choose among ways to multiply that give other bits: every start on a machine gets the same plan.

Times are made up here, other ones for each proof, as on a machine that is busy now and then.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.delta_interface import DeltaShape
from adapters.models.kernels.interfaces.product_list import NATIVE, Heads, ProductPlan, Products, Weight
from adapters.models.kernels.proof import prover, rule_trials, trials
from engine.loading.memory.packed_estimate import keeps_packed
from tests.models.numerics.test_numerics import Mutant, measure

pytestmark = pytest.mark.usefixtures("two_threads")
BRAIN = torch.bfloat16
LISTED = Products(
    (Weight(64, 64), Weight(256, 64), Weight(64, 128, gated=True)), (Heads(2, 16, 1024),), (4, 16, 64), (1, 2)
)
EIGHT = StepLayout("int8", 32)
FOUR = StepLayout("uint4", 32)
PACKED = evolve(
    LISTED, packed=tuple(evolve(weight, layout=layout) for weight in LISTED.weights for layout in (EIGHT, FOUR))
)
RECURRENT = evolve(LISTED, weights=(), heads=(), deltas=(DeltaShape(1, 1, 16, 16),))


class SumsInGroups(Mutant):
    """Rows of 4 and of 16 sum differently, and so do rows of 64: three groups, one of which has to serve."""

    def multiply(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        multiply = super().multiply
        if len(x) == 4 or weight.shape[0] == 16:
            return multiply(x, weight)
        quarter = x.shape[1] // (2 if len(x) == 16 else 4)
        left = x.clone()
        left[:, quarter:] = 0
        right = x.clone()
        right[:, :quarter] = 0
        return multiply(left, weight) + multiply(right, weight)


def prove_with_other_times(
    kernels: CpuKernels, products: Products, patch: pytest.MonkeyPatch, seed: int
) -> ProductPlan:
    """Prove with a clock that runs at random."""
    random = Random(seed)
    now = [0.0]

    def perf_counter() -> float:
        now[0] += random.choice((1e-6, 1e-4, 1e-2, 1.0)) * random.random()
        return now[0]

    clock = SimpleNamespace(perf_counter=perf_counter)
    for module in (trials, rule_trials, prover):
        patch.setattr(module, "time", clock, raising=False)
    plan = kernels.prove(products).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "products", [LISTED, PACKED, evolve(PACKED, small=True), RECURRENT], ids=["plain", "packed", "small", "delta"]
)
@pytest.mark.parametrize(
    "build",
    [lambda: CpuKernels(BRAIN), lambda: CpuKernels(BRAIN, own=False), lambda: CpuKernels(torch.float32), SumsInGroups],
    ids=["installed", "onednn", "float32", "groups"],
)
def test_a_machine_that_is_busy_now_and_then_proves_the_same_plan(
    build: Any, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [prove_with_other_times(build(), products, monkeypatch, seed) for seed in range(6)]
    assert len({plan.bit_signature() for plan in plans}) == 1


@pytest.mark.parametrize(
    ("products", "packed"),
    [(PACKED, {EIGHT}), (evolve(PACKED, small=True), {EIGHT, FOUR}), (evolve(PACKED, unpacked=False), {EIGHT, FOUR})],
    ids=["large", "small", "no memory to unpack"],
)
@pytest.mark.parametrize("dtype", [BRAIN, torch.float32])
def test_the_layout_says_what_a_processor_with_tiles_unpacks(
    dtype: torch.dtype, products: Products, packed: set[StepLayout]
) -> None:
    """The memory that a start reckons with is that of the plan."""
    kernels = CpuKernels(dtype)
    if NATIVE not in kernels.ways(wider=False):
        pytest.skip("nothing multiplies packed weights here")
    plan = kernels.prove(products).plan
    assert plan is not None
    found = {served.weight.layout for served in plan.packed}
    assert found == (packed if kernels.has_tiles else {EIGHT, FOUR})
    assert found == {layout for layout in (EIGHT, FOUR) if keeps_packed(products, dtype, layout)}


@pytest.mark.parametrize("own", [True, False], ids=["installed", "onednn"])
def test_the_numerics_class_is_the_same_at_every_start(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(1)
    monkeypatch.setattr(trials.Trial, "measure", lambda *_: random.random())
    found = [measure(CpuKernels(BRAIN, own=own), BRAIN) for _ in range(3)]
    assert len({one.numerics_class for one in found}) == 1
    assert len({(one.buckets, one.checks) for one in found}) == 1


def test_a_less_preferred_way_serves_only_where_it_takes_less_than_half_of_the_rows() -> None:
    """A group that has few rows cuts a chunk into pieces, each of which reads the weight."""
    whole = prover.estimate_rows((4, 8, 16, 32, 64, 128, 256), 256)
    few = prover.estimate_rows((4,), 256)
    assert (whole, few) == (272 + 32 * 20, 20 * 64 + 32 * 20)
    assert whole < prover.LESS * few
    assert whole > prover.LESS * prover.estimate_rows((4, 8), 256)
