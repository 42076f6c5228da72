"""One HTTP/1.1 connection to the server of a replica, and the pool of those that are idle. `relay.py` uses both.

Problem. A request passes an ingress twice, and what the ingress does is added to its time. A general HTTP client took a
sixth of that: sessions, redirects, cookies, timers, and a task for each body.

Idea. Both ends are ours. The server answers each request with a length or in chunks, never compressed, and never
redirects. So `HttpConnection` is enough.

Invariants, besides those of `HttpConnection`:
* A connection returns to the pool when its answer is complete and was read, and only then.
* A reader that is slower than the replica stops the connection from being read (MOST_UNREAD).

All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from attrs import define, field, frozen

from engine.fleet.ingress.held_answer import RawHeaders, ReplicaLost
from engine.settings.http_connection import HttpConnection

CONNECT_S: Final = 5.0
IDLE_S: Final = 60.0  # less than the 75 s after which a replica closes an idle connection
MOST_UNREAD: Final = 1 << 18  # bytes of an answer that wait for their reader; then the connection is not read
WITHOUT_BODY: Final = frozenset(
    {"GET", "HEAD", "DELETE", "OPTIONS"}
)  # methods that need no length if they have no body
Address: TypeAlias = tuple[str, int]


@frozen
class ReplicaRequest:
    """A request for one replica. target: path and query as they are sent. headers: without those of one connection."""

    method: str
    target: str
    headers: RawHeaders
    body: bytes = b""

    def encode(self, host: str) -> list[bytes]:
        """Return what is sent: the head, and the body if there is one. host: for a request that names none.

        Raises ValueError if a header would begin a line of its own.
        """
        lines = [f"{self.method} {self.target} HTTP/1.1".encode("latin-1")]
        lines += [name + b": " + value for name, value in self.headers]
        if all(name != b"host" for name, _ in self.headers):
            lines.append(b"host: " + host.encode())
        if self.body or self.method not in WITHOUT_BODY:
            lines.append(b"content-length: %d" % len(self.body))
        head = b"\r\n".join((*lines, b"", b""))
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
            raise ValueError("a line of the request's head has a line break")
        return [head, self.body] if self.body else [head]


@define(eq=False)
class ReplicaConnection(HttpConnection):
    """One connection to a replica."""

    idle_since: float = field(default=0.0, init=False)
    _parts: deque[bytes] = field(factory=deque, init=False)
    _unread: int = field(default=0, init=False)

    async def send(self, request: ReplicaRequest, host: str) -> None:
        """Send a request, and wait for the head of its answer. Raises ReplicaLost or ValueError."""
        self.begin_request(request.encode(host), is_head_only=request.method == "HEAD")
        await self.wait_for_head()

    async def read_parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the answer's body as they arrive. Raises ReplicaLost if it is cut short."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._count_unread(-len(part))
                yield part
            if self.is_complete:
                return
            await self.wait()

    def take_part(self, part: bytes) -> None:
        self._parts.append(part)
        self._count_unread(len(part))

    @property
    def has_unread_parts(self) -> bool:
        return bool(self._parts)

    def make_error(self, reason: str) -> ReplicaLost:
        return ReplicaLost(reason)

    def _count_unread(self, change: int) -> None:
        """Count bytes that wait for the reader. The connection is not read while there are too many."""
        was_full = self._unread > MOST_UNREAD
        self._unread += change
        is_full = self._unread > MOST_UNREAD
        if is_full != was_full and not self._transport.is_closing():
            (self._transport.pause_reading if is_full else self._transport.resume_reading)()


@lru_cache(1 << 12)
def parse_address(url: str) -> Address:
    """Return the host and the port of a server's URL."""
    parsed = urlsplit(url)
    assert parsed.hostname is not None
    assert parsed.port is not None
    return parsed.hostname, parsed.port


@define(eq=False)
class ConnectionPool:
    """The connections of an ingress to its replicas. idle: by address, those that were used last at the end."""

    idle: dict[Address, list[ReplicaConnection]] = field(factory=dict, init=False)

    @contextmanager
    def lend(self, connection: ReplicaConnection, address: Address) -> Iterator[None]:
        """Take a connection back when the block ends, if its answer was read to its end. Otherwise close it."""
        try:
            yield
        finally:
            if connection.can_be_reused:
                connection.idle_since = asyncio.get_running_loop().time()
                self.idle.setdefault(address, []).append(connection)
            else:
                connection.close()

    async def open(self, address: Address) -> ReplicaConnection:
        """Return an idle connection, or a new one. Raises ReplicaLost if none can be made."""
        loop = asyncio.get_running_loop()
        if (connection := self._find_idle(address, loop.time() - IDLE_S)) is not None:
            return connection
        self._forget_lost()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(ReplicaConnection, *address)
        except (TimeoutError, OSError) as error:
            raise ReplicaLost(f"{type(error).__name__}: {error}") from error
        return connection

    def close(self) -> None:
        """Close all idle connections."""
        for connections in self.idle.values():
            for connection in connections:
                connection.close()
        self.idle.clear()

    def _forget_lost(self) -> None:
        """Forget the connections that have ended meanwhile. Those of a replica that is gone are never asked for."""
        for address in list(self.idle):
            kept = [connection for connection in self.idle[address] if not connection.is_lost]
            if kept:
                self.idle[address] = kept
            else:
                del self.idle[address]

    def _find_idle(self, address: Address, oldest: float) -> ReplicaConnection | None:
        """Return the idle connection that was used last. Those that are lost or older are closed."""
        kept = self.idle.get(address, [])
        while kept:
            connection = kept.pop()
            if not connection.is_lost and connection.idle_since >= oldest:
                return connection
            connection.close()
        self.idle.pop(address, None)
        return None
