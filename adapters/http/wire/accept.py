"""Accept connections from a listening socket, as many as there is room for. `server.py` runs this on the event loop.

asyncio's own server has no limit of connections. Where no file descriptor is left, it logs a traceback for each
connection that waits. It also takes a client that has already hung up through the whole life of a connection. This
acceptor differs in these points:
* It leaves some descriptors for the files that the rest of the process opens.
* It takes up to `BATCH` connections at a time, so a client behind thousands of others waits for few turns of the loop.
  A connection whose client has hung up costs two system calls.
* A new connection that finds no room takes the place of the one that `ConnectionWaits.find_oldest` names: one whose
  client has to act next. The new one is refused only where every connection is being answered.
* Where there is no descriptor at all, new connections stay in the kernel's queue for a moment.
* The log has one line a minute about a lack of room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
from collections import deque
from collections.abc import Callable, Iterator

from attrs import define, field

from adapters.http.wire.client_waits import ConnectionWaits
from adapters.http.wire.connection import LimitedProtocol
from adapters.http.wire.plain_error import encode_error

log = logging.getLogger("rekindle.http")
OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# Descriptors left to the rest of the process: an eighth of all, within these bounds.
LEAST_SPARE = 4
MOST_SPARE = 64
BATCH = 32  # connections accepted together: each takes some 0.1 ms, its request 0.5 ms or more
LEAST_AGE_S = 0.05  # a connection is not closed before its client could act: 80,000 new ones a second in 4,000 places
# The pause where no descriptor is free, or every connection is too young to be closed. No event tells when that ends:
# other parts of this process, and other processes, open and close files as well, and the listener stays readable.
PAUSE_S = 0.02
# Refused connections that stay open until as many follow. Closed at once, they might be reset before they read.
MAX_REFUSED_OPEN = 4
QUIET_S = 60.0  # seconds between two lines in the log
BUSY = encode_error(
    "503 Service Unavailable", "unavailable_error", "unavailable", "Too many connections.", "retry-after: 1"
)


@define(eq=False)
class Acceptor:
    """Accepts connections from `start` to `close`.

    waits: the connections that are open now. max_connections: how many may be open.
    """

    listener: socket.socket
    make_protocol: Callable[[], LimitedProtocol]
    waits: ConnectionWaits[LimitedProtocol]
    max_connections: int
    _task: asyncio.Task[None] | None = None
    _refused: deque[socket.socket] = field(factory=deque)
    _warning_count: int = 0
    _silent_until: float = 0

    def start(self) -> None:
        """Begin to accept connections, in a task of the running event loop."""
        self.listener.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Stop accepting, and close the socket and the connections that were refused."""
        if self._task is not None:
            self._task.cancel()
        self.listener.close()
        while self._refused:
            self._refused.popleft().close()

    async def wait_closed(self) -> None:
        """Do nothing: uvicorn awaits this, but the server itself ends the connections."""

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                first, _ = await loop.sock_accept(self.listener)
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS and not self._make_room():
                    self._warn("no file descriptor is free for connections")
                await asyncio.sleep(PAUSE_S)
                continue
            waiting = deque([first, *self._accept_waiting()])
            taken = list[socket.socket]()
            try:
                while waiting:
                    await self._take_first(waiting, taken)
                await self._connect_all(taken)
            except BaseException:
                for connection in (*waiting, *taken):
                    connection.close()
                raise

    def _accept_waiting(self) -> Iterator[socket.socket]:
        """Yield the connections that wait behind the first one, without waiting for any."""
        for _ in range(BATCH - 1):
            try:
                connection, _ = self.listener.accept()
            except OSError:  # none waits, or there is no descriptor: the next turn finds out which
                return
            connection.setblocking(False)
            yield connection

    async def _take_first(self, waiting: deque[socket.socket], taken: list[socket.socket]) -> None:
        """Accept the first connection that waits, or refuse it. Leave it where it is if it has to wait for others."""
        connection = waiting[0]
        if has_hung_up(connection):
            waiting.popleft().close()
        elif self._has_room(connection, len(taken)) or self._make_room():
            taken.append(waiting.popleft())
        elif taken:  # these are not among the waits yet, so none of them could make room
            await self._connect_all(taken)
        elif self.waits.find_oldest() is None:
            self._refuse(waiting.popleft())
        else:
            await asyncio.sleep(PAUSE_S)

    async def _connect_all(self, taken: list[socket.socket]) -> None:
        """Make protocols for all accepted connections together, as each of them takes a few turns of the loop."""
        await asyncio.gather(*map(self._connect, taken))
        taken.clear()
        await asyncio.sleep(0)  # connections that were closed for them are gone after this turn

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self.make_protocol, connection)
        except asyncio.CancelledError:
            connection.close()
            raise
        except OSError:  # its client has gone meanwhile
            connection.close()
        except Exception:
            log.exception("a bug in taking a connection")
            connection.close()

    def _has_room(self, connection: socket.socket, pending: int) -> bool:
        """Return whether one more connection may be open. pending: accepted connections that are not among the
        waits yet.
        """
        return len(self.waits) + pending < self.max_connections and connection.fileno() < descriptor_limit()

    def _make_room(self) -> bool:
        """Close the connection whose wait is the oldest. Return False if there is none, or if it is too young to be
        closed.
        """
        now = asyncio.get_running_loop().time()
        while (found := self.waits.find_oldest()) is not None:
            connection, since = found
            if since > now - LEAST_AGE_S:
                return False
            if connection.has_made_progress():
                self.waits.renew(connection, now)
                continue
            connection.evict()
            self._warn("there is no room for all connections: those that wait longest for their client are closed")
            return True
        return False

    def _refuse(self, connection: socket.socket) -> None:
        self._warn("there is no room for all connections: every one is being answered")
        if len(self._refused) == MAX_REFUSED_OPEN:
            self._refused.popleft().close()
        self._refused.append(connection)
        try:
            connection.send(BUSY)  # far less than a new socket's buffer
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # its client has gone meanwhile
            self._refused.pop().close()

    def _warn(self, reason: str) -> None:
        self._warning_count += 1
        now = asyncio.get_running_loop().time()
        if now >= self._silent_until:
            log.warning("%s (%d times since this was last said)", reason, self._warning_count)
            self._warning_count = 0
            self._silent_until = now + QUIET_S


def has_hung_up(connection: socket.socket) -> bool:
    """Return whether the client has closed the connection without sending anything."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def descriptor_limit() -> float:
    """Return the number below which a connection's descriptor leaves enough descriptors to the rest of the process. The
    system hands descriptors out from the lowest number on.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - min(MOST_SPARE, max(LEAST_SPARE, limit // 8))
