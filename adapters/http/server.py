"""Serves an ASGI application on a socket: uvicorn with h11, in the caller's task, with the limits it lacks.

uvicorn waits for ever for a request's head; here a head must be complete within `header_timeout_s`, the first one and
every later one, and an application can drop a connection whose client does not read (`scope[ABORT]`).
"""

from __future__ import annotations

import json
import logging
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import h11
import uvicorn
from attrs import define
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from adapters.http.answer import ABORT
from adapters.http.guard import MAX_HEAD_BYTES

log = logging.getLogger("rekindle.http")
BACKLOG = 2048


@define(eq=False)
class Serving:
    """A server that listens."""

    host: str
    port: int
    _server: uvicorn.Server

    def stop(self, *, now: bool = False) -> None:
        """Accept no more; end when the open requests have, or at once. May be called again, to hurry."""
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or now


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    on_listening: Callable[[Serving], None],
    header_timeout_s: float = 10,
    keep_alive_s: float = 75,
    max_connections: int = 1024,
    grace_s: float | None = None,
) -> None:
    """Serve until `Serving.stop` is called. Port 0 takes a free one. Signals are left to the caller.

    grace_s: after `stop`, how long open requests may go on; None: as long as they take.
    Raises OSError if the address cannot be had. Being cancelled drops every connection.
    """
    listener = bind(host, port)
    config = uvicorn.Config(
        app,
        loop="none",
        http=type("LimitedProtocol", (Protocol,), {"header_timeout_s": header_timeout_s}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=grace_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=BACKLOG,
    )
    server = Server(config)
    bound_host, bound_port = listener.getsockname()[:2]
    server.tell = lambda: on_listening(Serving(bound_host, bound_port, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        with anyio.CancelScope(shield=True):
            await server.drop()
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Made with its protocol named: asyncio then sets TCP_NODELAY, and a token is not held up."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Server(uvicorn.Server):
    """uvicorn's, but signals are somebody else's business, and it says when it listens."""

    tell: Callable[[], None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
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


class Protocol(H11Protocol):
    """One connection."""

    header_timeout_s: float = 10
    head_timer: TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner: Any = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT] = self.transport.abort
            await inner(scope, receive, send)

        self.app = app

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self.head_timer is None and not self.transport.is_closing():
            self._await_head()  # the beginning of a further request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()

    def _await_head(self) -> None:
        self._head_came()
        self.head_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _head_came(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is answered in the shape of every other error."""
        described = {"message": msg, "type": "invalid_request_error", "param": None, "code": "bad_http"}
        body = json.dumps({"error": described}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for part in (reply, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
