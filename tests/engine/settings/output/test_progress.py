"""Tests of the progress that long commands show: lines in a log, a bar on a terminal, and nothing for short work."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from effects.ids import RequestId
from effects.stream import ReportProgress
from engine.__main__ import main
from engine.core.prefill_log import PrefillLog
from engine.settings.output.progress import announce_if_slow, count_progress, silence_progress
from tests.cache_command.test_cache import FIRST, fill
from tests.engine.stories import GOLDEN


def test_lines_come_seconds_apart_and_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with count_progress("things", 1000, clock=lambda: now[0]) as step:
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


def test_what_has_no_steps_is_told_when_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with announce_if_slow("importing", 0.05):
        while not (shown := capsys.readouterr()).err:  # the test's own limit is the bound
            time.sleep(0.005)
    assert shown.out == ""
    assert re.fullmatch(r"importing \(\d+ s\)\n", shown.err)
    with announce_if_slow("importing"):
        pass
    with silence_progress(True), announce_if_slow("importing", 0.0):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    now = [0.0]
    with count_progress("things", clock=lambda: now[0]) as step:
        now[0] = 2
        step(5)
    shown = capsys.readouterr().err
    assert "things" in shown
    assert "\x1b[" in shown
    assert "5/?" in shown


def test_who_wants_no_news_gets_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    now = [0.0]
    with silence_progress(True), count_progress("things", 10, clock=lambda: now[0]) as step:
        now[0] = 100
        step(5, name="more")
    assert capsys.readouterr().err == ""
    with silence_progress(False), count_progress("things", 10, clock=lambda: now[0]) as step:
        now[0] = 200
        step(5)
    assert "things" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "TRACE"],
        ["simulate", "TRACE", "--scope", "full", "--json"],
        ["trace", "view", "TRACE", "-o", "OUT"],
        ["cache", "verify", "FOLDER"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("quiet", [[], ["-q"], ["--quiet"]], ids=str)
def test_commands_tell_how_far_they_are_unless_they_are_to_be_quiet(
    words: list[str],
    quiet: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The delay of the first line is 0 here, so every command shows progress at once."""
    kept = tmp_path / "kept"
    fill(kept, FIRST)
    monkeypatch.setattr("engine.settings.output.progress.FIRST_S", -1.0)
    named = {"TRACE": str(GOLDEN / "a_full_house.jsonl"), "OUT": str(tmp_path / "out.html"), "FOLDER": str(kept)}
    assert main([*(named.get(word, word) for word in words), *quiet]) == 0
    shown = capsys.readouterr()
    assert bool(shown.err) is not bool(quiet)
    assert shown.out


def test_a_prompt_that_takes_long_is_told_of_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    now, long, short = [0.0], RequestId(1), RequestId(2)
    log = PrefillLog(clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "rekindle"):
        for done in range(0, 10_000, 100):
            log.log_progress(long, ReportProgress(1000 + done, 11_000, 1000))
            if done < 500:
                log.log_progress(short, ReportProgress(done, 500, 0))
            now[0] += 1 / 8
        log.log_progress(long, ReportProgress(10_999, 11_000, 1000))
        log.forget(long)
        log.forget(short)
        log.forget(RequestId(3))
    assert [record.getMessage() for record in caplog.records] == [
        "request 1: 1,800 of 11,000 prompt tokens (1,000 of them restored) after 1.0 s",
        "request 1: 5,800 of 11,000 prompt tokens (1,000 of them restored) after 6.0 s",
        "request 1: 9,800 of 11,000 prompt tokens (1,000 of them restored) after 11.0 s",
    ]
    assert {record.__dict__["request"] for record in caplog.records} == {1}
    assert not log._started_and_due  # noqa: SLF001
