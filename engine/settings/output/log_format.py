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
ABOUT = ("request", "requests", "answer")  # the request numbers of the engine, and the id that clients see


class Stderr(logging.StreamHandler[TextIO]):
    """Writes to the present stderr: a progress bar replaces it, to stay below what is written."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class JsonLines(logging.Formatter):
    """Formats one JSON object a line: time, level, logger and message, and the requests and the traceback if there are
    any.
    """

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
    """Set up the log. level: that of our own messages. At `debug`, libraries stay at `info`."""
    handler = Stderr()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level="INFO" if level == "debug" else level.upper(), handlers=[handler])
    logging.getLogger("rekindle").setLevel(level.upper())
