"""Large bodies, all connections together: held up to a limit, in turn, and not for those that do not send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.abc
import pytest
from attrs import define

from adapters.http.wire.body_budget import BUDGETED_BODIES, FREE_BYTES, BodyBudget
from tests.http.conftest import Site, served
from tests.http.test_guard import JSON, head, status
from tests.http.wire.test_connections import answer, connect
from tests.http.wire.test_lifecycle import until

LARGEST = 1 << 20
BODY = json.dumps({"prompt": "Hello", "max_tokens": 1, "unknown": "x" * (LARGEST - 100)}).encode()
HEAD = head("Host: localhost", JSON, f"Content-Length: {len(BODY)}", target="/v1/completions")
CHUNKED = head("Host: localhost", JSON, "Transfer-Encoding: chunked", target="/v1/completions")


@define(eq=False)
class Taking:
    """A server, and what it holds of bodies."""

    site: Site
    budget: BodyBudget

    async def begun(self, stack: AsyncExitStack, count: int) -> list[anyio.abc.SocketStream]:
        """So many connections that have sent all of a body but the last byte."""
        streams = [await stack.enter_async_context(await connect(self.site)) for _ in range(count)]
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(stream.send, HEAD + BODY[:-1])
        return streams

    async def whole(self) -> int:
        async with await connect(self.site) as stream:
            await stream.send(HEAD + BODY)
            return status(await answer(stream))


@pytest.fixture
async def taking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Taking]:
    made = list[BodyBudget]()

    def build(most: int, retry_after_s: int) -> BodyBudget:
        made.append(BodyBudget(most, retry_after_s))
        return made[-1]

    monkeypatch.setattr("adapters.http.app.BodyBudget", build)
    async with served(folder, max_body=LARGEST) as site:
        yield Taking(site, made[0])
    assert made[0].used == 0


async def first_of(streams: Sequence[anyio.abc.SocketStream]) -> bytes:
    """Return the first answer on any of the streams. It is not defined which body was read first."""
    found = list[bytes]()

    async def heard(stream: anyio.abc.SocketStream) -> None:
        found.append(await answer(stream))
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(heard, stream)
    return found[0]


def waiting(budget: BodyBudget) -> int:
    return len(budget.waiting_bodies)


async def test_however_many_bodies_come_only_so_much_is_held_and_all_are_answered(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.http.wire.body_budget.PIECE_TIMEOUT_S", 60)
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = await taking.begun(stack, 12)
            await until(lambda: waiting(taking.budget) >= 6)
            assert (await taking.site.complete(max_tokens=1)).status_code == 200, "small ones need no room"
            assert taking.budget.limit == BUDGETED_BODIES * LARGEST
            assert taking.budget.limit - LARGEST < taking.budget.used <= taking.budget.limit + LARGEST
            for stream in streams:
                await stream.send(BODY[-1:])
            assert [status(await answer(stream)) for stream in streams] == [200] * 12
    await until(lambda: taking.budget.used == 0)


async def test_clients_that_send_no_more_lose_their_room_to_one_that_sends(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.http.wire.body_budget.PIECE_TIMEOUT_S", 1.0)
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = await taking.begun(stack, 7)
            await until(lambda: waiting(taking.budget) > 0)
            assert await taking.whole() == 200
            received = await first_of(streams)
    assert status(received) == 408
    assert "while others waited for room" in json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_client_that_sends_slowly_is_left_alone_where_nobody_waits(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.http.wire.body_budget.PIECE_TIMEOUT_S", 0.01)
    async with await connect(taking.site) as stream:
        await stream.send(CHUNKED)
        for start in range(0, len(BODY), LARGEST // 8):
            part = BODY[start : start + LARGEST // 8]
            await stream.send(b"%x\r\n%b\r\n" % (len(part), part))
            await anyio.sleep(0.05)
        assert taking.budget.used > LARGEST // 2
        await stream.send(b"0\r\n\r\n")
        assert status(await answer(stream)) == 200


async def test_who_finds_no_room_in_time_is_told_when_to_come_again(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.http.wire.body_budget.PIECE_TIMEOUT_S", 60)
    monkeypatch.setattr("adapters.http.wire.body_budget.MAX_WAIT_S", 0.3)
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            await taking.begun(stack, 5)
            await until(lambda: taking.budget.used > taking.budget.limit)
            async with await connect(taking.site) as late:
                await late.send(HEAD + BODY)
                received = await answer(late)
    assert status(received) == 503
    assert b"retry-after: 1\r\n" in received
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"


async def test_clients_that_leave_give_their_room_back(taking: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.http.wire.body_budget.PIECE_TIMEOUT_S", 60)
    with anyio.fail_after(60):
        async with AsyncExitStack() as stack:
            await taking.begun(stack, 8)
            await until(lambda: waiting(taking.budget))
        assert await taking.whole() == 200
        await until(lambda: taking.budget.used == 0)


async def test_a_body_up_to_the_small_size_takes_no_room(taking: Taking) -> None:
    with taking.budget.open_body(5) as body:
        await taking.budget.grow(body, FREE_BYTES)
        assert (body.budgeted, taking.budget.used) == (0, 0)
        await taking.budget.grow(body, 5)
        assert (body.budgeted, taking.budget.used) == (5, 5)
