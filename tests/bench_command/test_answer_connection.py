"""The connections of a load: answers of every form of HTTP/1.1, cut anywhere."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from contextlib import suppress
from typing import Any

import anyio
import pytest

from engine.settings.http_connection import MOST_HEAD
from engine.settings.sse_client import StreamBroken
from engine.tools.bench.answer_connection import CUT, AnswerConnections

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"4\r\none \r\n10;name=value\r\ntwo\r\n\r\nand three\r\n0\r\nTrailer: 1\r\n\r\n"
BODY = b"one two\r\n\r\nand three"


class AnsweringPeer:
    """A server that answers each request with these bytes, in parts of `size` bytes, and counts connections."""

    def __init__(self, answer: bytes, size: int = 1 << 16, *, closes: bool = False) -> None:
        self.answer = answer
        self.size = size
        self.closes = closes
        self.requests = list[bytes]()
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2))
                for at in range(0, len(self.answer), self.size):
                    writer.write(self.answer[at : at + self.size])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    break
        writer.close()

    async def ask(self, times: int = 1, silence_s: float = 5.0) -> list[tuple[int, bytes]]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = AnswerConnections(f"http://127.0.0.1:{port}/api", {"Authorization": "x"}, silence_s, lambda: 1.0)
        found = list[tuple[int, bytes]]()
        try:
            for _ in range(times):
                async with connections.post("/v1", b"{}") as answer:
                    found.append((answer.status_code, await answer.aread()))
        finally:
            connections.close()
            server.close()
            await asyncio.sleep(0.01)  # the server's end of the connections ends
        return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + CHUNKS,
        OK + b"content-length: %d\r\n\r\n" % len(BODY) + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + CHUNKS,
    ],
    ids=["chunks", "length", "continue"],
)
def test_answers_are_whole_however_they_are_cut_and_the_connection_stays_open(answer: bytes, size: int) -> None:
    peer = AnsweringPeer(answer, size)
    assert anyio.run(peer.ask, 3) == [(200, BODY)] * 3
    assert peer.connections == 1
    head = peer.requests[0]
    assert head.startswith(b"POST /api/v1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: x\r\n\r\n{}" in head


def test_a_connection_that_was_closed_after_its_answer_is_opened_again() -> None:
    peer = AnsweringPeer(CHUNKED + CHUNKS, closes=True)
    assert anyio.run(peer.ask, 3) == [(200, BODY)] * 3
    assert peer.connections == 3
    assert len(peer.requests) == 3


def test_a_first_request_is_not_sent_again() -> None:
    peer = AnsweringPeer(b"", closes=True)
    with pytest.raises(StreamBroken, match=CUT):
        anyio.run(peer.ask)
    assert len(peer.requests) == 1


def test_an_answer_up_to_the_end_of_its_connection_is_whole() -> None:
    peer = AnsweringPeer(OK + b"\r\n" + BODY, closes=True)
    assert anyio.run(peer.ask, 2) == [(200, BODY)] * 2
    assert peer.connections == 2


@pytest.mark.parametrize(
    ("answer", "closes", "said"),
    [
        (CHUNKED + b"4\r\non", True, CUT),
        (OK + b"Content-Length: 9\r\n\r\nshort", True, CUT),
        (b"", True, CUT),
        (b"SSH-2.0-x\r\n\r\n", False, "cannot be read"),
        (CHUNKED + b"zz\r\n", False, "cannot be read"),
        (CHUNKED + b"1\r\nxx\r\n", False, "cannot be read"),
        (CHUNKED + b"4\r\n", False, "nothing came for 0.2 s"),
        (b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nx", False, "another protocol"),
        (OK + b"\r\n" + BODY, False, "nothing came for 0.2 s"),
        (OK + b"X: " + b"x" * (2 * MOST_HEAD), False, "head"),
        (OK + b"X: y\r\n" * MOST_HEAD, False, "head"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * MOST_HEAD, False, "head"),
        (CHUNKED + b"1\r\nx\r\n0\r\n" + b"X: y\r\n" * MOST_HEAD, False, "head"),
    ],
    ids=[
        *("a chunk", "a length", "nothing", "no HTTP", "no size", "a wrong size", "silence in chunks", "an upgrade"),
        *("silence without a length", "a header", "headers", "interim answers", "trailers"),
    ],
)
def test_an_answer_that_breaks_off_says_how(answer: bytes, closes: bool, said: str) -> None:
    peer: Any = AnsweringPeer(answer, closes=closes)
    with pytest.raises(StreamBroken, match=said):
        anyio.run(peer.ask, 1, 0.2)


def test_a_reset_connection_is_no_end_of_an_answer_without_a_length() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"\r\n" + BODY)
        await asyncio.sleep(0.05)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    peer = AnsweringPeer(b"")
    peer.serve = reset  # type: ignore[method-assign]
    with pytest.raises(StreamBroken, match="ConnectionResetError"):
        anyio.run(peer.ask)


@pytest.mark.parametrize(
    ("base", "headers", "line", "field"),
    [
        ("http://u%40:p@127.0.0.1:{}/a b/\u00e4/%20", {}, b"POST /a%20b/%C3%A4/%20/v1 HTTP/1.1", b"Basic dUA6cA=="),
        ("http://u:p@127.0.0.1:{}", {"Authorization": "Bearer x"}, b"POST /v1 HTTP/1.1", b"Bearer x"),
    ],
    ids=["of the address", "a key"],
)
def test_paths_and_credentials_are_sent_as_http_wants_them(
    base: str, headers: dict[str, str], line: bytes, field: bytes
) -> None:
    async def ask() -> list[bytes]:
        peer = AnsweringPeer(OK + b"Content-Length: 0\r\n\r\n")
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        connections = AnswerConnections(base.format(server.sockets[0].getsockname()[1]), headers, 5.0, lambda: 1.0)
        async with connections.post("/v1", b"{}"):
            pass
        connections.close()
        server.close()
        await asyncio.sleep(0.01)
        return peer.requests

    (request,) = anyio.run(ask)
    assert request.startswith(line + b"\r\nHost: 127.0.0.1:")
    assert request.count(b"\r\nAuthorization: ") == request.count(b"\r\nAuthorization: " + field + b"\r\n") == 1


def test_certificates_are_read_once_and_only_for_a_server_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[ssl.SSLContext]()

    def make() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return made[-1]

    async def ask(base: str) -> None:
        connections = AnswerConnections(base, {}, 5.0, lambda: 1.0)
        for _ in range(3):
            with pytest.raises(StreamBroken, match="no connection"):
                async with connections.post("/v1", b"{}"):
                    pass

    monkeypatch.setattr(ssl, "create_default_context", make)
    anyio.run(ask, "http://127.0.0.1:1")
    assert not made
    anyio.run(ask, "HTTPS://127.0.0.1:1")
    assert len(made) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    async def ask() -> None:
        async with AnswerConnections("http://127.0.0.1:1", {}, 5.0, lambda: 1.0).post("/v1", b"{}"):
            pass

    with pytest.raises(StreamBroken, match="no connection"):
        anyio.run(ask)
