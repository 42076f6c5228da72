"""Connections on which a load is sent, and which read streamed answers with little work. Used by `load_client.py`.

A general client of HTTP takes 60 to 90 us of processor time for each event of a stream. With 64 streams, whose next
tokens come every 7 ms, that is nearly all of one processor, and the times would be those of the client. Here an event
takes some 20 us. So a connection is a protocol of asyncio that reads HTTP/1.1 itself: the head of an answer once, and
of its body only lengths. It notes when each piece came.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import SplitResult, urlsplit

from attrs import define, field

from engine.settings.sse_client import StreamBroken

LONGEST_HEAD = 1 << 16  # bytes of the head of an answer, or of a line between two chunks
CUT = "the server closed the connection within its answer"


class AnswerConnection(asyncio.Protocol):
    """One connection. It has one request at a time, and is the answer to it.

    It has `status_code` first, then the pieces of the body.

    clock: returns the time at which data came. arrived: the time of the piece that was read last. timeout: seconds
    without a byte after which the request fails.
    """

    def __init__(self, clock: Callable[[], float], timeout: float) -> None:
        self.clock = clock
        self.timeout = timeout
        self.arrived = 0.0
        self.status_code = 0  # 0: the head has not come
        self.is_complete = True
        self.is_lost = False  # the connection has ended
        self._keeps_open = False
        self._error = ""
        self._pieces = deque[tuple[float, bytes]]()
        self._unread = b""  # of a head, or of a line between two chunks
        self._left: int | None = None  # bytes of the body, or of the chunk that has begun; None: up to the end
        self._is_chunked = False
        self._is_behind_chunk = False  # the next line is empty: it ends a chunk
        self._is_behind_body = False  # lines up to an empty one are trailers
        self._wakeup: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    @property
    def can_be_used(self) -> bool:
        """Can it have another request?"""
        return self.is_complete and self._keeps_open and not self.is_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # that of TLS is no subclass of it

    def send(self, request: bytes) -> None:
        """Send a request. The connection has no other one."""
        self.status_code = 0
        self.is_complete = False
        self._unread = b""
        self._pieces.clear()
        self._is_behind_chunk = False
        self._is_behind_body = False
        self._last_s = self._loop_time()
        self._check_silence()
        self.transport.write(request)

    async def wait_for_head(self) -> None:
        """Wait until `status_code` is known. Raises StreamBroken."""
        while not self.status_code:
            await self._wait()

    async def aiter_bytes(self) -> AsyncGenerator[bytes]:
        """Yield the pieces of the body, and set `arrived` for each. Raises StreamBroken."""
        while True:
            while self._pieces:
                self.arrived, piece = self._pieces.popleft()
                yield piece
            if self.is_complete:
                return
            await self._wait()

    async def aread(self) -> bytes:
        """Return the whole body. Raises StreamBroken."""
        return b"".join([piece async for piece in self.aiter_bytes()])

    def close(self) -> None:
        """Close the connection, whatever it is doing."""
        self._stop_watch()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.is_complete or self._error:
            return
        self._last_s = self._loop_time()
        try:
            if not self.status_code:
                data = self._read_head(data)
            if not self.status_code:
                return
            piece = self._read_chunks(data) if self._is_chunked else self._read_plain(data)
        except ValueError as error:
            self._error = f"an answer that is no HTTP/1.1: {error}"
        else:
            if piece:
                self._pieces.append((self.clock(), piece))
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self.status_code and self._left is None and not self._is_chunked:
            self.is_complete = True
        elif not self.is_complete and not self._error:
            self._error = CUT if error is None else f"{CUT} ({error})"
        self._wake()

    def _read_head(self, data: bytes) -> bytes:
        """Read the head of the answer, if it is there, and return what follows it. Raises ValueError."""
        data = self._unread + data
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            self._unread = data
            if len(data) > LONGEST_HEAD:
                raise ValueError("its head is too long")
            return b""
        self._unread = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ")
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise ValueError(first[:80])
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if status.startswith("1"):
            return self._read_head(rest)
        self.status_code = int(status)
        self._is_chunked = fields.get("transfer-encoding", "").lower().endswith("chunked")
        length = fields.get("content-length")
        self._left = 0 if self._is_chunked else None if length is None else int(length)
        closes = fields.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        self._keeps_open = not closes and self._left is not None
        self.is_complete = self._left == 0 and not self._is_chunked
        return rest

    def _read_plain(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        self._left -= len(data)
        self.is_complete = self._left <= 0
        return data

    def _read_chunks(self, data: bytes) -> bytes:
        """Return what these bytes have of the body. Raises ValueError."""
        data = self._unread + data
        self._unread = b""
        parts = list[bytes]()
        at = 0
        while at < len(data) and not self.is_complete:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                self._is_behind_chunk = not self._left
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._unread = data[at:]
                if len(self._unread) > LONGEST_HEAD:
                    raise ValueError("a line between two chunks is too long")
                break
            self._read_line(data[at:end])
            at = end + 2
        return b"".join(parts)

    def _read_line(self, line: bytes) -> None:
        """Read a line between two chunks, or behind the last one. Raises ValueError."""
        if self._is_behind_body:
            self.is_complete = not line
        elif self._is_behind_chunk:
            if line:
                raise ValueError("a chunk is longer than it says")
            self._is_behind_chunk = False
        else:
            self._left = int(line.partition(b";")[0], 16)
            if self._left < 0:
                raise ValueError("a chunk has a negative length")
            self._is_behind_body = not self._left

    async def _wait(self) -> None:
        if self._error:
            raise StreamBroken(self._error)
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup

    def _wake(self) -> None:
        if self.is_complete or self.is_lost:
            self._stop_watch()
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _check_silence(self) -> None:
        """Fail if nothing came for `timeout` seconds, else look again when that can be."""
        left = self._last_s + self.timeout - self._loop_time()
        if left <= 0:
            self._error = f"nothing came for {self.timeout:g} s"
            self._wake()
        else:
            self._watch = asyncio.get_running_loop().call_later(left, self._check_silence)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()


@define(eq=False)
class AnswerConnections:
    """Connections to one server: as many as there are requests at once. They stay open for further requests.

    base: the server's address. clock and timeout: see `AnswerConnection`.
    """

    base: str
    headers: Mapping[str, str]
    timeout: float
    clock: Callable[[], float]
    _idle: list[AnswerConnection] = field(factory=list["AnswerConnection"])

    @asynccontextmanager
    async def post(self, path: str, content: bytes) -> AsyncIterator[AnswerConnection]:
        """Send JSON, and give the block the answer when its head has come. Raises StreamBroken."""
        url = urlsplit(self.base)
        connection = await self._open(url)
        try:
            connection.send(self._write_head(url, path, len(content)) + content)
            await connection.wait_for_head()
            yield connection
        finally:
            if connection.can_be_used:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def _open(self, url: SplitResult) -> AnswerConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.can_be_used:
                return connection
            connection.close()
        tls = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if tls else 80)
        try:
            async with asyncio.timeout(self.timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: AnswerConnection(self.clock, self.timeout), url.hostname or "", port, ssl=tls
                )
        except (OSError, TimeoutError) as error:
            raise StreamBroken(f"no connection: {error}") from error
        return connection

    def _write_head(self, url: SplitResult, path: str, length: int) -> bytes:
        host = url.netloc.rpartition("@")[2]
        fields = {"Host": host, "Content-Type": "application/json", "Content-Length": str(length), **self.headers}
        lines = (f"POST {url.path.rstrip('/')}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()))
        return "\r\n".join((*lines, "", "")).encode("latin-1")
