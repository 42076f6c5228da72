"""Connections whose client has to act make room for others: the oldest of the wait that most connections are in."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.abc
import pytest

from adapters.http.wire.client_waits import PROGRESS_BYTES, ClientWait, ConnectionWaits
from adapters.http.wire.paced_calls import PacedCalls
from tests.campaign.crowd import MANNERS, Manner
from tests.http.conftest import Site, chat, served
from tests.http.test_guard import JSON, head, status
from tests.http.wire.test_connections import answer, connect, ended
from tests.http.wire.test_lifecycle import raw_post, until
from tests.pairs import one_in

PLACES = 12
UNFINISHED_BODY = head("Host: localhost", JSON, "Content-Length: 900000")
CONTENT = b'{"content":"Hello"}'
TOKENIZE = head("Host: localhost", JSON, f"Content-Length: {len(CONTENT)}", target="/tokenize") + CONTENT
CLOSE = head("Host: localhost", "Connection: close", target="/x", method="GET")


@pytest.fixture
async def narrow(folder: Path) -> AsyncIterator[Site]:
    async with served(folder, server={"max_connections": PLACES}) as site:
        yield site


async def opened(stack: AsyncExitStack, site: Site, count: int, sends: bytes) -> list[anyio.abc.SocketStream]:
    """So many connections that the server has taken one after the other, and read what they send."""
    streams = []
    for _ in range(count):
        before = set(site.serving.connections)
        streams.append(await stack.enter_async_context(await connect(site)))
        await streams[-1].send(sends)
        await until(lambda before=before: any(one.cycle for one in site.serving.connections - before))
    return streams


# --- the record of waits ---

ORDERS: Sequence[tuple[str, Sequence[tuple[str, ClientWait | None]], str | None]] = (
    ("no connection is open", (), None),
    ("all are being answered", (("a", None), ("b", None)), None),
    ("the oldest goes first", (("a", ClientWait.BODY), ("b", ClientWait.BODY)), "a"),
    (
        "the kind that most have goes first",
        (("a", ClientWait.REQUEST), ("b", ClientWait.BODY), ("c", ClientWait.BODY)),
        "b",
    ),
    ("who is being answered stays", (("a", ClientWait.HEAD), ("b", ClientWait.HEAD), ("a", None)), "b"),
    ("the same wait keeps its age", (("a", ClientWait.HEAD), ("b", ClientWait.HEAD), ("a", ClientWait.HEAD)), "a"),
    (
        "another wait is a new one",
        (("a", ClientWait.HEAD), ("b", ClientWait.BODY), ("c", ClientWait.BODY), ("a", ClientWait.BODY)),
        "b",
    ),
)


@pytest.mark.parametrize(("events", "first"), [row[1:] for row in ORDERS], ids=[row[0] for row in ORDERS])
def test_who_makes_room(events: Sequence[tuple[str, ClientWait | None]], first: str | None) -> None:
    waits = ConnectionWaits[str]()
    for now, (name, wait) in enumerate(events):
        if waits.is_open(name):
            waits.record(name, wait, now)
        else:
            waits.add(name, ClientWait.HEAD, now)
            waits.record(name, wait, now)
    found = waits.find_oldest()
    assert (None if found is None else found[0]) == first


def test_whoever_pays_is_young_again_and_whoever_is_closed_is_gone() -> None:
    waits = ConnectionWaits[str]()
    for now, name in enumerate("abc"):
        waits.add(name, ClientWait.BODY, now)
    waits.renew("a", 3)
    assert waits.find_oldest() == ("b", 1)
    waits.remove("b")
    waits.remove("c")
    assert waits.find_oldest() == ("a", 3)
    waits.remove("a")
    waits.record("a", ClientWait.HEAD, 4)
    assert (len(waits), waits.find_oldest()) == (0, None)


# --- over sockets ---


# A stream that is not read is being answered until the sockets are full. The queue bounds them, far below the places.
HOLDING = {name: manner for name, manner in MANNERS.items() if name != "unread streams"}


@one_in(2, "manner")
@pytest.mark.parametrize("manner", HOLDING.values(), ids=HOLDING)
async def test_however_many_connections_are_held_others_are_answered(narrow: Site, manner: Manner) -> None:
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            for _ in range(5 * PLACES):
                stream = await stack.enter_async_context(await connect(narrow))
                try:
                    await stream.send(manner.sends)
                except anyio.BrokenResourceError:
                    assert manner.sends
            for _ in range(3):
                async with await connect(narrow) as other:
                    await other.send(head("Host: localhost", "Connection: close", target="/health", method="GET"))
                    assert status(await answer(other)) == 200
                async with await connect(narrow) as other:
                    await other.send(TOKENIZE)
                    assert status(await answer(other)) == 200


async def test_of_connections_that_send_a_body_the_oldest_are_closed_with_an_error(narrow: Site) -> None:
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = await opened(stack, narrow, PLACES, UNFINISHED_BODY)
            for oldest in streams[:3]:
                async with await connect(narrow) as other:
                    await other.send(head("Host: localhost", target="/health", method="GET"))
                    assert status(await answer(other)) == 200
                    seen = await answer(oldest)
                    assert status(seen) == 408
                    assert json.loads(seen.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"
                    assert await ended(oldest)
                await until(lambda: len(narrow.serving.connections) < PLACES)
                await opened(stack, narrow, 1, UNFINISHED_BODY)
            assert len(narrow.serving.connections) == PLACES


async def test_only_so_many_connections_may_send_a_body_at_a_time(
    narrow: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.http.wire.client_waits.MOST_BODIES", 3)
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = await opened(stack, narrow, 5, UNFINISHED_BODY)
            assert [status(await answer(stream)) for stream in streams[:2]] == [408, 408]
            await until(lambda: len(narrow.serving.connections) == 3)


async def test_an_idle_connection_is_not_closed_for_those_that_hold_bodies(narrow: Site) -> None:
    async with await connect(narrow) as kept, AsyncExitStack() as stack:
        with anyio.fail_after(60):
            await kept.send(head("Host: localhost", target="/health", method="GET"))
            assert status(await answer(kept)) == 200
            await opened(stack, narrow, 3 * PLACES, UNFINISHED_BODY)
            await kept.send(head("Host: localhost", target="/health", method="GET"))
            assert status(await answer(kept)) == 200


async def test_an_upload_that_goes_on_is_not_closed_for_those_that_stand_still(narrow: Site) -> None:
    parts = 2 * PLACES
    body = json.dumps({"prompt": "Hello", "max_tokens": 1, "unknown": "x" * (parts * PROGRESS_BYTES)}).encode()
    async with await connect(narrow) as upload, AsyncExitStack() as stack:
        with anyio.fail_after(60):
            await upload.send(head("Host: localhost", JSON, f"Content-Length: {len(body)}", target="/v1/completions"))
            await opened(stack, narrow, PLACES - 1, UNFINISHED_BODY)
            for index in range(parts):
                await upload.send(body[index * PROGRESS_BYTES :][:PROGRESS_BYTES])
                await opened(stack, narrow, 1, UNFINISHED_BODY)
            await upload.send(body[parts * PROGRESS_BYTES :])
            assert status(await answer(upload)) == 200


async def test_clients_that_are_answered_are_never_closed_for_others(folder: Path) -> None:
    async with served(folder, server={"max_connections": 4}, door={"step_s": 0.02}) as site, AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = [await stack.enter_async_context(await connect(site)) for _ in range(3)]
            for stream in streams:
                await stream.send(raw_post(chat(max_tokens=20)))
            await until(lambda: len(site.door.tickets) == 3)
            for _ in range(12):
                other = await stack.enter_async_context(await connect(site))
                await other.send(UNFINISHED_BODY)
            assert [status(await answer(stream)) for stream in streams] == [200] * 3


async def test_clients_that_open_and_drop_leave_nothing_behind(narrow: Site) -> None:
    def drop() -> None:
        for _ in range(300):
            socket.create_connection(("127.0.0.1", narrow.serving.port), 20).close()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(anyio.to_thread.run_sync, drop)
            assert (await narrow.client.get("/health")).status_code == 200
        await until(lambda: len(narrow.serving.connections) <= 1)


async def test_calls_that_wait_for_their_turn_are_made_one_in_a_turn_of_the_loop() -> None:
    turns, made = PacedCalls(), list[int]()
    for number in range(3):
        turns.put(lambda number=number: made.append(number))
    seen = []
    for _ in range(4):
        seen.append(len(made))
        await anyio.lowlevel.checkpoint()
    assert (seen, made) == ([0, 1, 2, 3], [0, 1, 2])


async def test_requests_that_are_sent_ahead_are_all_answered_in_their_order(narrow: Site) -> None:
    async with await connect(narrow) as stream:
        with anyio.fail_after(60):
            wanted = [head("Host: localhost", target=f"/v1/models/{number}", method="GET") for number in range(50)]
            await stream.send(
                b"".join(wanted) + head("Host: localhost", "Connection: close", target="/x", method="GET")
            )
            received = b""
            try:
                while True:
                    received += await stream.receive()
            except anyio.EndOfStream:
                pass
    offsets = [received.index(f"The model '{number}' is".encode()) for number in range(50)]
    assert offsets == sorted(offsets)
    assert received.count(b"HTTP/1.1 404 ") == 51
