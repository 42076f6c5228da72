"""Limit how many bytes of large request bodies are in memory at a time, over all connections.

A body counts for the bytes that have arrived, not for the size that its head claims. It counts from its first piece
until the request has been made of it. Where the budget is used up, the server stops reading the connection, so the
client waits for its turn. Two rules keep the queue moving:
* One body may always exceed the budget, so bodies that have all arrived by half never wait for each other.
* While any body waits, a body that arrives too slowly to be worth its room is given up.

The arithmetic: the budget is `BUDGETED_BODIES` bodies of the largest size, and one body may exceed it. That is 160 MiB
at the default `--max-body` of 32 MiB. The first `FREE_BYTES` of each body are not counted, so ordinary requests never
wait here. Those are 128 MiB if each of the 2,048 connections that may be sending a body (`client_waits.py`) has sent as
much. A connection that is not read has at most 0.4 MiB in asyncio and h11, and at most `MAX_WAITING` of them wait: 100
MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from attrs import define, field

from adapters.http.wire.errors import ApiError, unavailable

BUDGETED_BODIES = 4  # bodies of the largest size
FREE_BYTES = 1 << 16
PIECE = 1 << 18  # bytes that must arrive ...
PIECE_TIMEOUT_S = 1.0  # ... within this time, while other bodies wait
MAX_WAITING = 256  # bodies that may wait
MAX_WAIT_S = 10.0  # seconds that a body may wait in all
STALL_CHECK_S = 0.1  # seconds between two checks for stalled bodies
CLOSE_HEADERS = {"connection": "close"}  # the rest of the body is not read


@define(eq=False)
class IncomingBody:
    """One body: how much of it has arrived, and what it takes of the budget.

    piece_time: when its last whole piece was there, or when it began. scope: cancelled when the time for the body is
    over. size: bytes that have arrived. budgeted: those of them that count. piece_size: its size at `piece_time`.
    waited_s: seconds that it has waited for room. admission: set when a waiting body may go on.
    """

    piece_time: float
    scope: anyio.CancelScope
    size: int = 0
    budgeted: int = 0
    piece_size: int = 0
    waited_s: float = 0
    admission: anyio.Event | None = None
    is_stalled: bool = False

    def count_unbudgeted(self) -> int:
        """Return how many arrived bytes still have to be charged to the budget."""
        return max(0, self.size - FREE_BYTES) - self.budgeted


@define(eq=False)
class BodyBudget:
    """The bytes that all large bodies may take together.

    limit: in bytes. retry_after_s: the delay that a client gets which found no room.
    """

    limit: int
    retry_after_s: int = 1
    used: int = 0
    _receiving: set[IncomingBody] = field(factory=set)
    waiting_bodies: deque[IncomingBody] = field(factory=deque)
    _exempt: IncomingBody | None = None  # the one body that may exceed the budget

    @contextmanager
    def open_body(self, timeout_s: float) -> Iterator[IncomingBody]:
        """Account for one body for as long as the block runs. timeout_s: for its arrival, without the time that it
        waits for room.
        """
        now = anyio.current_time()
        body = IncomingBody(now, anyio.CancelScope(deadline=now + timeout_s))
        try:
            yield body
        finally:
            self._receiving.discard(body)
            self.used -= body.budgeted
            if self._exempt is body:
                self._exempt = None
            self._admit_waiting()

    async def grow(self, body: IncomingBody, size: int) -> None:
        """Account for `size` bytes more that have arrived, and wait in turn if there is no room for them. Raises
        ApiError 503 if there is no room in time.
        """
        body.size += size
        if body.size - body.piece_size >= PIECE:
            body.piece_size = body.size
            body.piece_time = anyio.current_time()
        if body.count_unbudgeted() <= 0:
            return
        self._receiving.add(body)
        if body is self._exempt or (not self.waiting_bodies and self._fits(body)):
            self._charge(body)
            return
        if len(self.waiting_bodies) >= MAX_WAITING:
            raise self._make_error()
        body.admission = admitted = anyio.Event()
        self.waiting_bodies.append(body)
        self._admit_waiting()
        if not admitted.is_set():
            await self._wait(body, admitted)

    def finish(self, body: IncomingBody) -> None:
        """Note that the body has arrived as a whole, so it can no longer stall."""
        self._receiving.discard(body)

    async def _wait(self, body: IncomingBody, admitted: anyio.Event) -> None:
        begun = anyio.current_time()
        until = begun + MAX_WAIT_S - body.waited_s
        if not body.waited_s:
            body.scope.deadline += MAX_WAIT_S
        try:
            while not admitted.is_set() and anyio.current_time() < until:
                if self.waiting_bodies[0] is body:
                    self._cancel_stalled()
                with anyio.move_on_after(STALL_CHECK_S):
                    await admitted.wait()
        finally:
            body.piece_time = anyio.current_time()
            body.waited_s += body.piece_time - begun
            if not admitted.is_set():
                self.waiting_bodies.remove(body)
                body.admission = None
        if not admitted.is_set():
            raise self._make_error()

    def _make_error(self) -> ApiError:
        error = unavailable("Too many large bodies at a time. Try again in a moment.", self.retry_after_s)
        return error.add_headers(CLOSE_HEADERS)

    def _fits(self, body: IncomingBody) -> bool:
        return self.used + body.count_unbudgeted() <= self.limit

    def _charge(self, body: IncomingBody) -> None:
        self.used += body.count_unbudgeted()
        body.budgeted += body.count_unbudgeted()
        if body.admission is not None:
            body.admission.set()
            body.admission = None

    def _admit_waiting(self) -> None:
        """Let the first waiting bodies go on: those that fit, and one that exceeds the budget."""
        while self.waiting_bodies and (self._fits(self.waiting_bodies[0]) or self._exempt is None):
            body = self.waiting_bodies.popleft()
            if not self._fits(body):
                self._exempt = body
            self._charge(body)

    def _cancel_stalled(self) -> None:
        """Give up the bodies that arrive too slowly while others wait."""
        late = anyio.current_time() - PIECE_TIMEOUT_S
        for body in self._receiving:
            if body.admission is None and body.piece_time < late:
                body.is_stalled = True
                body.scope.cancel()


def make_timeout_error(body: IncomingBody, timeout_s: float) -> ApiError:
    """Return the error for a body that did not arrive in time, or too slowly while others waited."""
    message = f"The body did not arrive within {timeout_s:g} s."
    if body.is_stalled:
        least = int(PIECE / PIECE_TIMEOUT_S)
        message = f"The body came too slowly, with less than {least} bytes a second, while others waited for room."
    return ApiError(408, message, code="body_timeout", headers=CLOSE_HEADERS)
