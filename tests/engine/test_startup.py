"""What a start shows: lines where nobody looks, a bar that leaves nothing behind where somebody does."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from engine.startup import STEPS, Steps


def test_each_step_is_a_line_where_stderr_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle"), Steps() as steps:
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
    with Steps() as steps:
        steps(STEPS[2])
        steps.done()
        shown = sys.stderr.getvalue()
    assert STEPS[2] in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased"
    assert not caplog.records
