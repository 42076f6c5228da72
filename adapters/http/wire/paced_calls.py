"""Make calls one by one, each in a turn of the event loop of its own."""

from __future__ import annotations

from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class PacedCalls:
    """Makes calls in the order in which they were put in, one in each turn of the event loop."""

    _calls: deque[Callable[[], None]] = field(factory=deque)

    def put(self, call: Callable[[], None]) -> None:
        """Add a call to the end of the line."""
        self._calls.append(call)
        if len(self._calls) == 1:
            get_running_loop().call_soon(self._make_next_call)

    def _make_next_call(self) -> None:
        try:
            self._calls[0]()
        finally:
            self._calls.popleft()
            if self._calls:
                get_running_loop().call_soon(self._make_next_call)
