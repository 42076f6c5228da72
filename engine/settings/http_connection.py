"""One connection of an HTTP/1.1 client, read with little work. The ingress of a fleet and `rekindle bench` build on it.

A general client of HTTP takes 60 to 90 us of processor time for each part of a stream. Here a connection is a protocol
of asyncio around the parser of `httptools`. A request is written at once, and what arrives goes to the one that awaits
it.

Invariants:
* A connection has one request at a time. It can be reused when its answer is complete and was read, and only then.
* Whoever leaves an answer before its end closes the connection, so no answer can reach another request. That holds
  also if the rest of the answer has come already.
* What a server sends besides the body of an answer takes at most MOST_HEAD bytes, and what arrives at once.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable
from typing import Final, cast

import httptools
from attrs import define, field

MOST_HEAD: Final = 1 << 17  # bytes without any of a body: heads, interim answers, sizes of chunks, trailers


@define(eq=False)
class HttpConnection(asyncio.Protocol):
    """One connection. asyncio calls the methods of the second half; the parser calls those from `on_message_begin` on.

    status, headers: of the answer that arrives now. is_complete: its end has arrived. is_lost: the connection is gone.
    """

    status: int = field(default=0, init=False)
    headers: list[tuple[bytes, bytes]] = field(factory=list, init=False)
    is_complete: bool = field(default=True, init=False)
    is_lost: bool = field(default=False, init=False)
    has_head: bool = field(default=False, init=False)
    _is_kept: bool = field(default=False, init=False)  # the server keeps the connection after this answer
    _is_head_only: bool = field(default=False, init=False)  # the request is a HEAD, so no body follows
    _head_bytes: int = field(default=0, init=False)  # that came since the request, or since the last part of the body
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    _reason: str = field(default="the connection was closed", init=False)
    _transport: asyncio.Transport = field(init=False)
    _parser: httptools.HttpResponseParser = field(init=False)

    @abstractmethod
    def take_part(self, part: bytes) -> None:
        """Take a part of the answer's body."""

    @property
    @abstractmethod
    def has_unread_parts(self) -> bool:
        """Are there parts of the body that were taken and not read?"""

    @abstractmethod
    def make_error(self, reason: str) -> Exception:
        """Return what is raised where an answer is cut short."""

    @property
    def can_be_reused(self) -> bool:
        return self.is_complete and not self.is_lost and self._is_kept and not self.has_unread_parts

    def begin_request(self, parts: Iterable[bytes], *, is_head_only: bool = False) -> None:
        """Write a request. The connection has no other one."""
        self.is_complete = False
        self.has_head = False
        self._is_kept = False
        self._is_head_only = is_head_only
        self._head_bytes = 0
        self.headers = []
        self._transport.writelines(parts)

    async def wait_for_head(self) -> None:
        """Wait until `status` and `headers` are known. Raises as `wait` does."""
        while not self.has_head:
            await self.wait()

    async def wait(self) -> None:
        """Wait until something arrives. Raises `make_error` if the connection is gone."""
        if self.is_lost:
            raise self.make_error(self._reason)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def give_up(self, reason: str) -> None:
        """Close the connection, because its answer can be of no use."""
        self._reason = reason
        self.is_lost = True
        self._transport.abort()
        self._wake()

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # those of uvloop and of TLS are no subclass of it
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(f"the answer cannot be read: {error}")
        except httptools.HttpParserUpgrade:  # no such error
            self.give_up("the answer cannot be read: it changes to another protocol")
        if self._head_bytes > MOST_HEAD:
            self.give_up(f"the answer's head is larger than {MOST_HEAD} bytes")
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_lost and error is not None:
            self._reason = f"{type(error).__name__}: {error}"
        self.is_lost = True
        self._wake()

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("no request waits for this answer")  # the parser raises an error of its own for it

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # the final answer follows
            self.headers = []
            return
        self.has_head = True
        self.is_complete = self._is_head_only

    def on_body(self, part: bytes) -> None:
        self._head_bytes = 0
        self.take_part(part)

    def on_message_complete(self) -> None:
        self.is_complete = self.has_head
        self._is_kept = self._parser.should_keep_alive()  # it can tell only now
