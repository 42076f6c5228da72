"""Long commands say how far they are: lines where nobody watches, a bar on a terminal, nothing for short work."""

from __future__ import annotations

import pytest

from engine.progress import progress


def test_lines_come_seconds_apart_and_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with progress("things", 1000, clock=lambda: now[0]) as step:
        for _ in range(15):
            now[0] += 1 / 16
            step()
        assert capsys.readouterr().err == ""
        for _ in range(100):
            now[0] += 1 / 16
            step(name="more things")
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["more things: 16 of 1,000", "more things: 96 of 1,000"]
    assert shown.out == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    now = [0.0]
    with progress("things", clock=lambda: now[0]) as step:
        now[0] = 2
        step(5)
    shown = capsys.readouterr().err
    assert "things" in shown
    assert "\x1b[" in shown
    assert "5/?" in shown
