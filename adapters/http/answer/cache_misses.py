"""Explain why a prompt was not in the cache: where it leaves the kept prompt that it shares most with. `/debug/misses`
lists the last misses.

Both texts are shown to the sender of the request only. Under one salt all prompts are of one API key
(`separate_by_owner`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from adapters.http.answer.job_stream import FinishedChoice

MAX_MISSES = 64  # misses that are kept for each API key, 1 KiB each
MAX_OWNERS = 256  # keys with misses; the oldest key is dropped


def describe_miss(ended: FinishedChoice) -> dict[str, Any] | None:
    """Return `rekindle.prefix_cache.miss`; None if nothing was missed."""
    closed = ended.outcome
    explained = ended.miss_explanation
    if explained is None:
        return {"reason": closed.report.miss} if closed.report.miss else None
    return {
        "reason": closed.report.miss or f"diverged_at:{explained.at}",
        "diverged_at": explained.at,
        "message": explained.message,
        "role": explained.role,
        "kept_in": explained.tier if explained.tier != "none" else "recent",
        "sent": explained.sent,
        "kept": explained.kept,
    }


@define(eq=False)
class MissLog:
    """The last misses of each API key."""

    _owned: dict[str, deque[Mapping[str, Any]]] = field(factory=dict)

    def record(self, owner: str, name: str, ended: FinishedChoice) -> None:
        """Record the miss of a choice, if it had one. name: the answer's id."""
        miss = describe_miss(ended)
        if miss is None:
            return
        report = ended.outcome.report
        at = round(time.time(), 3)
        counts = {"prompt_tokens": report.prompt_tokens, "restored_tokens": report.restored_tokens}
        if owner not in self._owned and len(self._owned) >= MAX_OWNERS:
            del self._owned[next(iter(self._owned))]
        self._owned.setdefault(owner, deque(maxlen=MAX_MISSES)).append({"id": name, "at": at, **counts, **miss})

    def list_misses(self, owner: str) -> list[Mapping[str, Any]]:
        """Return the misses of one API key, the newest first."""
        return [*self._owned.get(owner, ())][::-1]
