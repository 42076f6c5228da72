"""Threads of narrow steps follow what steps took, and one that was interrupted decides nothing."""

from __future__ import annotations

from adapters.models.kernels.cpu.thread_tuning import ThreadTuning


def ran(pace, steps, seconds):
    """On how many threads each of so many steps ran. seconds: by that number and the step's."""
    found = []
    for step in range(steps):
        found.append(pace.threads)
        pace.record(seconds(found[-1], step))
    return found


def test_the_quicker_number_serves_and_the_other_is_tried_ever_more_seldom():
    pace = ThreadTuning(1, 2)
    found = ran(pace, 400, lambda threads, _: 3.0 / threads)
    assert found[:16] == [1] * 16
    assert found[16:35] == [2] * 19
    tried = [step for step in range(35, 400) if found[step] == 1]
    assert tried == [35, 36, 37, 70, 71, 72, 137, 138, 139, 268, 269, 270]


def test_it_changes_with_what_else_runs():
    pace = ThreadTuning(1, 2)
    found = ran(pace, 3000, lambda threads, step: 3.0 / threads if step < 1000 else 3.0 * threads)
    assert found[990:1000].count(2) > 6
    assert found[-1000:].count(1) > 990


def test_a_step_that_was_interrupted_decides_nothing():
    pace = ThreadTuning(2, 1)
    found = ran(pace, 400, lambda threads, step: 50.0 if step in {15, 16, 17} else 3.0 / threads)
    assert found.count(2) > 380


def test_work_that_grows_does_not_look_slow():
    pace = ThreadTuning(2, 1)
    assert ran(pace, 1000, lambda threads, step: (1 + step / 1000) / threads).count(2) > 970
