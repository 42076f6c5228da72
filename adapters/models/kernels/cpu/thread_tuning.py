"""The thread count of narrow steps: of the two that products were proven for, the one that was quicker lately.

Bits are the same on both, so time may decide. On an idle machine two threads read weights nearly twice as fast as
one. Beside other processes a step on both may wait for the thread that the system does not run, and take several
times as long as on one. The better count changes while a server runs, so the other one is tried again and again, ever
more seldom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch
from attrs import define, field

T = TypeVar("T")

_TRIED = 3  # steps in a row, compared with as many before them; the median ignores one that was interrupted
_SOON = 16  # steps until the other count is tried again, at first
_SELDOM = 512  # steps until the other count is tried again, at last


@define(eq=False)
class ThreadTuning:
    """The choice for steps of one kind. current: threads that they run on. other: the count that is tried now and
    then.
    """

    current: int
    other: int
    _times: list[float] = field(init=False, factory=list)  # seconds of the latest steps
    _tried: list[float] = field(init=False, factory=list)
    _apart: int = field(init=False, default=_SOON)
    _since: int = field(init=False, default=0)

    @property
    def threads(self) -> int:
        """Threads of the next step."""
        return self.other if self._since >= self._apart else self.current

    def run(self, body: Callable[[], T]) -> T:
        """Run a step on `threads` threads and record its time; torch's thread count is left as it was."""
        threads = self.threads
        usual = torch.get_num_threads()
        start = time.perf_counter()
        if threads != usual:
            torch.set_num_threads(threads)
        try:
            return body()
        finally:
            if threads != usual:
                torch.set_num_threads(usual)
            self.record(time.perf_counter() - start)

    def record(self, seconds: float) -> None:
        """Record the time of the step that `threads` was read for."""
        if self._since < self._apart:
            self._times = [*self._times[1 - _TRIED :], seconds]
            self._since += 1
            return
        self._tried.append(seconds)
        if len(self._tried) < _TRIED:
            return
        self._apart = min(2 * self._apart, _SELDOM)
        if median(self._tried) < median(self._times):
            self.current, self.other = self.other, self.current
            self._apart = _SOON
        self._times = []
        self._tried = []
        self._since = 0
