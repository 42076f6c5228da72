"""Launches that go on alone: the same tokens as asked for step by step, until somebody has to be asked."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import pytest
from attrs import evolve

from adapters.device.underway import StepsTaken
from effects.all import Ask, Launch
from effects.decode import Decoded
from effects.grammar import Grammar
from effects.ids import DeviceFailed
from effects.stream import Halt
from tests.device.driver import GREEDY, PENALISED, SAMPLED, VOCAB, Caller, Driver, drive, prompt_of
from tests.device.fake_shard import FakeShard
from tests.device.test_constraint import Scripted

STEPS = 20
TOLD = evolve(SAMPLED, seed=9, logprobs=3)


async def went(driver: Driver, *clients: Caller, steps: int, propose: int = 0) -> list[tuple[Decoded, ...]]:
    """What came of it, in order."""
    found, ended = list[tuple[Decoded, ...]](), anyio.Event()

    def done(result) -> None:
        if isinstance(result, tuple):
            found.append(result)
            ended.set()
        else:
            found.extend(result.take())

    asks = [client.round(propose) for client in clients]
    launch = Launch(tuple(Ask(ask.request, evolve(ask.effect, steps=steps)) for ask in asks))
    driver.executor.submit(launch, done)
    await ended.wait()
    for members in found:
        for client, outcome in zip(clients, members, strict=True):
            client.take(outcome)
    return found


@pytest.fixture(params=["one by one", "ahead"])
def driver(request, shard, monkeypatch):
    """A host that does as a GPU does, too: what is asked for is there at once, and all else is the same."""
    if request.param == "ahead":
        monkeypatch.setattr(type(shard), "runs_ahead", True)
    driver = drive(shard)
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
    found = await went(driver, *alone, steps=STEPS)
    assert [client.answer for client in alone] == [client.answer for client in asked]
    assert [[one.logprobs for one in client.done] for client in alone][2] != [()] * len(found)
    logprobs = [tuple(word for one in client.done for word in one.logprobs) for client in (alone[2], asked[2])]
    assert logprobs[0] == logprobs[1]
    assert [[one.more for one in members] for members in found] == [[True] * 3] * (len(found) - 1) + [[False] * 3]
    assert sum(members[0].steps for members in found) == STEPS
    for client in alone:  # and the slots are where they were said to be
        await driver.decode(client)


async def test_penalties_see_what_was_picked_alone(driver):
    asked = await opened(driver, samplings=(PENALISED, GREEDY), stops=((), ()))
    for _ in range(STEPS):
        await driver.decode(*asked)
    alone = await opened(driver, samplings=(PENALISED, GREEDY), stops=((), ()))
    await went(driver, *alone, steps=STEPS)
    assert [client.answer for client in alone] == [client.answer for client in asked]


async def test_a_grammar_hears_what_was_picked_alone(driver):
    """It lets follow what the sum of all before says, so a pick that was not told of the last one would show."""
    driver.executor.matched_by(lambda _: Scripted(lambda said: [(sum(said) + more) % VOCAB for more in (1, 5, 9)]))
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


async def test_a_grammar_that_lets_nothing_follow_ends_it_for_all(driver):
    driver.executor.matched_by(lambda _: Scripted(lambda said: [7] if len(said) < 5 else []))
    clients = await opened(driver, (GREEDY, evolve(SAMPLED, grammar=Grammar("regex", "any"))), ((), ()))
    asks = [client.round() for client in clients]
    going = [Ask(ask.request, evolve(ask.effect, steps=STEPS)) for ask in asks]
    other, ended = await driver.perform(*going)
    assert isinstance(ended, DeviceFailed)
    assert ended.kind == "dead_end"
    assert len(other.tokens) in (6, 7), "those of the steps until then, and one that was under way"
    clients[0].take(other)
    await driver.decode(clients[0])


async def test_a_stop_token_ends_it_for_all(driver):
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
        assert client.answer == other.answer[: len(client.answer)]
        assert at + 1 <= len(client.answer) <= at + 2, "a step more that was under way is no loss"
        (outcome,) = await driver.decode(client)
        assert list(outcome.tokens) == other.answer[len(client.answer) - 1 : len(client.answer)]


@pytest.mark.parametrize("how", ["halted", "other work"])
async def test_it_goes_on_no_further_than_the_step_it_is_at(driver, how):
    clients = await opened(driver)
    held = threading.Event()
    lane = driver.executor._lane  # noqa: SLF001
    lane.post(held.wait, print)  # so that what follows is there before the first step begins
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(went, driver, *clients, steps=STEPS))
            await anyio.wait_all_tasks_blocked()
            match how:
                case "halted":
                    driver.executor.halt(clients[1].request, Halt())
                case _:
                    await driver.open(prompt_of(9, 4), slot=3)
            held.set()
    assert {len(client.answer) for client in clients} <= {1, 2}, "one, or one more that was under way"


async def test_who_is_given_up_ends_it_for_all(on_fake, monkeypatch):
    clients, forward, forwards = await opened(on_fake), FakeShard.forward, list[int]()

    def third(self, step, inputs):
        forwards.append(step.rows)
        if len(forwards) == 3:
            on_fake.executor.abandon(clients[1].request)
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", third)
    await went(on_fake, *clients, steps=STEPS)
    assert [len(client.answer) for client in clients] == [3, 3, 3], "what has begun is finished"


async def test_who_has_left_the_lane_is_not_halted(driver):
    (client,) = await opened(driver, samplings=(GREEDY,), stops=((),))
    driver.executor.halt(client.request, Halt())
    await went(driver, client, steps=STEPS)
    assert len(client.answer) == STEPS


def of(*tokens: int, proposed: int = 0, more: bool = True) -> tuple[Decoded, ...]:
    return (Decoded(tokens, proposed, ns=10, more=more),)


def test_who_falls_behind_is_told_once_and_takes_plain_steps_together() -> None:
    told = list[StepsTaken]()
    steps = StepsTaken(told.append)
    for token in (1, 2, 3):
        steps.put(of(token))
    steps.put(of(4, 5, proposed=2))
    steps.put(of(6))
    assert told == [steps]
    assert steps.take() == (
        (Decoded((1, 2, 3), 0, ns=10, accepted=0, steps=3, more=True),),
        of(4, 5, proposed=2),
        of(6),
    )
    assert steps.take() == ()
    steps.put(of(7))
    assert told == [steps, steps]
    assert steps.take() == (of(7),)
