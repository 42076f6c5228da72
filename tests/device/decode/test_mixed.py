"""Mixed forwards: decode steps and a piece of a prompt each get what they get alone, also if others of them fail."""

from __future__ import annotations

import random
import threading

import anyio
import pytest
import torch
from attrs import evolve

from effects.all import EffectRequest
from effects.decode import Decoded
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import LoadModel
from tests.device.driver import (
    CHUNK,
    GREEDY,
    PENALISED,
    SAMPLED,
    Caller,
    Driver,
    prompt_of,
    ready,
    straightforward,
)
from tests.device.fake_shard import FakeShard
from tests.device.speculation.test_proposals import drafted

TOLD = evolve(SAMPLED, seed=9, logprobs=3)


async def mixed(driver: Driver, clients: list[Caller], prompt: Caller, rows: int):
    """One launch of both; the last outcome is the prompt's."""
    stop = min(prompt.valid + rows, prompt.prompt - 1)
    outcomes = await driver.perform(*[client.round() for client in clients], prompt.chunk(stop))
    for client, outcome in zip(clients, outcomes, strict=False):
        if isinstance(outcome, Decoded):
            client.take(outcome)
    if isinstance(outcomes[-1], PrefillAdvanced):
        prompt.valid = outcomes[-1].stop
    return outcomes


async def test_a_prompt_that_came_in_pieces_and_those_who_decoded_meanwhile_are_answered_as_alone(driver):
    kinds, chance = (GREEDY, PENALISED, TOLD), random.Random(2)
    prompts = [prompt_of(70 + slot, 9 + 5 * slot) for slot in range(3)]
    alone = [await driver.answer(prompt, kind, 12) for prompt, kind in zip(prompts, kinds, strict=True)]
    late = await driver.answer(prompt_of(80, 90), SAMPLED, 6)
    clients = [await driver.open(*job, slot) for slot, job in enumerate(zip(prompts, kinds, strict=True))]
    for client in clients:
        await client.prefill()
    newcomer = await driver.open(prompt_of(80, 90), SAMPLED, 3)
    while newcomer.valid < newcomer.prompt - 1:
        company = chance.sample(clients, chance.randint(1, 3))
        outcomes = await mixed(driver, company, newcomer, chance.choice((1, 3, CHUNK - 3)))
        assert outcomes[-1] == PrefillAdvanced(newcomer.valid)
    while min(len(client.answer) for client in (*clients, newcomer)) < 12:
        await driver.decode(*clients, newcomer)
    assert [client.answer[:12] for client in clients] == alone
    assert newcomer.answer[:6] == late
    assert all(len(one.logprobs) == 1 for one in clients[2].done)


async def test_rows_of_several_prompts_go_with_decode_steps_in_one_forward_and_all_are_answered_as_alone(driver):
    prompts = [prompt_of(70, 9), prompt_of(80, 90), prompt_of(81, 41), prompt_of(82, 12)]
    alone = [await driver.answer(prompt, SAMPLED, 6) for prompt in prompts]
    client, *late = [await driver.open(prompt, SAMPLED, slot) for slot, prompt in enumerate(prompts)]
    await client.prefill()
    while waiting := [one for one in late if one.valid < one.prompt - 1]:
        each = (CHUNK - 1) // len(waiting)
        stops = [min(one.valid + each, one.prompt - 1) for one in waiting]
        chunks = [one.chunk(stop) for one, stop in zip(waiting, stops, strict=True)]
        decoded, *advanced = await driver.perform(client.round(), *chunks)
        assert isinstance(decoded, Decoded)
        client.take(decoded)
        assert advanced == [PrefillAdvanced(stop) for stop in stops]
        for one, stop in zip(waiting, stops, strict=True):
            one.valid = stop
    while min(len(one.answer) for one in (client, *late)) < 6:
        await driver.decode(client, *late)
    assert [one.answer[:6] for one in (client, *late)] == alone


async def test_a_prompt_that_cannot_share_the_forward_and_those_behind_it_follow_it(on_fake, fake):
    (client,) = await ready(on_fake, 1)
    first, second, third = [await on_fake.open(prompt_of(80 + slot, 40), slot=slot) for slot in (1, 2, 3)]
    wrong = EffectRequest(second.request, RunPrefill(second.slot, 5, 9))
    before = len(fake.steps)
    decoded, *others = await on_fake.perform(client.round(), first.chunk(8), wrong, third.chunk(7))
    assert isinstance(decoded, Decoded)
    misfit = DeviceFailed("broken", "slot 2 has 0 rows; a chunk cannot start at 5")
    assert others == [PrefillAdvanced(8), misfit, PrefillAdvanced(7)]
    assert [[one.slot for one in step.segments] for step in fake.steps[before:]] == [[0, 1], [3]]


@pytest.mark.parametrize("who", ["prompt", "decode step"])
async def test_who_was_given_up_before_it_started_is_left_out_of_a_mixed_forward(on_fake, fake, who):
    clients = await ready(on_fake, 2)
    newcomer, go_on, found = await on_fake.open(prompt_of(80, 40), slot=2), threading.Event(), []
    on_fake.executor._lane.post(lambda: go_on.wait(60), pytest.fail)  # noqa: SLF001 - keeps the lane busy

    async def launch():
        found.extend(await mixed(on_fake, clients, newcomer, 20))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(launch)
        await anyio.wait_all_tasks_blocked()
        on_fake.executor.abandon((newcomer if who == "prompt" else clients[0]).request)
        go_on.set()
    left_out, slots = (2, [0, 1]) if who == "prompt" else (0, [1, 2])
    assert [isinstance(one, DeviceFailed) and one.kind == "abandoned" for one in found] == [
        n == left_out for n in range(3)
    ]
    assert [segment.slot for segment in fake.steps[-1].segments] == slots


async def test_where_nobody_is_left_who_decodes_the_prompt_gets_on_alone(driver):
    (client,) = await ready(driver, 1)
    newcomer = await driver.open(prompt_of(80, 40), slot=2)
    wrong = evolve(client.round(), effect=evolve(client.round().effect, position=3))
    failed, advanced = await driver.perform(wrong, newcomer.chunk(20))
    assert isinstance(failed, DeviceFailed)
    assert advanced == PrefillAdvanced(20)


async def test_rows_that_are_not_the_prompts_next_fail_and_nobody_else_does(driver):
    clients = await ready(driver, 2)
    newcomer = await driver.open(prompt_of(80, 40), slot=2)
    wrong = EffectRequest(newcomer.request, RunPrefill(newcomer.slot, 5, 9))
    *decoded, failed = await driver.perform(*[client.round() for client in clients], wrong)
    assert failed == DeviceFailed("broken", "slot 2 has 0 rows; a chunk cannot start at 5")
    assert [type(one) for one in decoded] == [Decoded, Decoded]


async def test_a_prompt_whose_rows_are_to_be_told_of_follows_behind_the_decode_steps(driver):
    clients = await ready(driver, 2)
    newcomer = await driver.open(prompt_of(80, 40), evolve(GREEDY, logprobs=2), 2)
    asked = EffectRequest(newcomer.request, RunPrefill(newcomer.slot, 0, 9, logprobs=2))
    *decoded, advanced = await driver.perform(*[client.round() for client in clients], asked)
    assert [type(one) for one in decoded] == [Decoded, Decoded]
    assert isinstance(advanced, PrefillAdvanced)
    assert len(advanced.logprobs) == 9


async def test_a_mixed_forward_that_finds_no_memory_is_the_prompts_failure(on_fake, fake, monkeypatch):
    clients = await ready(on_fake, 2)
    newcomer = await on_fake.open(prompt_of(80, 40), slot=2)
    forward = FakeShard.forward

    def short(self, step, inputs):
        if step.rows > 2:
            raise torch.OutOfMemoryError("no room")
        return forward(self, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", short)
    first, second, failed = await on_fake.perform(*[client.round() for client in clients], newcomer.chunk(20))
    assert isinstance(failed, DeviceFailed)
    assert failed.kind == "out_of_memory"
    assert {type(first), type(second)} == {Decoded}
    monkeypatch.undo()
    assert await on_fake.perform(newcomer.chunk(20)) == (PrefillAdvanced(20),)


async def test_what_is_no_batch_is_a_bug(on_fake):
    first, second = await ready(on_fake, 2)
    for block_requests in (
        (first.chunk(1), second.round()),
        (first.chunk(1), second.chunk(1), second.round()),
        (first.round(), EffectRequest(second.request, LoadModel("draft"))),
    ):
        with pytest.raises(ValueError, match="only decode steps and pieces of prompts are batched"):
            await on_fake.perform(*block_requests)


async def test_a_draft_follows_one_who_decodes_and_a_prompt_through_mixed_forwards():
    driver, draft, _ = drafted()
    prompts = [prompt_of(90, 9), prompt_of(91, 60)]
    client, newcomer = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    await client.prefill()
    while newcomer.valid < newcomer.prompt - 1:
        await mixed(driver, [client], newcomer, 9)
    before = len(client.answer)
    await driver.decode(client, newcomer, propose=7)
    assert [
        (block_request.first, block_request.position)
        for block_requests in draft.asked
        for block_request in block_requests
    ] == [(0, 8 + before), (0, 59)]
    for one, prompt in zip((client, newcomer), prompts, strict=True):
        assert len(one.answer) > 7
        assert one.answer == straightforward(FakeShard(), prompt, GREEDY, len(one.answer))
    assert driver.executor.close()
