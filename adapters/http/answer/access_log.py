"""The line of a request in the log: how it ended and why, how long the first text took; never what was said in it."""

from __future__ import annotations

import re
import time

from attrs import define, field

from adapters.http.answer.job_stream import Ended, Event, Progress
from adapters.http.wire.errors import ApiError

NOTE = "rekindle.note"  # in a scope: what the line ends with
ABOUT = "rekindle.about"  # in a scope: the ids that the line is about, by the names that the log has for them
ARRIVED = "rekindle.arrived"  # in a scope: when the request's head was there
CALLER = "rekindle.caller"  # in a scope: a name for who sent the right key, which tells nothing of the key
NOT_A_FIELD = re.compile(r"[^\w.$\[\]]", re.ASCII)  # in a path into a body: what only a client can have chosen


def refused(error: ApiError) -> str:
    """For the log: why, and which field."""
    field = "" if error.param is None else f" field={NOT_A_FIELD.sub('?', error.param)[:100]}"
    return f" refused code={error.code or error.type}{field}"


@define
class AnswerFigures:
    """What the line of an answer in the log tells besides how it ended."""

    first: float | None = None  # when the first text came, or the end of an answer without any
    last: float = 0
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    _prompts: set[int] = field(factory=set)

    def heard(self, event: Event) -> None:
        if isinstance(event, Progress):
            return
        self.last = time.monotonic()
        self.first = self.last if self.first is None else self.first
        if isinstance(event, Ended):
            self.tokens += event.tokens
            if event.planned.prompt not in self._prompts:
                self._prompts.add(event.planned.prompt)
                self.prompt += len(event.planned.job.prompt)
                self.cached += event.closed.report.restored_tokens

    def line(self, start: float) -> str:
        if self.first is None or not self._prompts:
            return "" if self.first is None else f" first={self.first - start:.3f}s"
        spent = self.last - self.first
        speed = f" {self.tokens / spent:.1f}tok/s" if spent > 0 else ""
        counts = f" prompt={self.prompt} cached={self.cached} tokens={self.tokens}"
        return f"{counts} first={self.first - start:.3f}s{speed}"
