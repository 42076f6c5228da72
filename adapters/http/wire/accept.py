"""Takes connections from a listening socket, as many as there is room for. Runs inside the server's event loop.

asyncio's own server has no limit, and where no file descriptor is left it logs a traceback for each connection that
waits. It also takes a client that has hung up already through all of a connection's life. Here
* some descriptors are left for the files that the rest of the process opens;
* up to `BATCH` connections are taken at a time, so that a client behind thousands of others waits for few turns of the
  loop; those whose client has hung up cost two system calls;
* a newcomer that finds no room takes the place of the connection that `DebtLedger.oldest` names: one that owes
  something. Only where every connection is being answered is the newcomer refused;
* where there is no descriptor at all, newcomers stay in the kernel's queue for a moment;
* the log has one line a minute about it.
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

from adapters.http.wire.connection import Protocol, plain_error
from adapters.http.wire.connection_debts import DebtLedger

log = logging.getLogger("rekindle.http")
SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LEAST_SPARE, MOST_SPARE = 4, 64  # descriptors left to others: an eighth of all within these
BATCH = 32  # connections that are taken together: new ones take some 0.1 ms each, their requests 0.5 ms or more
LEAST_AGE_S = 0.05  # a connection is not closed before its client could act: 80,000 newcomers a second in 4,000 places
PAUSE_S = 0.02
REFUSED = 4  # refused ones that stay open until as many follow: closed at once they might be reset before they read
QUIET_S = 60.0  # between two lines in the log
BUSY = plain_error(
    "503 Service Unavailable", "unavailable_error", "unavailable", "Too many connections.", "retry-after: 1"
)


@define(eq=False)
class Acceptor:
    """Runs from `start` to `close`. ledger: the connections that are open now; most: that may be."""

    listener: socket.socket
    make: Callable[[], Protocol]
    ledger: DebtLedger[Protocol]
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
                first, _ = await loop.sock_accept(self.listener)
            except OSError as error:
                if error.errno in SHORT and not self._make_room():
                    self._tell("no file descriptor is free for connections")
                await asyncio.sleep(PAUSE_S)
                continue
            waiting, taken = deque([first, *self._further()]), list[socket.socket]()
            try:
                while waiting:
                    await self._take(waiting, taken)
                await self._connect_all(taken)
            except BaseException:
                for connection in (*waiting, *taken):
                    connection.close()
                raise

    def _further(self) -> Iterator[socket.socket]:
        """Those that wait behind the first one, without waiting for any."""
        for _ in range(BATCH - 1):
            try:
                connection, _ = self.listener.accept()
            except OSError:  # none waits, or there is no descriptor, which the next turn finds out
                return
            connection.setblocking(False)
            yield connection

    async def _take(self, waiting: deque[socket.socket], taken: list[socket.socket]) -> None:
        """Take the first that waits, or refuse it; where it has to wait for others, leave it where it is."""
        connection = waiting[0]
        if has_hung_up(connection):
            waiting.popleft().close()
        elif self._has_room(connection, len(taken)) or self._make_room():
            taken.append(waiting.popleft())
        elif taken:  # they are not in the ledger yet, so none of them could make room
            await self._connect_all(taken)
        elif self.ledger.oldest() is None:
            self._refuse(waiting.popleft())
        else:
            await asyncio.sleep(PAUSE_S)

    async def _connect_all(self, taken: list[socket.socket]) -> None:
        """Each takes a few turns of the loop, so all of them take these together."""
        await asyncio.gather(*map(self._connect, taken))
        taken.clear()
        await asyncio.sleep(0)  # what was closed for them has gone then

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self.make, connection)
        except asyncio.CancelledError:
            connection.close()
            raise
        except OSError:  # its client has gone meanwhile
            connection.close()
        except Exception:
            log.exception("a bug in taking a connection")
            connection.close()

    def _has_room(self, connection: socket.socket, before: int) -> bool:
        """before: connections that are taken and not in the ledger yet."""
        return len(self.ledger) + before < self.most and connection.fileno() < allowed()

    def _make_room(self) -> bool:
        """Close the connection that owes something and goes first. False: there is none, or it is too young."""
        now = asyncio.get_running_loop().time()
        while (found := self.ledger.oldest()) is not None:
            connection, since = found
            if since > now - LEAST_AGE_S:
                return False
            if connection.pays():
                self.ledger.renew(connection, now)
                continue
            connection.evict()
            self._tell("there is no room for all connections: those that wait longest for their client are closed")
            return True
        return False

    def _refuse(self, connection: socket.socket) -> None:
        self._tell("there is no room for all connections: every one is being answered")
        if len(self._refused) == REFUSED:
            self._refused.popleft().close()
        self._refused.append(connection)
        try:
            connection.send(BUSY)  # far less than a new socket's buffer
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # its client has gone meanwhile
            self._refused.pop().close()

    def _tell(self, what: str) -> None:
        self._told += 1
        now = asyncio.get_running_loop().time()
        if now >= self._silent_until:
            log.warning("%s (%d times since this was last said)", what, self._told)
            self._told, self._silent_until = 0, now + QUIET_S


def has_hung_up(connection: socket.socket) -> bool:
    """Has its client closed it, without a word?"""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def allowed() -> float:
    """Descriptors are given out from the lowest number on: one below this leaves some to others."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - min(MOST_SPARE, max(LEAST_SPARE, limit // 8))
