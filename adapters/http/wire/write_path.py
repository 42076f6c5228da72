"""The way of answers to a connection: the transport as uvicorn sees it, and pieces of streams written at once.

A piece of a streamed answer usually passes five layers that only look at the first message of an answer, each with a
coroutine of its own. With 64 streams that is done 9,000 times a second, on the thread that the device thread shares the
interpreter with. So `write_now` writes a chunk itself. It refuses where an answer has no chunks or would have to wait.
Chunks do not change the state of h11's connection, which still writes the head and the end of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import h11

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from adapters.http.wire.connection import LimitedProtocol

WRITE_NOW = "rekindle.write_now"  # in a scope, where the server can: a `WriteNow` for the answer
# Writes a piece of an answer that has begun and goes on, and whose head has no length. The piece is not empty. False:
# nothing was written, and `send` must be used.
WriteNow: TypeAlias = Callable[[bytes], bool]


def write_now(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a piece of the answer of this cycle, as `WriteNow`."""
    if cycle.conn.our_state is not h11.SEND_BODY or cycle.disconnected or cycle.flow.write_paused:
        return False
    if cycle.scope["http_version"] != "1.1" or cycle.scope["method"] == "HEAD":
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def refuse_to_write(_: bytes) -> bool:
    """Write nothing, where a server has no `WRITE_NOW`."""
    return False


class ClosingTransport:
    """A transport as uvicorn sees it. The protocol decides how it closes, and records whether reading is paused."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.raw_transport, name)

    def write(self, data: bytes) -> None:
        self._protocol.raw_transport.write(data)

    def close(self) -> None:
        self._protocol.close()

    def pause_reading(self) -> None:
        self._protocol.pause_receiving()

    def resume_reading(self) -> None:
        self._protocol.resume_receiving()

    def is_closing(self) -> bool:
        return self._protocol.is_half_closed or self._protocol.raw_transport.is_closing()
