"""Prompts that go along with the steps of a launch: everybody gets what they get alone, whatever ends or fails."""

from __future__ import annotations

import threading

import anyio
import pytest
import torch
from attrs import define, evolve, field

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.running_batch import has_more_to_come
from adapters.device.sampling.sampler import LaunchedPicks
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.numerics.synthetic import RandomWeights
from effects.all import EffectRequest, Launch
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.stream import StopLaunch
from tests.device.driver import GREEDY, PENALISED, SAMPLED, VOCAB, Caller, Driver, drive, let_run_ahead, prompt_of
from tests.device.fake_shard import FakeShard
from tests.models.checkpoints import proven
from tests.models.hybrids import config

ROWS = 16  # of a mixed forward
LONG = 70  # tokens of a prompt that goes along
STEPS = 20


@define
class Outcomes:
    """The outcomes of launches, by request, and who still waits for one."""

    driver: Driver
    found: dict[RequestId, list] = field(factory=dict)
    callers: dict[RequestId, Caller] = field(factory=dict)
    heard: anyio.Event = field(factory=anyio.Event)

    def submit(self, *effect_requests: EffectRequest, callers: tuple[Caller, ...], joins: bool = False) -> None:
        self.callers |= {caller.request: caller for caller in callers}
        self.found |= {caller.request: [] for caller in callers}
        self.driver.executor.submit(Launch(effect_requests, joins=joins), self.take)

    def take(self, reported) -> None:
        for request, outcome in reported:
            self.found[request].append(outcome)
            if isinstance(outcome, Decoded):
                self.callers[request].take(outcome)
            elif isinstance(outcome, PrefillAdvanced):
                self.callers[request].valid = outcome.stop
        self.heard.set()
        self.heard = anyio.Event()

    def is_over(self, caller: Caller) -> bool:
        outcomes = self.found[caller.request]
        return bool(outcomes) and not has_more_to_come(outcomes[-1])

    async def wait_for(self, *callers: Caller) -> None:
        while not all(map(self.is_over, callers)):
            await self.heard.wait()


def decode_step(caller: Caller, steps: int = STEPS) -> EffectRequest:
    asked = caller.round()
    return EffectRequest(asked.request, evolve(asked.effect, steps=steps))


def along(caller: Caller, rows: int = ROWS) -> EffectRequest:
    stop = min(caller.valid + 32, caller.prompt - 1)
    return EffectRequest(caller.request, RunPrefill(caller.slot, caller.valid, stop, forward_rows=rows))


@pytest.fixture
def ahead(shard):
    driver = drive(shard)
    let_run_ahead(driver)
    yield driver
    assert driver.executor.close()


@pytest.fixture
def fake_shard() -> FakeShard:
    return FakeShard()


@pytest.fixture
def fake_ahead(fake_shard):
    driver = drive(fake_shard)
    let_run_ahead(driver)
    yield driver
    assert driver.executor.close()


async def open_decoding(driver: Driver, samplings=(GREEDY, SAMPLED)) -> list[Caller]:
    clients = [
        await driver.open(prompt_of(60 + slot, 9 + 5 * slot), sampling, slot) for slot, sampling in enumerate(samplings)
    ]
    for client in clients:
        await client.prefill()
    return clients


async def test_a_prompt_that_went_along_and_those_who_decoded_get_what_they_get_alone(ahead):
    samplings = (GREEDY, PENALISED)
    alone = [
        await ahead.answer(prompt_of(60 + slot, 9 + 5 * slot), sampling, STEPS)
        for slot, sampling in enumerate(samplings)
    ]
    late = await ahead.answer(prompt_of(80, LONG), SAMPLED, 6)
    clients = await open_decoding(ahead, samplings)
    prompt = await ahead.open(prompt_of(80, LONG), SAMPLED, 2)
    outcomes = Outcomes(ahead)
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    await outcomes.wait_for(prompt)
    stops = [(one.stop, one.more) for one in outcomes.found[prompt.request]]
    assert stops[-1] == (32, False)
    assert all(more for _, more in stops[:-1])
    while prompt.valid < prompt.prompt - 1:
        outcomes.submit(along(prompt), callers=(prompt,), joins=True)
        await outcomes.wait_for(prompt)
        assert not any(isinstance(one, DeviceFailed) for one in outcomes.found[prompt.request])
    await outcomes.wait_for(*clients)
    while len(prompt.answer) < 6:
        await ahead.decode(prompt)
    assert [client.answer for client in clients] == alone
    assert prompt.answer == late


async def test_the_rows_of_a_prompt_fill_forwards_that_are_launched_one_after_the_other(fake_ahead, fake_shard):
    clients = await open_decoding(fake_ahead)
    prompt = await fake_ahead.open(prompt_of(80, LONG), slot=2)
    outcomes = Outcomes(fake_ahead)
    before = len(fake_shard.steps)
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    await outcomes.wait_for(prompt, *clients)
    rows = [[segment.count for segment in step.segments if segment.slot == 2] for step in fake_shard.steps[before:]]
    assert rows[:4] == [[14], [14], [4], []], "the last row of these is not the prompt's"
    assert not any(rows[4:])
    mixed, plain = outcomes.found[clients[0].request][0], outcomes.found[clients[0].request][-1]
    assert plain.ns >= 0
    assert mixed.ns == 0, "the time of a forward with rows of a prompt is not that of a decode step"


async def open_prompts(driver: Driver, lengths: tuple[int, ...], first_slot: int = 1) -> list[Caller]:
    return [
        await driver.open(prompt_of(80 + number, length), SAMPLED, first_slot + number)
        for number, length in enumerate(lengths)
    ]


async def test_several_prompts_that_went_along_and_who_decoded_get_what_they_get_alone(ahead):
    lengths = (LONG, 12, 31)
    alone = [await ahead.answer(prompt_of(60, 9), PENALISED, STEPS)]
    alone += [await ahead.answer(prompt_of(80 + number, length), SAMPLED, 6) for number, length in enumerate(lengths)]
    (client,) = await open_decoding(ahead, (PENALISED,))
    prompts = await open_prompts(ahead, lengths)
    outcomes = Outcomes(ahead)
    outcomes.submit(decode_step(client), *map(along, prompts), callers=(client, *prompts))
    await outcomes.wait_for(*prompts)
    while waiting := [one for one in prompts if one.valid < one.prompt - 1]:
        outcomes.submit(*map(along, waiting), callers=tuple(waiting), joins=True)
        await outcomes.wait_for(*waiting)
        assert not any(isinstance(outcomes.found[one.request][-1], DeviceFailed) for one in waiting)
    await outcomes.wait_for(client)
    while min(len(one.answer) for one in prompts) < 6:
        await ahead.decode(*prompts)
    assert [client.answer, *(one.answer[:6] for one in prompts)] == alone


async def test_prompts_take_the_rows_of_forwards_in_order_and_one_that_joins_follows(fake_ahead, fake_shard):
    (client,) = await open_decoding(fake_ahead, (GREEDY,))
    prompts = await open_prompts(fake_ahead, (13, 10, 8))
    outcomes = Outcomes(fake_ahead)
    before = len(fake_shard.steps)
    outcomes.submit(decode_step(client), *map(along, prompts), callers=(client, *prompts))
    await outcomes.wait_for(*prompts, client)
    steps = fake_shard.steps[before:]
    found = [[(one.slot, one.start, one.count) for one in step.segments[1:]] for step in steps[:3]]
    assert found == [[(1, 0, 13), (2, 0, 2)], [(2, 2, 8), (3, 0, 7)], []], "two with the row of the last token"
    assert [outcomes.found[one.request] for one in (prompts[0], prompts[2])] == [
        [PrefillAdvanced(12)],
        [PrefillAdvanced(7)],
    ]
    assert outcomes.found[prompts[1].request][-1] == PrefillAdvanced(9)
    assert [len(client.answer), *(one.valid for one in prompts)] == [STEPS, 12, 9, 7]


async def test_one_of_several_prompts_is_given_up_and_the_others_go_along(fake_ahead, fake_shard):
    (client,) = await open_decoding(fake_ahead, (GREEDY,))
    prompts = await open_prompts(fake_ahead, (13, 10, 8))
    outcomes, go_on = Outcomes(fake_ahead), threading.Event()
    executor = fake_ahead.executor
    executor._lane.post(lambda: go_on.wait(60), pytest.fail)  # noqa: SLF001 - keeps the lane busy
    before = len(fake_shard.steps)
    outcomes.submit(decode_step(client), *map(along, prompts), callers=(client, *prompts))
    executor.abandon(prompts[1].request)
    go_on.set()
    await outcomes.wait_for(*prompts, client)
    [failed] = outcomes.found[prompts[1].request]
    assert isinstance(failed, DeviceFailed)
    assert failed.kind == "abandoned"
    found = [[(one.slot, one.start, one.count) for one in step.segments[1:]] for step in fake_shard.steps[before:]]
    assert found[:3] == [[(1, 0, 13), (3, 0, 2)], [(3, 2, 6)], []]


async def test_the_last_rows_are_reported_before_their_step_has_been_read(fake_ahead, monkeypatch):
    """So that the prompt's first decode step can go with the next one."""
    clients = await open_decoding(fake_ahead)
    prompt = await fake_ahead.open(prompt_of(80, 9), SAMPLED, 2)
    outcomes, heard, read = Outcomes(fake_ahead), threading.Event(), LaunchedPicks.read

    def wait_and_read(self):
        assert heard.wait(60)
        return read(self)

    monkeypatch.setattr(LaunchedPicks, "read", wait_and_read)
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    await outcomes.wait_for(prompt)
    assert outcomes.found[prompt.request] == [PrefillAdvanced(8)]
    outcomes.submit(decode_step(prompt, 4), callers=(prompt,), joins=True)
    heard.set()
    await outcomes.wait_for(prompt, *clients)
    monkeypatch.undo()
    assert prompt.answer == await fake_ahead.answer(prompt_of(80, 9), SAMPLED, 4, 3)


async def test_a_prompt_that_is_given_up_before_its_rows_are_launched_fails_and_others_go_on(fake_ahead):
    clients = await open_decoding(fake_ahead)
    prompt = await fake_ahead.open(prompt_of(80, LONG), slot=2)
    outcomes, go_on = Outcomes(fake_ahead), threading.Event()
    executor = fake_ahead.executor
    executor._lane.post(lambda: go_on.wait(60), pytest.fail)  # noqa: SLF001 - keeps the lane busy
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    executor.abandon(prompt.request)
    go_on.set()
    await outcomes.wait_for(prompt, *clients)
    [failed] = outcomes.found[prompt.request]
    assert isinstance(failed, DeviceFailed)
    assert failed.kind == "abandoned"
    assert [len(client.answer) for client in clients] == [STEPS, STEPS]


async def test_a_launch_that_is_stopped_says_how_far_the_prompt_came(fake_ahead, monkeypatch):
    clients = await open_decoding(fake_ahead)
    prompt = await fake_ahead.open(prompt_of(80, LONG), slot=2)
    outcomes, executor = Outcomes(fake_ahead), fake_ahead.executor
    reached, go_on = threading.Event(), threading.Event()
    forward = FakeShard.forward

    def hold(self, step, inputs):
        if any(segment.slot == 2 for segment in step.segments) and not reached.is_set():
            reached.set()
            assert go_on.wait(60)
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", hold)
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    await anyio.to_thread.run_sync(reached.wait)
    executor.stop_launch(prompt.request, StopLaunch())
    go_on.set()
    await outcomes.wait_for(prompt, *clients)
    assert outcomes.found[prompt.request] == [PrefillAdvanced(14)]
    assert [len(client.answer) for client in clients] == [1, 1]
    await prompt.prefill()
    await fake_ahead.decode(prompt)


async def test_a_prompt_whose_launch_has_ended_is_computed_by_itself(fake_ahead):
    prompt = await fake_ahead.open(prompt_of(80, LONG), slot=2)
    outcomes = Outcomes(fake_ahead)
    outcomes.submit(along(prompt), callers=(prompt,), joins=True)
    await outcomes.wait_for(prompt)
    assert [evolve(one, ns=0) for one in outcomes.found[prompt.request]] == [PrefillAdvanced(32)]


async def test_several_prompts_whose_launch_has_ended_are_computed_one_after_the_other(fake_ahead, fake_shard):
    prompts = await open_prompts(fake_ahead, (LONG, 12))
    outcomes = Outcomes(fake_ahead)
    before = len(fake_shard.steps)
    outcomes.submit(*map(along, prompts), callers=tuple(prompts), joins=True)
    await outcomes.wait_for(*prompts)
    assert [[evolve(one, ns=0) for one in outcomes.found[prompt.request]] for prompt in prompts] == [
        [PrefillAdvanced(32)],
        [PrefillAdvanced(11)],
    ]
    assert [[one.count for one in step.segments] for step in fake_shard.steps[before:]] == [[32], [11]]


@pytest.mark.parametrize("shard", ["fake", "cpu"], indirect=True)  # a GPU overlaps them
async def test_where_steps_are_not_overlapped_the_first_of_several_prompts_shares_their_forward(driver):
    (client,) = await open_decoding(driver, (GREEDY,))
    prompts = await open_prompts(driver, (LONG, 12))
    outcomes = Outcomes(driver)
    outcomes.submit(decode_step(client), *map(along, prompts), callers=(client, *prompts))
    await outcomes.wait_for(client, *prompts)
    assert outcomes.found[prompts[0].request] == [PrefillAdvanced(15)]
    assert [evolve(one, ns=0) for one in outcomes.found[prompts[1].request]] == [PrefillAdvanced(11)]
    assert len(client.answer) == 1


@pytest.mark.parametrize("shard", ["fake", "cpu"], indirect=True)
async def test_where_steps_are_not_overlapped_one_forward_takes_rows_along(driver):
    clients = await open_decoding(driver)
    prompt = await driver.open(prompt_of(80, LONG), SAMPLED, 2)
    outcomes = Outcomes(driver)
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    await outcomes.wait_for(prompt, *clients)
    assert outcomes.found[prompt.request] == [PrefillAdvanced(14)]
    assert [len(client.answer) for client in clients] == [1, 1]


@pytest.mark.parametrize("which", [1, 2])
async def test_a_step_with_rows_that_finds_no_memory_is_the_prompts_failure(fake_ahead, monkeypatch, which):
    alone = await fake_ahead.answer(prompt_of(60, 9), GREEDY, STEPS)
    (client,) = await open_decoding(fake_ahead, (GREEDY,))
    prompt = await fake_ahead.open(prompt_of(80, LONG), slot=2)
    forward, met = FakeShard.forward, []

    def short(self, step, inputs):
        if any(segment.slot == 2 for segment in step.segments):
            met.append(step)
            if len(met) == which:
                raise torch.OutOfMemoryError("no room")
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", short)
    outcomes = Outcomes(fake_ahead)
    outcomes.submit(decode_step(client), along(prompt), callers=(client, prompt))
    await outcomes.wait_for(prompt)
    last = outcomes.found[prompt.request][-1]
    assert isinstance(last, DeviceFailed)
    assert last.kind == "out_of_memory"
    assert len(outcomes.found[prompt.request]) == 1, "nothing is said behind the last outcome"
    await outcomes.wait_for(client)
    monkeypatch.undo()
    while len(client.answer) < STEPS:
        await fake_ahead.decode(client)
    assert client.answer == alone


async def test_a_step_with_rows_of_several_prompts_that_finds_no_memory_is_their_failure(fake_ahead, monkeypatch):
    alone = await fake_ahead.answer(prompt_of(60, 9), GREEDY, STEPS)
    (client,) = await open_decoding(fake_ahead, (GREEDY,))
    prompts = await open_prompts(fake_ahead, (13, 40))
    forward, met = FakeShard.forward, []

    def short(self, step, inputs):
        met.append([one.slot for one in step.segments])
        if len(met) == 2:
            raise torch.OutOfMemoryError("no room")
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", short)
    outcomes = Outcomes(fake_ahead)
    outcomes.submit(decode_step(client), *map(along, prompts), callers=(client, *prompts))
    await outcomes.wait_for(client, *prompts)
    assert met[:2] == [[0, 1, 2], [0, 2]]
    assert outcomes.found[prompts[0].request] == [PrefillAdvanced(12)], "its rows were in the step before"
    [failed] = outcomes.found[prompts[1].request]
    assert isinstance(failed, DeviceFailed)
    assert failed.kind == "out_of_memory"
    monkeypatch.undo()
    while len(client.answer) < STEPS:
        await fake_ahead.decode(client)
    assert client.answer == alone


BLOCK_ROWS = 64  # rows of a prompt that a step takes along where a shard does not commit per segment


@pytest.fixture(scope="module")
def hybrid():
    """A small model with recurrent layers, whose states move every 64 rows."""
    own = config((2, 4, 32, 32), VOCAB, 96, 160, 3, 3, 1, 32, 512, 1e6, rotated=8)
    buckets = (4, 8, 16, 32, 64)
    kernels = proven(own, torch.float32, 512, buckets).copy_for_shard()
    shape = ShardPlacement(slots=4, capacity=512, buckets=buckets, state_checkpoints=2)
    shard = DenseShard(own, RandomWeights(own, scale=own.hidden_size**-0.5), kernels, shape)
    driver = Driver(DeviceExecutor(ExecutorParts(shard, buckets, lane=DeviceLane(shard.spec.device))))
    yield driver
    assert driver.executor.close()


@pytest.mark.timeout(120)
async def test_positional_states_move_with_rows_that_go_along_as_with_those_that_come_alone(hybrid):
    """Prompts come one after the other, each joins, and decodes behind its last rows in the same launch."""
    samplings, lengths = (GREEDY, SAMPLED, evolve(SAMPLED, seed=8)), (9, 150, 190)
    prompts = [prompt_of(30 + slot, length) for slot, length in enumerate(lengths)]
    chunks = (BLOCK_ROWS,)
    counts = (140, 60, 30)
    alone = [
        await hybrid.answer(prompt, sampling, count, chunks=chunks)
        for prompt, sampling, count in zip(prompts, samplings, counts, strict=True)
    ]
    let_run_ahead(hybrid)
    callers = [await hybrid.open(prompts[slot], samplings[slot], slot) for slot in range(3)]
    await callers[0].prefill(chunks)
    outcomes = Outcomes(hybrid)
    outcomes.submit(decode_step(callers[0], counts[0]), callers=(callers[0],))
    went_along = 0
    for number in (1, 2):
        caller = callers[number]
        while caller.valid < caller.prompt - 1:
            stop = min(caller.valid + BLOCK_ROWS, caller.prompt - 1)
            rows = RunPrefill(caller.slot, caller.valid, stop, forward_rows=24)
            outcomes.submit(EffectRequest(caller.request, rows), callers=(caller,), joins=True)
            await outcomes.wait_for(caller)
            assert isinstance(outcomes.found[caller.request][-1], PrefillAdvanced)
            went_along += len(outcomes.found[caller.request]) > 1
        outcomes.submit(decode_step(caller, counts[number]), callers=(caller,), joins=True)
    await outcomes.wait_for(*callers)
    for caller, count in zip(callers, counts, strict=True):
        while len(caller.answer) < count:
            await hybrid.decode(caller)
    assert [caller.answer for caller in callers] == alone
    assert went_along, "in several forwards"
