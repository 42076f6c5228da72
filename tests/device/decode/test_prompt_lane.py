"""Prompts on the prompt lane: they wait until their slot is open, and decode steps do not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import pytest
import torch
from attrs import define, evolve, field

from adapters.device.decode import prefill
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.running_batch import OutcomeQueue, has_more_to_come
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement, ShardSpec
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.numerics.synthetic import RandomWeights
from effects.all import EffectRequest, Launch, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import ENGINE, MAIN, PROMPTS, DeviceFailed, RequestId
from effects.pacing import PaceSteps
from effects.ports import LaunchFailed, RequestOutcome
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.stream import StopLaunch
from tests.device.driver import (
    BUCKETS,
    CHUNK,
    GREEDY,
    SAMPLED,
    TINY,
    Caller,
    Driver,
    drive,
    let_run_ahead,
    prompt_of,
    ready,
    straightforward,
)
from tests.device.fake_shard import SPEC, FakeShard


@define(eq=False)
class Held(FakeShard):
    """A forward of a whole chunk waits at its beginning."""

    begun: threading.Event = field(factory=threading.Event)
    going: threading.Event = field(factory=threading.Event)

    def forward(self, step, inputs):
        if step.rows == CHUNK:
            self.begun.set()
            assert self.going.wait(20)
        return super().forward(step, inputs)


async def prefill_beside(driver: Driver, client: Caller, rows: int = CHUNK, narrow: int = 0) -> None:
    """narrow: rows of a forward that is on the lane of decode steps. What is of several chunks gives way to others."""
    while client.valid < client.prompt - 1:
        stop = min(client.valid + rows, client.prompt - 1)
        effect_request = EffectRequest(client.request, RunPrefill(client.slot, client.valid, stop))
        lane = PROMPTS if stop - client.valid > narrow else MAIN
        (outcome,) = await driver.executor.perform(Launch((effect_request,), lane))
        assert isinstance(outcome, PrefillAdvanced), outcome
        assert min(client.valid + CHUNK, stop) <= outcome.stop <= stop
        client.valid = outcome.stop


@pytest.fixture
def shard():
    return Held()


@pytest.fixture
def driver(shard):
    driving = drive(shard)
    driving.executor = DeviceExecutor(evolve(driving.executor.parts, prompt_lane=DeviceLane(purpose="prompts")))
    yield driving
    shard.going.set()
    assert driving.executor.close()
    assert shard.closed


async def test_decode_steps_go_on_while_a_prompt_is_read(driver, shard):
    reader, short = prompt_of(1, CHUNK + 1), prompt_of(2, 7)
    client = await driver.open(short, SAMPLED, 0)
    await client.prefill()
    newcomer = await driver.open(reader, GREEDY, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefill_beside, driver, newcomer)
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(shard.begun.wait)
            for _ in range(5):
                await driver.decode(client)
        assert newcomer.valid == 0
        shard.going.set()
    while len(newcomer.answer) < 5:
        await driver.decode(client, newcomer)
    assert client.answer == straightforward(shard, short, SAMPLED, 10)
    assert newcomer.answer == straightforward(shard, reader, GREEDY, 5)


async def test_a_prefill_waits_until_its_slot_is_open(driver, shard):
    shard.going.set()
    gate = threading.Event()
    driver.executor._lane.post(lambda: gate.wait(20), pytest.fail)  # noqa: SLF001 - whatever else it may be at
    newcomer = await driver.open(prompt_of(1, CHUNK + 1), GREEDY, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefill_beside, driver, newcomer)
        await anyio.sleep(0.05)
        assert not shard.begun.is_set()
        gate.set()
    assert newcomer.valid == CHUNK


async def test_a_slot_that_could_not_be_opened_refuses_its_prefill(driver, shard):
    shard.going.set()
    newcomer = await driver.open(prompt_of(1, CHUNK + 1), GREEDY, 1, source=0, keep=8)  # slot 0 was never opened
    effect_request = EffectRequest(newcomer.request, RunPrefill(newcomer.slot, 8, CHUNK))
    (outcome,) = await driver.executor.perform(Launch((effect_request,), PROMPTS))
    assert "does not hold the first 8 tokens" in outcome.detail


async def test_who_hears_that_a_slot_was_lost_hears_it_before_its_prefill_fails(driver):
    heard = list[object]()
    driver.executor.events.connect(lambda event: heard.extend(event.slots))
    newcomer = await driver.open(prompt_of(1, CHUNK + 1), GREEDY, 1, source=0, keep=8)
    effect_request = EffectRequest(newcomer.request, RunPrefill(newcomer.slot, 8, CHUNK))
    heard += await driver.executor.perform(Launch((effect_request,), PROMPTS))
    assert heard[0] == newcomer.slot
    assert isinstance(heard[1], DeviceFailed)


async def test_what_is_read_when_all_ends_keeps_its_rows_and_no_lane_takes_more():
    shard = Held()
    driver, prompt_lane = drive(shard), DeviceLane(purpose="prompts")
    driver.executor = DeviceExecutor(evolve(driver.executor.parts, prompt_lane=prompt_lane))
    newcomer = await driver.open(prompt_of(1, CHUNK + 1), GREEDY, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefill_beside, driver, newcomer)
        await anyio.to_thread.run_sync(shard.begun.wait)
        assert not await anyio.to_thread.run_sync(driver.executor.close, 0.05)
        assert not shard.closed
        assert [lane.is_closed for lane in (driver.executor._lane, prompt_lane)] == [True, True]  # noqa: SLF001
        shard.going.set()


def test_rows_that_are_loaded_while_those_before_them_are_computed_are_never_lost():
    """The other thread comes in the middle of it."""

    @define(eq=False)
    class Interrupted(SlotState):
        others: list[threading.Thread] = field(factory=list)

        def _mark_computed(self, valid):
            if not self.others:
                self.others.append(threading.Thread(target=self.mark_computed, args=(64,)))
                self.others[0].start()
                self.others[0].join(0.05)
            super()._mark_computed(valid)

    state = Interrupted(RequestId(1), [0] * 200, 0, None)
    state.add_loaded_rows(64, 128)
    state.others[0].join()
    assert state.valid == 128


async def test_who_has_no_such_lane_reads_on_the_one_that_there_is():
    shard = FakeShard()
    driver, prompt = drive(shard), prompt_of(3, 2 * CHUNK + 5)
    client = await driver.open(prompt, GREEDY, 2)
    await prefill_beside(driver, client)
    while len(client.answer) < 4:
        await driver.decode(client)
    assert client.answer == straightforward(shard, prompt, GREEDY, 4)
    assert driver.executor.close()


AHEAD = evolve(SPEC, runs_ahead=True)


@define(eq=False)
class ToldAhead(Held):
    """A shard where a chunk may be launched before the one before it is done."""

    spec: ShardSpec = AHEAD


@pytest.fixture
async def ahead():
    shard, prompt_lane = ToldAhead(), DeviceLane(purpose="prompts")
    driving = drive(Pipeline([shard]))
    driving.executor = DeviceExecutor(evolve(driving.executor.parts, prompt_lane=prompt_lane))
    yield driving, shard
    shard.going.set()
    assert driving.executor.close()


def launched(client: Caller, stop: int) -> Launch:
    return Launch((EffectRequest(client.request, RunPrefill(client.slot, client.valid, stop)),), PROMPTS)


@pytest.mark.parametrize("how", ["goes on", "stopped", "given up"])
async def test_a_launch_of_several_chunks_goes_on_no_further_once_somebody_wants_its_lane(ahead, how):
    driver, shard = ahead
    reader = prompt_of(1, 4 * CHUNK + 1)
    client, outcomes = await driver.open(reader, GREEDY, 1), list[PrefillAdvanced]()

    async def reading() -> None:
        outcomes.extend(await driver.executor.perform(launched(client, 4 * CHUNK)))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reading)
            await anyio.to_thread.run_sync(shard.begun.wait)
            if how == "stopped":
                driver.executor.stop_launch(client.request, StopLaunch())
            elif how == "given up":
                driver.executor.abandon(client.request)
            shard.going.set()
    assert outcomes[-1].stop == (4 * CHUNK if how == "goes on" else CHUNK)
    client.valid = outcomes[-1].stop
    await prefill_beside(driver, client)
    while len(client.answer) < 4:
        await driver.decode(client)
    assert client.answer == straightforward(shard, reader, GREEDY, 4)


async def test_a_chunk_is_told_of_when_the_device_has_done_it_and_is_at_the_next_one(ahead, monkeypatch):
    driver, shard = ahead
    happened, forward, put = list[tuple[str, int]](), ToldAhead.forward, OutcomeQueue.put

    @define(eq=False)
    class Chunk:
        number: int

        def synchronize(self) -> None:
            assert state().valid == self.number * CHUNK, "others would count on rows that are not there"
            happened.append(("done", self.number))

    def state() -> SlotState:
        found = driver.executor.parts.slots.find(client.slot, client.request)
        assert isinstance(found, SlotState)
        return found

    def marked(_: object) -> Chunk:
        return Chunk(sum(kind == "launched" for kind, _ in happened) - 1)

    def recorded(self, step, inputs):
        happened.append(("launched", step.segments[0].start // CHUNK))
        return forward(self, step, inputs)

    def reported(self, members):
        happened.append(("reported", members[0][1].stop // CHUNK - 1))
        put(self, members)

    monkeypatch.setattr(prefill, "record_event", marked)
    monkeypatch.setattr(ToldAhead, "forward", recorded)
    monkeypatch.setattr(OutcomeQueue, "put", reported)
    shard.going.set()
    client = await driver.open(prompt_of(1, 3 * CHUNK + 1), GREEDY, 1)
    (outcome,) = await driver.executor.perform(launched(client, 3 * CHUNK))
    assert outcome.stop == 3 * CHUNK
    first, then = [("launched", 0), ("launched", 1), ("done", 0), ("reported", 0)], [("launched", 2), ("done", 1)]
    assert happened == [*first, *then, ("reported", 1), ("done", 2), ("reported", 2)]


async def test_a_chunk_that_there_is_no_memory_for_ends_it_behind_those_before_it(ahead, monkeypatch):
    driver, shard = ahead
    forward, waited = ToldAhead.forward, list[int]()

    def third(self, step, inputs):
        if step.segments[0].start == 2 * CHUNK:
            raise torch.OutOfMemoryError("no room")
        return forward(self, step, inputs)

    monkeypatch.setattr(ToldAhead, "forward", third)
    monkeypatch.setattr(ToldAhead, "synchronize", lambda _: waited.append(1))
    shard.going.set()
    client = await driver.open(prompt_of(1, 4 * CHUNK + 1), GREEDY, 1)
    reported, ended = list[Outcome](), anyio.Event()

    def heard(some: Sequence[RequestOutcome] | LaunchFailed) -> None:
        assert not isinstance(some, LaunchFailed)
        reported.extend(outcome for _, outcome in some)
        if not has_more_to_come(reported[-1]):
            ended.set()

    driver.executor.submit(launched(client, 4 * CHUNK), heard)
    with anyio.fail_after(20):
        await ended.wait()
    advanced, failed = reported
    assert (evolve(advanced, ns=0), failed.kind, waited) == (PrefillAdvanced(CHUNK, more=True), "out_of_memory", [1])
    assert driver.executor.parts.slots.find(client.slot, client.request).valid == CHUNK, (
        "of the one that was on its way, too"
    )


@pytest.mark.cuda
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("pages", "span"), [(0, 1), (60, 1), (0, 8), (60, 8)])
async def test_a_gpu_is_at_both_and_every_answer_is_the_one_alone(pages, span):
    from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - Triton comes with CUDA only

    device, buckets = torch.device("cuda", 0), (*BUCKETS, 64, 128, 256)
    config = evolve(TINY, hidden_size=512, head_dim=64, num_layers=6, intermediate_size=1024, max_positions=4096)
    weights, kernels = RandomWeights(config, 1, device, torch.bfloat16, scale=0.2), TritonKernels(device)
    shape = {"slots": 5, "capacity": 2560, "buckets": buckets, "pages": pages}
    shard = DenseShard(config, weights, kernels, ShardPlacement(device=device, dtype=torch.bfloat16, **shape))
    driver = Driver(DeviceExecutor(ExecutorParts(Pipeline([shard]), buckets, lane=DeviceLane(device))))
    driver.executor = DeviceExecutor(evolve(driver.executor.parts, prompt_lane=DeviceLane(device, purpose="prompts")))
    kinds, lengths, taken = (GREEDY, SAMPLED, evolve(SAMPLED, seed=8)), (300, 9, 700), 90
    prompts, readers = [prompt_of(slot, n) for slot, n in enumerate(lengths)], [prompt_of(9, 2300), prompt_of(8, 1025)]
    alone = [
        await driver.answer(prompt, kind, taken, 0, chunks=(256,))
        for _ in range(2)  # the second time graphs are recorded, as they are before anybody is served
        for prompt, kind in zip(prompts, kinds, strict=True)
    ][3:]
    expected = [await driver.answer(prompt, GREEDY, 6, 3, chunks=(256,)) for prompt in readers]
    done = anyio.Event()

    async def answering() -> None:
        clients = [await driver.open(*job, slot) for slot, job in enumerate(zip(prompts, kinds, strict=True))]
        for client in clients:
            await prefill_beside(driver, client, 256, NARROW)
        while len(clients[0].answer) < taken:
            await anyio.lowlevel.checkpoint()  # the executor waits whatever becomes of who asks
            effect_requests = [
                EffectRequest(one.request, RunDecode(one.slot, one.valid, one.tokens[-1], steps=6)) for one in clients
            ]
            for client, outcome in zip(
                clients, await driver.executor.perform(Launch(tuple(effect_requests))), strict=True
            ):
                assert isinstance(outcome, Decoded)
                client.take(outcome)
        assert [client.answer[:taken] for client in clients] == alone
        done.set()

    async def reading() -> None:
        times = 0
        while not done.is_set() or not times:
            for slot, (prompt, answer) in enumerate(zip(readers, expected, strict=True), 3):
                client = await driver.open(prompt, GREEDY, slot)
                await prefill_beside(driver, client, span * 256, NARROW)
                while len(client.answer) < 6:
                    await anyio.lowlevel.checkpoint()
                    await driver.decode(client)
                assert client.answer == answer
            times += 1

    for gives_way in (False, True, False):
        done = anyio.Event()
        driver.executor.pace_steps(ENGINE, PaceSteps(gives_way))
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answering)
                tasks.start_soon(reading)
    assert driver.executor.close()


@pytest.mark.parametrize(
    ("opening", "waits"),
    [((3, 3, 0), False), ((3, 1, 4), True), ((1, 1, 0), True)],
    ids=["no one has used it", "it has rows of another", "it is in the step"],
)
async def test_an_opening_waits_for_the_step_under_way_where_that_is_at_its_slot(on_fake, monkeypatch, opening, waits):
    let_run_ahead(on_fake)
    clients = await ready(on_fake, 2)
    opening = OpenSlot(*opening, tuple(clients[1].tokens), GREEDY)
    forward, forwards, found = FakeShard.forward, list[int](), list[bool]()

    def watched(self, step, inputs):
        forwards.append(step.rows)
        if len(forwards) in (1, 3):  # nothing, and one before the one under way has been looked at then
            on_fake.executor._lane.post(opened, pytest.fail)  # noqa: SLF001
        return forward(self, step, inputs)

    def opened() -> None:
        found.append(on_fake.executor._open(RequestId(9), opening))  # noqa: SLF001

    monkeypatch.setattr(FakeShard, "forward", watched)
    effect_requests = [EffectRequest(client.request, evolve(client.round().effect, steps=9)) for client in clients]
    outcomes = await on_fake.perform(*effect_requests)
    await on_fake.executor._lane.run(opened)  # noqa: SLF001
    assert found == [True, waits, True], "nor where the lane is at no step"
    assert [outcome.steps for outcome in outcomes] == [9, 9]
