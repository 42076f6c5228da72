"""Launches that run unattended: their tokens are those of steps that the core asks for one by one.

Most of these steps are overlapped (`overlapped_decode.py`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import anyio
import pytest
from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.lane.running_batch import OutcomeQueue, has_more_to_come
from adapters.device.sampling.sampler import LaunchedPicks
from adapters.models.kernels.interfaces.step_pacer import NoStepPacer
from effects.all import EffectRequest, Launch
from effects.decode import Decoded
from effects.grammar import Grammar
from effects.ids import ENGINE, DeviceFailed, RequestId
from effects.pacing import PaceSteps
from effects.ports import LaunchFailed, RequestOutcome
from effects.stream import StopLaunch
from tests.device.driver import GREEDY, PENALISED, SAMPLED, VOCAB, Caller, Driver, drive, let_run_ahead, prompt_of
from tests.device.fake_shard import FakeShard
from tests.device.sampling.test_constraint import Scripted

STEPS = 20
TOLD = evolve(SAMPLED, seed=9, logprobs=3)


async def went(
    driver: Driver, *clients: Caller, steps: int, propose: int = 0, joins: bool = False
) -> list[RequestOutcome]:
    """Return the outcomes of the launch, in order."""
    found, missing, ended = list[RequestOutcome](), {client.request: client for client in clients}, anyio.Event()

    def done(outcomes) -> None:
        for request, outcome in outcomes:
            found.append((request, outcome))
            missing[request].take(outcome)
            if not has_more_to_come(outcome):
                del missing[request]
        if not missing:
            ended.set()

    effect_requests = [client.round(propose) for client in clients]
    launch = Launch(
        tuple(
            EffectRequest(effect_request.request, evolve(effect_request.effect, steps=steps))
            for effect_request in effect_requests
        ),
        joins=joins,
    )
    driver.executor.submit(launch, done)
    await ended.wait()
    return found


@pytest.fixture(params=["one by one", "ahead"])
def driver(request, shard):
    """A host that does as a GPU does, too: what is asked for is there at once, and all else is the same."""
    driver = drive(shard)
    if request.param == "ahead":
        let_run_ahead(driver)
    yield driver
    assert driver.executor.close()


async def opened(driver: Driver, samplings=(GREEDY, SAMPLED, TOLD), stops=((), (), ())) -> list[Caller]:
    clients = [
        await driver.open(prompt_of(60 + slot, 9 + 5 * slot), sampling, slot, stops=stops[slot])
        for slot, sampling in enumerate(samplings)
    ]
    for client in clients:
        await client.prefill()
    return clients


async def test_steps_taken_alone_are_those_that_are_asked_for_one_by_one(driver):
    asked = await opened(driver)
    for _ in range(STEPS):
        await driver.decode(*asked)
    alone = await opened(driver)
    await went(driver, *alone, steps=STEPS)
    assert [client.answer for client in alone] == [client.answer for client in asked]
    assert all(one.logprobs for one in alone[2].done)
    logprobs = [tuple(word for one in client.done for word in one.logprobs) for client in (alone[2], asked[2])]
    assert logprobs[0] == logprobs[1]
    for client in alone:
        assert [one.more for one in client.done] == [True] * (len(client.done) - 1) + [False]
        assert sum(one.steps for one in client.done) == STEPS
    for client in alone:  # and the slots are where they were said to be
        await driver.decode(client)


@pytest.mark.parametrize("driver", ["ahead"], indirect=True)
async def test_the_time_of_a_step_has_the_wait_for_the_device_in_it(driver, monkeypatch):
    read, waits = LaunchedPicks.read, 0.005
    monkeypatch.setattr(LaunchedPicks, "read", lambda self: (time.sleep(waits), read(self))[1])
    outcomes = await went(driver, *await opened(driver), steps=4)
    # A GPU may have the last chunk of a prompt before it in the first step's time, which is then not reported.
    times = [outcome.ns for _, outcome in outcomes if outcome.ns]
    assert len(times) >= len(outcomes) * 3 // 4
    assert all(time >= waits * 1e9 for time in times)


async def test_penalties_see_what_was_picked_alone(driver):
    asked = await opened(driver, samplings=(PENALISED, GREEDY), stops=((), ()))
    for _ in range(STEPS):
        await driver.decode(*asked)
    alone = await opened(driver, samplings=(PENALISED, GREEDY), stops=((), ()))
    await went(driver, *alone, steps=STEPS)
    assert [client.answer for client in alone] == [client.answer for client in asked]


async def test_a_grammar_hears_what_was_picked_alone(driver):
    """The allowed tokens depend on the sum of all picks before. So a pick that the grammar did not get would show."""
    driver.executor = DeviceExecutor(
        evolve(
            driver.executor.parts,
            match_grammar=lambda _: Scripted(lambda said: [(sum(said) + more) % VOCAB for more in (1, 5, 9)]),
        )
    )
    held = evolve(SAMPLED, grammar=Grammar("regex", "any"))
    samplings = (evolve(held, temperature=0), PENALISED, held)
    asked = await opened(driver, samplings)
    for _ in range(STEPS):
        await driver.decode(*asked)
    alone = await opened(driver, samplings)
    await went(driver, *alone, steps=STEPS)
    assert [client.answer for client in alone] == [client.answer for client in asked]
    for client in (alone[0], alone[2]):
        said = client.answer
        assert all((token - sum(said[:at])) % VOCAB in (1, 5, 9) for at, token in enumerate(said))


async def test_a_grammar_that_lets_nothing_follow_ends_it_for_nobody_else(driver):
    driver.executor = DeviceExecutor(
        evolve(driver.executor.parts, match_grammar=lambda _: Scripted(lambda said: [7] if len(said) < 5 else []))
    )
    clients = await opened(driver, (GREEDY, evolve(SAMPLED, grammar=Grammar("regex", "any"))), ((), ()))
    effect_requests = [client.round() for client in clients]
    going = [
        EffectRequest(effect_request.request, evolve(effect_request.effect, steps=STEPS))
        for effect_request in effect_requests
    ]
    other, ended = await driver.perform(*going)
    assert isinstance(ended, DeviceFailed)
    assert ended.kind == "dead_end"
    assert len(other.tokens) == STEPS
    clients[0].take(other)
    await driver.decode(clients[0])


async def test_a_stop_token_ends_it_for_nobody_else(driver):
    asked = await opened(driver)
    for _ in range(STEPS):
        await driver.decode(*asked)
    at, stop = next(
        (at, token) for at, token in enumerate(asked[1].answer) if at > 3 and token not in asked[1].answer[:at]
    )
    alone = await opened(driver, stops=((), (stop,), ()))
    await went(driver, *alone, steps=STEPS)
    assert alone[1].answer == asked[1].answer[: at + 1]
    for client, other in ((alone[0], asked[0]), (alone[2], asked[2])):
        assert client.answer == other.answer
    await went(driver, alone[2], steps=STEPS, joins=True)  # no launch runs that could be joined


async def test_each_has_as_many_steps_as_it_was_given(driver):
    asked = await opened(driver)
    for _ in range(STEPS):
        await driver.decode(*asked)
    alone, counts = await opened(driver), (1, STEPS, 7)
    effect_requests = [client.round() for client in alone]
    given = zip(effect_requests, counts, strict=True)
    outcomes = await driver.perform(
        *(
            EffectRequest(effect_request.request, evolve(effect_request.effect, steps=most))
            for effect_request, most in given
        )
    )
    assert [outcome.steps for outcome in outcomes] == list(counts)
    assert [list(outcome.tokens) for outcome in outcomes] == [
        client.answer[:most] for client, most in zip(asked, counts, strict=True)
    ]


@pytest.mark.parametrize(
    "samplings", [(GREEDY, SAMPLED, TOLD), (PENALISED, GREEDY, SAMPLED), (TOLD, SAMPLED, PENALISED)]
)
async def test_who_joins_goes_on_with_the_others_and_every_answer_is_the_one_alone(driver, samplings):
    """They come and go one by one. An opening, and a request that is admitted with it, wait for the end of no other."""
    asked = await opened(driver, samplings)
    for client in asked:
        for _ in range(STEPS):
            await driver.decode(client)
    first, second, third = await opened(driver, samplings)
    shard, begun = driver.executor.decoding.shard, list[int]()
    forward, lane = type(shard).forward, driver.executor._lane  # noqa: SLF001
    loop, there, rows = asyncio.get_running_loop(), threading.Event(), list[int]()

    def counted(self, step, inputs):
        rows.append(step.rows)
        begun.append(1)
        if len(begun) == 4:
            loop.call_soon_threadsafe(come.set)
            assert there.wait(20)
        return forward(self, step, inputs)

    come = anyio.Event()
    type(shard).forward = counted
    try:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(went, driver, first, second, steps=STEPS))
                await come.wait()
                other = await driver.open(prompt_of(9, 4), slot=3)
                tasks.start_soon(partial(went, driver, third, steps=STEPS, joins=True))
                await anyio.wait_all_tasks_blocked()
                there.set()
    finally:
        type(shard).forward = forward
    assert [client.answer for client in (first, second, third)] == [client.answer for client in asked]
    assert max(rows) == 3, "together"
    assert not lane.has_waiting_work
    await other.prefill()


async def test_it_goes_on_no_further_than_the_step_it_is_at_where_somebody_waits(driver):
    clients = await opened(driver)
    held = threading.Event()
    lane = driver.executor._lane  # noqa: SLF001
    lane.post(held.wait, print)  # so that what follows is there before the first step begins
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(went, driver, *clients, steps=STEPS))
            await anyio.wait_all_tasks_blocked()
            driver.executor.stop_launch(clients[1].request, StopLaunch())
            held.set()
    assert {len(client.answer) for client in clients} == {1}


async def test_who_joins_has_a_step_before_others_have_the_lane(driver):
    first, second, third = await opened(driver)
    held = threading.Event()
    lane = driver.executor._lane  # noqa: SLF001
    lane.post(held.wait, print)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(went, driver, first, second, steps=STEPS))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(partial(went, driver, third, steps=STEPS, joins=True))
            await anyio.wait_all_tasks_blocked()
            driver.executor.stop_launch(first.request, StopLaunch())
            held.set()
    # Where steps run ahead, the last row of the third prompt was kept. So its first token needs no forward.
    found = 2 if driver.executor.parts.shard.spec.runs_ahead else 1
    assert [len(client.answer) for client in (first, second, third)] == [2, 2, found]


async def test_what_a_step_raises_is_told_to_all_who_are_in_it_and_to_nobody_else(on_fake, monkeypatch):
    let_run_ahead(on_fake)
    first, second, third = await opened(on_fake)
    forward, heard, ended, rows = FakeShard.forward, list[RequestOutcome](), anyio.Event(), list[int]()

    def broken(self, step, inputs):
        rows.append(step.rows)
        if len(rows) == 5:
            raise ValueError("no such product")
        return forward(self, step, inputs)

    def done(outcomes) -> None:
        if isinstance(outcomes, LaunchFailed):
            heard.extend((request, outcomes.error) for request in outcomes.requests)
        else:
            heard.extend(one for one in outcomes if not has_more_to_come(one[1]))
        if len(heard) == 3:
            ended.set()

    monkeypatch.setattr(FakeShard, "forward", broken)
    held = threading.Event()
    on_fake.executor._lane.post(held.wait, print)  # noqa: SLF001
    for client, steps, joins in ((first, 2, False), (second, STEPS, True), (third, STEPS, True)):
        effect_request = client.round()
        launch = Launch(
            (EffectRequest(effect_request.request, evolve(effect_request.effect, steps=steps)),), joins=joins
        )
        on_fake.executor.submit(launch, done)
    held.set()
    with anyio.fail_after(60):
        await ended.wait()
    assert max(rows) == 3
    (whose, outcome), *others = heard
    assert (whose, type(outcome)) == (first.request, Decoded)
    assert [(request, str(error)) for request, error in others] == [
        (client.request, "no such product") for client in (second, third)
    ]
    states = [on_fake.executor.parts.slots.find(client.slot, client.request) for client in (first, second, third)]
    assert [isinstance(state, DeviceFailed) for state in states] == [False, True, True]


async def test_steps_keep_an_even_pace_while_prompts_wait_for_each_other(on_fake, monkeypatch):
    let_run_ahead(on_fake)
    expected, forward, heard = await opened(on_fake), FakeShard.forward, list[str]()
    await went(on_fake, *expected, steps=STEPS)
    clients = await opened(on_fake)

    def launched(self, step, inputs):
        heard.append("step")
        on_fake.executor.pace_steps(ENGINE, PaceSteps(heard.count("step") in (3, 4), interval_ns=heard.count("step")))
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", launched)
    monkeypatch.setattr(NoStepPacer, "beat", lambda _, interval_ns: heard.append(f"even {interval_ns}"))
    monkeypatch.setattr(NoStepPacer, "stop", lambda _: heard.append("at once"))
    await went(on_fake, *clients, steps=6)
    assert heard == [*["step", "at once"] * 2, "step", "even 3", "step", "even 4", *["step", "at once"] * 2]
    assert [client.answer for client in clients] == [client.answer[:6] for client in expected]


async def test_who_is_given_up_ends_it_for_nobody_else(on_fake, monkeypatch):
    clients, forward, forwards = await opened(on_fake), FakeShard.forward, list[int]()

    def third(self, step, inputs):
        forwards.append(step.rows)
        if len(forwards) == 3:
            on_fake.executor.abandon(clients[1].request)
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", third)
    await went(on_fake, *clients, steps=STEPS)
    assert [len(client.answer) for client in clients] == [STEPS, 3, STEPS], "what has begun is finished"


async def test_who_has_left_the_lane_is_not_stopped(driver):
    (client,) = await opened(driver, samplings=(GREEDY,), stops=((),))
    driver.executor.stop_launch(client.request, StopLaunch())
    await went(driver, client, steps=STEPS)
    assert len(client.answer) == STEPS


def of(*tokens: int, proposed: int = 0, more: bool = True) -> tuple[RequestOutcome, ...]:
    return ((RequestId(1), Decoded(tokens, proposed, ns=10, more=more)),)


def test_who_falls_behind_is_told_once_and_takes_plain_steps_together() -> None:
    reports = list[OutcomeQueue]()
    queue = OutcomeQueue(reports.append, {RequestId(1): None, RequestId(2): None})
    for token in (1, 2, 3):
        queue.put(of(token))
    queue.put(of(4, 5, proposed=2))
    queue.put(of(6))
    assert reports == [queue]
    assert queue.take() == (
        (RequestId(1), Decoded((1, 2, 3), 0, ns=10, accepted=0, steps=3, more=True)),
        *of(4, 5, proposed=2),
        *of(6),
    )
    assert queue.take() == ()
    queue.put(of(7))
    assert reports == [queue, queue]
    assert queue.take() == of(7)


def test_what_came_before_a_failure_is_told_before_it() -> None:
    """However late it is looked at."""
    failed = (RequestId(1), DeviceFailed("dead_end", "nothing follows"))
    queue = OutcomeQueue(lambda _: None, {RequestId(1): None})
    for step in (of(1), of(2), (failed,)):
        queue.put(step)
    assert queue.take() == ((RequestId(1), Decoded((1, 2), 0, ns=10, accepted=0, steps=2, more=True)), failed)
    assert not queue.members


def test_members_come_and_go_between_two_steps() -> None:
    one, two = RequestId(1), RequestId(2)
    queue = OutcomeQueue(lambda _: None, {one: None})
    queue.put(of(1))
    queue.members[two] = None
    queue.put((*of(2, more=False), (two, Decoded((8,), more=True))))
    queue.put(((two, Decoded((9,), more=True)),))
    assert list(queue.members) == [two]
    assert queue.take() == (
        (one, Decoded((1, 2), 0, ns=10, accepted=0, steps=2)),
        (two, Decoded((8, 9), 0, accepted=0, steps=2, more=True)),
    )
