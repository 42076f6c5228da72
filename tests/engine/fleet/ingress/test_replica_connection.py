"""The connections of an ingress to replicas, against a server that sends what a test says, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from engine.fleet.ingress.held_answer import ReplicaLost
from engine.fleet.ingress.replica_connection import (
    IDLE_S,
    MOST_UNREAD,
    ConnectionPool,
    ReplicaRequest,
    parse_address,
)

pytestmark = pytest.mark.timeout(30)
GET = ReplicaRequest("GET", "/props?full=1", [(b"accept", b"*/*")])
POST = ReplicaRequest("POST", "/v1/completions", [(b"host", b"fleet")], b"{}")
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kind: Whole\r\n\r\nhello"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


class ScriptedReplica:
    """A server. Each request gets the next of the answers; None: the connection is closed.

    stays: it waits for its client after the last one. heads: the requests that have arrived.
    """

    def __init__(self, *answers: bytes | None, stays: bool = True) -> None:
        self.answers = list(answers)
        self.stays = stays
        self.heads: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.heads.append(head + await reader.readexactly(int(length or 0)))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
            if self.stays:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended.set()
            writer.close()


@asynccontextmanager
async def serve(script: ScriptedReplica) -> AsyncIterator[tuple[ConnectionPool, tuple[str, int]]]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    pool = ConnectionPool()
    try:
        yield pool, parse_address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        pool.close()
        server.close()


async def ask(pool: ConnectionPool, address: tuple[str, int], request: ReplicaRequest = GET) -> tuple[int, bytes]:
    connection = await pool.open(address)
    with pool.lend(connection, address):
        await connection.send(request, "replica")
        return connection.status, b"".join([part async for part in connection.read_parts()])


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run a test in one of the two event loops: Ray Serve uses the second one."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())

    return run_in_loop


def test_answers_of_both_lengths_share_a_connection(run: Callable[..., None]) -> None:
    async def test() -> None:
        script = ScriptedReplica(WHOLE, CHUNKS, b"HTTP/1.1 204 No Content\r\n\r\n", WHOLE)
        async with serve(script) as (pool, address):
            found = [await ask(pool, address, request) for request in (GET, POST, GET, POST)]
            assert found == [(200, b"hello"), (200, b"hello"), (204, b""), (200, b"hello")]
        assert script.connections == 1
        assert script.heads[0] == b"GET /props?full=1 HTTP/1.1\r\naccept: */*\r\nhost: replica\r\n\r\n"
        assert script.heads[1] == b"POST /v1/completions HTTP/1.1\r\nhost: fleet\r\ncontent-length: 2\r\n\r\n{}"

    run(test)


def test_names_of_headers_are_in_lower_case_and_values_as_sent(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with serve(ScriptedReplica(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + WHOLE)) as (pool, address):
            connection = await pool.open(address)
            with pool.lend(connection, address):
                await connection.send(GET, "replica")
                assert connection.headers == [(b"content-length", b"5"), (b"x-kind", b"Whole")]
                assert [part async for part in connection.read_parts()] == [b"hello"]

    run(test)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.1 200 OK\r\n",
        WHOLE[:-1],
        CHUNKS[:-8],
        b"no HTTP at all\r\n\r\n",
        CHUNKS.replace(b"2\r\nlo", b"x\r\nlo"),
    ],
)
def test_an_answer_that_is_cut_or_broken_is_a_lost_replica(run: Callable[..., None], answer: bytes | None) -> None:
    async def test() -> None:
        async with serve(ScriptedReplica(answer, stays=False)) as (pool, address):
            with pytest.raises(ReplicaLost):
                await ask(pool, address)
            assert not pool.idle

    run(test)


@pytest.mark.parametrize(
    "leave", [WHOLE.replace(b"X-Kind: Whole", b"Connection: close"), WHOLE + WHOLE, WHOLE.replace(b"1.1", b"1.0")]
)
def test_a_connection_that_may_not_be_used_again_is_closed(run: Callable[..., None], leave: bytes) -> None:
    async def test() -> None:
        script = ScriptedReplica(leave, WHOLE)
        async with serve(script) as (pool, address):
            assert await ask(pool, address) == (200, b"hello")
            assert await ask(pool, address) == (200, b"hello")
            assert script.connections == 2

    run(test)


def test_the_answer_to_a_head_has_no_body(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with serve(ScriptedReplica(WHOLE.removesuffix(b"hello"), WHOLE)) as (pool, address):
            assert await ask(pool, address, ReplicaRequest("HEAD", "/", [])) == (200, b"")
            assert await ask(pool, address) == (200, b"hello")

    run(test)


def test_who_leaves_an_answer_closes_its_connection(run: Callable[..., None]) -> None:
    async def test() -> None:
        script = ScriptedReplica(WHOLE[:-2])
        async with serve(script) as (pool, address):
            asking: Awaitable[tuple[int, bytes]] = asyncio.wait_for(ask(pool, address), 0.1)
            with pytest.raises(TimeoutError):
                await asking
            await script.ended.wait()
            assert not pool.idle

    run(test)


@pytest.mark.parametrize("first", [b"secret", b"s" * (2 * MOST_UNREAD)], ids=["small", "large"])
@pytest.mark.parametrize("taken", [0, 1])
def test_an_answer_that_came_but_was_not_read_reaches_no_other_request(
    run: Callable[..., None], first: bytes, taken: int
) -> None:
    """A client leaves while the rest of its answer, which has come, waits for it."""
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n%x\r\n%b\r\n0\r\n\r\n"

    async def test() -> None:
        async with serve(ScriptedReplica(answer % (len(first), first), WHOLE)) as (pool, address):
            connection = await pool.open(address)
            with pool.lend(connection, address):
                await connection.send(POST, "replica")
                parts = connection.read_parts()
                for _ in range(taken):
                    assert await anext(parts) == b"a"
                for _ in range(100):
                    await asyncio.sleep(0.002)
                    if connection.is_complete:
                        break
            async with asyncio.timeout(5):
                assert await ask(pool, address) == (200, b"hello")

    run(test)


def test_idle_connections_are_kept_for_a_while_and_lost_ones_are_forgotten(run: Callable[..., None]) -> None:
    async def test() -> None:
        script = ScriptedReplica(WHOLE, WHOLE, WHOLE)
        async with serve(script) as (pool, address):
            await ask(pool, address)
            pool.idle[address][0].idle_since -= 2 * IDLE_S
            await ask(pool, address)
            assert script.connections == 2
            pool.idle[address][0].close()
            await asyncio.sleep(0.05)
            with pytest.raises(ReplicaLost):
                await pool.open(("127.0.0.1", 1))
            assert not pool.idle

    run(test)


def test_an_answer_that_nobody_reads_is_not_taken_in(run: Callable[..., None]) -> None:
    size = 64 << 20

    async def test() -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
        async with serve(ScriptedReplica(head + bytes(size))) as (pool, address):
            connection = await pool.open(address)
            with pool.lend(connection, address):
                await connection.send(GET, "replica")
                await asyncio.sleep(0.1)
                held = sum(map(len, connection._parts))  # noqa: SLF001 - what is held is in no answer
                assert MOST_UNREAD < held < 2 * MOST_UNREAD + (1 << 20)
                assert sum([len(part) async for part in connection.read_parts()]) == size

    run(test)


@pytest.mark.parametrize(
    "broken",
    [
        ReplicaRequest("GET", "/\r\nx: y", []),
        ReplicaRequest("GET", "/", [(b"accept", b"a\nb")]),
        ReplicaRequest("GET", "/", [(b"accept", b"a\rb")]),
    ],
)
def test_no_header_begins_a_line_of_its_own(broken: ReplicaRequest) -> None:
    with pytest.raises(ValueError, match="line break"):
        broken.encode("replica")
