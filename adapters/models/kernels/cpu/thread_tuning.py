"""On how many threads narrow steps run: of the two numbers that products were proven for, whichever was quicker lately.

Bits are the same on both, so time may decide. Where nothing else runs, two threads read weights nearly twice as fast as
one; beside other processes, a step on both may wait for the one that the system does not run, and take several times as
long as on one. Which it is changes while a server runs, so it is tried again and again, ever more seldom.
"""

from __future__ import annotations

from statistics import median

from attrs import define, field

_TRIED = 3  # steps in a row, against as many before them: the median of so few does not see one that was interrupted
_SOON, _SELDOM = 16, 512  # steps until the other number is tried again, at first and at last


@define(eq=False)
class ThreadTuning:
    """Of steps of one kind. current: threads that they run on; other: the number that is tried now and then."""

    current: int
    other: int
    _times: list[float] = field(init=False, factory=list)  # of the latest steps
    _tried: list[float] = field(init=False, factory=list)
    _apart: int = field(init=False, default=_SOON)
    _since: int = field(init=False, default=0)

    @property
    def threads(self) -> int:
        """Of the next step."""
        return self.other if self._since >= self._apart else self.current

    def took(self, seconds: float) -> None:
        """The step that `threads` was asked for."""
        if self._since < self._apart:
            self._times = [*self._times[1 - _TRIED :], seconds]
            self._since += 1
            return
        self._tried.append(seconds)
        if len(self._tried) < _TRIED:
            return
        self._apart = min(2 * self._apart, _SELDOM)
        if median(self._tried) < median(self._times):
            self.current, self.other, self._apart = self.other, self.current, _SOON
        self._times, self._tried, self._since = [], [], 0
