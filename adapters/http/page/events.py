"""Stream what `/props` shows: all of it first, then the parts that have changed.

No task runs while no page listens. Each listener reads the properties at an interval, and all listeners share what one
has read. No events are queued: a client that reads slowly gets fewer, and a client that does not read at all is
dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
from attrs import define, field
from starlette.types import Message, Receive, Scope, Send

from adapters.http.answer.reply import STREAM_HEADERS
from adapters.http.edge_options import EdgeTimes
from adapters.http.wire.connection import ABORT, STOPPING
from adapters.http.wire.errors import ApiError

CHECK_INTERVAL_S = 0.25  # reading takes 1 ms with 64 requests running: 0.4 % of one core
MAX_LISTENERS = 32  # each listener takes one of 4,096 connections, and a task
COMMENT = b": nothing new\n\n"


@define(eq=False)
class PropsWatch:
    """Reads the properties of the server, and knows which parts changed when.

    read_props: returns what /props shows.
    """

    read_props: Callable[[], Mapping[str, Any]]
    times: EdgeTimes
    listener_count: int = 0
    # Of each property: the version that changed it last, and its JSON.
    _parts: dict[str, tuple[int, bytes]] = field(factory=dict)
    _version: int = 0
    _read_time: float = 0

    def make_listener(self) -> Listener:
        """Return an application for one more listener. Raises ApiError 429 if too many listen."""
        if self.listener_count >= MAX_LISTENERS:
            message = f"{MAX_LISTENERS} pages watch this server already. Close one of them."
            headers = {"retry-after": str(max(5, self.times.retry_after_s))}
            raise ApiError(429, message, "rate_limit_error", code="too_many_listeners", headers=headers)
        return Listener(self)

    @contextmanager
    def count_listener(self) -> Iterator[None]:
        """Count one listener more for as long as the block runs."""
        self.listener_count += 1
        try:
            yield
        finally:
            self.listener_count -= 1

    def read_changes(self, seen: int) -> tuple[int, bytes]:
        """Return the current version, and an event with the parts that changed since the version `seen`."""
        now = time.monotonic()
        if not self._version or now - self._read_time >= CHECK_INTERVAL_S:
            self._read_time = now
            self._version = self._version + 1
            for name, value in self.read_props().items():
                encoded = msgspec.json.encode(value)
                if self._parts.get(name, (0, b""))[1] != encoded:
                    self._parts[name] = (self._version, encoded)
        changed = [b'"%s":%s' % (name.encode(), encoded) for name, (at, encoded) in self._parts.items() if at > seen]
        return self._version, b"event: status\ndata: {%s}\n\n" % b",".join(changed) if changed else b""


@define(eq=False)
class Listener:
    """An ASGI application for one listener. It ends when the client leaves or does not read, or when the server
    stops.
    """

    watch: PropsWatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.watch.count_listener():
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_disconnect, receive, tasks.cancel_scope)
                await self._stream_changes(scope.get(STOPPING) or anyio.Event(), send)
                tasks.cancel_scope.cancel()
        except* TimeoutError:
            if ABORT in scope:
                scope[ABORT]()

    async def _stream_changes(self, stopping: anyio.Event, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        seen = 0
        told_at = 0.0
        while not stopping.is_set():
            seen, event = self.watch.read_changes(seen)
            if event or time.monotonic() - told_at >= self.watch.times.keepalive_s:
                body = event or COMMENT
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
                told_at = time.monotonic()
            with anyio.move_on_after(CHECK_INTERVAL_S):
                await stopping.wait()
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        with anyio.fail_after(self.watch.times.write_timeout_s):
            await send(message)


async def wait_for_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the scope when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
