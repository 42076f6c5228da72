"""The log: lines of text, or of JSON with what a collector asks for; nothing more than the level that was chosen."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from engine.settings.output import log_format
from engine.settings.output.start_progress import PROBE, StartProgress


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "uvicorn", "rekindle")]
    handlers, levels = loggers[0].handlers[:], [logger.level for logger in loggers]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def configure(form: log_format.LogFormat, level: log_format.LogLevel) -> None:
    """Configure logs as in a process that has none yet: pytest adds handlers of its own to the root logger."""
    logging.getLogger().handlers.clear()
    log_format.configure(form, level)


def test_lines_are_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    logging.getLogger("rekindle").info("request %d: %s", 7, "done", extra={"request": 7})
    assert capsys.readouterr().err.endswith(" INFO rekindle: request 7: done\n")


def test_lines_are_objects_for_what_collects_them(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "debug")
    log = logging.getLogger("rekindle.http")
    before = datetime.now(UTC).replace(microsecond=0)
    log.warning('line one\nline "two"', extra={"request": 7})
    logging.getLogger("another.package").debug("noise")
    log.debug("POST", extra={"answer": "chatcmpl-1", "requests": [7, 8]})
    try:
        int("lost")
    except ValueError:
        log.exception("a bug")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(first.pop("time")) >= before
    assert first == {
        "level": "warning",
        "logger": "rekindle.http",
        "message": 'line one\nline "two"',
        "request": 7,
    }
    assert (second["answer"], second["requests"], second["level"]) == ("chatcmpl-1", [7, 8], "debug")
    assert "request" not in second
    assert third["traceback"].endswith("'lost'")


def test_less_than_the_level_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "warning")
    log = logging.getLogger("rekindle")
    log.info("hm")
    log.warning("ah")
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()] == ["ah"]


def test_a_start_that_logs_objects_shows_no_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure("json", "info")
    with StartProgress(lines=True, every_s=3600) as steps:
        steps(PROBE)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"].startswith(f"starting: {PROBE}")
