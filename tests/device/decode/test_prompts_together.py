"""Several prompts in one launch, and in one forward where they fit: each gets what it gets alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.step import Forward, Step
from effects.all import EffectRequest
from effects.ids import DeviceFailed, RequestId, SlotId
from effects.prefill import PrefillAdvanced, RunPrefill
from tests.device.driver import CHUNK, GREEDY, SAMPLED, Driver, prompt_of
from tests.device.fake_shard import FakeShard


@pytest.mark.parametrize("lengths", [(9, 12, 8), (20, 25, 30), (CHUNK, 5), (7, CHUNK, 11, 14)], ids=str)
async def test_prompts_that_share_a_launch_are_answered_as_alone(driver: Driver, lengths: tuple[int, ...]) -> None:
    kinds = [GREEDY if slot % 2 else SAMPLED for slot in range(len(lengths))]
    prompts = [prompt_of(70 + slot, rows + 1) for slot, rows in enumerate(lengths)]
    alone = [await driver.answer(prompt, kind, 6) for prompt, kind in zip(prompts, kinds, strict=True)]
    clients = [await driver.open(*job, slot) for slot, job in enumerate(zip(prompts, kinds, strict=True))]
    outcomes = await driver.perform(*[client.chunk(client.prompt - 1) for client in clients])
    assert outcomes == tuple(PrefillAdvanced(rows) for rows in lengths)
    for client, rows in zip(clients, lengths, strict=True):
        client.valid = rows
    while len(clients[0].answer) < 6:
        await driver.decode(*clients)
    assert [client.answer for client in clients] == alone


async def test_rows_go_behind_those_that_a_slot_has(driver: Driver) -> None:
    """Each turn of several agents begins behind the turn before."""
    prompts = [prompt_of(80 + slot, 50) for slot in range(2)]
    alone = [await driver.answer(prompt, GREEDY, 4) for prompt in prompts]
    clients = [await driver.open(prompt, GREEDY, slot) for slot, prompt in enumerate(prompts)]
    for stops in ((11, 20), (24, 32), (40, 49), (49, 49)):
        due = [(client, stop) for client, stop in zip(clients, stops, strict=True) if client.valid < stop]
        await driver.perform(*[client.chunk(stop) for client, stop in due])
        for client, stop in due:
            client.valid = stop
    while len(clients[0].answer) < 4:
        await driver.decode(*clients)
    assert [client.answer for client in clients] == alone


async def test_what_cannot_be_computed_leaves_the_others_as_they_are(driver: Driver) -> None:
    alone = await driver.answer(prompt_of(90, 20), GREEDY, 3, 2)
    first, second, third = [await driver.open(prompt_of(88 + slot, 20), GREEDY, slot) for slot in range(3)]
    misfit = EffectRequest(second.request, RunPrefill(second.slot, 3, 19))
    outcomes = await driver.perform(first.chunk(19), misfit, third.chunk(19))
    assert isinstance(outcomes[1], DeviceFailed)
    assert "cannot start at 3" in outcomes[1].detail
    assert (outcomes[0], outcomes[2]) == (PrefillAdvanced(19), PrefillAdvanced(19))
    third.valid = 19
    while len(third.answer) < 3:
        await driver.decode(third)
    assert third.answer == alone
    elsewhere = EffectRequest(RequestId(99), RunPrefill(SlotId(0), 0, 5))
    assert [type(one) for one in await driver.perform(elsewhere, second.chunk(19))] == [DeviceFailed, PrefillAdvanced]


async def test_missing_memory_fails_the_prompts_that_have_no_rows_yet(
    on_fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt has a forward of its own here, and the second one finds no memory."""
    clients = [await on_fake.open(prompt_of(60 + slot, CHUNK), GREEDY, slot) for slot in range(3)]
    forward = FakeShard.forward
    steps = list[Step]()

    def run(shard: FakeShard, step: Step, inputs: Tensor) -> Forward:
        steps.append(step)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        return forward(shard, step, inputs)

    monkeypatch.setattr(FakeShard, "forward", run)
    outcomes = await on_fake.perform(*[client.chunk(CHUNK - 1) for client in clients])
    assert outcomes[0] == PrefillAdvanced(CHUNK - 1)
    assert [one.kind for one in outcomes[1:] if isinstance(one, DeviceFailed)] == ["out_of_memory"] * 2
    again = await on_fake.perform(clients[1].chunk(CHUNK - 1), clients[2].chunk(CHUNK - 1))
    assert again == (PrefillAdvanced(CHUNK - 1),) * 2


async def test_a_slot_is_in_a_launch_once(on_fake: Driver) -> None:
    client = await on_fake.open(prompt_of(60, 19), GREEDY)
    again = EffectRequest(RequestId(99), RunPrefill(client.slot, 9, 18))
    with pytest.raises(ValueError, match="slot 0 is in a launch twice"):
        await on_fake.perform(client.chunk(9), again)


async def test_prompts_whose_logprobs_are_asked_for_share_no_launch(on_fake: Driver) -> None:
    clients = [await on_fake.open(prompt_of(60 + slot, 9), GREEDY, slot) for slot in range(2)]
    asked = EffectRequest(clients[1].request, RunPrefill(clients[1].slot, 0, 8, logprobs=1))
    with pytest.raises(ValueError, match="without logprobs"):
        await on_fake.perform(clients[0].chunk(8), asked)
