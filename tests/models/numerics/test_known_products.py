"""Tests that what a target's proof knows is not multiplied again for a draft, and that nothing more is taken from the
proof.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.product_list import Heads, Products, Weight
from tests.models.numerics.test_numerics import in_halves

TARGET = Products((Weight(64, 64), Weight(256, 64)), (Heads(2, 16, 1024),), (4, 8, 16, 32, 64), (1, 2), wider=False)
DRAFT = evolve(TARGET, weights=(Weight(64, 64), Weight(64, 192)), heads=(Heads(2, 16, 1280),))


class Counting(CpuKernels):
    """Knows what it was asked for. odd: keys over which a narrow product adds up in another order."""

    def __init__(self, odd: int = 0) -> None:
        super().__init__(torch.float32, own=False)
        self.odd, self.asked = odd, set[tuple[int, int]]()

    def multiply(self, x, weight):
        self.asked.add((weight.shape[0], x.shape[1]))
        flawed = weight.shape[0] == self.odd and len(x) <= 8
        return in_halves(x, weight, super().multiply) if flawed else super().multiply(x, weight)


@pytest.fixture
def known():
    return CpuKernels(torch.float32, own=False).prove(TARGET).plan


def test_only_what_is_new_is_multiplied(known):
    kernels = Counting()
    plan = kernels.prove(DRAFT, known).plan
    assert kernels.asked == {(64, 192), (1024, 16), (1280, 16)}
    assert plan.find_weight(64, 64) == known.find_weight(64, 64)
    assert plan.find_attention(2, 16) == evolve(known.find_attention(2, 16), heads=Heads(2, 16, 1280))
    assert plan.heads[0].heads.keys == 1280


def test_nothing_is_multiplied_where_all_of_it_is_known(known):
    kernels = Counting()
    assert kernels.prove(TARGET, known).plan == known
    assert not kernels.asked


def test_longer_spans_than_were_proven_are_proven_and_where_they_differ_everything_is(known):
    kernels = Counting(odd=1280)
    plan = kernels.prove(DRAFT, known).plan
    narrow = {4, 8} & set(known.find_attention(2, 16).rows)  # none of them serve on some processors with AMX
    assert not narrow or (256, 16) in kernels.asked
    rows = set() if plan is None else set(plan.find_attention(2, 16).rows)
    assert rows.isdisjoint({4, 8}) or rows <= {4, 8}, "those that agree with each other, whichever serve faster here"


@pytest.mark.parametrize("other", [{"rows": (4, 8, 16, 32, 64, 128)}, {"threads": (2, 2)}], ids=str)
def test_other_rows_or_threads_than_were_proven_are_proven(known, other):
    kernels = Counting()
    kernels.prove(evolve(TARGET, **other), known)
    assert {(64, 64), (256, 64), (256, 16), (1024, 16)} <= kernels.asked


def test_a_head_that_sees_more_rows_than_it_was_proven_for_is_proven(known):
    few = evolve(known, weights=tuple(evolve(one, weight=evolve(one.weight, most=16)) for one in known.weights))
    kernels = Counting()
    kernels.prove(TARGET, few)
    assert (256, 64) in kernels.asked
