"""Tests of what a connection may cost: bodies that are not needed, answers that are not read, and more clients than
there is room for.
"""

from __future__ import annotations

import json
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined] # what a socket is behind
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from errno import ENOTCONN
from pathlib import Path

import anyio
import anyio.abc
import pytest

from tests.http.conftest import Site, chat, served
from tests.http.test_guard import JSON, complete, head, status
from tests.http.wire.test_lifecycle import raw_post, until

GONE = (anyio.EndOfStream, anyio.BrokenResourceError)


@pytest.fixture
async def impatient(folder: Path) -> AsyncIterator[Site]:
    async with served(folder, server={"drain_s": 0.3, "max_connections": 20}, max_body=100_000) as site:
        yield site


async def connect(site: Site) -> anyio.abc.SocketStream:
    return await anyio.connect_tcp("127.0.0.1", site.serving.port)


async def answer(stream: anyio.abc.SocketStream) -> bytes:
    received = b""
    while not complete(received):
        received += await stream.receive()
    return received


async def ended(stream: anyio.abc.SocketStream) -> bool:
    """Read until the server closes."""
    try:
        while True:
            await stream.receive()
    except GONE:
        return True


async def pushed(stream: anyio.abc.SocketStream, part: bytes, pause: float = 0) -> int:
    """Send it again and again until the server closes: bytes that were taken."""
    sent = 0
    try:
        while True:
            await stream.send(part)
            sent += len(part)
            await anyio.sleep(pause)
    except GONE:
        return sent


async def test_a_body_that_nobody_wants_and_that_does_not_end_closes_its_connection(impatient: Site) -> None:
    async with await connect(impatient) as stream:
        await stream.send(head("Host: localhost", "Content-Length: 1000000", target="/health", method="GET") + b"x")
        with anyio.fail_after(60):
            assert status(await answer(stream)) == 200
            assert await ended(stream)


async def test_a_body_that_nobody_wants_and_that_trickles_has_the_same_time(impatient: Site) -> None:
    async with await connect(impatient) as stream:
        await stream.send(head("Host: localhost", "Content-Length: 1000000", target="/health", method="GET"))
        with anyio.fail_after(60):
            assert await pushed(stream, b"x", pause=0.02) > 1


async def test_only_so_much_of_a_body_is_thrown_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.http.wire.connection.DRAIN_BYTES", 1 << 20)
    async with served(folder, server={"drain_s": 60}) as site, await connect(site) as stream:
        await stream.send(head("Host: localhost", f"Content-Length: {1 << 40}", target="/health", method="GET"))
        with anyio.fail_after(60):
            sent = await pushed(stream, b" " * (1 << 16))
    assert sent < 32 << 20, "the socket's own buffers take some, too"


async def test_a_body_that_comes_late_leaves_the_connection_as_it_was(impatient: Site) -> None:
    async with await connect(impatient) as stream:
        with anyio.fail_after(60):
            for _ in range(3):
                await stream.send(head("Host: localhost", "Content-Length: 5", target="/health", method="GET") + b"1")
                assert status(await answer(stream)) == 200
                await stream.send(b"2345")
            await anyio.sleep(0.5)
            await stream.send(raw_post(chat(max_tokens=1)))
            assert status(await answer(stream)) == 200


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_client_that_still_sends_too_large_a_body_hears_why(impatient: Site, declared: bool) -> None:
    size = 8 << 20
    how = f"Content-Length: {size}" if declared else "Transfer-Encoding: chunked"
    part = b" " * (1 << 16) if declared else b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    async with await connect(impatient) as stream:
        await stream.send(head("Host: localhost", JSON, how))
        with anyio.fail_after(60):
            for _ in range(size >> 16):
                await stream.send(part)
            received = await answer(stream)
    assert status(received) == 413
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"


async def test_what_is_not_http_hears_why_even_while_it_sends(impatient: Site) -> None:
    async with await connect(impatient) as stream:
        with anyio.fail_after(60):
            await stream.send(head("Host: localhost", target="/" + "x" * 2_000_000, method="GET"))
            received = await answer(stream)
    assert status(received) == 414
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "target_too_long"


@pytest.mark.parametrize("pause", [0, 0.02], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (head("Host: localhost", "X: " + "x" * 200_000, target="/health", method="GET"), (431, "head_too_large")),
        (
            head("Host: localhost", *(f"X-{at}: y" for at in range(20_000)), target="/health", method="GET"),
            (431, "head_too_large"),
        ),
        (head("Host: localhost", target="/" + "x" * 200_000, method="GET"), (414, "target_too_long")),
        (head("Host: localhost", "Transfer-Encoding: odd"), (501, "bad_http")),
        (head("Host: localhost", "Transfer-Encoding: chunked") + b"5;" + b"x" * 200_000, (400, "bad_http")),
    ],
    ids=["a header", "headers", "target", "coding", "a chunk's line"],
)
async def test_what_is_too_large_or_unknown_has_its_own_status(
    impatient: Site, raw: bytes, expected: tuple[int, str], pause: float
) -> None:
    async with await connect(impatient) as stream:
        with anyio.fail_after(60):
            for at in range(0, len(raw), 1 << 15):
                await stream.send(raw[at : at + (1 << 15)])
                await anyio.sleep(pause)
            received = await answer(stream)
    assert (status(received), json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"]) == expected


async def test_a_client_that_is_gone_when_its_answer_ends_is_no_fault(
    impatient: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything was sent, and the reset has come and is not read yet. So the socket cannot be half closed any more."""

    def gone(_: object) -> None:
        raise OSError(ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(_SelectorSocketTransport, "write_eof", gone)
    async with await connect(impatient) as stream:
        await stream.send(head("Host: localhost", JSON, "Content-Length: 1000000") + b"x")
        with anyio.fail_after(60):
            assert status(await answer(stream)) == 413
            assert await ended(stream)
    assert [line for line in caplog.records if line.exc_info] == []


async def test_connections_that_only_wait_make_room_for_others(impatient: Site) -> None:
    """These connections say nothing, or send half a head, or a head whose body does not come."""
    starts = (b"", b"GET /hea", head("Host: localhost", "Content-Length: 9", target="/health", method="GET"))
    async with AsyncExitStack() as open_ones:
        for number in range(60):
            stream = await open_ones.enter_async_context(await connect(impatient))
            await stream.send(starts[number % 3])
        with anyio.fail_after(60):
            assert (await impatient.client.get("/health")).status_code == 200


async def test_where_every_connection_is_being_answered_the_next_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(folder, server={"max_connections": 4}, door={"step_s": 0.05}) as site, AsyncExitStack() as stack:
        for _ in range(4):
            stream = await stack.enter_async_context(await connect(site))
            await stream.send(raw_post(chat(stream=True)))
        await until(lambda: len(site.door.tickets) == 4)
        with anyio.fail_after(60):
            for _ in range(9):
                async with await connect(site) as late:
                    assert status(await answer(late)) == 503
                    assert await ended(late)
        shown = [record for record in caplog.records if "no room for all connections" in record.getMessage()]
        assert len(shown) == 1
    async with served(folder) as site:
        assert (await site.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("closing", [True, False], ids=["to be closed", "kept alive"])
async def test_an_answer_that_is_not_taken_does_not_keep_its_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch, closing: bool
) -> None:
    """All of it is in the server's buffer, whether or not the client asked to be closed after it."""
    monkeypatch.setattr("adapters.http.wire.connection.CLOSE_S", 0.3)
    async with served(folder, max_ctx=1 << 20, door={"per_step": 1000}) as site, await connect(site) as stream:
        request = raw_post(chat(logprobs=True, top_logprobs=20, max_tokens=4000))
        await stream.send(request.replace(b"Host:", b"Connection: close\r\nHost:") if closing else request)
        connections = site.serving.connections
        await until(lambda: connections and next(iter(connections)).cycle)
        await until(lambda: not connections, seconds=20)
        assert site.serving.connections == set()


async def test_an_answer_that_is_taken_slowly_keeps_its_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.http.wire.connection.CLOSE_S", 1.5)
    async with served(folder, max_ctx=1 << 20, door={"per_step": 1000}) as site, await connect(site) as stream:
        await stream.send(raw_post(chat(logprobs=True, top_logprobs=20, max_tokens=12_000)))
        received = bytearray()
        with anyio.fail_after(60):
            while len(received) < length(received):
                received += await stream.receive(1 << 18)
                await anyio.sleep(0.03)
        assert len(received) == length(received) > 8 << 20, "more than the sockets hold"


def length(received: bytearray) -> int:
    """Return the length of the whole answer, as its head says. Until the head is there, this is one byte more than was
    received.
    """
    top, end, _ = bytes(received[:4000]).partition(b"\r\n\r\n")
    if not end:
        return len(received) + 1
    (declared,) = [line for line in top.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(top) + 4 + int(declared.partition(b":")[2])


async def test_a_stop_does_not_wait_for_bodies_that_nobody_wants(folder: Path) -> None:
    async with served(folder, server={"drain_s": 60}) as site, await connect(site) as stream:
        await stream.send(head("Host: localhost", "Content-Length: 1000000", target="/health", method="GET") + b"x")
        assert status(await answer(stream)) == 200
        site.serving.stop()
        with anyio.fail_after(30):  # and not what is left of the minute
            await site.serving.end_event.wait()
