"""Whoever reaches a daemon's port: hellos are heard beside each other, and apart from the server that is served.

A stranger holds one thread for `HELLO_S` at most. Of many, the oldest goes first, so however many connections say
nothing, a server that knows the secret is through before they have made it the oldest.
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
MOST_HELLOS = 64  # at once: a thread and 0.1 MB each
TURN_S = 15.0  # for the server that is served to leave: it drains for 10 s unless told otherwise
PAUSE_S = 0.1  # where there is no descriptor for one more connection


@define(eq=False)
class WaitingServer:
    """A server that has proven to know the secret and waits for its turn, which it is given once or refused once."""

    channel: Channel
    proven: ProvenServer
    _settled: bool = False
    _lock: threading.Lock = field(factory=threading.Lock)
    _taken: threading.Event = field(factory=threading.Event)

    def claim(self) -> bool:
        """Is it still undecided what becomes of it? Whoever asks first decides."""
        with self._lock:
            first, self._settled = not self._settled, True
        self._taken.set()
        return first

    def wait(self, seconds: float) -> bool:
        """Did its turn come?"""
        return self._taken.wait(seconds)


@define(eq=False)
class Reception:
    """`next` gives one server after the other. hello_s, turn_s: seconds that a hello and the wait for a turn take."""

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
        """Take no more, and let go of strangers."""
        self._closing.set()
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)  # whoever waits in `accept` wakes up
        self.listening.close()
        with self._lock:
            for channel in self._strangers:
                channel.close()

    def next(self) -> WaitingServer:
        """Wait for a server that knows the secret; its turn has come."""
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
                    log.warning("no connection was taken: %s", error.strerror or error)
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
        """Make room for one more."""
        with self._lock:
            if len(self._strangers) >= MOST_HELLOS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close("others came")
            self._strangers[channel] = None

    def _hear(self, channel: Channel) -> None:
        """On a thread of the connection's own."""
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
