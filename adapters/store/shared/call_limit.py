"""A limit for a call on a thread that does one thing after another, each of which may hang.

The thread says when it begins to read (`begin`), and when it has read and what follows may take its time (`claim`). The
caller looks at the limit from time to time (`compute_time_left`). If nothing is left it gives up, and the thread learns
that when it comes back: then it changes nothing any more.
"""

from __future__ import annotations

import threading
import time
from math import inf

from attrs import define, field

from adapters.store.shared.object_client import StoreUnreachable
from adapters.store.shared.store_health import compute_limit

LOOKED_S = 1.0  # so often at least a caller looks


@define(eq=False)
class CallLimit:
    """A limit. limit_s: of what is being done. It counts from the start, so that a thread that never comes counts."""

    limit_s: float = field(factory=lambda: compute_limit(0))
    _end_s: float = field(init=False)
    _is_over: bool = False
    _lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self._end_s = time.monotonic() + self.limit_s

    def begin(self, size: int) -> None:
        """Give reading so many bytes its time. Raises StoreUnreachable if the caller has given up."""
        with self._lock:
            self._check()
            self.limit_s = compute_limit(size)
            self._end_s = time.monotonic() + self.limit_s

    def claim(self) -> None:
        """Let what was read count, and have no limit until `begin`. Raises StoreUnreachable as `begin` does."""
        with self._lock:
            self._check()
            self._end_s = inf

    def compute_time_left(self) -> float:
        """Return the seconds until the caller has to look again. 0: it is over, and what the thread does counts no
        more.
        """
        with self._lock:
            left_s = min(LOOKED_S, self._end_s - time.monotonic())
            self._is_over = self._is_over or left_s <= 0
            return 0.0 if self._is_over else left_s

    def _check(self) -> None:
        if self._is_over:
            raise StoreUnreachable("the caller has not waited for it")
