"""The log on stderr: lines of text for people, or of JSON for what collects logs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ABOUT = ("request", "requests", "answer")  # what a line may be about: the engine's numbers, and the id that clients see


class Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is now: a bar takes it over, to keep below what is written."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message; what it is about, and the traceback, where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in ABOUT if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(form: LogFormat, level: LogLevel) -> None:
    """level: of what is ours; what libraries have to say only those who work on them want to know."""
    handler = Stderr()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level="INFO" if level == "debug" else level.upper(), handlers=[handler])
    logging.getLogger("rekindle").setLevel(level.upper())
