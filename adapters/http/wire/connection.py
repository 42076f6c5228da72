"""One connection: uvicorn's protocol on h11, with the limits that it lacks.

uvicorn waits for ever for a request's head, and for the rest of a body that no handler reads. This protocol differs:
* A head must be complete within `header_timeout_s`, the first one and every later one.
* A connection whose client has to act next can make room for another one (`client_waits.py`).
* The rest of a body that still arrives after its answer is thrown away, up to `DRAIN_BYTES` and for `drain_s` seconds.
  Then the connection ends. If it were closed at once, with bytes unread, it would be reset. A client that is still
  sending might then never see the answer.
* Requests that a client has sent ahead of their answers (pipelining) begin one in each turn of the event loop, over all
  connections. So a client that sends many of them delays itself.
* An application can drop a connection whose client does not read (`scope[ABORT]`). A connection that is closed is gone
  within a time limit, whether or not its client reads.
"""

from __future__ import annotations

import sys
from asyncio import AbstractEventLoop, TimerHandle, Transport
from functools import partial
from typing import Any, cast

import anyio
import h11
from attrs import field, frozen
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from adapters.http.wire import client_waits
from adapters.http.wire.client_waits import PROGRESS_BYTES, ClientWait, ConnectionWaits
from adapters.http.wire.http_framing import StrictReceiveBuffer
from adapters.http.wire.paced_calls import PacedCalls
from adapters.http.wire.plain_error import encode_error, make_refusal
from adapters.http.wire.write_path import WRITE_NOW, ClosingTransport, write_now

ABORT = "rekindle.abort"  # in a scope, where the server can: drops the connection without waiting for its client
ANNOUNCED = "rekindle.announced"  # in a scope: how many bytes the chunks of its body have announced so far
STOPPING = "rekindle.stopping"  # in a scope: an event that is set when the server stops, for answers without an end
DRAIN_BYTES = 64 << 20  # bytes of one body that are thrown away: twice the default of --max-body
CLOSE_S = 60.0  # seconds that a client may take for the end of its answer


LATE_MESSAGE = "The rest of the body did not come while other connections waited for room."
LATE_BODY = encode_error("408 Request Timeout", "invalid_request_error", "body_timeout", LATE_MESSAGE, "retry-after: 1")


@frozen(eq=False)
class SharedState:
    """The state that all connections of one server share.

    The limits are in seconds. stopping: set when the server stops.
    """

    header_timeout_s: float
    drain_s: float
    stopping: anyio.Event
    waits: ConnectionWaits[LimitedProtocol]
    paced_calls: PacedCalls = field(factory=PacedCalls)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol for one connection, with the limits that the head of this module lists."""

    timer: TimerHandle | None = None  # waits for a head, for the end of a body, or for the end of the connection
    timer_awaits_head: bool = False  # the timer is for a head
    timer_awaits_reading: bool = False  # the timer is for the reading of a written answer
    drained_bytes: int | None = None  # bytes that arrived of a body that no handler reads; None: a handler reads it
    is_half_closed: bool = False
    is_ending_answer: bool = False  # an answer ends at this moment
    has_queued_request: bool = False  # the next request has arrived, and waits for its turn
    is_reading_paused: bool = False  # the server reads no more for now
    announcing_cycle: object = None  # the request whose chunks are counted
    announced_bytes: int = 0
    # Bytes of a body since its wait was renewed, or bytes of an answer that were unread then.
    progress_bytes: int = 0
    raw_transport: Transport

    def __init__(
        self,
        shared: SharedState,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.shared = shared
        self.waits = shared.waits
        inner: Any = self.app
        self.conn._receive_buffer = StrictReceiveBuffer(self._count_announced)  # noqa: SLF001 - h11 has no option for it

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT] = self.raw_transport.abort
            scope[STOPPING] = shared.stopping
            cycle = self.cycle
            scope[WRITE_NOW] = partial(write_now, cycle)
            scope[ANNOUNCED] = lambda: self.announced_bytes if self.cycle is cycle else 0
            await inner(scope, receive, send)

        self.app = app

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered on this connection."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        self.raw_transport = transport
        super().connection_made(cast("Transport", ClosingTransport(self)))
        self._await_head()
        self.waits.add(self, ClientWait.HEAD, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.waits.remove(self)
        super().connection_lost(exc)

    # -- what the server waits for

    def record_wait(self) -> None:
        """Record what the server waits for now. If too many connections are sending bodies, the oldest is closed."""
        self.waits.record(self, self._find_wait(), self.loop.time())
        if (oldest := self.waits.find_excess(ClientWait.BODY, client_waits.MOST_BODIES)) is not None:
            oldest.evict()

    def _find_wait(self) -> ClientWait | None:
        if self.is_half_closed or self.drained_bytes is not None or self.raw_transport.is_closing():
            return ClientWait.CLOSING
        if self.flow.write_paused:
            return ClientWait.READING
        if self.is_idle:
            return ClientWait.HEAD if self.timer_awaits_head else ClientWait.REQUEST
        if self.conn.their_state is h11.SEND_BODY and not self.is_reading_paused:
            return ClientWait.BODY
        return None

    def has_made_progress(self) -> bool:
        """Return whether the client has read `PROGRESS_BYTES` of the answer since the last call."""
        left = self.raw_transport.get_write_buffer_size()
        before = self.progress_bytes
        if not self.flow.write_paused or left > before - PROGRESS_BYTES:
            return False
        self.progress_bytes = left
        return True

    def evict(self) -> None:
        """Close this connection at once, to make room for another one. A client that is sending a body gets an error
        first.
        """
        if self._find_wait() is ClientWait.BODY and not self.cycle.response_started:
            self.raw_transport.write(LATE_BODY)
        self.waits.remove(self)
        self.raw_transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.progress_bytes = self.raw_transport.get_write_buffer_size()
        self.record_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.progress_bytes = 0
        if self.timer_awaits_reading:
            self._stop_timer()
        self.record_wait()

    def pause_receiving(self) -> None:
        """Read no more of the connection: it is the server's turn."""
        self.is_reading_paused = True
        self.raw_transport.pause_reading()
        self.record_wait()

    def resume_receiving(self) -> None:
        """Read the connection again."""
        self.is_reading_paused = False
        self.raw_transport.resume_reading()
        self.record_wait()

    # -- what the client sends

    def _count_announced(self, size: int) -> None:
        """Count a chunk of `size` bytes that begins, and wake the reader of the body whether or not a byte of it has
        arrived.
        """
        if self.announcing_cycle is not self.cycle:
            self.announcing_cycle = self.cycle
            self.announced_bytes = 0
        self.announced_bytes += size
        self.cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._receive(data)
        self.record_wait()
        if not self.flow.write_paused:
            self.progress_bytes += len(data)
            if self.progress_bytes >= PROGRESS_BYTES:
                self.progress_bytes = 0
                if self._find_wait() is ClientWait.BODY:
                    self.waits.renew(self, self.loop.time())

    def _receive(self, data: bytes) -> None:
        if self.drained_bytes is not None:
            self.drained_bytes += len(data)
            if self.drained_bytes > DRAIN_BYTES:
                self.raw_transport.abort()
        if self.is_half_closed or self.raw_transport.is_closing():
            return
        super().data_received(data)
        if self.is_half_closed or self.raw_transport.is_closing():
            return
        if self.drained_bytes is not None:
            if self.conn.their_state is h11.SEND_BODY and self.is_idle:
                return
            self.drained_bytes = None
            self._stop_timer()
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self.timer is None:
            self._await_head()  # a further request begins

    def on_response_complete(self) -> None:
        self.is_ending_answer = True
        super().on_response_complete()
        self.is_ending_answer = False
        self._follow_client()

    def handle_events(self) -> None:
        if self.is_ending_answer and self.conn.trailing_data[0]:
            self.has_queued_request = True
            self.flow.pause_reading()
            self.shared.paced_calls.put(self._next_request)
        else:
            super().handle_events()

    def _next_request(self) -> None:
        self.has_queued_request = False
        if not self.is_half_closed and not self.raw_transport.is_closing():
            self.flow.resume_reading()
            super().handle_events()
            self._follow_client()

    def _follow_client(self) -> None:
        """Go on after the end of an answer, or when the next request begins."""
        self._start_client_timer()
        self.record_wait()

    def _start_client_timer(self) -> None:
        """Start the timer for what the client has to do next, if it has to do anything."""
        if self.is_half_closed or self.raw_transport.is_closing() or self.has_queued_request:
            return
        if self.conn.their_state is h11.SEND_BODY and self.is_idle:
            self._drain()
        elif self.flow.write_paused and self.is_idle:
            self._await_reading()
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()

    def shutdown(self) -> None:
        """End the connection when the server stops. It does not wait for the rest of a body that no handler reads."""
        if self.drained_bytes is None and not self.raw_transport.is_closing():
            super().shutdown()
        elif self.is_idle and not self.raw_transport.get_write_buffer_size():
            self.raw_transport.abort()

    def close(self) -> None:
        """Close the connection as the transport's `close` would. While the client is sending, close only the writing
        half first.
        """
        if self.is_half_closed or self.raw_transport.is_closing():
            return
        if self.conn.their_state in {h11.SEND_BODY, h11.ERROR}:
            self.is_half_closed = True
            self.flow.resume_reading()
            try:
                self.raw_transport.write_eof()
            except OSError:  # the client is gone, and its reset was not read yet
                self.raw_transport.abort()
            else:
                self._drain()
        else:
            self.raw_transport.close()
            self._start_timer(CLOSE_S)
        self.record_wait()

    def _drain(self) -> None:
        self.drained_bytes = self.drained_bytes or 0
        self._start_timer(self.shared.drain_s)

    def _await_head(self) -> None:
        self._start_timer(self.shared.header_timeout_s)
        self.timer_awaits_head = True

    def _await_reading(self) -> None:
        """Wait for the client to read an answer that is written as a whole. `reply.py` watches streams itself."""
        self._stop_timer()
        self.timer = self.loop.call_later(CLOSE_S, self._check_reading)
        self.timer_awaits_reading = True

    def _check_reading(self) -> None:
        if self.has_made_progress():
            self._await_reading()
        else:
            self.raw_transport.abort()

    def _stop_head_timer(self) -> None:
        if self.timer_awaits_head:
            self._stop_timer()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(seconds, self.raw_transport.abort)

    def _stop_timer(self) -> None:
        self.timer_awaits_head = self.timer_awaits_reading = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read as HTTP with an error object of the same form as all other errors.

        uvicorn calls this where it handles h11's error, which says more than its message.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = self.conn.trailing_data[0] if self.is_idle else None
            for part in make_refusal(msg, sys.exception(), start):
                self.raw_transport.write(self.conn.send(part) or b"")
        # The 400 was the answer to the request whose body is broken, so no other answer may follow.
        if self.cycle is not None and not self.is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.close()
