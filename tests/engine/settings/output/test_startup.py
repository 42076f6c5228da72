"""Tests of what a start shows: lines in a log, and on a terminal a bar that leaves nothing behind."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import time
from collections.abc import Callable

import pytest

from engine.settings.output.start_progress import (
    COMPILE,
    STEPS,
    WEIGHTS,
    StartProgress,
    find_module,
    make_weight_counter,
    speed_up_imports,
)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_step_that_goes_on_says_so_and_how_far_it_has_got(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle"), StartProgress(every_s=0.01) as steps:
        steps(WEIGHTS)
        wait_for(lambda: any("still reading weights (" in line for line in lines(caplog)))
        count_one = make_weight_counter(steps, 1000)
        for _ in range(1200):  # more than were expected are no more than all
            count_one()
        wait_for(lambda: any("still reading weights, 1,000 of 1,000 (" in line for line in lines(caplog)))
    first = lines(caplog)[0]
    assert first.startswith("starting: reading weights (")


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's own limit is the bound
        time.sleep(0.005)


def test_who_wants_no_news_gets_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with caplog.at_level(logging.WARNING, "rekindle"), StartProgress(every_s=0.01) as steps:
        steps(WEIGHTS)
        steps(WEIGHTS, 1, 2)
    assert sys.stderr.getvalue() == ""
    assert not caplog.records


def test_a_part_is_told_once_for_each_hundredth_of_all() -> None:
    reports = list[tuple[str, int, int]]()
    one_more = make_weight_counter(lambda step, done=0, total=0: reports.append((step, done, total)), 18_000)
    for _ in range(18_000):
        one_more()
    assert len(reports) == 100
    assert reports[-1] == (WEIGHTS, 18_000, 18_000)


def test_each_step_is_a_line_where_stderr_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle"), StartProgress(every_s=3600) as steps:
        for step in STEPS:
            steps(step)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(STEPS)
    for line, step in zip(lines, STEPS, strict=True):
        assert line.startswith(f"starting: {step} (0.")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_a_bar_and_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with caplog.at_level(logging.INFO, "rekindle"), StartProgress() as steps:
        steps(STEPS[2])
        steps.finish()
        shown = sys.stderr.getvalue()
    assert STEPS[2] in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased"
    assert not caplog.records


def test_while_modules_are_imported_frames_say_of_which_they_are() -> None:
    ask, frame = inspect.getmodule, sys._getframe()  # noqa: SLF001
    asked = (frame, ask, StartProgress, 5)
    expected = [ask(one) for one in asked]
    with speed_up_imports():
        assert inspect.getmodule is not ask
        assert [inspect.getmodule(one) for one in asked] == expected
    assert inspect.getmodule is ask
    assert find_module(pytest.fail, frame) is expected[0]  # who asks about a frame looks at no file
    assert find_module(ask, StartProgress, _filename=None) is sys.modules["engine.settings.output.start_progress"]
    assert expected[0] is sys.modules[__name__]


def test_a_step_that_begins_once_more_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels are compiled for one form of weights after the other."""
    with caplog.at_level(logging.INFO, "rekindle"), StartProgress(every_s=3600) as steps:
        for step in (COMPILE, COMPILE, WEIGHTS):
            steps(step)
    reports = [message.partition(" (")[0] for message in caplog.messages]
    assert reports == [f"starting: {COMPILE}", f"starting: {WEIGHTS}"]
