"""What every door promises: the real one, and the fake that the HTTP edge is tested with, alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias, get_type_hints

import anyio
import pytest
from attrs import evolve

from effects.all import Launch
from effects.job import Job
from effects.ports import Closed, Door, Message, SlotStatus, Status, Ticket
from effects.stream import EmitTokens, ReportProgress
from tests.engine.play import SETTINGS, ScriptedDevice, engine
from tests.http.fake_door import FakeDoor, digest_script

JOB = Job(prompt=tuple(range(100)), max_tokens=5)
# a door of one slot and one place in its queue, which works only while the event is set
Open: TypeAlias = Callable[[anyio.Event], AbstractAsyncContextManager[Door]]


@asynccontextmanager
async def real(go: anyio.Event) -> AsyncIterator[Door]:
    async def before(_: Launch) -> None:
        await go.wait()

    async with engine(evolve(SETTINGS, slots=1, max_queue=1), ScriptedDevice(before=before)) as running:
        yield running.door
        go.set()


@asynccontextmanager
async def fake(go: anyio.Event) -> AsyncIterator[Door]:
    async with FakeDoor.opened(digest_script(20, 300), slots=1, max_queue=1, go=go) as door:
        yield door


@pytest.fixture(params=[real, fake])
def opened(request: pytest.FixtureRequest) -> Open:
    found: Open = request.param
    return found


async def heard(ticket: Ticket) -> list[Message]:
    with anyio.fail_after(5):
        return [message async for message in ticket]


async def until(door: Door, condition: Callable[[Status], object]) -> Status:
    with anyio.fail_after(5):
        while not condition(status := door.status()):  # noqa: ASYNC110 - a door tells nobody of its changes
            await anyio.sleep(0.001)
    return status


async def test_a_stream_begins_with_accepted_and_ends_once(opened: Open) -> None:
    go = anyio.Event()
    go.set()
    async with opened(go) as door:
        first, *middle, last = await heard(door.submit(JOB))
    assert first == ReportProgress(0, 100, 0)
    assert isinstance(last, Closed)
    assert (last.finish, last.report.prompt_tokens, last.report.completion_tokens) == ("length", 100, 5)
    assert set(last.stages_ms) == {"Prefilling", "Speculating"}
    assert sum(len(message.tokens) for message in middle if isinstance(message, EmitTokens)) == 5
    done = [message.done for message in middle if isinstance(message, ReportProgress)]
    assert done == sorted(done)


async def test_status_has_the_same_keys_and_kinds_whatever_goes_on(opened: Open) -> None:
    go = anyio.Event()
    kinds = {"state": str, "slots": list, "slots_busy": int, "queue": int, "queue_full": bool, "troubles": dict}
    assert kinds.keys() == get_type_hints(Status).keys()
    async with opened(go) as door:
        states = [door.status()]
        one = door.submit(JOB)
        states.append(await until(door, lambda status: status["slots_busy"] == 1))
        two = door.submit(JOB)
        states.append(await until(door, lambda status: status["queue"] == 1))
        turned_away = await heard(door.submit(JOB))
        go.set()
        await heard(one)
        await heard(two)
        states.append(await until(door, lambda status: status["slots_busy"] == 0))
    assert [isinstance(message, Closed) and message.finish for message in turned_away] == ["queue_full"]
    for status in states:
        assert {name: type(status[name]) for name in kinds} == kinds  # type: ignore[literal-required]
        assert all(slot.keys() == get_type_hints(SlotStatus).keys() for slot in status["slots"])
        assert status["slots_busy"] == sum(slot["is_processing"] for slot in status["slots"])
    assert [(status["slots_busy"], status["queue"], status["queue_full"]) for status in states] == [
        (0, 0, False),
        (1, 0, False),
        (1, 1, True),
        (0, 0, False),
    ]


async def test_cancelling_ends_a_stream_once_however_often_and_late_it_is_asked(opened: Open) -> None:
    go = anyio.Event()
    async with opened(go) as door:
        running, waiting = door.submit(JOB), door.submit(JOB)
        await until(door, lambda status: status["queue"] == 1)
        waiting.cancel("client_gone")
        waiting.cancel("deadline")
        running.cancel("stop_string")
        go.set()
        ends = [(await heard(ticket))[-1] for ticket in (waiting, running)]
        running.cancel("client_gone")
    assert [isinstance(end, Closed) and end.finish for end in ends] == ["cancelled", "stop"]
