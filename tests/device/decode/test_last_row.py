"""The row of a prompt's last token, computed with its last chunk: the same answers, and a forward less."""

from __future__ import annotations

import pytest
from attrs import define, field

from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Step
from adapters.sequence_layout import TensorSpec
from tests.device.driver import (
    CHUNK,
    GREEDY,
    PENALISED,
    SAMPLED,
    Driver,
    drive,
    let_run_ahead,
    prompt_of,
    straightforward,
)
from tests.device.fake_shard import FakeShard, NoStates

STATES = NoStates((TensorSpec("layers.0.state", "F32", (1,)),))


@define(eq=False)
class HybridShard(FakeShard):
    """A fake shard that keeps the last row of a step aside, where a commit leaves it out and a later one keeps it."""

    states: NoStates = STATES
    aside: dict[tuple[int, int], int] = field(factory=dict)

    def commit(self, step: Step, kept: list[Kept]) -> None:
        if step != self.unsettled:
            [segment] = step.segments
            assert list(kept) == [1]
            self.cache[segment.slot, segment.start] = self.aside.pop((segment.slot, segment.start))
            return
        last = step.segments[-1]
        self.aside = {(last.slot, last.start + last.count - 1): int(self.written[step.rows - 1])}
        super().commit(step, kept)


@pytest.fixture
def hybrid():
    return HybridShard()


@pytest.fixture
def driver(hybrid):
    driver = drive(hybrid)
    let_run_ahead(driver)
    yield driver
    assert driver.executor.close()


@pytest.mark.parametrize("length", [2, 9, CHUNK, CHUNK + 2, 2 * CHUNK])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_the_first_token_takes_no_forward_of_its_own(driver: Driver, hybrid, length, sampling):
    prompt = prompt_of(3, length)
    expected = straightforward(FakeShard(), prompt, sampling, 6)
    client = await driver.open(prompt, sampling)
    await client.prefill()
    rows = [step.rows for step in hybrid.steps]
    assert sum(rows) == length
    await driver.decode(client)
    assert [step.rows for step in hybrid.steps] == rows
    while len(client.answer) < 6:
        await driver.decode(client)
    assert client.answer == expected
    assert [step.rows for step in hybrid.steps] == [*rows, *[1] * 5]


async def test_a_chunk_without_room_for_the_last_row_leaves_it_to_the_decode_step(driver: Driver, hybrid):
    prompt = prompt_of(4, CHUNK + 1)
    client = await driver.open(prompt)
    await client.prefill()
    assert [(step.rows, step.rows_only) for step in hybrid.steps] == [(CHUNK, True)]
    await driver.decode(client)
    assert [step.rows for step in hybrid.steps] == [CHUNK, 1]
    assert client.answer == straightforward(FakeShard(), prompt, GREEDY, 1)


async def test_beside_other_requests_the_row_is_computed_again(driver: Driver, hybrid):
    prompts = [prompt_of(5 + slot, 9 + slot) for slot in range(2)]
    clients = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    for _ in range(4):
        await driver.decode(*clients)
    assert [step.rows for step in hybrid.steps] == [9, 10, 2, 2, 2, 2]
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.answer == straightforward(FakeShard(), prompt, GREEDY, 4)


async def test_a_slot_that_is_opened_again_has_no_row_of_the_prompt_before(driver: Driver, hybrid):
    for seed in (7, 8):
        client = await driver.open(prompt_of(seed, 12))
        await client.prefill()
    hybrid.steps.clear()
    await driver.decode(client)
    assert hybrid.steps == []
    assert client.answer == straightforward(FakeShard(), prompt_of(8, 12), GREEDY, 1)
