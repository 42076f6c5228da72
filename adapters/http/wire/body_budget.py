"""How much of large request bodies is held at a time, all connections together.

A body counts for what has come of it, not for what it claims, from its first piece until the request has been made of
it. Where there is no more room its connection is not read, so its client waits, in turn. One body may always go on
beyond the limit, so bodies that are all half there never wait for each other; and while anybody waits, one that comes
too slowly to be worth its room loses it.

The arithmetic: `ROOM` bodies of the largest size and the one that goes on, 160 MiB at the default `--max-body` of 32.
The first `SMALL` bytes of each need no room, so that ordinary requests never wait here: 128 MiB, if each of the 2,048
connections that may owe a body (`debts.py`) has sent as much. What has come from a connection that is not read is 0.4
MiB at most, in asyncio and h11; at most `LINE` of them wait: 100 MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from attrs import define, field

from adapters.http.wire.errors import ApiError, unavailable

ROOM = 4  # of the largest bodies
SMALL = 1 << 16
PIECE = 1 << 18  # bytes that must come ...
STALL_S = 1.0  # ... within this, where others wait for the room
LINE = 256  # bodies that may wait
WAIT_S = 10.0  # that a body may wait, in all
LOOK_S = 0.1  # how often the first in the line looks for one that stalls
CLOSE = {"connection": "close"}  # what else comes of the body is not read


@define(eq=False)
class Body:
    """What has come of one body.

    size: bytes. counted: those of them that take room. mark, since: its size when its last whole piece was there, and
    when that was. waited: seconds, for room.
    """

    since: float
    scope: anyio.CancelScope
    size: int = 0
    counted: int = 0
    mark: int = 0
    waited: float = 0
    waits: anyio.Event | None = None
    stalled: bool = False

    def wants(self) -> int:
        return max(0, self.size - SMALL) - self.counted


@define(eq=False)
class Intake:
    """most: bytes. retry_after_s: what those are told who found no room."""

    most: int
    retry_after_s: int = 1
    held: int = 0
    _receiving: set[Body] = field(factory=set)
    line: deque[Body] = field(factory=deque)
    _beyond: Body | None = None  # the one that may go on where there is no room

    @contextmanager
    def body(self, timeout_s: float) -> Iterator[Body]:
        """Room for a body, for as long as the block takes. timeout_s: to receive it, without what it waits for room."""
        now = anyio.current_time()
        body = Body(now, anyio.CancelScope(deadline=now + timeout_s))
        try:
            yield body
        finally:
            self._receiving.discard(body)
            self.held -= body.counted
            if self._beyond is body:
                self._beyond = None
            self._admit()

    async def grow(self, body: Body, size: int) -> None:
        """So many bytes more have come. Waits for room, in turn. Raises ApiError 503 where there is none in time."""
        body.size += size
        if body.size - body.mark >= PIECE:
            body.mark, body.since = body.size, anyio.current_time()
        if body.wants() <= 0:
            return
        self._receiving.add(body)
        if body is self._beyond or (not self.line and self._fits(body)):
            self._take(body)
            return
        if len(self.line) >= LINE:
            raise self._no_room()
        body.waits = admitted = anyio.Event()
        self.line.append(body)
        self._admit()
        if not admitted.is_set():
            await self._wait(body, admitted)

    def arrived(self, body: Body) -> None:
        """It is there as a whole, so nobody waits for its client."""
        self._receiving.discard(body)

    async def _wait(self, body: Body, admitted: anyio.Event) -> None:
        begun = anyio.current_time()
        until = begun + WAIT_S - body.waited
        if not body.waited:
            body.scope.deadline += WAIT_S
        try:
            while not admitted.is_set() and anyio.current_time() < until:
                if self.line[0] is body:
                    self._turn_away()
                with anyio.move_on_after(LOOK_S):
                    await admitted.wait()
        finally:
            body.since = anyio.current_time()
            body.waited += body.since - begun
            if not admitted.is_set():
                self.line.remove(body)
                body.waits = None
        if not admitted.is_set():
            raise self._no_room()

    def _no_room(self) -> ApiError:
        error = unavailable("Too many large bodies at a time. Try again in a moment.", self.retry_after_s)
        error.headers = {**error.headers, **CLOSE}
        return error

    def _fits(self, body: Body) -> bool:
        return self.held + body.wants() <= self.most

    def _take(self, body: Body) -> None:
        self.held += body.wants()
        body.counted += body.wants()
        if body.waits is not None:
            body.waits.set()
            body.waits = None

    def _admit(self) -> None:
        """The first in the line go on: as far as there is room, and one beyond it."""
        while self.line and (self._fits(self.line[0]) or self._beyond is None):
            body = self.line.popleft()
            if not self._fits(body):
                self._beyond = body
            self._take(body)

    def _turn_away(self) -> None:
        """Whose client sends too slowly, while others wait."""
        late = anyio.current_time() - STALL_S
        for body in self._receiving:
            if body.waits is None and body.since < late:
                body.stalled = True
                body.scope.cancel()


def too_slow(body: Body, timeout_s: float) -> ApiError:
    message = f"The body did not arrive within {timeout_s:g} s."
    if body.stalled:
        least = int(PIECE / STALL_S)
        message = f"The body came too slowly, with less than {least} bytes a second, while others waited for room."
    return ApiError(408, message, code="body_timeout", headers=CLOSE)
