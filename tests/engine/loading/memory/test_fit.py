"""Tests of the number of slots and their length: what memory has room for, what was asked for, and what the ledger
charges in the end.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.loading.memory.memory_fit import (
    LEAST,
    LONG_CONTEXT,
    SLOT_COUNTS,
    DeviceNeed,
    Fit,
    fit_slots,
    has_room,
    list_lengths,
)

KIB, GIB = 1 << 10, 1 << 30
# As Qwen3-4B in bfloat16: 8 GB of weights, 144 KiB a token.
FIXED, ROW, LIMIT = 8_044_936_192, 144 * KIB, 40960


def device(gib: float, **more: int) -> DeviceNeed:
    return DeviceNeed("cuda:0", int(gib * GIB), FIXED, ROW, **more)


@pytest.mark.parametrize(
    ("gib", "fit"),
    [
        (368, Fit(16, LIMIT)),
        (367, Fit(8, LIMIT)),
        (188, Fit(8, LIMIT)),
        (187, Fit(4, LIMIT)),
        (80, Fit(4, LIMIT)),
        (30, Fit(4, LIMIT)),
        (29, Fit(4, 32768)),
        (20, Fit(2, LIMIT)),
        (17, Fit(2, 32768)),
        (16, Fit(1, LIMIT)),
        (11, Fit(1, 24576)),
        (7.7, Fit(1, 1024)),
        (7, Fit(1, 1024, fits=False)),
    ],
)
def test_what_nobody_chose_is_what_fits(gib: float, fit: Fit) -> None:
    assert fit_slots([device(gib)], LIMIT) == fit


def test_what_was_asked_for_stays_and_the_other_follows() -> None:
    need = device(20)
    assert fit_slots([need], LIMIT, slots=8) == Fit(8, 8192)
    assert fit_slots([need], LIMIT, context=8192) == Fit(4, 8192)
    assert fit_slots([need], LIMIT, slots=4, context=40960) == Fit(4, 40960, fits=False)
    assert fit_slots([device(80)], LIMIT, slots=64, context=100) == Fit(64, 100)


def test_the_tightest_device_decides() -> None:
    assert fit_slots([device(80), device(11)], LIMIT) == fit_slots([device(11)], LIMIT)


def test_a_small_model_has_what_it_was_made_for() -> None:
    assert fit_slots([DeviceNeed("cpu", GIB, 50 << 20, 5120)], 8192) == Fit(4, 8192)
    assert fit_slots([DeviceNeed("cpu", 4 * GIB, 50 << 20, 5120)], 8192) == Fit(16, 8192)
    assert fit_slots([DeviceNeed("cpu", GIB, 50 << 20, 5120)], 100) == Fit(16, 100)


def test_more_slots_than_four_leave_most_of_every_device_to_others() -> None:
    roomy, tight = (DeviceNeed(name, gib * GIB, 0, 5120) for name, gib in (("roomy", 64), ("tight", 2)))
    assert fit_slots([roomy, roomy], 32768) == Fit(16, 32768)
    assert fit_slots([roomy, tight], 32768) == Fit(4, 32768)
    assert fit_slots([roomy, tight], 32768, slots=8) == Fit(8, 32768)


def test_what_is_there_once_is_charged_once() -> None:
    assert DeviceNeed("cpu", GIB, fixed=5, row=3, state=7, once=2).compute_taken(Fit(4, 100)) == 5 + 200 + 4 * 307


@pytest.mark.parametrize("limit", [1, 1000, 1024, 1025, 40960, 262144, 1 << 24])
def test_lengths_go_down_from_what_the_model_can(limit: int) -> None:
    steps = list(list_lengths(0, limit))
    assert steps[0] == limit
    assert steps == sorted(set(steps), reverse=True)
    assert steps[-1] == min(limit, LEAST)
    assert all(2 * small >= large for large, small in pairwise(steps))


@given(
    st.integers(1, 64), st.integers(0, 60), st.integers(1, 1 << 20), st.integers(0, 1 << 30), st.integers(1, 1 << 21)
)
def test_what_is_said_to_fit_does_and_nothing_better_was_left_out(
    there: int, fixed: int, row: int, state: int, limit: int
) -> None:
    needs = [DeviceNeed("x", there * GIB, fixed * GIB, row, state)]
    found = fit_slots(needs, limit)
    assert 1 <= found.context <= limit
    assert found.fits == has_room(needs, found.slots, found.context)
    for slots in SLOT_COUNTS:
        if not found.fits or (slots > found.slots and found.context >= LONG_CONTEXT):
            assert not has_room(needs, slots, min(limit, LONG_CONTEXT))
        if found.fits and found.context < min(limit, LONG_CONTEXT):
            assert not any(has_room(needs, slots, each) for each in list_lengths(0, limit) if each > found.context)
