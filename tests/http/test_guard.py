"""Tests of who may call, and of what a connection may do before its request is whole. Raw sockets are used where httpx
is too polite.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest

from tests.http.conftest import Site, chat, served
from tests.http.wire.test_lifecycle import until
from tests.plain_http import NO_TLS

PATH = "/v1/chat/completions"
BODY = json.dumps(chat(max_tokens=1)).encode()
JSON = "Content-Type: application/json"


def head(*lines: str, target: str = PATH, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()


async def exchange(site: Site, raw: bytes, seconds: float = 30) -> bytes:
    """Send, then read until the server closes or nothing more comes."""
    received = b""
    async with await anyio.connect_tcp("127.0.0.1", site.serving.port) as stream:
        with anyio.move_on_after(seconds):
            try:
                await stream.send(raw)
                while not complete(received):
                    received += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
    return received


def complete(received: bytes) -> bool:
    head, _, body = received.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return False


def status(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "127.0.0.1:99", "127.9.9.9", "[::1]:8000", "me.localhost", "allowed.example"],
)
async def test_known_hosts_are_answered(guarded: Site, host: str) -> None:
    assert (await guarded.client.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "x/health?", "a@localhost", "", "1.2.3.4", "[::"],
)
async def test_any_other_host_is_misdirected(guarded: Site, host: str) -> None:
    response = await guarded.client.get("/health", headers={"host": host})
    assert response.status_code == 421
    assert response.json()["error"]["code"] == "misdirected_request"


@pytest.fixture(scope="module")
async def guarded(folder: Path) -> AsyncIterator[Site]:
    """Keys, one more host, one page; small and impatient."""
    options = {
        "api_keys": ("first-key", "ключ"),
        "allowed_hosts": ("allowed.example",),
        "allowed_origins": ("https://page.example",),
        "max_body": 100_000,
        "body_timeout_s": 0.5,
    }
    async with served(folder, server={"header_timeout_s": 0.5}, **options) as site:
        site.client.headers["authorization"] = "Bearer first-key"
        yield site


async def test_a_page_of_another_origin_is_refused_and_learns_nothing(guarded: Site) -> None:
    for origin in ("http://evil.example", "null", f"http://localhost.evil:{guarded.serving.port}"):
        for method, headers in (("POST", {"content-type": "text/plain"}), ("OPTIONS", {}), ("GET", {})):
            response = await guarded.client.request(method, PATH, headers={"origin": origin, **headers})
            assert response.status_code == 403
            assert not [name for name in response.headers if name.startswith("access-control")]


async def test_the_servers_own_page_and_an_allowed_one_may_call(guarded: Site) -> None:
    own = str(guarded.client.base_url).rstrip("/")
    assert (await guarded.client.get("/props", headers={"origin": own})).status_code == 200
    allowed = {"origin": "https://page.example"}
    preflight = {**allowed, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    async with httpx.AsyncClient(base_url=own, trust_env=False, verify=NO_TLS) as keyless:
        answer = await keyless.options(PATH, headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.headers["access-control-allow-headers"] == "x-api-key"
    assert {"GET", "POST", "DELETE", "OPTIONS"} == set(answer.headers["access-control-allow-methods"].split(", "))
    assert (await guarded.client.get("/props", headers=allowed)).headers["vary"] == "Origin"


async def test_the_same_name_over_another_protocol_is_another_origin(guarded: Site) -> None:
    """This server speaks no TLS, so another server has sent that page."""
    own = str(guarded.client.base_url).rstrip("/").replace("http:", "https:")
    response = await guarded.client.get("/props", headers={"origin": own})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin")
    assert "--allow-origin" in response.json()["error"]["message"]


async def test_a_star_lets_every_page_call(folder: Path) -> None:
    async with served(folder, allowed_origins=("*",)) as site:
        for origin in ("http://evil.example", "null", "https://page.example:444"):
            response = await site.client.get("/props", headers={"origin": origin})
            assert response.headers["access-control-allow-origin"] == origin
            assert "retry-after" in response.headers["access-control-expose-headers"]
            preflight = {"origin": origin, "access-control-request-method": "POST"}
            assert (await site.client.options(PATH, headers=preflight)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer first"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": "k" * 10_000},
    ],
    ids=lambda headers: str(headers)[:50],
)
async def test_without_a_key_nothing_but_health_is_answered(guarded: Site, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=guarded.client.base_url, trust_env=False, verify=NO_TLS) as client:
        for method, path in (("POST", PATH), ("GET", "/props"), ("GET", "/"), ("GET", "/metrics"), ("GET", "/nothing")):
            response = await client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        assert (await client.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer first-key"},
        {"x-api-key": "first-key"},
        {"x-api-key": "first-key", "authorization": "Bearer wrong"},
        {"x-api-key": "ключ".encode().decode("latin-1")},
    ],
    ids=lambda headers: ascii(headers)[:50],
)
async def test_a_right_key_in_either_header_opens(guarded: Site, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with httpx.AsyncClient(base_url=guarded.client.base_url, trust_env=False, verify=NO_TLS) as client:
        assert (await client.get("/props", headers=raw)).status_code == 200


async def test_a_wrong_key_is_told_before_the_body_is_sent(guarded: Site) -> None:
    raw = head("Host: localhost", JSON, "Content-Length: 50000", "Expect: 100-continue")
    received = await exchange(guarded, raw)
    assert status(received) == 401
    assert b"connection: close" in received.lower()


async def test_an_absolute_target_does_not_get_around_the_key(guarded: Site) -> None:
    for target in (
        "http://localhost/health",
        "http://x/health?/props",
        "//health",
        "/health/../props",
        "/health%2f..%2fprops",
    ):
        received = await exchange(guarded, head("Host: localhost", target=target, method="GET"))
        assert status(received) == 401, target


async def test_other_kinds_of_body_are_refused(guarded: Site) -> None:
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ):
        response = await guarded.client.post(PATH, content=BODY, headers=headers)
        assert response.status_code == 415
    response = await guarded.client.post(
        PATH, content=BODY, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 200


async def test_expect_100_continue_is_honoured(guarded: Site) -> None:
    lines = ["Host: localhost", JSON, "Authorization: Bearer first-key", f"Content-Length: {len(BODY)}"]
    async with await anyio.connect_tcp("127.0.0.1", guarded.serving.port) as stream:
        with anyio.fail_after(60):
            await stream.send(head(*lines, "Expect: 100-continue"))
            assert status(await stream.receive()) == 100
            await stream.send(BODY)
            assert status(await stream.receive()) == 200


async def test_a_body_over_the_cap_is_refused_by_its_length_or_while_it_comes(guarded: Site) -> None:
    lines = ["Host: localhost", JSON, "Authorization: Bearer first-key"]
    declared = await exchange(guarded, head(*lines, "Content-Length: 50000000"))
    assert status(declared) == 413
    assert b"connection: close" in declared.lower()
    part = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    chunked = await exchange(guarded, head(*lines, "Transfer-Encoding: chunked") + part * 10)
    assert status(chunked) == 413
    assert b"100000 bytes" in chunked


async def test_a_body_that_does_not_come_is_a_timeout(guarded: Site) -> None:
    start = time.monotonic()
    lines = ["Host: localhost", JSON, "Authorization: Bearer first-key", "Content-Length: 100"]
    received = await exchange(guarded, head(*lines) + b"{")
    assert status(received) == 408
    assert time.monotonic() - start > 0.3
    assert b"0.5 s" in received


@pytest.mark.parametrize(
    "raw", [b"", b"POST /v1", head("Host: localhost")[:-2]], ids=["idle", "half a line", "half a head"]
)
async def test_a_head_that_does_not_come_closes_the_connection(guarded: Site, raw: bytes) -> None:
    start = time.monotonic()
    async with await anyio.connect_tcp("127.0.0.1", guarded.serving.port) as stream:
        if raw:
            await stream.send(raw)
        await until(lambda: guarded.serving.connections)
        assert {one.shared.header_timeout_s for one in guarded.serving.connections} == {0.5}
        with anyio.fail_after(60), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
    assert time.monotonic() - start > 0.3


async def test_the_head_of_a_second_request_has_its_own_timeout(guarded: Site) -> None:
    async with await anyio.connect_tcp("127.0.0.1", guarded.serving.port) as stream:
        await stream.send(head("Host: localhost", target="/health", method="GET"))
        assert status(await stream.receive()) == 200
        await anyio.sleep(0.8)  # idle between requests is no partial head
        await stream.send(b"GET /hea")
        with anyio.fail_after(60), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()


async def test_many_half_open_connections_do_not_keep_others_out(folder: Path) -> None:
    async with served(folder, server={"header_timeout_s": 60}) as site:
        streams = [await anyio.connect_tcp("127.0.0.1", site.serving.port) for _ in range(200)]
        try:
            for stream in streams:
                await stream.send(b"POST /v1/chat")
            assert (await site.client.get("/health")).status_code == 200
            assert len(site.serving.connections) > 200, "none of them has been given up"
        finally:
            for stream in streams:
                await stream.aclose()


@pytest.mark.parametrize(
    "raw",
    [
        head("Host: localhost", "X-Long: " + "x" * 100_000, target="/health", method="GET"),
        head("Host: localhost", *(f"X-{number}: y" for number in range(20_000)), target="/health", method="GET"),
        head("Host: localhost", target="/" + "x" * 2_000_000, method="GET"),
        head("Host: localhost", "Content-Length: 1", "Content-Length: 2"),
        head("Host: localhost", "Transfer-Encoding: xchunked"),
        head(),
        head("Host: localhost", "Host: evil.example"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS hello\r\n\r\n",
    ],
    ids=["long header", "many headers", "long target", "two lengths", "odd coding", "no host", "two hosts", "TLS"],
)
async def test_what_is_not_good_http_is_a_400(guarded: Site, raw: bytes) -> None:
    received = await exchange(guarded, raw)
    # The reply may be lost when the client was still sending.
    assert not received or status(received) in (400, 414, 431, 501)
    assert (await guarded.client.get("/health")).status_code == 200


async def test_both_length_and_chunks_are_a_400_and_the_connection_ends(guarded: Site) -> None:
    lines = [
        "Host: localhost",
        JSON,
        "Authorization: Bearer first-key",
        "Content-Length: 3",
        "Transfer-Encoding: chunked",
    ]
    received = await exchange(guarded, head(*lines) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert status(received) == 400
    async with await anyio.connect_tcp("127.0.0.1", guarded.serving.port) as stream:
        await stream.send(head(*lines) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        with anyio.fail_after(60):
            async for _ in stream:
                pass


@pytest.mark.parametrize("refused", [True, False], ids=["refused at once", "whose body is awaited"])
async def test_a_body_that_is_no_good_http_ends_what_was_being_answered(
    guarded: Site, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    lines = ["Host: evil.example" if refused else "Host: localhost", JSON, "Authorization: Bearer first-key"]
    received = await exchange(guarded, head(*lines, "Transfer-Encoding: chunked") + b"no length\r\n")
    assert status(received) == 400
    assert received.count(b"HTTP/1.1") == 1
    assert (await guarded.client.get("/health")).status_code == 200
    assert not [record for record in caplog.records if record.exc_info], "nothing was said after the 400"


async def test_where_every_interface_is_listened_on_any_address_will_do_but_no_name(folder: Path) -> None:
    async with served(folder, allowed_hosts=("::", "named.example")) as site:
        for host, expected in (
            ("192.168.1.5:8000", 200),
            ("[fe80::1]:8000", 200),
            ("named.example", 200),
            ("evil.example", 421),
            ("127.0.0.1.evil.example", 421),
        ):
            assert (await site.client.get("/health", headers={"host": host})).status_code == expected, host


async def test_an_origin_that_is_no_url_is_refused(guarded: Site) -> None:
    for origin in ("http://[::", "http://[x]", "]["):
        response = await guarded.client.get("/health", headers={"origin": origin})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin")


async def test_a_star_accepts_any_host(folder: Path) -> None:
    async with served(folder, allowed_hosts=("*",)) as site:
        assert (await site.client.get("/health", headers={"host": "any.example"})).status_code == 200
