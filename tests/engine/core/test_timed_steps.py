"""Times of decode steps in traces."""

from __future__ import annotations

import pytest

from engine.core.trace import UNREADABLE, converter
from states.rates import Rates, TimedStep

TIMES = (TimedStep(0, 1, 0, 900, 0), TimedStep(0, 1, 8, 1500, 900))


def test_times_of_steps_are_lists_of_numbers() -> None:
    rates = Rates(prefill=(7,), decode=TIMES, copy_times=TIMES[1:])
    written = converter().unstructure(rates)
    assert written["decode"] == [[0, 1, 0, 900, 0], [0, 1, 8, 1500, 900]]
    assert converter().structure(written, Rates) == rates


@pytest.mark.parametrize("name", ["decode", "copy_times", "branch_times"])
@pytest.mark.parametrize("wrong", [[0, 1, 0, -1, 0], [0, -1, 0, 1, 0], [0, 1, 0, 900]])
def test_impossible_times_are_refused(name: str, wrong: list[int]) -> None:
    with pytest.raises(UNREADABLE):
        converter().structure({name: [[0, 1, 0, 900, 0], wrong]}, Rates)
