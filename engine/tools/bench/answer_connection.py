"""Connections on which a load is sent, and which read streamed answers with little work. Used by `load_client.py`.

With 64 streams, whose next tokens come every 7 ms, a client has 110 us for each. A general one took 60 to 90 us of
processor time for an event, so the times that it saw were partly its own. Here an event takes some 25 us.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import SplitResult, quote, unquote_to_bytes, urlsplit

from attrs import define, field

from engine.settings.http_connection import HttpConnection
from engine.settings.sse_client import StreamBroken

CUT = "the server closed the connection within its answer"
PATH_CHARACTERS = "/%:@!$&'()*+,;=~"  # that stay as they are in a path, besides letters, digits and `_.-`
LENGTHS = {b"content-length", b"transfer-encoding"}  # headers of an answer that does not end with its connection


@define(eq=False)
class AnswerConnection(HttpConnection):
    """One connection of a load, and the answer that arrives on it (`sse_client.StreamedAnswer`).

    clock: returns the time at which data came. silence_s: seconds without a byte after which a request fails. arrived:
    the time at which the part that was read last came. is_stale: the server closed the connection after an earlier
    answer, and nothing came for the last request.
    """

    clock: Callable[[], float]
    silence_s: float
    arrived: float = field(default=0.0, init=False)
    is_stale: bool = field(default=False, init=False)
    _sent: int = field(default=0, init=False)  # requests
    _is_answered: bool = field(default=False, init=False)  # a byte came since the last request
    _parts: deque[tuple[float, bytes]] = field(factory=deque, init=False)
    _last_s: float = field(default=0.0, init=False)  # of the loop's clock, when a byte came or the request was sent
    _watch: asyncio.TimerHandle | None = field(default=None, init=False)

    @property
    def status_code(self) -> int:
        return self.status

    async def send(self, request: bytes) -> None:
        """Send a request, and wait for the head of its answer. Raises StreamBroken."""
        self._sent += 1
        self._is_answered = False
        self.begin_request([request])
        self._last_s = asyncio.get_running_loop().time()
        self._check_silence()
        await self.wait_for_head()

    async def aiter_bytes(self) -> AsyncGenerator[bytes]:
        """Yield the parts of the body, and set `arrived` for each. Raises StreamBroken."""
        while True:
            while self._parts:
                self.arrived, part = self._parts.popleft()
                yield part
            if self.is_complete:
                return
            await self.wait()

    async def aread(self) -> bytes:
        """Return the whole body. Raises StreamBroken."""
        return b"".join([part async for part in self.aiter_bytes()])

    def take_part(self, part: bytes) -> None:
        self._parts.append((self.clock(), part))

    @property
    def has_unread_parts(self) -> bool:
        return bool(self._parts)

    def make_error(self, reason: str) -> StreamBroken:
        return StreamBroken(reason)

    def data_received(self, data: bytes) -> None:
        self._last_s = asyncio.get_running_loop().time()
        self._is_answered = True
        super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.stop_watch()
        if not self.is_lost:
            self.is_stale = self._sent > 1 and not self._is_answered
            if error is None:
                if self.has_head and LENGTHS.isdisjoint(name for name, _ in self.headers):
                    self.is_complete = True
                else:
                    self._reason = CUT
        super().connection_lost(error)

    def stop_watch(self) -> None:
        """Let a request take as long as it likes."""
        if self._watch is not None:
            self._watch.cancel()

    def _check_silence(self) -> None:
        """Fail if nothing came for `silence_s` seconds, else look again when that can be."""
        loop = asyncio.get_running_loop()
        left = self._last_s + self.silence_s - loop.time()
        if left <= 0:
            self.give_up(f"nothing came for {self.silence_s:g} s")
        else:
            self._watch = loop.call_later(left, self._check_silence)


@define(eq=False)
class AnswerConnections:
    """Connections to one server: as many as there are requests at once. They stay open for further requests.

    base: the server's address. silence_s, clock: see `AnswerConnection`.
    """

    base: str
    headers: Mapping[str, str]
    silence_s: float
    clock: Callable[[], float]
    _idle: list[AnswerConnection] = field(factory=list["AnswerConnection"])
    _tls: ssl.SSLContext | None = field(init=False)  # made once: reading the certificates takes a tenth of a second

    def __attrs_post_init__(self) -> None:
        self._tls = ssl.create_default_context() if self.base.lower().startswith("https:") else None

    @asynccontextmanager
    async def post(self, path: str, content: bytes) -> AsyncIterator[AnswerConnection]:
        """Send JSON, and give the block the answer when its head has come. Raises StreamBroken."""
        url = urlsplit(self.base)
        request = self._write_head(url, path, len(content)) + content
        connection = await self._open(url)
        try:
            try:
                await connection.send(request)
            except StreamBroken:
                if not connection.is_stale:
                    raise
                # llama.cpp closes a connection after each stream, although its head says that it stays open.
                connection = await self._connect(url)
                await connection.send(request)
            yield connection
        finally:
            connection.stop_watch()
            if connection.can_be_reused:
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
            if connection.can_be_reused:
                return connection
            connection.close()
        return await self._connect(url)

    async def _connect(self, url: SplitResult) -> AnswerConnection:
        address = url.hostname or "", url.port or (443 if self._tls else 80)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.silence_s):
                _, connection = await loop.create_connection(
                    lambda: AnswerConnection(self.clock, self.silence_s), *address, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise StreamBroken(f"no connection: {error}") from error
        return connection

    def _write_head(self, url: SplitResult, path: str, length: int) -> bytes:
        credentials, _, host = url.netloc.rpartition("@")
        fields = {"Host": host, "Content-Type": "application/json", "Content-Length": str(length)}
        if credentials:
            fields["Authorization"] = f"Basic {b64encode(unquote_to_bytes(credentials)).decode()}"
        fields |= self.headers
        target = quote(url.path.rstrip("/"), safe=PATH_CHARACTERS) + path
        lines = (f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()))
        return "\r\n".join((*lines, "", "")).encode("latin-1")
