"""Tests that a failure of one request fails that one, with a reason, and that the slots stay sound."""

from __future__ import annotations

import threading

import anyio
import pytest
import torch
from attrs import evolve

from adapters.device.slots.checkpoints import StateCheckpoints
from adapters.sequence_layout import TensorSpec
from effects.all import EffectRequest, Launch
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId, SlotId
from effects.job import Sampling
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.residency import UnloadModel
from tests.device.driver import (
    GREEDY,
    VOCAB,
    drive,
    prompt_of,
    ready,
    straightforward,
)
from tests.device.fake_shard import FakeShard, NoStates

WRONG = {
    "position": (lambda effect: evolve(effect, position=effect.position + 1), "a decode step cannot feed"),
    "token": (lambda effect: evolve(effect, token=(effect.token + 1) % VOCAB), "a decode step cannot feed"),
    "slot of another": (lambda effect: evolve(effect, slot=SlotId(0)), "slot 0 serves request 1, not 2"),
    "closed slot": (lambda effect: evolve(effect, slot=SlotId(3)), "slot 3 was never opened"),
    "no slot": (lambda effect: evolve(effect, slot=SlotId(99)), "slot 99 was never opened"),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_a_decode_step_out_of_step_with_its_slot_fails_alone(driver, kind):
    spoil, message = WRONG[kind]
    expected = [await driver.answer(prompt_of(20 + slot, 10 + slot), count=3, slot=slot) for slot in range(3)]
    driver.requests = 0
    clients = await ready(driver)
    effect_requests = [client.round() for client in clients]
    effect_requests[1] = evolve(effect_requests[1], effect=spoil(effect_requests[1].effect))
    first, wrong, last = await driver.perform(*effect_requests)
    assert isinstance(wrong, DeviceFailed)
    assert wrong.kind == "broken"
    assert message in wrong.detail
    clients[0].take(first)
    clients[2].take(last)
    await driver.decode(*clients)
    assert clients[0].answer == expected[0][:2]
    assert clients[1].answer == expected[1][:1]
    assert clients[2].answer == expected[2][:2]


async def test_a_request_can_be_in_a_launch_once(driver):
    (client,) = await ready(driver, 1)
    with pytest.raises(ValueError, match="request 1 is in a launch twice"):
        await driver.perform(client.round(), client.round())


async def test_a_chunk_out_of_step_with_its_slot_fails(on_fake, fake):
    client = await on_fake.open(prompt_of(21, 80))
    for start, stop, message in (
        (1, 5, "slot 0 has 0 rows; a chunk cannot start at 1"),
        (0, 33, "slot 0: rows 0..33 are not at most 32 of the prompt's 80"),
        (0, 0, "slot 0: rows 0..0 are not at most 32"),
    ):
        (failed,) = await on_fake.perform(EffectRequest(client.request, RunPrefill(client.slot, start, stop)))
        assert isinstance(failed, DeviceFailed)
        assert message in failed.detail
    await client.prefill()
    (failed,) = await on_fake.perform(EffectRequest(client.request, RunPrefill(client.slot, 79, 81)))
    assert failed.kind == "broken"
    assert len(fake.steps) == 3


async def test_a_decode_step_before_the_prompt_is_in_place_fails(on_fake):
    client = await on_fake.open(prompt_of(22, 10))
    (failed,) = await on_fake.perform(client.round())
    assert "slot 0 has 0 rows for 10 tokens" in failed.detail


async def test_a_full_slot_says_so(on_fake, fake):
    client = await on_fake.open(prompt_of(23, fake.spec.capacity))
    await client.prefill()
    assert isinstance((await on_fake.decode(client))[0], Decoded)
    (failed,) = await on_fake.decode(client)
    assert failed == DeviceFailed("broken", "slot 0 is full: it has 256 rows")


BAD_OPENINGS = {
    "no such slot": ({"slot": 9}, "slots 9 and 9 are not both in 0..3"),
    "no such source": ({"source": -1}, "slots 0 and -1 are not both in 0..3"),
    "nothing to compute": ({"keep": 12}, "12 rows to keep of a prompt of 12"),
    "negative rows": ({"keep": -1}, "-1 rows to keep"),
    "source was never opened": ({"source": 2, "keep": 4}, "slot 2 does not hold the first 4 tokens"),
    "source holds another prompt": ({"source": 1, "keep": 5}, "slot 1 does not hold the first 5 tokens"),
    "too long": ({"prompt": (1,) * 257}, "a prompt of 257 tokens does not fit 1..256 rows"),
    "empty": ({"prompt": ()}, "a prompt of 0 tokens does not fit"),
    "unknown token": ({"prompt": (1, 97)}, r"the prompt has tokens that are not in 0..96"),
    "negative token": ({"prompt": (1, -1)}, r"the prompt has tokens that are not in 0..96"),
    "unknown bias": ({"sampling": Sampling(logit_bias=((97, 1.0),))}, "logit_bias names token 97"),
}


@pytest.mark.parametrize("case", BAD_OPENINGS)
async def test_a_slot_that_cannot_be_opened_says_why_when_it_is_used_and_can_be_opened_again(on_fake, fake, case):
    changes, message = BAD_OPENINGS[case]
    prompt = prompt_of(24, 12)
    neighbour = await on_fake.open([*prompt[:4], (prompt[4] + 1) % VOCAB, 7], slot=1)
    await neighbour.prefill()
    await on_fake.open(prompt)
    opening = {"slot": 0, "source": changes.get("slot", 0), "keep": 0, "prompt": tuple(prompt), "sampling": GREEDY}
    opening |= changes
    on_fake.executor.open(RequestId(77), OpenSlot(**opening))
    (failed,) = await on_fake.perform(EffectRequest(RequestId(77), RunPrefill(SlotId(opening["slot"]), 0, 4)))
    assert isinstance(failed, DeviceFailed)
    assert failed.kind == "broken"
    assert message in failed.detail
    assert fake.rows.copies == []
    assert isinstance((await on_fake.decode(neighbour))[0], Decoded)
    assert await on_fake.answer(prompt) == straightforward(fake, prompt, GREEDY, 8)


async def test_a_request_that_cannot_be_served_leaves_the_rows_that_others_count_on(on_fake, fake):
    """It is cancelled before its first chunk, so its failure is not reported."""
    prompt, lost = prompt_of(24, 40), []
    on_fake.executor.events.connect(lambda event: lost.extend(event.slots))
    client = await on_fake.open(prompt)
    await client.prefill()
    refused = await on_fake.open(prompt, Sampling(logit_bias=((VOCAB, 1.0),)), slot=1, source=0, keep=32)
    other = await on_fake.open(prompt, slot=2, source=1, keep=32)
    assert await on_fake.perform(other.chunk(39)) == (PrefillAdvanced(39),)
    other.valid = 39
    await on_fake.decode(other)
    assert other.answer == straightforward(fake, prompt, GREEDY, 1)
    (failed,) = await on_fake.perform(refused.chunk(39))
    assert (failed.kind, "slot 1 could not be opened: logit_bias names token 97" in failed.detail) == ("broken", True)
    assert lost == []


async def test_a_slot_without_the_rows_it_was_opened_with_is_told_of_before_anybody_is_answered(on_fake):
    heard = []
    on_fake.executor.events.connect(lambda event: heard.append(event.slots))
    other = await on_fake.open(prompt_of(24, 40), slot=2, source=1, keep=32)
    heard += await on_fake.perform(other.chunk(39))
    assert [heard[0], heard[1].kind] == [(2,), "broken"]


async def test_rows_that_were_never_computed_cannot_be_copied(on_fake):
    prompt = prompt_of(25, 40)
    client = await on_fake.open(prompt)
    assert await on_fake.perform(client.chunk(16)) == (PrefillAdvanced(16),)
    for slot, keep, outcome in ((1, 16, PrefillAdvanced), (2, 17, DeviceFailed)):
        other = await on_fake.open(prompt, slot=slot, source=0, keep=keep)
        (found,) = await on_fake.perform(other.chunk(20))
        assert isinstance(found, outcome)


async def test_logits_that_are_not_finite_fail_their_request_only(driver, shard, monkeypatch):
    clients = await ready(driver)
    original = shard.logits

    def poisoned(self, step, hidden):
        logits = original(step, hidden)
        logits[1, 40] = torch.nan
        return logits

    monkeypatch.setattr(type(shard), "logits", poisoned)
    first, wrong, last = await driver.decode(*clients)
    assert isinstance(first, Decoded)
    assert isinstance(last, Decoded)
    assert wrong == DeviceFailed("broken", "slot 1: the logits for position 11 are not finite")


async def test_running_out_of_memory_is_an_outcome_and_the_slots_stay_as_they_were(driver, shard, monkeypatch):
    clients = await ready(driver)
    expected = await driver.answer(prompt_of(20, 10), slot=3)

    def exhausted(self, step, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(type(shard), "forward", exhausted)
        outcomes = await driver.decode(*clients)
        assert outcomes == (DeviceFailed("out_of_memory", "CUDA out of memory. Tried to allocate 2 GiB."),) * 3
        other = await driver.open(prompt_of(20, 10), slot=3)
        (failed,) = await driver.perform(other.chunk(4))
        assert failed.kind == "out_of_memory"
    while len(clients[0].answer) < 8:
        await driver.decode(clients[0])
    assert clients[0].answer == expected


async def test_a_step_that_runs_out_of_memory_while_it_is_settled_leaves_slots_that_nobody_goes_on_from(
    driver, shard, monkeypatch
):
    """The states of some layers may have moved, and those of others not."""
    clients = await ready(driver)
    expected = await driver.answer(prompt_of(20, 10), slot=3)

    def exhausted(self, step, kept):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(type(shard), "commit", exhausted)
        outcomes = await driver.decode(*clients)
    assert {outcome.kind for outcome in outcomes} == {"broken"}
    (failed,) = await driver.decode(clients[0])
    assert (failed.kind, "was being settled" in failed.detail) == ("broken", True)
    other = await driver.open(prompt_of(20, 10), slot=1, source=0, keep=4)
    (failed,) = await driver.perform(other.chunk(4))
    assert "slot 0 does not hold the first 4 tokens" in failed.detail
    assert await driver.answer(prompt_of(20, 10), slot=0) == expected


@pytest.mark.parametrize("survives_failure", [True, False])
async def test_a_prompt_that_runs_out_of_memory_takes_the_state_of_its_slot_along_where_states_do_not_survive_that(
    monkeypatch, survives_failure
):
    """Layers with a window have given rows back by then."""
    window = (TensorSpec("layers.0.k", "F32", (1, 64, 1)),)
    fake = FakeShard(states=NoStates(specs=window, survives_failure=survives_failure))
    driver = drive(fake)
    newcomer = await driver.open(prompt_of(20, 10))

    def exhausted(self, step, inputs):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(FakeShard, "forward", exhausted)
        (failed,) = await driver.perform(newcomer.chunk(4))
    (after,) = await driver.perform(newcomer.chunk(4))
    if survives_failure:
        assert failed == DeviceFailed("out_of_memory", "no room")
        assert isinstance(after, PrefillAdvanced)
    else:
        assert failed == after == DeviceFailed("broken", "slot 0 was being settled: no room")
    assert driver.executor.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("stateful", [True, False])
async def test_prompts_that_share_a_launch_without_memory_break_slots_whose_states_nobody_puts_back(
    monkeypatch, stateful
):
    state = (TensorSpec("layers.0.memory", "F32", (1, 64, 1)),)
    fake = FakeShard(states=NoStates(specs=state if stateful else ()))
    driver = drive(fake)
    clients = [await driver.open(prompt_of(20, 10), slot=slot) for slot in (0, 1)]

    def exhausted(self, step, inputs):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(FakeShard, "forward", exhausted)
        failed = await driver.perform(*(client.chunk(4) for client in clients))
    after = await driver.perform(*(client.chunk(4) for client in clients))
    if stateful:
        broken = tuple(DeviceFailed("broken", f"slot {slot} was being settled: no room") for slot in (0, 1))
        assert failed == after == broken
    else:
        assert failed == (DeviceFailed("out_of_memory", "no room"),) * 2
        assert [type(one) for one in after] == [PrefillAdvanced] * 2
    assert driver.executor.close()


@pytest.mark.timeout(30)
async def test_no_memory_for_a_checkpoint_is_an_outcome_of_every_prompt_that_shares_the_launch(monkeypatch):
    state = (TensorSpec("layers.0.memory", "F32", (1, 64, 1)),)
    driver = drive(FakeShard(states=NoStates(specs=state)))
    clients = [await driver.open(prompt_of(20, 10), slot=slot) for slot in (0, 1)]

    def exhausted(self, request, effect, state):
        raise torch.OutOfMemoryError("no room for a checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(StateCheckpoints, "keep_after_chunk", exhausted)
        failed = await driver.perform(*(client.chunk(4) for client in clients))
    assert {one.kind for one in failed} == {"broken"}
    assert driver.executor.close()


async def test_an_exception_that_is_a_bug_comes_through(on_fake, fake, monkeypatch):
    clients = await ready(on_fake, 2)

    def buggy(self, step, inputs):
        raise AttributeError("typo")

    with monkeypatch.context() as patch:
        patch.setattr(FakeShard, "forward", buggy)
        with pytest.raises(AttributeError, match="typo"):
            await on_fake.decode(*clients)
    assert {outcome.kind for outcome in await on_fake.decode(*clients)} == {"broken"}


async def test_after_an_exception_nobody_believes_in_the_slots_it_was_about(on_fake, fake, monkeypatch):
    """Neither who works in one, nor who was to be opened with its rows before it was known."""
    prompt = prompt_of(21, 40)
    client = await on_fake.open(prompt)
    await client.prefill()
    neighbour = await on_fake.open(prompt_of(22, 40), slot=1)
    await neighbour.prefill()
    with monkeypatch.context() as patch:
        patch.setattr(type(fake), "forward", lambda *_: (_ for _ in ()).throw(OSError("the link is down")))
        with pytest.raises(OSError, match="link"):
            await on_fake.perform(client.round())
    (failed,) = await on_fake.perform(client.round())
    assert (failed.kind, "the link is down" in failed.detail) == ("broken", True)
    copy = await on_fake.open(prompt, slot=2, source=0, keep=32)
    (failed,) = await on_fake.perform(copy.chunk(39))
    assert "slot 0 does not hold" in failed.detail
    assert isinstance((await on_fake.decode(neighbour))[0], Decoded)


async def test_a_member_that_is_abandoned_before_the_launch_starts_is_left_out(on_fake, fake):
    clients = await ready(on_fake)
    go_on, found = threading.Event(), []
    on_fake.executor._lane.post(lambda: go_on.wait(60), pytest.fail)  # noqa: SLF001 - keeps the lane busy

    async def launch():
        found.extend(await on_fake.decode(*clients))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(launch)
        await anyio.wait_all_tasks_blocked()
        on_fake.executor.abandon(clients[1].request)
        go_on.set()
    assert [type(outcome) for outcome in found] == [Decoded, DeviceFailed, Decoded]
    assert found[1].kind == "abandoned"
    assert [segment.slot for segment in fake.steps[-1].segments] == [0, 2]
    await on_fake.decode(*clients)
    assert len(clients[1].answer) == 1


async def test_a_chunk_that_runs_already_finishes(on_fake, fake, monkeypatch):
    client = await on_fake.open(prompt_of(26, 60))
    begun, go_on, found = threading.Event(), threading.Event(), []
    original = FakeShard.forward

    def slow(self, step, inputs):
        begun.set()
        go_on.wait(60)
        return original(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", slow)

    async def launch():
        found.extend(await on_fake.perform(client.chunk(32)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(launch)
        while not begun.is_set():  # noqa: ASYNC110 - the flag is set by a thread
            await anyio.sleep(0.001)
        on_fake.executor.abandon(client.request)
        go_on.set()
    assert found == [PrefillAdvanced(32)]


async def test_abandoning_concerns_what_is_in_flight_and_nothing_later(on_fake):
    """A cancelled request still snapshots and parks afterwards."""
    (client,) = await ready(on_fake, 1)
    on_fake.executor.abandon(client.request)
    assert isinstance((await on_fake.decode(client))[0], Decoded)


async def test_whoever_submits_hears_the_outcomes_or_the_bug_once(on_fake):
    *clients, other = await ready(on_fake, 3)
    heard, all_heard = [], anyio.Event()

    def done(result):
        heard.append(result)
        on_fake.executor.abandon(clients[0].request)  # it has landed, so there is nothing left to abandon
        if len(heard) == 2:
            all_heard.set()

    on_fake.executor.submit(Launch(tuple(client.round() for client in clients)), done)
    on_fake.executor.submit(Launch((EffectRequest(other.request, UnloadModel("draft")),)), done)
    with anyio.fail_after(60):
        await all_heard.wait()
    assert [(whose, type(outcome)) for whose, outcome in heard[0]] == [(one.request, Decoded) for one in clients]
    assert heard[1].requests == (other.request,)
    assert isinstance(heard[1].error, LookupError)
    for client, (_, outcome) in zip(clients, heard[0], strict=True):
        client.take(outcome)
    assert [type(outcome) for outcome in await on_fake.decode(*clients)] == [Decoded, Decoded]
