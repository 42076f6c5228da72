"""Serves an ASGI application on a socket: uvicorn with h11, in the caller's task, with connections of our own."""

from __future__ import annotations

import socket
from asyncio import get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import anyio
import uvicorn
from attrs import define, field
from starlette.types import ASGIApp

from adapters.http.wire.accept import Acceptor
from adapters.http.wire.address import BACKLOG, MAX_HEAD_BYTES, bind
from adapters.http.wire.connection import PacedCalls, Protocol
from adapters.http.wire.connection_debts import DebtLedger

MOST_CONNECTIONS = 4096  # 10 KiB each while they wait for a request, 25 KiB with one: 100 MiB


@define(eq=False)
class Serving:
    """A server that listens."""

    host: str
    port: int
    _server: uvicorn.Server
    _stopping: anyio.Event
    ended: anyio.Event = field(factory=anyio.Event)

    @property
    def connections(self) -> set[Protocol]:
        return cast("set[Protocol]", self._server.server_state.connections)

    def stop(self, *, now: bool = False) -> None:
        """Accept no more; end when the open requests have, or at once. May be called again, to hurry."""
        self._stopping.set()
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or now


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    on_listening: Callable[[Serving], None],
    header_timeout_s: float = 10,
    drain_s: float = 10,
    keep_alive_s: float = 75,
    max_connections: int = MOST_CONNECTIONS,
    grace_s: float | None = None,
) -> None:
    """Serve until `Serving.stop` is called. Port 0 takes a free one. Signals are left to the caller.

    drain_s: how long the rest of a body is taken that nobody wants.
    grace_s: after `stop`, how long open requests may go on; None: as long as they take.
    Raises OSError if the address cannot be had. Being cancelled drops every connection.
    """
    listener = bind(host, port)
    stopping = anyio.Event()
    ledger = DebtLedger[Protocol]()
    limits = {"header_timeout_s": header_timeout_s, "drain_s": drain_s, "stopping": stopping}
    shared = {"ledger": ledger, "turns": PacedCalls()}
    config = uvicorn.Config(
        app,
        loop="none",
        http=type("LimitedProtocol", (Protocol,), {**limits, **shared}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=grace_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=BACKLOG,
    )
    server = Server(config)
    server.listener, server.max_connections, server.ledger = listener, max_connections, ledger
    bound_host, bound_port = listener.getsockname()[:2]
    serving = Serving(bound_host, bound_port, server, stopping)
    server.tell = lambda: on_listening(serving)
    try:
        await server.serve()
    finally:
        with anyio.CancelScope(shield=True):
            await server.drop()
        listener.close()
        serving.ended.set()


class Server(uvicorn.Server):
    """uvicorn's, but signals are somebody else's business, connections are taken by us, and it says when it listens."""

    listener: socket.socket
    max_connections: int
    ledger: DebtLedger[Protocol]
    tell: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        del sockets
        await self.lifespan.startup()
        assert not self.lifespan.should_exit, "the application does not start"
        loop, made = get_running_loop(), cast("Any", self.config.http_protocol_class)

        def make() -> Protocol:
            return made(self.config, self.server_state, self.lifespan.state, loop)

        acceptor = Acceptor(self.listener, make, self.ledger, self.max_connections)
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True
        self.tell()

    async def drop(self) -> None:
        """What uvicorn leaves behind when it is cancelled or told to hurry."""
        for listener in getattr(self, "servers", ()):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        if self.started and not self.lifespan.shutdown_event.is_set():
            await self.lifespan.shutdown()
