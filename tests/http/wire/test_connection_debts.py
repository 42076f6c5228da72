"""Connections that owe the server something make room for others: the oldest of the kind that most connections have."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.abc
import pytest

from adapters.http.wire.connection_debts import INSTALMENT, Debt, DebtLedger
from adapters.http.wire.paced_calls import PacedCalls
from tests.campaign.crowd import MANNERS, Manner
from tests.http.conftest import Site, chat, served
from tests.http.test_guard import JSON, head, status
from tests.http.wire.test_connections import answer, connect, ended
from tests.http.wire.test_lifecycle import raw_post, until
from tests.pairs import one_in

PLACES = 12
OWES_A_BODY = head("Host: localhost", JSON, "Content-Length: 900000")
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


# --- the ledger ---

ORDERS: Sequence[tuple[str, Sequence[tuple[str, Debt | None]], str | None]] = (
    ("no connection is open", (), None),
    ("all are being answered", (("a", None), ("b", None)), None),
    ("the oldest goes first", (("a", Debt.BODY), ("b", Debt.BODY)), "a"),
    ("the kind that most have goes first", (("a", Debt.REQUEST), ("b", Debt.BODY), ("c", Debt.BODY)), "b"),
    ("who is being answered stays", (("a", Debt.HEAD), ("b", Debt.HEAD), ("a", None)), "b"),
    ("the same debt keeps its age", (("a", Debt.HEAD), ("b", Debt.HEAD), ("a", Debt.HEAD)), "a"),
    ("another debt is a new one", (("a", Debt.HEAD), ("b", Debt.BODY), ("c", Debt.BODY), ("a", Debt.BODY)), "b"),
)


@pytest.mark.parametrize(("events", "first"), [row[1:] for row in ORDERS], ids=[row[0] for row in ORDERS])
def test_who_makes_room(events: Sequence[tuple[str, Debt | None]], first: str | None) -> None:
    ledger = DebtLedger[str]()
    for now, (name, debt) in enumerate(events):
        if ledger.is_open(name):
            ledger.record(name, debt, now)
        else:
            ledger.add(name, Debt.HEAD, now)
            ledger.record(name, debt, now)
    found = ledger.find_oldest()
    assert (None if found is None else found[0]) == first


def test_whoever_pays_is_young_again_and_whoever_is_closed_is_gone() -> None:
    ledger = DebtLedger[str]()
    for now, name in enumerate("abc"):
        ledger.add(name, Debt.BODY, now)
    ledger.renew("a", 3)
    assert ledger.find_oldest() == ("b", 1)
    ledger.remove("b")
    ledger.remove("c")
    assert ledger.find_oldest() == ("a", 3)
    ledger.remove("a")
    ledger.record("a", Debt.HEAD, 4)
    assert (len(ledger), ledger.find_oldest()) == (0, None)


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


async def test_of_connections_that_owe_a_body_the_oldest_go_and_are_told(narrow: Site) -> None:
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = await opened(stack, narrow, PLACES, OWES_A_BODY)
            for oldest in streams[:3]:
                async with await connect(narrow) as other:
                    await other.send(head("Host: localhost", target="/health", method="GET"))
                    assert status(await answer(other)) == 200
                    seen = await answer(oldest)
                    assert status(seen) == 408
                    assert json.loads(seen.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"
                    assert await ended(oldest)
                await until(lambda: len(narrow.serving.connections) < PLACES)
                await opened(stack, narrow, 1, OWES_A_BODY)
            assert len(narrow.serving.connections) == PLACES


async def test_only_so_many_bodies_are_owed_at_a_time(narrow: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.http.wire.connection_debts.MOST_BODIES", 3)
    async with AsyncExitStack() as stack:
        with anyio.fail_after(60):
            streams = await opened(stack, narrow, 5, OWES_A_BODY)
            assert [status(await answer(stream)) for stream in streams[:2]] == [408, 408]
            await until(lambda: len(narrow.serving.connections) == 3)


async def test_an_idle_connection_is_not_closed_for_those_that_hold_bodies(narrow: Site) -> None:
    async with await connect(narrow) as kept, AsyncExitStack() as stack:
        with anyio.fail_after(60):
            await kept.send(head("Host: localhost", target="/health", method="GET"))
            assert status(await answer(kept)) == 200
            await opened(stack, narrow, 3 * PLACES, OWES_A_BODY)
            await kept.send(head("Host: localhost", target="/health", method="GET"))
            assert status(await answer(kept)) == 200


async def test_an_upload_that_goes_on_is_not_closed_for_those_that_stand_still(narrow: Site) -> None:
    parts = 2 * PLACES
    body = json.dumps({"prompt": "Hello", "max_tokens": 1, "unknown": "x" * (parts * INSTALMENT)}).encode()
    async with await connect(narrow) as upload, AsyncExitStack() as stack:
        with anyio.fail_after(60):
            await upload.send(head("Host: localhost", JSON, f"Content-Length: {len(body)}", target="/v1/completions"))
            await opened(stack, narrow, PLACES - 1, OWES_A_BODY)
            for index in range(parts):
                await upload.send(body[index * INSTALMENT :][:INSTALMENT])
                await opened(stack, narrow, 1, OWES_A_BODY)
            await upload.send(body[parts * INSTALMENT :])
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
                await other.send(OWES_A_BODY)
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


async def test_what_waits_for_its_turn_begins_one_in_a_turn_of_the_loop_and_others_come_between() -> None:
    """As requests do that come at once, and what a device has done meanwhile."""
    turns, begun, between = PacedCalls(), list[int](), list[int]()

    async def begin(number: int) -> None:
        await turns.wait_for_turn()
        begun.append(number)
        asyncio.get_running_loop().call_soon(lambda: between.append(len(begun)))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(begin, number)
    await anyio.lowlevel.checkpoint()
    assert begun == [0, 1, 2, 3, 4]
    assert between == [1, 2, 3, 4, 5]


async def test_a_request_that_is_given_up_before_its_turn_leaves_it_to_the_next() -> None:
    turns, begun = PacedCalls(), list[int]()

    async def begin(number: int) -> None:
        await turns.wait_for_turn()
        begun.append(number)

    tasks = [asyncio.ensure_future(begin(number)) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [0, 2]


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
