"""Holds whether the shared store can be used now, for all threads of a server. Decisions: `store_health.py`."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from attrs import define, field

from adapters.store.shared.garbage_policy import SILENT_S
from adapters.store.shared.store_health import StoreHealth, choose_pause, record_failure, record_refresh

log = logging.getLogger("rekindle.store")

STALE_S = SILENT_S / 2  # a server that has not refreshed for so long may have missed marks


def read_clock() -> float:
    """Return seconds that go on while the machine sleeps, so that a server that was suspended knows it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@define(eq=False)
class Availability:
    """The state of one store. Any thread may call it. clock: as `read_clock`."""

    lock: threading.RLock
    counts: Counter[str]
    clock: Callable[[], float] = read_clock
    _health: StoreHealth = field(factory=StoreHealth)
    _refreshed_s: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._refreshed_s = self.clock()

    @property
    def is_usable(self) -> bool:
        return self._health.is_usable and self.clock() - self._refreshed_s < STALE_S

    @property
    def trouble(self) -> str:
        """The reason why the store is not used, in one line; empty while it is."""
        if self.is_usable:
            return ""
        return self._health.trouble or f"the store was not listed for {self.clock() - self._refreshed_s:.0f} s"

    def report_failure(self, why: str) -> None:
        """Take the store away, and log it once."""
        with self.lock:
            was_usable = self._health.is_usable
            self._health = record_failure(self._health, self.clock(), why)
            self.counts["outages"] += was_usable
        if was_usable:
            log.warning("the shared tier is not used for now, requests are still answered: %s", why)

    def accept_refresh(self) -> None:
        """Take the store back after a refresh that worked."""
        with self.lock:
            was_usable = self.is_usable
            self._health = record_refresh(self._health)
            self._refreshed_s = self.clock()
        if not was_usable:
            log.info("the shared tier is used again")

    def choose_pause(self, refresh_took_s: float) -> float:
        """Return the seconds until the next refresh begins."""
        return choose_pause(self._health, self.clock(), refresh_took_s)

    def end(self, why: str) -> None:
        """Take the store away for good."""
        with self.lock:
            self._health = StoreHealth(why, 1, self.clock(), float("inf"))
