"""Takes connections from a listening socket, as many as there is room for.

asyncio's own server has no limit, and where no file descriptor is left it logs a traceback for each that waits. Here
* some descriptors are left for the files that the rest of the process opens;
* a newcomer that finds no room takes the place of the connection that has waited longest for a request of its client;
* where none waits it is told so, and where there is no descriptor at all it stays in the kernel's queue for a moment;
* the log has one line a minute about it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import resource
import socket
from collections import deque
from collections.abc import Callable, Collection

from attrs import define, field

from adapters.http.connection import Protocol

log = logging.getLogger("rekindle.http")
SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LEAST_SPARE, MOST_SPARE = 4, 64  # descriptors left to others: an eighth of all within these
UNTOUCHED_S = 0.25  # a connection that has waited less is not closed for another
PAUSE_S = 0.05
REFUSED = 4  # refused ones that stay open until as many follow: closed at once they might be reset before they read
QUIET_S = 60.0  # between two lines in the log
BUSY_ERROR = {"message": "Too many connections.", "type": "unavailable_error", "param": None, "code": "unavailable"}
BUSY_BODY = json.dumps({"error": BUSY_ERROR}).encode()
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BUSY_BODY), BUSY_BODY)
)


@define(eq=False)
class Acceptor:
    """Runs from `start` to `close`. connections: those that are open now; most: that may be."""

    listener: socket.socket
    make: Callable[[], Protocol]
    connections: Collection[Protocol]
    most: int
    _task: asyncio.Task[None] | None = None
    _refused: deque[socket.socket] = field(factory=deque)
    _told: int = 0
    _silent_until: float = 0

    def start(self) -> None:
        self.listener.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.listener.close()
        while self._refused:
            self._refused.popleft().close()

    async def wait_closed(self) -> None:
        """Connections are ended by the server."""

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self.listener)
            except OSError as error:
                if error.errno in SHORT and not self._make_room():
                    self._tell("no file descriptor is free for connections")
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                if await self._room_for(connection):
                    await loop.connect_accepted_socket(self.make, connection)
                else:
                    self._refuse(connection)
            except asyncio.CancelledError:
                connection.close()
                raise
            except OSError:  # its client has gone meanwhile
                connection.close()
            except Exception:
                log.exception("a bug in taking a connection")
                connection.close()

    async def _room_for(self, connection: socket.socket) -> bool:
        """By waiting a little and closing another, if it must be. False: every other one is being answered."""
        while len(self.connections) >= self.most or connection.fileno() >= allowed():
            if self._make_room():
                return True
            if not any(other.waiting for other in self.connections):
                return False
            await asyncio.sleep(PAUSE_S)
        return True

    def _make_room(self) -> bool:
        before = asyncio.get_running_loop().time() - UNTOUCHED_S
        idle = [other for other in self.connections if other.waiting and other.since < before]
        if not idle:
            return False
        min(idle, key=lambda other: other.since).wire.abort()
        self._tell("there is no room for all connections: those that wait longest for their client are closed")
        return True

    def _refuse(self, connection: socket.socket) -> None:
        self._tell("there is no room for all connections: every one is being answered")
        if len(self._refused) == REFUSED:
            self._refused.popleft().close()
        self._refused.append(connection)
        connection.send(BUSY)  # far less than a new socket's buffer
        connection.shutdown(socket.SHUT_WR)

    def _tell(self, what: str) -> None:
        self._told += 1
        now = asyncio.get_running_loop().time()
        if now >= self._silent_until:
            log.warning("%s (%d times since this was last said)", what, self._told)
            self._told, self._silent_until = 0, now + QUIET_S


def allowed() -> float:
    """Descriptors are given out from the lowest number on: one below this leaves some to others."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - min(MOST_SPARE, max(LEAST_SPARE, limit // 8))
