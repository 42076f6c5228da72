"""The executor's contract, on a shard that digests all it is given and on a small real model."""

from __future__ import annotations

import random

import pytest
import torch
from attrs import evolve

from adapters.device.lane.buckets import row_counts
from adapters.models.kernels.step import Segment, Step
from effects.all import EffectRequest
from effects.ids import DeviceFailed, RequestId, SlotId
from effects.prefill import OpenSlot, PrefillAdvanced
from effects.residency import LoadModel, UnloadModel
from tests.device.driver import (
    BUCKETS,
    CHUNK,
    GREEDY,
    PENALISED,
    SAMPLED,
    Caller,
    drive,
    prompt_of,
    ready,
    straightforward,
)
from tests.device.fake_shard import FakeShard, make_fake_shard


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("chunks", [(32,), (1,), (7, 32, 3), (16,)], ids=str)
async def test_any_chunking_gives_the_tokens_of_whole_forwards(driver, shard, chunks, sampling):
    prompt = prompt_of(1, 70)
    assert await driver.answer(prompt, sampling, 6, chunks=chunks) == straightforward(shard, prompt, sampling, 6)


async def test_a_prompt_of_one_token_needs_no_prefill(driver, shard):
    assert await driver.answer([5]) == straightforward(shard, [5], GREEDY, 8)


async def test_a_request_in_a_batch_gets_the_tokens_that_it_gets_alone(driver):
    kinds = [GREEDY, SAMPLED, PENALISED, evolve(SAMPLED, temperature=1.7, top_k=9, seed=8)]
    prompts = [prompt_of(seed, length) for seed, length in enumerate((3, 33, 64, 90))]
    alone = [await driver.answer(prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    clients = [
        await driver.open(prompt, kind, slot) for slot, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    for client in clients:
        await client.prefill()
    chance = random.Random(0)
    while any(len(client.answer) < 8 for client in clients):
        batch = [client for client in clients if len(client.answer) < 8 and chance.random() < 0.7]
        chance.shuffle(batch)
        if batch:
            await driver.decode(*batch)
    assert [client.answer for client in clients] == alone


async def test_random_interleavings_of_many_requests_equal_solo_runs(driver):
    chance = random.Random(4)
    jobs = [(prompt_of(seed, chance.randint(1, 80)), chance.choice([GREEDY, SAMPLED, PENALISED])) for seed in range(12)]
    expected = [await driver.answer(prompt, sampling, 4) for prompt, sampling in jobs]
    waiting, found = list(range(len(jobs))), {}
    live: dict[int, tuple[int, Caller]] = {}
    while waiting or live:
        free = [slot for slot in range(4) if slot not in live]
        if waiting and free and chance.random() < 0.5:
            job, slot = waiting.pop(), chance.choice(free)
            live[slot] = (job, await driver.open(*jobs[job], slot))
        filling = [client for _, client in live.values() if client.valid < client.prompt - 1]
        if filling:
            client = chance.choice(filling)
            stop = min(client.valid + chance.randint(1, CHUNK), client.prompt - 1)
            assert await driver.perform(client.chunk(stop)) == (PrefillAdvanced(stop),)
            client.valid = stop
        ready = [client for _, client in live.values() if client.valid == len(client.tokens) - 1]
        batch = chance.sample(ready, chance.randint(0, len(ready)))
        if batch:
            await driver.decode(*batch)
        for slot, (job, client) in list(live.items()):
            if len(client.answer) == 4:
                found[job] = client.answer
                del live[slot]
    assert [found[job] for job in range(len(jobs))] == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_a_copied_or_continued_prefix_equals_a_cold_prefill(driver, sampling):
    """Penalties over kept rows count the whole prompt, as they must: those rows are never seen by the new request."""
    shared = prompt_of(5, 64)
    prompts = [shared + prompt_of(seed, 20) for seed in (6, 7, 8)]
    cold = [await driver.answer(prompt, sampling, slot=3) for prompt in prompts]
    warm = [await driver.answer(prompts[0], sampling, slot=0)]
    warm.append(await driver.answer(prompts[1], sampling, slot=1, source=0, keep=64))
    warm.append(await driver.answer(prompts[2], sampling, slot=0, keep=64))
    assert warm == cold


async def test_a_conversation_continues_from_its_decoded_rows(driver):
    first = await driver.answer(prompt_of(9, 40), count=30)
    turn = prompt_of(9, 40) + first + prompt_of(10, 12)
    cold = await driver.answer(turn, slot=1)
    assert await driver.answer(turn, slot=0, keep=64) == cold


async def test_opening_twice_changes_nothing(driver):
    prompt, other = prompt_of(11, 50), prompt_of(11, 50)[:32] + prompt_of(12, 20)
    cold = await driver.answer(other, slot=2)
    await driver.answer(prompt, slot=0)
    opening = OpenSlot(SlotId(1), SlotId(0), 32, tuple(other), GREEDY)
    driver.executor.open(RequestId(driver.requests + 1), opening)
    assert await driver.answer(other, slot=1, source=0, keep=32) == cold


async def test_rounds_and_chunks_are_padded_to_the_smallest_rung_that_holds_them(on_fake, fake):
    client = await on_fake.open(prompt_of(13, 38))
    await client.prefill((32, 5))
    await on_fake.decode(client)
    assert fake.steps == [
        Step((Segment(0, 0, 32),), 32, rows_only=True),
        Step((Segment(0, 32, 5),), 8, rows_only=True),
        Step((Segment(0, 37, 1),), 4),
    ]


async def test_fast_runs_small_batches_at_their_real_size():
    fake = make_fake_shard(buckets=row_counts(BUCKETS, fast=True))
    driver = drive(fake, fast=True)
    client, other = await driver.open(prompt_of(13, 38)), await driver.open([1], slot=1)
    await client.prefill((32, 5))
    await driver.decode(client, other)
    assert [step.bucket for step in fake.steps] == [32, 5, 2]
    assert await driver.answer(prompt_of(13, 38)) == straightforward(fake, prompt_of(13, 38), GREEDY, 8)
    assert driver.executor.close()
    assert row_counts(BUCKETS, fast=False) == BUCKETS
    assert row_counts((4, 64), fast=True) == (*range(1, 17), 64)


async def test_logprobs_come_with_every_token_when_asked_for(driver):
    client = await driver.open(prompt_of(14, 9), PENALISED)
    await client.prefill()
    (done,) = await driver.decode(client)
    ((own, alternatives),) = done.logprobs
    assert len(alternatives) == 2
    assert own <= alternatives[0][1] <= 0
    assert alternatives[0][1] >= alternatives[1][1]
    plain = await driver.open(prompt_of(14, 9), slot=1)
    await plain.prefill()
    assert (await driver.decode(plain))[0].logprobs == ()


async def test_effects_of_later_parts_are_carried_out_by_the_handlers_that_they_bring():
    seen = []

    def offload(request, effect):
        seen.append((request, effect, torch.is_inference_mode_enabled()))
        return DeviceFailed("broken", "no draft") if request == 2 else effect.outcomes[0]()

    def exhausted(request, effect):
        torch.empty(1 << 60, dtype=torch.uint8)

    driver = drive(FakeShard(), handlers={UnloadModel: offload, LoadModel: exhausted})
    (parked,) = await driver.perform(EffectRequest(RequestId(1), UnloadModel("draft")))
    assert isinstance(parked, UnloadModel.outcomes[0])
    assert await driver.perform(EffectRequest(RequestId(2), UnloadModel("draft"))) == (
        DeviceFailed("broken", "no draft"),
    )
    (failed,) = await driver.perform(EffectRequest(RequestId(3), LoadModel("draft")))
    assert (failed.kind, "allocate" in failed.detail) == ("out_of_memory", True)
    assert seen == [(1, UnloadModel("draft"), True), (2, UnloadModel("draft"), True)]
    assert driver.executor.close()


async def test_an_effect_without_a_handler_and_an_odd_batch_are_bugs(on_fake):
    (client,) = await ready(on_fake, 1)
    with pytest.raises(LookupError, match="UnloadModel has no handler"):
        await on_fake.perform(EffectRequest(client.request, UnloadModel("draft")))
    with pytest.raises(ValueError, match="only decode steps and pieces of prompts are batched"):
        await on_fake.perform(client.round(), EffectRequest(client.request, UnloadModel("draft")))
    assert (await on_fake.decode(client))[0].kind == "broken", "nobody knows what a bug has left in a slot"


async def test_closing_gives_the_shards_memory_back(fake):
    driver = drive(fake)
    await driver.answer([1, 2, 3])
    assert driver.executor.close()
    assert driver.executor.close()
    assert fake.closed


def test_the_fake_shard_notices_every_wrong_row():
    """The suite is worth something only if its shard's logits change with anything that could be mixed up."""
    with torch.inference_mode():
        shard = make_fake_shard(vocab_size=50)
        step = Step((Segment(0, 0, 4),), 4)
        base = shard.logits(step, shard.forward(step, torch.tensor([1, 2, 3, 4])).hidden)
        for tokens in ([2, 1, 3, 4], [1, 2, 4, 3], [9, 2, 3, 4]):
            other = shard.logits(step, shard.forward(step, torch.tensor(tokens)).hidden)
            assert (other[3] != base[3]).sum() > 40
