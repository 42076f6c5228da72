"""Whatever a draft proposes, the answer stays."""

from __future__ import annotations

import random

import pytest

from effects.round import RoundDone
from tests.device.driver import (
    GREEDY,
    PENALISED,
    SAMPLED,
    VOCAB,
    Driver,
    drive,
    prompt_of,
)
from tests.device.fake_shard import FakeShard


def oracle(answers: dict[int, list[int]], errors: random.Random):
    """Proposes what will come, spoilt here and there."""

    def propose(wanted):
        found = []
        for state, most in wanted:
            coming = answers[state.request][len(state.tokens) :][: errors.randint(0, most)]
            found.append(tuple(token if errors.random() < 0.7 else errors.randrange(VOCAB) for token in coming))
        return found

    return propose


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_proposals_never_change_the_answer(shard, sampling):
    prompts = [prompt_of(30 + slot, 12 + 9 * slot) for slot in range(3)]
    plain = drive(shard)
    logprobs, expected = [], []
    for prompt in prompts:
        client = await plain.open(prompt, sampling)
        await client.prefill()
        while len(client.answer) < 40:
            await plain.rounds(client)
        expected.append(client.tokens)
        logprobs.append([value for done in client.done for value in done.logprobs])
    driver = Driver(plain.executor)
    driver.executor._propose = oracle(dict(enumerate(expected, 101)), random.Random(1))  # noqa: SLF001
    driver.requests = 100
    clients = [await driver.open(prompt, sampling, slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    while any(len(client.answer) < 30 for client in clients):
        outcomes = await driver.rounds(*clients, propose=7)
        assert all(len(outcome.tokens) <= outcome.proposed + 1 <= 8 for outcome in outcomes)
    for client, tokens, values in zip(clients, expected, logprobs, strict=True):
        assert client.tokens[: len(tokens)] == tokens[: len(client.tokens)]
        assert [value for done in client.done for value in done.logprobs][:30] == values[:30]
        accepted = sum(len(done.tokens) - 1 for done in client.done)
        assert 0 < accepted < sum(done.proposed for done in client.done)
    assert driver.executor.close()


async def test_no_more_is_proposed_than_a_slot_has_room_for():
    fake = FakeShard(capacity=16)
    asked = []

    def propose(wanted):
        asked.append([most for _, most in wanted])
        return [(1,) * most for _, most in wanted]

    driver = drive(fake, propose=propose)
    client = await driver.open(prompt_of(31, 14))
    await client.prefill()
    while isinstance((await driver.rounds(client, propose=4))[0], RoundDone):
        pass
    assert asked[0] == [2]
    assert client.valid == 16
    assert max(segment.start + segment.count for step in fake.steps for segment in step.segments) == 16
    assert driver.executor.close()
