"""Estimate when a client should try again that found the queue full, or too many requests before it on the way
there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define

from adapters.http.wire.errors import queue_full
from effects.ports import QUEUE_STAGES, Closed, Status

MOST_S = 60  # seconds; OpenAI's clients ignore a longer time and try again after half a second
NEWEST_SHARE = 0.2  # share of the newest request in the mean


def compute_retry_after(waiting: int, slots: int, seconds: float) -> int:
    """Return the whole seconds until the waiting requests and one more have been served: `slots` at once, for `seconds`
    each.
    """
    return max(1, min(MOST_S, math.ceil((waiting + 1) * seconds / max(1, slots))))


@define
class SlotTime:
    """The mean time for which requests hold a slot, in seconds. Newer requests count more."""

    mean_s: float | None = None

    def add(self, closed: Closed) -> None:
        """Add a request that has ended to the mean. Time in the queue does not count."""
        spent = (sum(closed.stages_ms.values()) - closed.spent_ms(QUEUE_STAGES)) / 1000
        self.mean_s = spent if self.mean_s is None else (1 - NEWEST_SHARE) * self.mean_s + NEWEST_SHARE * spent

    def estimate_retry_after(self, status: Status) -> int:
        """Return the seconds after which a new request would find room."""
        return compute_retry_after(status.queue, status.total_slots, self.mean_s or 0)


@define
class PreparationLimit:
    """Limits the requests whose prompt is being made of their body.

    More requests than slots and queue hold (`limit`) could not all be submitted. Tokenizing them would keep all others
    waiting.
    """

    limit: int
    count: int = 0

    @contextmanager
    def admit(self, retry_after: Callable[[], int]) -> Iterator[None]:
        """Count one request for as long as the block runs. Raises ApiError 429 if there are too many."""
        if self.count >= self.limit:
            raise queue_full(retry_after())
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
