"""Record for each open connection whether the server waits for its client, and find the one that makes room for others.

The server waits for a client that has to send a head or a body, read an answer, or close its connection. Waiting costs
the client nothing, so anybody could fill a server that may not close such connections. A connection whose request is
being answered waits for the server, and is never closed for another one.

The rule: the server looks at the kind of wait that most connections are in, and closes the oldest of these connections.
So clients that upload bodies displace each other. They displace neither the idle connections of a client library nor
clients that send their heads at once. The age counts from the beginning of the wait, or from the last `PROGRESS_BYTES`
that the client sent or read. So an upload that makes progress is younger than one that stands still.

Bodies take memory, so at most `MOST_BODIES` connections may be sending one at a time. Each wait also has a limit in
seconds, whether or not there is room: see `docs/RELIABILITY.md`.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

from attrs import define, field

PROGRESS_BYTES = 1 << 16  # bytes of a body or an answer that make the wait of its connection young again
MOST_BODIES = 2048  # a body that stops after 64 KiB takes 160 KiB of memory: 320 MiB for all

C = TypeVar("C")


class ClientWait(Enum):
    """The action of its client that a connection waits for."""

    HEAD = "head"  # send a request's head, or the rest of one
    REQUEST = "request"  # send a further request on a connection that is kept alive
    BODY = "body"  # send the rest of a body that a handler waits for
    READING = "reading"  # read what the server has written
    CLOSING = "closing"  # send the rest of a body that no handler reads, or close


@define(eq=False)
class ConnectionWaits(Generic[C]):
    """All open connections by the wait that they are in. Those of each kind are ordered by age, the oldest first."""

    _waits: dict[C, ClientWait | None] = field(factory=dict)
    _connections_by_wait: dict[ClientWait, dict[C, float]] = field(factory=lambda: {wait: {} for wait in ClientWait})

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, connection: C, wait: ClientWait, now: float) -> None:
        """Add a connection that was opened and is in this wait."""
        self._waits[connection] = wait
        self._connections_by_wait[wait][connection] = now

    def record(self, connection: C, wait: ClientWait | None, now: float) -> None:
        """Set the wait that an open connection is in from now on; None: the client waits for the server. Recording the
        same wait again does not change its age.
        """
        before = self._waits.get(connection)
        if before is wait or connection not in self._waits:
            return
        self._waits[connection] = wait
        if before is not None:
            del self._connections_by_wait[before][connection]
        if wait is not None:
            self._connections_by_wait[wait][connection] = now

    def renew(self, connection: C, now: float) -> None:
        """Make a wait as young as a new one, because the client has made progress."""
        if (wait := self._waits.get(connection)) is not None:
            del self._connections_by_wait[wait][connection]
            self._connections_by_wait[wait][connection] = now

    def remove(self, connection: C) -> None:
        """Remove a connection that was closed."""
        if (wait := self._waits.pop(connection, None)) is not None:
            del self._connections_by_wait[wait][connection]

    def is_open(self, connection: C) -> bool:
        """Return whether the connection is open."""
        return connection in self._waits

    def find_excess(self, wait: ClientWait, most: int) -> C | None:
        """Return the oldest connection in this wait, if more than `most` are."""
        connections = self._connections_by_wait[wait]
        return next(iter(connections)) if len(connections) > most else None

    def find_oldest(self) -> tuple[C, float] | None:
        """Return the connection that is closed first, and when its wait began. None: every connection is being
        answered.
        """
        fullest = max(self._connections_by_wait.values(), key=len)
        return next(iter(fullest.items()), None)
