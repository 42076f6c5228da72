"""A virtual clock: what is to happen is put in at its time, and happens in that order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

from attrs import define, field


@define
class Clock:
    """Nanoseconds since the simulation's start. What is due at the same time happens in the order it was put in."""

    now: int = 0
    _due: list[tuple[int, int, Callable[[], None]]] = field(factory=list["tuple[int, int, Callable[[], None]]"])
    _count: int = 0

    def at(self, ns: int, action: Callable[[], None]) -> None:
        """A time that has passed means now."""
        self._count += 1
        heapq.heappush(self._due, (max(ns, self.now), self._count, action))

    @property
    def next(self) -> float:
        """When something is due; infinity if nothing is."""
        return self._due[0][0] if self._due else inf

    def step(self) -> bool:
        """The next thing. False if there is none."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        action()
        return True


@define
class Queue:
    """One thing after the other, each taking its time: a device's lane, a disk that is read, a thread that writes."""

    clock: Clock
    free: int = 0  # when it will be

    def enter(self, ns: int) -> int:
        """When work that takes so long, and enters now, will be done."""
        self.free = max(self.free, self.clock.now) + ns
        return self.free
