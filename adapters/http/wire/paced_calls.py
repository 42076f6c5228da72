"""Calls that are made one by one, each in a turn of the event loop of its own.

Connections share one `PacedCalls` for the beginnings of requests. If many come at once, they do not all begin in one
turn. That would hold up every answer for as long as it takes to read them: 10 ms each on a server with 64 streams.
"""

from __future__ import annotations

from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class PacedCalls:
    """Makes calls in the order in which they were put in, one in each turn of the event loop, on its thread.

    If a call raises an exception, the event loop handles it, and the next calls are made all the same.
    """

    _calls: deque[Callable[[], None]] = field(factory=deque)

    def put(self, call: Callable[[], None]) -> None:
        """Add a call to the end of the queue. The first one is made in the next turn of the loop, not at once."""
        self._calls.append(call)
        if len(self._calls) == 1:
            get_running_loop().call_soon(self._make_next_call)

    async def wait_for_turn(self) -> None:
        """Wait for a turn behind the calls that were put in before."""
        turn = get_running_loop().create_future()

        def begin() -> None:
            if not turn.done():
                turn.set_result(None)

        self.put(begin)
        await turn

    def _make_next_call(self) -> None:
        try:
            self._calls[0]()
        finally:
            self._calls.popleft()
            if self._calls:
                get_running_loop().call_soon(self._make_next_call)
