"""Whoever finds the queue full, or too many before it on their way there, is told when to come again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define

from adapters.http.wire.errors import queue_full
from effects.ports import QUEUE_STAGES, Closed, Status

MOST_S = 60  # OpenAI's clients do not believe more, and come again after half a second
SHARE = 0.2  # of the newest request in the mean


def retry_after(waiting: int, slots: int, seconds: float) -> int:
    """Whole seconds until those that wait have been served, and one more: `slots` at once, for `seconds` each."""
    return max(1, min(MOST_S, math.ceil((waiting + 1) * seconds / max(1, slots))))


@define
class Turnover:
    """How long requests hold a slot, on average; the later ones count more."""

    seconds: float | None = None

    def served(self, closed: Closed) -> None:
        spent = (sum(closed.stages_ms.values()) - closed.spent_ms(QUEUE_STAGES)) / 1000
        self.seconds = spent if self.seconds is None else (1 - SHARE) * self.seconds + SHARE * spent

    def retry_after(self, status: Status) -> int:
        return retry_after(status.queue, len(status.slots), self.seconds or 0)


@define
class Preparing:
    """Requests whose prompt is being made of their body. More of them than slots and queue hold (`most`) could not all
    be put in, and tokenizing those would keep everybody else waiting.
    """

    most: int
    count: int = 0

    @contextmanager
    def one(self, retry_after: Callable[[], int]) -> Iterator[None]:
        """Raises ApiError 429 where there are too many."""
        if self.count >= self.most:
            raise queue_full(retry_after())
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
