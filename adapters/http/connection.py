"""One connection: uvicorn's protocol on h11, with the limits it lacks.

uvicorn waits for ever for a request's head, and for the rest of a body that nobody wants. Here
* a head must be complete within `header_timeout_s`, the first one and every later one;
* what still comes of a body when its answer is out is thrown away, so much of it and so long, and then the connection
  ends. Closed at once, with bytes unread, it would be reset, and a client that is still sending might never see why;
* an application can drop a connection whose client does not read (`scope[ABORT]`), and one that is closed is gone
  within a time, read or not.
"""

from __future__ import annotations

import json
from asyncio import TimerHandle, Transport
from typing import Any, cast

import anyio
import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

ABORT = "rekindle.abort"  # in a scope, where the server can: drops the connection without waiting for its client
STOPPING = "rekindle.stopping"  # in a scope: an event that is set when the server stops, for answers without an end
DRAIN_BYTES = 64 << 20  # thrown away of one body: twice what --max-body is by default
CLOSE_S = 60.0  # that a client may take for the last of its answer


class Protocol(H11Protocol):
    header_timeout_s: float = 10
    drain_s: float = 10
    stopping: anyio.Event
    timer: TimerHandle | None = None  # for a head, for the end of a body, or for the end of the connection
    heads: bool = False  # it is a head that the timer is for
    drained: int | None = None  # bytes of a body that nobody wants; None: somebody does
    half_closed: bool = False
    since: float = 0  # when it last began to wait for a request
    wire: Transport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner: Any = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT], scope[STOPPING] = self.wire.abort, self.stopping
            await inner(scope, receive, send)

        self.app = app

    @property
    def waiting(self) -> bool:
        """Nothing is being answered on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        self.wire, self.since = transport, self.loop.time()
        super().connection_made(cast("Transport", Closing(self)))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.drained is not None:
            self.drained += len(data)
            if self.drained > DRAIN_BYTES:
                self.wire.abort()
        if self.half_closed or self.wire.is_closing():
            return
        super().data_received(data)
        if self.half_closed or self.wire.is_closing():
            return
        if self.drained is not None:
            if self.conn.their_state is h11.SEND_BODY and self.waiting:
                return
            self.drained = None
            self._stop_timer()
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self.timer is None:
            self._await_head()  # the beginning of a further request

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        if self.half_closed or self.wire.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY and self.waiting:
            self._drain()
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()

    def shutdown(self) -> None:
        """The server stops: nobody waits for what is not wanted."""
        if self.drained is None and not self.wire.is_closing():
            super().shutdown()
        elif self.waiting and not self.wire.get_write_buffer_size():
            self.wire.abort()

    def close(self) -> None:
        """What the transport's close() does: first half, while the client is sending."""
        if self.half_closed or self.wire.is_closing():
            return
        if self.conn.their_state in {h11.SEND_BODY, h11.ERROR}:
            self.half_closed = True
            self.flow.resume_reading()
            try:
                self.wire.write_eof()
            except OSError:  # the client is gone, and its reset not read yet
                self.wire.abort()
            else:
                self._drain()
        else:
            self.wire.close()
            self._start_timer(CLOSE_S)

    def _drain(self) -> None:
        self.drained = self.drained or 0
        self._start_timer(self.drain_s)

    def _await_head(self) -> None:
        self._start_timer(self.header_timeout_s)
        self.heads = True

    def _head_came(self) -> None:
        if self.heads:
            self._stop_timer()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(seconds, self.wire.abort)

    def _stop_timer(self) -> None:
        self.heads = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

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
                self.wire.write(self.conn.send(part) or b"")
        if self.cycle is not None and not self.waiting:  # whose body it broke: that was its answer, no other may follow
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.close()


class Closing:
    """A protocol's transport as uvicorn sees it: closing is the protocol's business."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.wire, name)

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol.half_closed or self._protocol.wire.is_closing()
