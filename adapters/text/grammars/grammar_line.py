"""The line of grammars that wait to be compiled: one is compiled at a time, and every API key has a share of the line.

Compiling may take two seconds of a core, so who sends many costly grammars could keep everybody else waiting. So the
keys take turns, whoever of them has more waiting, and one key may have at most `SHARE` in the line. A key that has
nothing in it is always let in: there are no more keys than the server was started with. Without keys everybody is the
same caller, who may use the whole line.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import define, field

MOST_WAITING = 32  # a minute, if each takes all it may
SHARE = MOST_WAITING // 4  # of one API key


class TooManyGrammars(Exception):
    """They come faster than they can be compiled."""


@define(eq=False)
class GrammarLine:
    """Used on the event loop only."""

    _busy: bool = field(default=False, init=False)
    _waiting: OrderedDict[str, deque[anyio.Event]] = field(factory=OrderedDict, init=False)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn and have it. owner: a name for the API key; empty without keys. Raises TooManyGrammars."""
        if self._busy:
            await self._wait(owner)
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        own = len(self._waiting.get(owner, ()))
        if own >= (SHARE if owner else MOST_WAITING) or (own and self.waiting >= MOST_WAITING):
            raise TooManyGrammars
        called = anyio.Event()
        self._waiting.setdefault(owner, deque()).append(called)
        try:
            await called.wait()
        except BaseException:
            if called.is_set():  # called and cancelled at once: the turn is another's
                self._pass_on()
            else:
                self._leave(owner, called)
            raise

    def _leave(self, owner: str, called: anyio.Event) -> None:
        self._waiting[owner].remove(called)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _pass_on(self) -> None:
        """To the key whose last turn is the longest ago. The server stays busy for whoever is called."""
        if not self._waiting:
            self._busy = False
            return
        owner, line = self._waiting.popitem(last=False)
        line.popleft().set()
        if line:
            self._waiting[owner] = line
