"""One connection: uvicorn's protocol on h11, with the limits it lacks.

uvicorn waits for ever for a request's head, and for the rest of a body that nobody wants. Here
* a head must be complete within `header_timeout_s`, the first one and every later one;
* what a connection owes the server is in a ledger (`debts.py`), so that one that owes something can make room;
* what still comes of a body when its answer is out is thrown away, so much of it and so long, and then the connection
  ends. Closed at once, with bytes unread, it would be reset, and a client that is still sending might never see why;
* requests that a client has sent ahead of their answers (pipelining) begin one in a turn of the loop, all connections
  together, so that a client that sends many of them delays itself;
* an application can drop a connection whose client does not read (`scope[ABORT]`), and one that is closed is gone
  within a time, read or not.
"""

from __future__ import annotations

import json
from asyncio import TimerHandle, Transport, get_running_loop
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import anyio
import h11
from attrs import define, field
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from adapters.http.wire import connection_debts
from adapters.http.wire.connection_debts import INSTALMENT, Debt, DebtLedger
from adapters.http.wire.http_framing import StrictReceiveBuffer

ABORT = "rekindle.abort"  # in a scope, where the server can: drops the connection without waiting for its client
ANNOUNCED = "rekindle.announced"  # in a scope: how many bytes the chunks of its body have announced so far
STOPPING = "rekindle.stopping"  # in a scope: an event that is set when the server stops, for answers without an end
DRAIN_BYTES = 64 << 20  # thrown away of one body: twice what --max-body is by default
CLOSE_S = 60.0  # that a client may take for the last of its answer


def plain_error(status: str, kind: str, code: str, message: str, *more: str) -> bytes:
    """A whole answer that is an error, for where no application can be asked for one. more: headers of it."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    lines = f"HTTP/1.1 {status}", "content-type: application/json", "connection: close", *more
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", body)).encode()


LATE = "The rest of the body did not come while other connections waited for room."
LATE_BODY = plain_error("408 Request Timeout", "invalid_request_error", "body_timeout", LATE, "retry-after: 1")


@define(eq=False)
class PacedCalls:
    """Calls that are made one in each turn of the event loop, in the order in which they were put in."""

    _line: deque[Callable[[], None]] = field(factory=deque)

    def put(self, call: Callable[[], None]) -> None:
        self._line.append(call)
        if len(self._line) == 1:
            get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        try:
            self._line[0]()
        finally:
            self._line.popleft()
            if self._line:
                get_running_loop().call_soon(self._run)


class Protocol(H11Protocol):
    header_timeout_s: float = 10
    drain_s: float = 10
    stopping: anyio.Event
    ledger: DebtLedger[Protocol]
    turns: PacedCalls
    timer: TimerHandle | None = None  # for a head, for the end of a body, or for the end of the connection
    heads: bool = False  # it is a head that the timer is for
    reads: bool = False  # it is for the reading of an answer that is written
    drained: int | None = None  # bytes of a body that nobody wants; None: somebody does
    half_closed: bool = False
    ending: bool = False  # an answer ends at this moment
    queued: bool = False  # its next request is there, and waits for its turn
    read_paused: bool = False  # the server does not read what comes: it is its own turn
    announcing: object = None  # the request whose chunks are counted
    announced: int = 0
    unpaid: int = 0  # bytes of a body that came since its debt was renewed; of an answer, bytes that were unread then
    wire: Transport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner: Any = self.app
        self.conn._receive_buffer = StrictReceiveBuffer(self._announce)  # noqa: SLF001 - h11 has no option for it

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[ABORT], scope[STOPPING] = self.wire.abort, self.stopping
            cycle = self.cycle
            scope[ANNOUNCED] = lambda: self.announced if self.cycle is cycle else 0
            await inner(scope, receive, send)

        self.app = app

    @property
    def waiting(self) -> bool:
        """Nothing is being answered on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        self.wire = transport
        super().connection_made(cast("Transport", Closing(self)))
        self._await_head()
        self.ledger.add(self, Debt.HEAD, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.ledger.remove(self)
        super().connection_lost(exc)

    # -- what it owes

    def record_debt(self) -> None:
        self.ledger.record(self, self._debt(), self.loop.time())
        if (oldest := self.ledger.beyond(Debt.BODY, connection_debts.MOST_BODIES)) is not None:
            oldest.evict()

    def _debt(self) -> Debt | None:
        if self.half_closed or self.drained is not None or self.wire.is_closing():
            return Debt.CLOSING
        if self.flow.write_paused:
            return Debt.READING
        if self.waiting:
            return Debt.HEAD if self.heads else Debt.REQUEST
        if self.conn.their_state is h11.SEND_BODY and not self.read_paused:
            return Debt.BODY
        return None

    def pays(self) -> bool:
        """Has its client read an instalment of the answer since this was asked last?"""
        left, before = self.wire.get_write_buffer_size(), self.unpaid
        if not self.flow.write_paused or left > before - INSTALMENT:
            return False
        self.unpaid = left
        return True

    def evict(self) -> None:
        """Make room for another connection, at once. A client that is sending a body is told."""
        if self._debt() is Debt.BODY and not self.cycle.response_started:
            self.wire.write(LATE_BODY)
        self.ledger.remove(self)
        self.wire.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unpaid = self.wire.get_write_buffer_size()
        self.record_debt()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unpaid = 0
        if self.reads:
            self._stop_timer()
        self.record_debt()

    # -- what comes

    def _announce(self, size: int) -> None:
        """A chunk of so many bytes begins. Whoever reads the body is woken, whether or not a byte of it is there."""
        if self.announcing is not self.cycle:
            self.announcing = self.cycle
            self.announced = 0
        self.announced += size
        self.cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._take(data)
        self.record_debt()
        if not self.flow.write_paused:
            self.unpaid += len(data)
            if self.unpaid >= INSTALMENT:
                self.unpaid = 0
                if self._debt() is Debt.BODY:
                    self.ledger.renew(self, self.loop.time())

    def _take(self, data: bytes) -> None:
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
        self.ending = True
        super().on_response_complete()
        self.ending = False
        self._go_on()

    def handle_events(self) -> None:
        if self.ending and self.conn.trailing_data[0]:
            self.queued = True
            self.flow.pause_reading()
            self.turns.put(self._next_request)
        else:
            super().handle_events()

    def _next_request(self) -> None:
        self.queued = False
        if not self.half_closed and not self.wire.is_closing():
            self.flow.resume_reading()
            super().handle_events()
            self._go_on()

    def _go_on(self) -> None:
        """An answer has ended, or the request behind it begins."""
        self._wait_for_client()
        self.record_debt()

    def _wait_for_client(self) -> None:
        if self.half_closed or self.wire.is_closing() or self.queued:
            return
        if self.conn.their_state is h11.SEND_BODY and self.waiting:
            self._drain()
        elif self.flow.write_paused and self.waiting:
            self._await_reading()
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
        self.record_debt()

    def _drain(self) -> None:
        self.drained = self.drained or 0
        self._start_timer(self.drain_s)

    def _await_head(self) -> None:
        self._start_timer(self.header_timeout_s)
        self.heads = True

    def _await_reading(self) -> None:
        """Of an answer that is written as a whole. Who writes one piece by piece watches the time itself."""
        self._stop_timer()
        self.timer = self.loop.call_later(CLOSE_S, self._check_reading)
        self.reads = True

    def _check_reading(self) -> None:
        if self.pays():
            self._await_reading()
        else:
            self.wire.abort()

    def _head_came(self) -> None:
        if self.heads:
            self._stop_timer()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(seconds, self.wire.abort)

    def _stop_timer(self) -> None:
        self.heads = self.reads = False
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

    def pause_reading(self) -> None:
        self._protocol.read_paused = True
        self._protocol.wire.pause_reading()
        self._protocol.record_debt()

    def resume_reading(self) -> None:
        self._protocol.read_paused = False
        self._protocol.wire.resume_reading()
        self._protocol.record_debt()

    def is_closing(self) -> bool:
        return self._protocol.half_closed or self._protocol.wire.is_closing()
