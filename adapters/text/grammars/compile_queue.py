"""The queue of grammars that wait to be compiled. One grammar is compiled at a time, and API keys take turns.

Compiling may take two seconds of a core, so one client with many costly grammars could block all others. Two rules
prevent this. The keys take turns, however many grammars each has in the queue. One key may have at most
MAX_WAITING_PER_OWNER grammars in the queue. A key that has none in it is always admitted: there are no more keys than
the server was started with. Without API keys all clients are one caller, who may use the whole queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import define, field

MAX_WAITING = 32  # about a minute, if each takes the two seconds that it may
MAX_WAITING_PER_OWNER = MAX_WAITING // 4  # of one API key


class TooManyGrammars(Exception):
    """Grammars arrive faster than they can be compiled."""


@define(eq=False)
class CompileQueue:
    """Used on the event loop only."""

    _busy: bool = field(default=False, init=False)
    _waiting: OrderedDict[str, deque[anyio.Event]] = field(factory=OrderedDict, init=False)

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def wait_turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the turn, and keep it inside the context. Raises TooManyGrammars.

        owner: a name for the API key, or the empty text without keys.
        """
        if self._busy:
            await self._wait(owner)
        self._busy = True
        try:
            yield
        finally:
            self._start_next()

    async def _wait(self, owner: str) -> None:
        """Wait in the queue until it is the turn of this request. Raises TooManyGrammars."""
        own = len(self._waiting.get(owner, ()))
        if own >= (MAX_WAITING_PER_OWNER if owner else MAX_WAITING) or (own and self.waiting_count >= MAX_WAITING):
            raise TooManyGrammars
        called = anyio.Event()
        self._waiting.setdefault(owner, deque()).append(called)
        try:
            await called.wait()
        except BaseException:
            if called.is_set():  # called and cancelled at the same time, so the turn goes to another
                self._start_next()
            else:
                self._remove_waiter(owner, called)
            raise

    def _remove_waiter(self, owner: str, called: anyio.Event) -> None:
        self._waiting[owner].remove(called)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _start_next(self) -> None:
        """Give the turn to the key whose last turn is the longest ago. The queue stays busy for it."""
        if not self._waiting:
            self._busy = False
            return
        owner, line = self._waiting.popitem(last=False)
        line.popleft().set()
        if line:
            self._waiting[owner] = line
