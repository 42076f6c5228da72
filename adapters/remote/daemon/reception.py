"""The port of a daemon: handshakes with any number of connections, parallel to the server that is being served.

Each connection has a thread of its own until it has proven that it knows the secret, for `HELLO_S` at most. If there
are too many, the oldest is closed. So silent connections cannot keep out a server that knows the secret: its handshake
is done before it has become the oldest.

A server that has proven itself waits in a queue until the server before it has left, for `TURN_S` at most.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from queue import SimpleQueue

from attrs import define, field

from adapters.remote.protocol.channel import Channel, ConnectionBroken
from adapters.remote.protocol.handshake import HELLO_S, ProvenServer, challenge, refuse
from adapters.remote.protocol.keepalive import kept_alive
from adapters.remote.protocol.messages import Op

log = logging.getLogger("rekindle.shard")
MOST_HELLOS = 64  # handshakes at once: each takes a thread and 0.1 MB
TURN_S = 15.0  # seconds for the present server to leave: by default it drains for 10 s
PAUSE_S = 0.1  # seconds until the next try when there is no descriptor for one more connection


@define(eq=False)
class WaitingServer:
    """A server that has proven to know the secret and waits for its turn. It is either served or refused, once."""

    channel: Channel
    proven: ProvenServer
    _settled: bool = False
    _lock: threading.Lock = field(factory=threading.Lock)
    _taken: threading.Event = field(factory=threading.Event)

    def claim(self) -> bool:
        """Claim the decision whether it is served or refused. Only the first call returns True."""
        with self._lock:
            first = not self._settled
            self._settled = True
        self._taken.set()
        return first

    def wait(self, seconds: float) -> bool:
        """Wait until the decision is claimed. Return whether that happened in time."""
        return self._taken.wait(seconds)


@define(eq=False)
class Reception:
    """Accepts connections; `next` returns one server after the other.

    hello_s, turn_s: the most seconds of a handshake and of the wait for a turn.
    """

    listening: socket.socket
    secret: bytes
    hello_s: float = HELLO_S
    turn_s: float = TURN_S
    _strangers: dict[Channel, None] = field(factory=dict)  # the oldest first
    _lock: threading.Lock = field(factory=threading.Lock)
    _queue: SimpleQueue[WaitingServer] = field(factory=SimpleQueue)
    _closing: threading.Event = field(factory=threading.Event)

    def open(self) -> None:
        """Begin to take connections."""
        threading.Thread(target=self._accept, name="shard-reception", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and close those that have not proven anything."""
        self._closing.set()
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in `accept`
        self.listening.close()
        with self._lock:
            for channel in self._strangers:
                channel.close()

    def next(self) -> WaitingServer:
        """Wait for the next server that knows the secret, and claim it."""
        while True:
            server = self._queue.get()
            if server.claim():
                return server

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self.listening.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("a connection could not be accepted: %s", error.strerror or error)
                    self._closing.wait(PAUSE_S)
                continue
            try:
                channel = Channel(kept_alive(connection))
            except OSError:  # it has left already
                connection.close()
                continue
            self._admit(channel)
            threading.Thread(target=self._hear, args=(channel,), name="shard-hello", daemon=True).start()

    def _admit(self, channel: Channel) -> None:
        """Add a connection, and close the oldest one if there are too many."""
        with self._lock:
            if len(self._strangers) >= MOST_HELLOS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close("others came")
            self._strangers[channel] = None

    def _hear(self, channel: Channel) -> None:
        """Carry out the handshake and the wait for a turn. Runs on the connection's own thread."""
        try:
            proven = challenge(channel, self.secret, self.hello_s)
        except ConnectionBroken as error:
            channel.close()
            log.debug("a connection ended before its proof: %s", error)
            return
        finally:
            with self._lock:
                self._strangers.pop(channel, None)
        server = WaitingServer(channel, proven)
        self._queue.put(server)
        if not server.wait(self.turn_s) and server.claim():
            with suppress(ConnectionBroken):
                refuse(channel, Op.PROOF, proven.request, "another server is served here", self.hello_s)
