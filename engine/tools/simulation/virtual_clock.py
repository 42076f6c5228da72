"""A virtual clock. Actions are scheduled at times, and run in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

from attrs import define, field


@define
class Clock:
    """Nanoseconds since the simulation's start.

    Actions of the same time run in the order in which they were scheduled.
    """

    now: int = 0
    _due: list[tuple[int, int, Callable[[], None]]] = field(factory=list["tuple[int, int, Callable[[], None]]"])
    _count: int = 0

    def at(self, ns: int, action: Callable[[], None]) -> None:
        """Schedule an action. A time in the past means now."""
        self._count += 1
        heapq.heappush(self._due, (max(ns, self.now), self._count, action))

    @property
    def next(self) -> float:
        """The time of the next action; infinity if there is none."""
        return self._due[0][0] if self._due else inf

    def step(self) -> bool:
        """Run the next action. Return False if there is none."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        action()
        return True


@define
class SerialServer:
    """Work that is done one piece after the other, as on a device's lane, by a disk's reader or by its writer."""

    clock: Clock
    free: int = 0  # time when all work is done

    def enter(self, ns: int) -> int:
        """Return the time when work that takes `ns` and is queued now will be done."""
        self.free = max(self.free, self.clock.now) + ns
        return self.free
