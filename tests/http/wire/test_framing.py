"""Tests of how requests are separated in the bytes of a connection: lines, and chunks that announce too much."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from tests.http.conftest import Site, served
from tests.http.test_guard import JSON, head, status
from tests.http.wire.test_connections import answer, connect

BODY = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
CHUNKED = head("Host: localhost", JSON, "Transfer-Encoding: chunked", target="/v1/completions")
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
async def small(folder: Path) -> AsyncIterator[Site]:
    async with served(folder, max_body=1000) as site:
        yield site


async def said(site: Site, raw: bytes, *more: bytes) -> bytes:
    """The answer, which has to come long before a body would be late. more: sent after a moment, each."""
    async with await connect(site) as stream:
        await stream.send(raw)
        for part in more:
            await anyio.sleep(0.1)
            await stream.send(part)
        with anyio.fail_after(20):
            return await answer(stream)


@pytest.mark.parametrize(
    "parts",
    [
        (CHUNKED + b"3e9\r\n",),
        (CHUNKED, b"3e9\r\n"),
        (CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n",),
        (CHUNKED + b"3e9\r\nx",),
        (CHUNKED + b"5\r\n12345\r\n", b"3e5\r\n"),
        (CHUNKED + b"0" * 16 + b"3e9;name=value\r\n",),
    ],
    ids=["at once", "behind the head", "20 digits", "with a byte", "in all", "with an extension"],
)
async def test_a_chunk_that_announces_more_than_a_body_may_have_is_refused_at_once(
    small: Site, parts: tuple[bytes, ...]
) -> None:
    received = await said(small, *parts)
    assert status(received) == 413
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"


async def test_chunks_of_one_request_do_not_count_for_the_next(small: Site) -> None:
    large = b'{"prompt":"Hello","max_tokens":1,"unknown":"%b"}' % (b"x" * 700)
    async with await connect(small) as stream:
        with anyio.fail_after(20):
            for _ in range(3):
                await stream.send(CHUNKED + b"%x\r\n" % len(large))
                await anyio.sleep(0.05)
                await stream.send(large + b"\r\n0\r\n\r\n")
                assert status(await answer(stream)) == 200


@pytest.mark.parametrize(
    "raw",
    [
        CHUNKED.replace(b"\r\n", b"\n") + CHUNK + b"0\r\n\r\n",
        CHUNKED.replace(b"\r\n", b"\n", 1) + CHUNK + b"0\r\n\r\n",
        CHUNKED[:-2] + b"\n" + CHUNK + b"0\r\n\r\n",
        CHUNKED + CHUNK + b"0\r\nX: y\n\r\n",
        CHUNKED + CHUNK + b"0\r\n\n",
        CHUNKED + CHUNK.replace(b"\r\n", b"\n", 1) + b"0\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["all", "the first", "the last", "a trailer", "behind the chunks", "a chunk", "no body", "an empty line"],
)
async def test_a_line_that_ends_with_a_bare_line_feed_is_refused(small: Site, raw: bytes) -> None:
    received = await said(small, raw)
    assert status(received) == 400
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"


async def test_chunks_with_extensions_and_trailers_are_read(small: Site) -> None:
    chunk = CHUNK.replace(b"\r\n", b";name=value\r\n", 1)
    assert status(await said(small, CHUNKED + chunk, b"0\r\nX: y\r\n\r\n")) == 200
