"""Why a prompt was not there: where it leaves the likest one that is kept, in words. A few are kept for /debug/misses.

Both texts are told to whoever sent the request only: under one salt all prompts are of one API key (`kept_apart`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from adapters.http.answer.job_stream import Ended

MOST = 64  # misses that are kept for each API key: of 1 KiB each
MOST_OWNERS = 256  # keys with any; the one that was heard of first goes


def told(ended: Ended) -> dict[str, Any] | None:
    """`rekindle.prefix_cache.miss`; None where nothing was missed."""
    closed, explained = ended.closed, ended.explained
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
    """The last misses, by whose they are."""

    _owned: dict[str, deque[Mapping[str, Any]]] = field(factory=dict)

    def note(self, owner: str, name: str, ended: Ended) -> None:
        """name: of the answer."""
        miss = told(ended)
        if miss is None:
            return
        report, at = ended.closed.report, round(time.time(), 3)
        counts = {"prompt_tokens": report.prompt_tokens, "restored_tokens": report.restored_tokens}
        if owner not in self._owned and len(self._owned) >= MOST_OWNERS:
            del self._owned[next(iter(self._owned))]
        self._owned.setdefault(owner, deque(maxlen=MOST)).append({"id": name, "at": at, **counts, **miss})

    def of(self, owner: str) -> list[Mapping[str, Any]]:
        """The newest first."""
        return [*self._owned.get(owner, ())][::-1]
