"""The row of a prompt's last token, computed with its last chunk: the same answers, and a forward less."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
import torch
from attrs import define, field

from adapters.device.decode import prefill
from adapters.device.decode.last_row import can_take_last_row, is_row_cheap
from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import GPU_BUCKETS
from adapters.sequence_layout import TensorSpec
from effects.all import Launch, Outcome
from effects.ids import RequestId, SlotId
from effects.prefill import PrefillAdvanced, RunPrefill
from tests.device.driver import (
    BUCKETS,
    CHUNK,
    GREEDY,
    PENALISED,
    SAMPLED,
    VOCAB,
    Caller,
    Driver,
    drive,
    let_run_ahead,
    prompt_of,
    qwen3,
    straightforward,
)
from tests.device.fake_shard import FakeShard, NoStates

STATES = NoStates((TensorSpec("layers.0.state", "F32", (1,)),))


@define(eq=False)
class HybridShard(FakeShard):
    """A fake shard with positional state."""

    states: NoStates = STATES


@pytest.fixture(params=[HybridShard, FakeShard])
def shard(request):
    return request.param()


@pytest.fixture
def driver(shard):
    driver = drive(shard)
    let_run_ahead(driver)
    yield driver
    assert driver.executor.close()


@pytest.mark.parametrize("length", [2, 9, CHUNK, CHUNK + 2, 2 * CHUNK])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_the_first_token_takes_no_forward_of_its_own(driver: Driver, shard, length, sampling):
    prompt = prompt_of(3, length)
    expected = straightforward(FakeShard(), prompt, sampling, 6)
    client = await driver.open(prompt, sampling)
    await client.prefill()
    rows = [step.rows for step in shard.steps]
    assert sum(rows) == length
    await driver.decode(client)
    assert [step.rows for step in shard.steps] == rows
    while len(client.answer) < 6:
        await driver.decode(client)
    assert client.answer == expected
    assert [step.rows for step in shard.steps] == [*rows, *[1] * 5]


async def test_a_chunk_without_room_for_the_last_row_leaves_it_to_the_decode_step(driver: Driver, shard):
    prompt = prompt_of(4, CHUNK + 1)
    client = await driver.open(prompt)
    await client.prefill()
    assert [(step.rows, step.rows_only) for step in shard.steps] == [(CHUNK, True)]
    await driver.decode(client)
    assert [step.rows for step in shard.steps] == [CHUNK, 1]
    assert client.answer == straightforward(FakeShard(), prompt, GREEDY, 1)


async def test_beside_other_requests_the_row_is_computed_again(driver: Driver, shard):
    prompts = [prompt_of(5 + slot, 9 + slot) for slot in range(2)]
    clients = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    for _ in range(4):
        await driver.decode(*clients)
    assert [step.rows for step in shard.steps] == [9, 10, 2, 2, 2, 2]
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.answer == straightforward(FakeShard(), prompt, GREEDY, 4)


def make_state() -> SlotState:
    return SlotState(RequestId(1), prompt_of(1, 9), 0, Sampler(GREEDY, (), VOCAB, torch.device("cpu")))


@pytest.mark.parametrize("is_alone", [False, True])
def test_only_a_hybrid_takes_it_beside_other_requests(driver: Driver, shard, is_alone):
    """Another request decodes, or will: with it the row would be computed again."""
    pipeline, effect = driver.executor.parts.shard, RunPrefill(SlotId(0), 0, 8)
    state = make_state()
    taken = can_take_last_row(pipeline, BUCKETS, state, effect, is_alone=is_alone)
    assert taken is (is_alone or bool(shard.states.specs))


def test_buckets_that_may_not_be_proven_leave_the_row_to_the_decode_step(driver: Driver, shard):
    effect = RunPrefill(SlotId(0), 0, 8)
    state = make_state()
    taken = can_take_last_row(driver.executor.parts.shard, (4, CHUNK), state, effect, is_alone=True)
    assert taken is bool(shard.states.specs)


@define(eq=False)
class WaitsForDevice:
    """The waits of the host for the device. rows: computed, at each of them."""

    shard: FakeShard
    rows: list[int] = field(factory=list)

    def synchronize(self) -> None:
        self.rows.append(sum(step.rows for step in self.shard.steps))


@pytest.mark.parametrize("has_own_lane", [False, True], ids=["one lane", "a lane for prompts"])
async def test_the_chunk_with_the_last_row_is_reported_when_it_is_launched(driver, shard, has_own_lane, monkeypatch):
    """So that the first decode step is launched while the device computes it. Another stream would not wait for it."""
    events, ends = WaitsForDevice(shard), WaitsForDevice(shard)
    monkeypatch.setattr(prefill, "record_event", lambda _: events)
    monkeypatch.setattr(driver.executor.parts.shard, "synchronize", ends.synchronize)
    driver.executor._prefills.has_own_lane = has_own_lane  # noqa: SLF001 - a second lane needs a GPU
    client = await driver.open(prompt_of(3, CHUNK + 9))
    await client.prefill((2 * CHUNK,))
    every = CHUNK + 9
    # The first chunk is waited for while the device is at the second one.
    assert (events.rows, ends.rows) == (([every] * 2, [every]) if has_own_lane else ([every], []))
    await driver.decode(client)
    assert client.answer == straightforward(FakeShard(), prompt_of(3, CHUNK + 9), GREEDY, 1)


async def test_a_prompt_without_its_last_row_is_reported_when_it_is_computed(driver, shard, monkeypatch):
    events, ends = WaitsForDevice(shard), WaitsForDevice(shard)
    monkeypatch.setattr(prefill, "record_event", lambda _: events)
    monkeypatch.setattr(driver.executor.parts.shard, "synchronize", ends.synchronize)
    client = await driver.open(prompt_of(4, 2 * CHUNK + 1))
    await client.prefill((2 * CHUNK,))
    assert (events.rows, ends.rows) == ([2 * CHUNK, 2 * CHUNK], [2 * CHUNK])


async def test_whole_chunks_of_a_long_prefill_have_the_time_that_they_took_so_far(driver, shard):
    client = await driver.open(prompt_of(3, 3 * CHUNK + 9))
    found = list[PrefillAdvanced]()
    done = anyio.Event()

    def take(reported) -> None:
        found.extend(outcome for _, outcome in reported)
        if not found[-1].more:
            done.set()

    driver.executor.submit(Launch((client.chunk(3 * CHUNK + 8),)), take)
    await done.wait()
    assert (found[-1].stop, found[-1].ns) == (3 * CHUNK + 8, 0)
    times = [outcome.ns for outcome in found[:-1]]
    assert all(ns > 0 for ns in times)
    assert times == sorted(times)


@pytest.mark.parametrize("shard", [HybridShard], indirect=True)
async def test_a_step_beside_a_prompt_that_has_just_ended_has_no_time(driver: Driver, shard):
    """It may have waited for that prompt's last chunk."""
    clients = [await driver.open(prompt_of(5 + slot, 9 + slot), slot=slot) for slot in range(2)]
    for client in clients:
        await client.prefill()
    for _ in range(2):
        for client, outcome in zip(clients, await step_of(driver, clients), strict=True):
            client.take(outcome)
    assert [[outcome.ns > 0 for outcome in client.done] for client in clients] == [[False, True]] * 2


async def step_of(driver: Driver, clients: list[Caller]) -> tuple[Outcome, ...]:
    return await driver.executor.perform(Launch(tuple(client.round() for client in clients)))


@pytest.mark.parametrize("shard", [FakeShard], indirect=True)
async def test_only_a_step_with_a_forward_has_a_time(driver: Driver, shard):
    client = await driver.open(prompt_of(3, 9))
    await client.prefill()
    for _ in range(2):
        [outcome] = await driver.executor.perform(Launch((client.round(),)))
        client.take(outcome)
    assert [outcome.ns > 0 for outcome in client.done] == [False, True]


MODELS = [qwen3, pytest.param(partial(qwen3, device="cuda"), marks=pytest.mark.cuda)]


@pytest.mark.parametrize("shard", MODELS, indirect=True)
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
async def test_a_model_answers_as_with_a_forward_for_each_token(driver: Driver, shard, sampling, monkeypatch):
    prompt = prompt_of(6, CHUNK + 9)
    expected = straightforward(shard, prompt, sampling, 5)
    counts, forward = list[int](), DenseShard.forward

    def count_rows(self, step, inputs):
        counts.append(step.rows)
        return forward(self, step, inputs)

    monkeypatch.setattr(DenseShard, "forward", count_rows)
    client = await driver.open(prompt, sampling)
    await client.prefill()
    for _ in range(5):
        await driver.decode(client)
    assert client.answer == expected
    # On a CPU, the library takes the steps of a request without penalties.
    is_native = shard.spec.device.type == "cpu" and sampling is GREEDY
    assert counts == [CHUNK, 9, *[1] * (0 if is_native else 4)]


@pytest.mark.parametrize(
    ("rows", "cheap"), [(1, True), (127, True), (128, False), (200, True), (256, False), (512, False), (513, True)]
)
def test_a_row_more_must_not_need_a_wider_bucket(rows, cheap):
    assert is_row_cheap((*GPU_BUCKETS, 1024), rows) is cheap


async def test_a_slot_that_is_opened_again_has_no_row_of_the_prompt_before(driver: Driver, shard):
    for seed in (7, 8):
        client = await driver.open(prompt_of(seed, 12))
        await client.prefill()
    shard.steps.clear()
    await driver.decode(client)
    assert shard.steps == []
    assert client.answer == straightforward(FakeShard(), prompt_of(8, 12), GREEDY, 1)
