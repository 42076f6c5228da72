"""When to come again: told to whoever found the queue full."""

from __future__ import annotations

import math

from attrs import define

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
