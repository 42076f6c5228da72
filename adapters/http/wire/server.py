"""Serve an ASGI application on a socket: uvicorn with h11, in the caller's task, with connections of our own."""

from __future__ import annotations

import socket
from asyncio import get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import anyio
import uvicorn
from attrs import define, frozen
from starlette.types import ASGIApp

from adapters.http.wire.accept import Acceptor
from adapters.http.wire.address import BACKLOG, MAX_HEAD_BYTES, bind_listener
from adapters.http.wire.client_waits import ConnectionWaits
from adapters.http.wire.connection import LimitedProtocol, SharedState

MOST_CONNECTIONS = 4096  # 10 KiB each while they wait for a request, 25 KiB with one: 100 MiB


@define(eq=False)
class RunningServer:
    """A server that listens. end_event: set when it has ended."""

    host: str
    port: int
    _server: uvicorn.Server
    _stopping: anyio.Event
    end_event: anyio.Event

    @property
    def connections(self) -> set[LimitedProtocol]:
        return cast("set[LimitedProtocol]", self._server.server_state.connections)

    def stop(self, *, now: bool = False) -> None:
        """Accept no more connections. End when the open requests have ended, or at once. It may be called again, to
        hurry.
        """
        self._stopping.set()
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or now


@frozen
class ServerLimits:
    """The limits of a server's connections.

    header_timeout_s: for the head of a request. drain_s: for how long the rest of a body is taken that no handler
    reads. keep_alive_s: for the next request on an idle connection. grace_s: how long open requests may go on after
    `stop`; None: as long as they take.
    """

    header_timeout_s: float = 10
    drain_s: float = 10
    keep_alive_s: float = 75
    max_connections: int = MOST_CONNECTIONS
    grace_s: float | None = None


async def serve_app(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    on_listening: Callable[[RunningServer], None],
    limits: ServerLimits | None = None,
) -> None:
    """Serve until `RunningServer.stop` is called. Port 0 takes a free one. The caller handles signals.

    Raises OSError if the address cannot be had. Being cancelled drops every connection.
    """
    limits = limits or ServerLimits()
    listener = bind_listener(host, port)
    shared = SharedState(
        header_timeout_s=limits.header_timeout_s,
        drain_s=limits.drain_s,
        stopping=anyio.Event(),
        waits=ConnectionWaits(),
    )
    config = uvicorn.Config(
        app,
        loop="none",
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=limits.grace_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=BACKLOG,
    )
    end_event = anyio.Event()

    def announce() -> None:
        bound_host, bound_port = listener.getsockname()[:2]
        on_listening(RunningServer(bound_host, bound_port, server, shared.stopping, end_event))

    server = Server(config, listener, limits.max_connections, shared, announce)
    try:
        await server.serve()
    finally:
        with anyio.CancelScope(shield=True):
            await server.drop_connections()
        listener.close()
        end_event.set()


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, with connections of our own, and with a call when it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        max_connections: int,
        shared: SharedState,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.listener = listener
        self.max_connections = max_connections
        self.shared = shared
        self.on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        del sockets
        await self.lifespan.startup()
        assert not self.lifespan.should_exit, "the application does not start"
        loop = get_running_loop()

        def make_protocol() -> LimitedProtocol:
            return LimitedProtocol(self.shared, self.config, self.server_state, self.lifespan.state, loop)

        acceptor = Acceptor(self.listener, make_protocol, self.shared.waits, self.max_connections)
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True
        self.on_started()

    async def drop_connections(self) -> None:
        """End the connections and tasks that uvicorn leaves when it is cancelled or stopped at once."""
        for listener in getattr(self, "servers", ()):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        if self.started and not self.lifespan.shutdown_event.is_set():
            await self.lifespan.shutdown()
