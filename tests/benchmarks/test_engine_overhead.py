"""Tests of the cost of the engine in a step: which messages and steps count, and that calls are counted alike each
time.
"""

from __future__ import annotations

import pytest

from benchmarks.engine_overhead import (
    CASES,
    DecodeCase,
    DecodeRun,
    compare,
    count_calls,
    make_row,
    measure,
    run_case,
)


def test_figures_are_those_of_the_middle_half_of_a_run() -> None:
    lane_ns = [0, 9000, 10_000, 11_000, 12_000, 13_000, 14_000, 90_000]
    messages = [(0, 0, 1), (9000, 50, 1), (10_000, 1000, 2), (12_000, 3000, 2), (16_000, 4000, 2), (90_000, 0, 1)]
    run = DecodeRun(lane_ns, messages)
    assert run.lane_us == 1
    assert [run.per_step(index) for index in (0, 1)] == [7 / 6, 3.95 / 6]
    assert run.tokens_a_message == 7 / 4


def test_rows_have_the_least_time_of_the_rounds_and_are_compared_by_case() -> None:
    rounds = [{"lane_us": 4.0, "tokens_a_message": 3.0}, {"lane_us": 2.0, "tokens_a_message": 5.0}, {"lane_calls": 7.0}]
    ours = make_row(CASES[0], "this", rounds)
    assert ours == {
        "requests": "1 request",
        "checkout": "this",
        "lane_us": 2.0,
        "tokens_a_message": 4.0,
        "lane_calls": 7.0,
    }
    theirs = make_row(CASES[0], "before", [{"lane_us": 4.0, "tokens_a_message": 1.0, "lane_calls": 14.0}])
    assert compare(ours, theirs) == {"requests": "1 request", "lane_us": 0.5, "lane_calls": 0.5}


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_in_lockstep_each_message_has_one_token(case: DecodeCase) -> None:
    run = run_case(case, 40, lockstep=True)
    assert sum(message[2] for message in run.messages) == 40
    assert 1 <= run.tokens_a_message <= 1 + case.overlapped
    assert run.lane_us > 0
    assert run.per_step(1) > 0


def test_a_worker_measures_what_it_is_asked_for() -> None:
    times = measure({"case": 1, "steps": 40})
    assert times["processor_us"] == times["lane_us"] + times["loop_us"]
    calls = measure({"case": 1})
    assert calls["calls_a_token"] == (calls["loop_calls"] + calls["lane_calls"]) / 4
    assert count_calls(CASES[1])[1] == pytest.approx(calls["lane_calls"], rel=0.02)
