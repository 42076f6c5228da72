"""What `/props` shows, as a stream of events: whole at first, then the parts that have changed.

Nothing runs while nobody listens. Whoever listens looks every so often, and what one has seen serves all others.
Nothing is queued for anybody: who reads slowly is told less often, and who does not read at all is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import msgspec
from attrs import define, field
from starlette.types import Message, Receive, Scope, Send

from adapters.http.answer.reply import STREAM_HEADERS
from adapters.http.edge_options import EdgeOptions
from adapters.http.wire.connection import ABORT, STOPPING
from adapters.http.wire.errors import ApiError

EVERY_S = 0.25  # a look takes 1 ms with 64 requests running: 0.4 % of one core
MOST_LISTENERS = 32  # pages: of 4,096 connections, and a task each
COMMENT = b": nothing new\n\n"


@define(eq=False)
class Watch:
    """props: what /props shows."""

    props: Callable[[], Mapping[str, Any]]
    options: EdgeOptions
    listeners: int = 0
    _parts: dict[str, tuple[int, bytes]] = field(factory=dict)  # of /props: the look that changed it last, as JSON
    _looks: int = 0
    _looked: float = 0

    def join(self) -> Listener:
        """Raises ApiError where too many listen."""
        if self.listeners >= MOST_LISTENERS:
            message = f"{MOST_LISTENERS} pages watch this server already. Close one of them."
            headers = {"retry-after": str(max(5, self.options.retry_after_s))}
            raise ApiError(429, message, "rate_limit_error", code="too_many_listeners", headers=headers)
        return Listener(self)

    def look(self, seen: int) -> tuple[int, bytes]:
        """The number of the last look, and what has changed since the one with this number, as an event."""
        now = time.monotonic()
        if not self._looks or now - self._looked >= EVERY_S:
            self._looked, self._looks = now, self._looks + 1
            for name, value in self.props().items():
                told = msgspec.json.encode(value)
                if self._parts.get(name, (0, b""))[1] != told:
                    self._parts[name] = (self._looks, told)
        changed = [b'"%s":%s' % (name.encode(), told) for name, (at, told) in self._parts.items() if at > seen]
        return self._looks, b"event: status\ndata: {%s}\n\n" % b",".join(changed) if changed else b""


@define(eq=False)
class Listener:
    """An ASGI application for one listener: until it leaves, does not read, or the server stops."""

    watch: Watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.watch.listeners += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(left, receive, tasks.cancel_scope)
                await self._tell(scope.get(STOPPING) or anyio.Event(), send)
                tasks.cancel_scope.cancel()
        except* TimeoutError:
            if ABORT in scope:
                scope[ABORT]()
        finally:
            self.watch.listeners -= 1

    async def _tell(self, stopping: anyio.Event, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        seen, told_at = 0, 0.0
        while not stopping.is_set():
            seen, event = self.watch.look(seen)
            if event or time.monotonic() - told_at >= self.watch.options.keepalive_s:
                body = event or COMMENT
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
                told_at = time.monotonic()
            with anyio.move_on_after(EVERY_S):
                await stopping.wait()
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        with anyio.fail_after(self.watch.options.write_timeout_s):
            await send(message)


async def left(receive: Receive, scope: anyio.CancelScope) -> None:
    """Ends it when the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
