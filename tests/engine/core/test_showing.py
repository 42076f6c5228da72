"""Tests of what the engine shows of requests while they run and afterwards: stages with their times, tokens and totals,
all of it bounded.
"""

from __future__ import annotations

import json

import anyio
import pytest
from attrs import evolve
from cattrs import Converter

from effects.all import Launch
from effects.decode import RunDecode
from effects.ids import RequestId
from effects.job import Job
from effects.ports import MAX_RECENT_SHOWN, MAX_RUNNING_SHOWN, Activity
from effects.residency import ModelLoaded
from engine.core.engine_props import show_rates
from engine.core.event_loop import Envelope
from engine.core.request_meter import STAGES, RequestMeter, stage_of
from engine.core.status import list_running as named
from engine.core.status import slot_status
from engine.core.submission import Submissions
from states.events import ForRequest, Submitted
from states.rates import ClassGains, Rates, TimedStep
from states.request_states import Waiting
from states.residency import Resolved
from states.world import advance, make_world
from tests.engine.play import SETTINGS, PlayedEngine, ScriptedDevice, collect, engine

PROMPT = tuple(range(10, 110))


class Halting:
    """Lets decode steps pass only while `go` is set."""

    def __init__(self) -> None:
        self.go = anyio.Event()
        self.steps = 0

    async def __call__(self, launch: Launch) -> None:
        if isinstance(launch.effect_requests[0].effect, RunDecode):
            self.steps += 1
            if self.steps > 3:
                await self.go.wait()


async def until_halted(device: Halting) -> None:
    with anyio.fail_after(60):
        while device.steps < 4:  # noqa: ASYNC110 - a scripted device announces no changes
            await anyio.sleep(0.001)


def plain(activity: Activity) -> Activity:
    """Assert that the activity survives JSON, and return it."""
    converter = Converter(forbid_extra_keys=True)
    assert converter.structure(converter.unstructure(activity), Activity) == activity
    return activity


async def test_a_request_is_told_of_while_it_runs_and_when_it_has_ended() -> None:
    halting = Halting()
    async with engine(SETTINGS, ScriptedDevice(before=halting)) as playing:
        assert plain(playing.door.activity()) == playing.door.activity()
        assert (playing.door.activity().running, playing.door.activity().recent) == ((), ())
        ticket = playing.door.submit(Job(prompt=PROMPT, max_tokens=5))
        await until_halted(halting)
        (one,) = plain(playing.door.activity()).running
        assert (one.id, one.stage) == (ticket.request, "Speculating")
        assert list(one.stages_ms) == ["Prefilling", "Speculating"]
        assert min(one.stages_ms.values()) > 0
        assert (one.prompt_tokens, one.done, one.restored_tokens, one.tier) == (100, 100, 0, "none")
        assert (one.completion_tokens, one.decode_steps) == (3, 3)
        assert playing.door.activity().totals.completion_tokens == 3
        halting.go.set()
        _, closed = await collect(ticket)
        await until_empty(playing)
        shown = plain(playing.door.activity())
        assert shown.running == ()
        (past,) = shown.recent
        assert (past.id, past.finish, past.miss) == (ticket.request, "length", "nothing_shared_on_device")
        assert past.stages_ms.items() >= {"Prefilling": closed.stages_ms["Prefilling"]}.items()
        assert (past.completion_tokens, past.decode_steps, past.at > 0) == (5, 5, True)
        assert shown.totals.finished == {"length": 1}
        assert shown.totals.misses == {"nothing_shared_on_device": 1}
        assert (shown.totals.prompt_tokens, shown.totals.completion_tokens, shown.totals.decode_steps) == (100, 5, 5)


async def until_empty(playing: PlayedEngine) -> None:
    with anyio.fail_after(60):
        await playing.door.wait_until_empty()


async def test_a_hit_is_counted_by_tier_and_a_prefill_tells_how_far_it_is() -> None:
    async with engine() as playing:
        await collect(playing.door.submit(Job(prompt=PROMPT, max_tokens=2)))
        _, closed = await collect(playing.door.submit(Job(prompt=PROMPT, max_tokens=2)))
        await until_empty(playing)
        totals = playing.door.activity().totals
        assert totals.hits == {"device": 1}
        assert totals.restored == {"device": closed.report.restored_tokens}
        assert closed.report.restored_tokens > 0


async def test_who_waits_is_told_last_and_so_many_are_told_and_no_more() -> None:
    halting = Halting()
    settings = evolve(SETTINGS, slots=2, max_queue=50)
    async with engine(settings, ScriptedDevice(before=halting)) as playing:
        tickets = [playing.door.submit(Job(prompt=(*PROMPT, n), max_tokens=4)) for n in range(40)]
        await until_halted(halting)
        shown = playing.door.activity().running
        assert [one.stage == "Waiting" for one in shown[:2]] == [False, False]
        assert all(one.stage == "Waiting" and one.done == 0 for one in shown[2:])
        assert len(shown) == 40
        world = playing.event_loop.world
        waiting = next(state for state in world.requests.values() if isinstance(state, Waiting))
        crowd = evolve(world, requests={**{1000 + n: waiting for n in range(90)}, **world.requests})
        limited = named(crowd, playing.door.meter, 0)
        assert len(limited) == MAX_RUNNING_SHOWN
        assert [one.id for one in limited[:2]] == [one.id for one in shown[:2]]
        halting.go.set()
        for ticket in tickets:
            await collect(ticket)
        await until_empty(playing)
        recent = playing.door.activity().recent
        assert [one.id for one in recent] == [ticket.request for ticket in reversed(tickets)][:MAX_RECENT_SHOWN]
        assert playing.door.activity().totals.finished == {"length": 40}


@pytest.mark.parametrize("reason", ["client_gone", "deadline"])
async def test_a_request_that_drains_is_told_of_until_it_has(reason: str) -> None:
    halting = Halting()
    async with engine(SETTINGS, ScriptedDevice(before=halting)) as playing:
        ticket = playing.door.submit(Job(prompt=PROMPT, max_tokens=50))
        await until_halted(halting)
        ticket.cancel(reason)  # type: ignore[arg-type]
        await collect(ticket)
        shown = playing.door.activity()
        assert [one.stage for one in shown.running] == ["Draining"]
        assert [one.id for one in shown.recent] == [ticket.request]
        assert shown.recent[0].stages_ms["Draining"] > 0  # as far as it has gone
        halting.go.set()
        await until_empty(playing)
        assert playing.door.activity().running == ()
        ended = playing.door.activity().recent[0].stages_ms
        assert ended["Draining"] > shown.recent[0].stages_ms["Draining"]
        assert playing.door.activity().recent[0].stages_ms == ended  # nothing goes on


async def test_what_was_turned_away_is_counted_and_spent_no_time() -> None:
    async with engine() as playing:
        door: Submissions = playing.door
        await door.drain(0)
        await collect(door.submit(Job(prompt=PROMPT, max_tokens=1)))
        assert door.activity().recent == ()  # it never came in


def test_time_is_spent_where_a_request_is_also_when_anothers_event_took_it_there() -> None:
    """Two wait for one model: the event that it is there names one of them, and both go on to prefill."""
    world, meter = (
        make_world(evolve(SETTINGS, max_proposals=4, residency=Resolved("request-scoped", "park"))),
        RequestMeter(),
    )
    one, other = RequestId(1), RequestId(2)
    job = Job(prompt=PROMPT, max_tokens=5)
    stages = []
    another = evolve(job, salt="another")  # so that it does not follow the first one
    happened = [ForRequest(one, Submitted(job)), ForRequest(other, Submitted(another)), ForRequest(one, ModelLoaded())]
    for seq, event in enumerate(happened):
        before = world
        world, outs = advance(before, event)
        meter.observe(Envelope(seq, 1_000_000 * seq, event), outs, before, world)
        stages.append([STAGES[type(state)] for state in world.requests.values()])
    assert stages == [["UnparkingDraft"], ["UnparkingDraft", "UnparkingDraft"], ["Prefilling", "Prefilling"]]
    assert meter.stages_ms(one, 9_000_000) == {"UnparkingDraft": 2, "Prefilling": 7}
    assert meter.stages_ms(other, 9_000_000) == {"UnparkingDraft": 1, "Prefilling": 7}


def test_a_request_that_waits_for_the_lane_moves_no_weights() -> None:
    """One prefills, another has asked for a draft that is there already: what it waits for is the lane."""
    world, meter = make_world(evolve(SETTINGS, max_proposals=4)), RequestMeter()
    one, other = RequestId(1), RequestId(2)
    job = Job(prompt=PROMPT, max_tokens=5)
    another = evolve(job, salt="another")  # so that it does not follow the first one
    for seq, event in enumerate([ForRequest(one, Submitted(job)), ForRequest(other, Submitted(another))]):
        before = world
        world, outs = advance(before, event)
        meter.observe(Envelope(seq, 1_000_000 * seq, event), outs, before, world)
    assert [STAGES[type(state)] for state in world.requests.values()] == ["Prefilling", "UnparkingDraft"]
    assert [stage_of(state, world) for state in world.requests.values()] == ["Prefilling", "Prefilling"]
    assert meter.stages_ms(other, 9_000_000) == {"Prefilling": 8}
    assert [slot_status(place, slot, world).state for place, slot in enumerate(world.slots.slots)] == ["Prefilling"] * 2


def test_measured_times_of_every_kind_can_be_shown_as_json():
    step = TimedStep(span=0, members=1, rows=0, ns=5, plain_then_ns=0)
    rates = Rates(prefill=(7,), loads={"host": 3}, decode=(step,), copy_times=(step,), copied=(ClassGains(1, (2,)),))
    shown = json.loads(json.dumps(show_rates(rates)))
    assert (shown["prefill"], shown["host"], shown["disk"]) == ([7], 3, 0)
    assert shown["decode"] == shown["copy_times"] == [[0, 1, 0, 5, 0]]
    assert shown["copied"] == [{"seen": 1, "gains": [2], "branch_gain": 0}]
