"""Tests of the promises that every door makes: of the real one, and of the fake with which the HTTP edge is tested."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias, get_args

import anyio
import pytest
from attrs import evolve
from cattrs import Converter

from effects.all import Launch
from effects.job import Job, Report
from effects.ports import (
    ANSWER_STAGES,
    PROMPT_STAGES,
    QUEUE_STAGES,
    Closed,
    Door,
    Message,
    Props,
    Stage,
    Status,
    Ticket,
)
from effects.scope import Selection
from effects.stream import EmitTokens, ReportProgress
from engine.core.request_meter import STAGES
from engine.core.submission import describe_cache_use
from engine.settings.output.live_figures import LiveFigures, MemoryLedger, ShardMemory
from states.request_states import Done, New, State
from tests.engine.play import SETTINGS, ScriptedDevice, engine
from tests.http.fake_door import FakeDoor, FakeProps, digest_script

SHARDS = LiveFigures(
    MemoryLedger(
        models={},
        experts=None,
        shards=(
            ShardMemory("cpu", 1, {}, layers=(0, 3)),
            ShardMemory("tcp://10.0.0.2:7461", 2, {}, layers=(3, 10), remote=True),
        ),
        draft=None,
        drafter=None,
        slots={},
        buffers={},
        blocks={},
        pool={},
    )
)
STRICT = Converter(forbid_extra_keys=True)
PROPS = FakeProps()  # in place of those of a door, which only become JSON
STRICT.register_structure_hook(Props, lambda *_: PROPS)
JOB = Job(prompt=tuple(range(100)), max_tokens=5)
Shut: TypeAlias = Callable[[], Awaitable[object]]  # what shutting down does to a door
# a door of one slot and one place in its queue, which works only while the event is set
OpenDoor: TypeAlias = Callable[[anyio.Event], AbstractAsyncContextManager[tuple[Door, Shut]]]


@asynccontextmanager
async def real(go: anyio.Event) -> AsyncIterator[tuple[Door, Shut]]:
    async def before(_: Launch) -> None:
        await go.wait()

    async with engine(evolve(SETTINGS, slots=1, max_queue=1), ScriptedDevice(before=before)) as running:
        yield running.door, lambda: running.door.drain(0)
        go.set()


@asynccontextmanager
async def fake(go: anyio.Event) -> AsyncIterator[tuple[Door, Shut]]:
    async with FakeDoor.opened(digest_script(20, 300), slots=1, max_queue=1, go=go) as door:

        async def shut() -> None:
            door.state = "draining"

        yield door, shut


@pytest.fixture(params=[real, fake])
def opened(request: pytest.FixtureRequest) -> OpenDoor:
    found: OpenDoor = request.param
    return found


async def heard(ticket: Ticket) -> list[Message]:
    with anyio.fail_after(60):
        return [message async for message in ticket]


async def until(door: Door, condition: Callable[[Status], object]) -> Status:
    with anyio.fail_after(60):
        while not condition(status := door.status()):  # noqa: ASYNC110 - a door announces no changes
            await anyio.sleep(0.001)
    return status


async def test_a_stream_begins_with_accepted_and_ends_once(opened: OpenDoor) -> None:
    go = anyio.Event()
    go.set()
    async with opened(go) as (door, _):
        first, *middle, last = await heard(door.submit(JOB))
    assert first == ReportProgress(0, 100, 0)
    assert isinstance(last, Closed)
    assert (last.finish, last.report.prompt_tokens, last.report.completion_tokens) == ("length", 100, 5)
    assert set(last.stages_ms) == {"Prefilling", "Speculating"}
    assert last.spent_ms(PROMPT_STAGES) + last.spent_ms(ANSWER_STAGES) == sum(last.stages_ms.values())
    assert sum(len(message.tokens) for message in middle if isinstance(message, EmitTokens)) == 5
    done = [message.done for message in middle if isinstance(message, ReportProgress)]
    assert done == sorted(done)


async def test_status_is_whole_and_of_the_same_kinds_whatever_goes_on(opened: OpenDoor) -> None:
    go = anyio.Event()
    async with opened(go) as (door, _):
        states, takes = [door.status()], [door.get_acceptance()]
        one = door.submit(JOB)
        states.append(await until(door, lambda status: status.slots_busy == 1))
        takes.append(door.get_acceptance())
        two = door.submit(JOB)
        states.append(await until(door, lambda status: status.queue == 1))
        takes.append(door.get_acceptance())
        turned_away = await heard(door.submit(JOB))
        go.set()
        await heard(one)
        await heard(two)
        states.append(await until(door, lambda status: status.slots_busy == 0))
    assert [isinstance(message, Closed) and message.finish for message in turned_away] == ["queue_full"]
    for status in states:
        shown = json.loads(json.dumps(STRICT.unstructure(evolve(status, props=PROPS))))
        assert evolve(STRICT.structure(shown, Status), props=status.props) == status
        assert json.dumps(status.props.build_json())
        assert status.slots_busy == sum(slot.is_processing for slot in status.slots)
        for number, slot in enumerate(status.slots):
            assert slot.id == number
            assert slot.is_processing == (slot.request is not None) == (slot.state is not None)
    assert takes == ["ready", "ready", "queue_full"]
    assert [(status.slots_busy, status.queue, status.queue_full) for status in states] == [
        (0, 0, False),
        (1, 0, False),
        (1, 1, True),
        (0, 0, False),
    ]


async def test_a_door_is_ready_exactly_as_long_as_the_next_job_is_not_rejected() -> None:
    """Jobs with the same prompt follow the first one into slots that are free, and do not fill the queue."""
    go = anyio.Event()

    async def wait_for_it(_: Launch) -> None:
        await go.wait()

    settings = evolve(SETTINGS, slots=3, max_queue=1)
    async with engine(settings, ScriptedDevice(before=wait_for_it)) as running:
        door = running.door
        said = list[tuple[str, bool]]()
        tickets = list[Ticket]()
        for count in range(1, 7):
            acceptance = door.get_acceptance()
            tickets.append(ticket := door.submit(JOB))
            await until(door, lambda _, count=count: running.event_loop.world.requests or count > 4)
            await anyio.wait_all_tasks_blocked()
            message = ticket.next_message()
            said.append((acceptance, isinstance(message, Closed) and message.finish == "queue_full"))
        assert door.status().slots_busy == 1, "the other slots are free for those that follow"
        go.set()
        for ticket in tickets[:4]:
            await heard(ticket)
    assert said == [("ready", False)] * 4 + [("queue_full", True)] * 2


async def test_cancelling_ends_a_stream_once_however_often_and_late_it_is_asked(opened: OpenDoor) -> None:
    go = anyio.Event()
    async with opened(go) as (door, _):
        running, waiting = door.submit(JOB), door.submit(JOB)
        await until(door, lambda status: status.queue == 1)
        waiting.cancel("client_gone")
        waiting.cancel("deadline")
        running.cancel("stop_string")
        go.set()
        ends = [(await heard(ticket))[-1] for ticket in (waiting, running)]
        running.cancel("client_gone")
    assert [isinstance(end, Closed) and end.finish for end in ends] == ["cancelled", "stop"]
    assert isinstance(ends[0], Closed)
    assert set(ends[0].stages_ms) == {"Waiting"}


async def test_a_door_that_shuts_ends_what_waits_and_takes_no_more(opened: OpenDoor) -> None:
    go = anyio.Event()
    go.set()
    async with opened(go) as (door, shut):
        await heard(door.submit(JOB))
        assert door.status().state == "ready"
        await shut()
        assert door.status().state == door.get_acceptance() == "draining"
        (closed,) = await heard(door.submit(JOB))
    assert isinstance(closed, Closed)
    assert (closed.finish, closed.report.prompt_tokens, closed.stages_ms) == ("shutdown", 100, {})


def test_every_state_that_a_request_can_be_seen_in_has_its_own_stage() -> None:
    assert STAGES.keys() == {*get_args(State)} - {New, Done}
    assert sorted(STAGES.values()) == sorted(get_args(Stage))
    assert {*QUEUE_STAGES, *PROMPT_STAGES, *ANSWER_STAGES} < {*get_args(Stage)}


def test_the_log_names_what_each_shard_has_adopted_and_what_was_selected() -> None:
    report = Report(200, 128, "disk", cache=Selection("full", "end", 0, 192, 128))
    assert describe_cache_use(report, SHARDS) == (
        "full shared=0 selected=192 kept=128 (end); 128 of 200 prompt tokens restored (disk); "
        "adopted by 0-2@cpu local=128, 3-9@tcp://10.0.0.2:7461 remote=128"
    )
    assert "adopted" not in describe_cache_use(evolve(report, restored_tokens=0), SHARDS)
