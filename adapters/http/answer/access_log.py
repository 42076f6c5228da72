"""The line of a request in the log: how it ended and why, and how long the first text took. It never has any text of
it.
"""

from __future__ import annotations

import re
import time

from attrs import define, field

from adapters.http.answer.job_stream import AnswerEvent, FinishedChoice, PromptProgress
from adapters.http.wire.errors import ApiError

NOTE = "rekindle.note"  # in a scope: the end of the log line
LOG_IDS = "rekindle.about"  # in a scope: the ids in the log line, by their names in the log
ARRIVED = "rekindle.arrived"  # in a scope: when the request's head had arrived
CALLER = "rekindle.caller"  # in a scope: a name for the caller's key, which reveals nothing of the key
NOT_A_FIELD = re.compile(r"[^\w.$\[\]]", re.ASCII)  # characters in a path that only a client can have chosen


def describe_refusal(error: ApiError) -> str:
    """Return the end of a refused request's line: the error's code, and the field that is wrong."""
    field = "" if error.param is None else f" field={NOT_A_FIELD.sub('?', error.param)[:100]}"
    return f" refused code={error.code or error.type}{field}"


@define
class AnswerFigures:
    """The figures of one answer for its line in the log."""

    first_text_time: float | None = None  # when the first text arrived, or the end of an answer without text
    last_event_time: float = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    _counted_prompts: set[int] = field(factory=set)

    def record(self, event: AnswerEvent) -> None:
        """Add one event of the answer to the figures."""
        if isinstance(event, PromptProgress):
            return
        self.last_event_time = time.monotonic()
        self.first_text_time = self.last_event_time if self.first_text_time is None else self.first_text_time
        if isinstance(event, FinishedChoice):
            self.answer_tokens += event.tokens
            if event.planned_job.prompt_index not in self._counted_prompts:
                self._counted_prompts.add(event.planned_job.prompt_index)
                self.prompt_tokens += len(event.planned_job.job.prompt)
                self.cached_tokens += event.outcome.report.restored_tokens

    def format_line(self, start: float) -> str:
        """Return the figures as the log shows them. start: when the request arrived, on the monotonic clock."""
        if self.first_text_time is None or not self._counted_prompts:
            return "" if self.first_text_time is None else f" first={self.first_text_time - start:.3f}s"
        spent = self.last_event_time - self.first_text_time
        speed = f" {self.answer_tokens / spent:.1f}tok/s" if spent > 0 else ""
        counts = f" prompt={self.prompt_tokens} cached={self.cached_tokens} tokens={self.answer_tokens}"
        return f"{counts} first={self.first_text_time - start:.3f}s{speed}"
