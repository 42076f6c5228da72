"""Tests that the answer stays the same whatever is proposed, and however."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from attrs import define, evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.sampling.sampler import Sampler
from adapters.device.speculation import guesses
from adapters.device.speculation.draft_context import DeferredRowBuffer
from adapters.device.speculation.drafting import Drafting, ProposalPicker, ProposalRequest
from adapters.device.speculation.proposal_tree import Tree, chain, to_depth_first
from adapters.device.speculation.proposer import DraftRequest, Proposer
from effects.all import EffectRequest
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from tests.device.driver import (
    BUCKETS,
    GREEDY,
    PENALISED,
    SAMPLED,
    VOCAB,
    Driver,
    drive,
    let_run_ahead,
    prompt_of,
    straightforward,
)
from tests.device.fake_draft import FakeDraft
from tests.device.fake_shard import FakeShard, make_fake_shard
from tests.pairs import usual_where

KINDS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])


@define
class Oracle(Proposer):
    """Proposes what will come, spoilt here and there; with branches, among wrong ones."""

    answers: dict[int, list[int]]
    errors: random.Random
    branches: bool = False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        return [self.tree(request) if self.branches else chain(self.spoilt(request)) for request in requests]

    def spoilt(self, request: DraftRequest) -> tuple[int, ...]:
        state = request.state
        coming = self.answers[state.request][len(state.tokens) :][
            : self.errors.randint(0, min(request.most, request.depth))
        ]
        wrong = [token if self.errors.random() < 0.7 else self.errors.randrange(VOCAB) for token in coming]
        return (state.tokens[-1], *wrong)

    def tree(self, request: DraftRequest) -> Tree:
        """The right path and others, node by node in any order, no two children of a node alike."""
        coming = self.answers[request.state.request][len(request.state.tokens) :]
        grown, right, depths, known = list[tuple[int, int]](), {0: 0}, [0], set[tuple[int, int]]()
        for _ in range(self.errors.randint(0, request.most)):
            parent = self.errors.choice([node for node, depth in enumerate(depths) if depth < request.depth])
            hit = parent in right and right[parent] < len(coming) and self.errors.random() < 0.7
            token = coming[right[parent]] if hit else self.errors.randrange(VOCAB)
            if (parent, token) in known:
                continue
            known.add((parent, token))
            grown.append((parent, token))
            depths.append(depths[parent] + 1)
            if parent in right and right[parent] < len(coming) and token == coming[right[parent]]:
                right[len(grown)] = right[parent] + 1
        return to_depth_first(request.state.tokens[-1], grown)

    def follow(self, step, aux_hidden_states, kept, states, plain_steps=0):
        """It knows everything already."""

    def catch_up(self, slot):
        """The same."""

    def inherit_rows(self, source, target, state):
        """The same."""


@usual_where(lambda places: places["branches"] == places["sampling"] % 2)
@pytest.mark.parametrize("branches", [False, True], ids=["chains", "trees"])
@KINDS
async def test_proposals_never_change_the_answer(shard, sampling, branches):
    prompts = [prompt_of(30 + slot, 12 + 9 * slot) for slot in range(3)]
    plain = drive(shard)
    logprobs, expected = [], []
    for prompt in prompts:
        client = await plain.open(prompt, sampling)
        await client.prefill()
        while len(client.answer) < 40:
            await plain.decode(client)
        expected.append(client.tokens)
        logprobs.append([value for done in client.done for value in done.logprobs])
    driver = Driver(plain.executor)
    oracle = Oracle(dict(enumerate(expected, 101)), random.Random(1), branches)
    # The same shard, lane and slots, now with a proposer.
    driver.executor = DeviceExecutor(evolve(driver.executor.parts, proposer=oracle))
    driver.requests = 100
    clients = [await driver.open(prompt, sampling, slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    while any(len(client.answer) < 30 for client in clients):
        outcomes = await driver.decode(*clients, propose=7)
        assert all(len(outcome.tokens) <= outcome.proposed + 1 <= 8 for outcome in outcomes)
    for client, tokens, values in zip(clients, expected, logprobs, strict=True):
        assert client.tokens[: len(tokens)] == tokens[: len(client.tokens)]
        assert [value for done in client.done for value in done.logprobs][:30] == values[:30]
        accepted = sum(len(done.tokens) - 1 for done in client.done)
        assert 0 < accepted < sum(done.proposed for done in client.done)
    assert driver.executor.close()


class Sure(Oracle):
    """Proposes what will come, as far as it is asked to, and then something wrong."""

    def spoilt(self, request: DraftRequest) -> tuple[int, ...]:
        state = request.state
        coming = self.answers[state.request][len(state.tokens) :][: request.most - 1]
        return (state.tokens[-1], *coming, (coming[-1] + 1) % VOCAB)


@pytest.mark.parametrize("offset", range(9))
async def test_a_decode_step_tells_how_many_of_its_tokens_were_proposed_wherever_it_ends(offset):
    prompt = prompt_of(46, 20)
    answer = straightforward(FakeShard(), prompt, GREEDY, 40)
    index = next(at for at in range(offset, 40) if answer[at] not in answer[:at])
    driver = drive(FakeShard(), proposer=Sure({1: prompt + answer}, random.Random(0)))
    client = await driver.open(prompt, stops=(answer[index],))
    await client.prefill()
    while len(client.answer) <= index:
        (done,) = await driver.decode(client, propose=5)
        proposals = answer[len(client.answer) - len(done.tokens) :][:4]
        assert done.accepted == sum(1 for one, other in zip(done.tokens, proposals, strict=False) if one == other)
        assert done.accepted == len(done.tokens) - (len(done.tokens) == 5)
    assert client.answer == answer[: index + 1]
    assert driver.executor.close()


async def test_no_more_is_proposed_than_a_slot_has_room_for():
    fake, draft = make_fake_shard(capacity=16), FakeDraft(capacity=16)
    driver = drive(fake, proposer=Drafting(draft, BUCKETS))
    client = await driver.open(prompt_of(31, 12))
    await client.prefill()
    while isinstance((await driver.decode(client, propose=7))[0], Decoded):
        pass
    assert [block_request.count for block_requests in draft.asked for block_request in block_requests] == [4]
    assert client.valid == 16
    assert max(segment.start + segment.count for step in fake.steps for segment in step.segments) == 16
    assert driver.executor.close()


# --- a draft that knows the shard, so that whatever is wrong with its context shows in what is agreed to ---


def drafted(nodes: int = 0, **options) -> tuple[Driver, FakeDraft, FakeShard]:
    fake, draft = FakeShard(), FakeDraft(**options)
    drafting = Drafting(draft, BUCKETS, nodes)
    handlers = {LoadModel: drafting.load_back, UnloadModel: drafting.offload}
    return drive(fake, proposer=drafting, handlers=handlers), draft, fake


async def agreed(driver: Driver, prompt, *, propose: int = 7, sampling=GREEDY, count: int = 24, **how):
    """Return how many tokens each decode step gave. The tokens are checked."""
    client = await driver.open(prompt, sampling, **how)
    await client.prefill((32, 5))
    while len(client.answer) < count:
        await driver.decode(client, propose=propose)
    assert client.answer == straightforward(FakeShard(), prompt, sampling, len(client.answer))
    return [len(done.tokens) for done in client.done]


async def test_a_draft_follows_the_target_through_chunks_decode_steps_copies_and_turns():
    driver, _, _ = drafted()
    prompt = prompt_of(40, 70)
    assert await agreed(driver, prompt) == [8, 8, 8]
    assert await agreed(driver, prompt[:64] + prompt_of(41, 9), slot=2, source=0, keep=64) == [8, 8, 8]
    turn = prompt + straightforward(FakeShard(), prompt, GREEDY, 24)[:20] + prompt_of(42, 5)
    assert await agreed(driver, turn, slot=0, keep=80) == [8, 8, 8]
    assert await agreed(driver, prompt, slot=0, keep=69) == [8, 8, 8], "nothing was left to compute"
    assert driver.executor.close()


async def test_the_first_decode_step_of_a_prompt_of_one_token_has_nothing_to_go_by():
    driver, draft, _ = drafted()
    assert await agreed(driver, [5], count=17) == [1, 8, 8]
    assert [
        (block_request.first, block_request.position)
        for block_requests in draft.asked
        for block_request in block_requests
    ] == [(0, 1), (0, 9)]
    assert driver.executor.close()


async def test_requests_of_one_batch_are_proposed_to_in_one_call():
    driver, draft, fake = drafted()
    clients = [await driver.open(prompt_of(43 + slot, 20 + slot), slot=slot) for slot in range(3)]
    for client in clients:
        await client.prefill()
    while len(clients[0].answer) < 16:
        await driver.decode(*clients, propose=7)
    assert [len(block_requests) for block_requests in draft.asked] == [3, 3]
    assert [len(done.tokens) for client in clients for done in client.done] == [8] * 6
    assert [step.bucket for step in fake.steps[-2:]] == [32, 32]
    assert driver.executor.close()


async def test_the_request_decides_how_wide_a_decode_step_is():
    driver, draft, _ = drafted()
    assert await agreed(driver, prompt_of(44, 20), propose=0, count=3) == [1, 1, 1]
    assert draft.asked == []
    assert await agreed(driver, prompt_of(44, 20), propose=3, count=8) == [4, 4]
    assert await agreed(driver, prompt_of(44, 20), propose=100, count=16) == [8, 8]
    assert driver.executor.close()


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
async def test_proposals_are_picked_with_the_settings_and_the_noise_of_the_request(sampling, monkeypatch):
    """The fake draft knows no noise beyond the first row, where its logits are the target's: with all of the noise and
    all of what may be drawn it must be right there.
    """
    monkeypatch.setattr(guesses, "FIRST_NOISE_SHARE", 1.0)
    monkeypatch.setattr(guesses, "TOP_P_SHARE", 1.0)
    driver, draft, _ = drafted()
    decode = await agreed(driver, prompt_of(45, 20), sampling=sampling)
    assert min(decode) >= 2
    draft.block = 2
    driver.requests += 1
    assert set(await agreed(driver, prompt_of(45, 20), sampling=sampling)) == {2}
    assert driver.executor.close()


@KINDS
async def test_a_chain_that_is_launched_ahead_of_the_host_gives_the_same_answers(sampling):
    """Penalties need each token on the host, so nothing is launched with them."""
    for noise in (0.0, 1.0):
        done = []
        for ahead in (False, True):
            driver, draft, _ = drafted(is_sequential=True, noise=noise)
            if ahead:
                let_run_ahead(driver)
            done.append(await agreed(driver, prompt_of(45, 20), sampling=sampling))
            assert bool(draft.launched) == (ahead and sampling is not PENALISED)
            assert driver.executor.close()
        assert done[0] == done[1], "the same proposals"
        assert sampling is not GREEDY or (max(done[0]) == 8 if not noise else 1 < max(done[0]) < 8)


async def test_launched_chains_of_several_slots_have_the_lengths_that_were_asked_for():
    driver, draft, fake = drafted(is_sequential=True)
    let_run_ahead(driver)
    prompts = [prompt_of(43 + slot, 20 + slot) for slot in range(3)]
    clients = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    while len(clients[0].answer) < 16:
        wanted = [client.round(propose) for client, propose in zip(clients, (7, 0, 3), strict=True)]
        for client, outcome in zip(clients, await driver.perform(*wanted), strict=True):
            client.take(outcome)
    assert [[one.count for one in asked] for asked in draft.launched] == [[7, 3]] * 2
    assert [[len(done.tokens) for done in client.done] for client in clients] == [[8, 8], [1, 1], [4, 4]]
    assert [step.rows for step in fake.steps[-2:]] == [13, 13]
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.answer == straightforward(FakeShard(), prompt, GREEDY, len(client.answer))
    assert driver.executor.close()


async def test_a_launched_chain_for_which_there_is_no_memory_proposes_nothing():
    driver, draft, _ = drafted(is_sequential=True)
    let_run_ahead(driver)
    draft.exhausted.add("propose")
    assert await agreed(driver, prompt_of(45, 20), count=3) == [1, 1, 1]
    draft.exhausted.clear()
    driver.requests += 1
    assert await agreed(driver, prompt_of(45, 20), slot=1, count=8) == [8]
    assert driver.executor.close()


@usual_where(lambda places: (places["offset"] + places["nodes"] + places["ahead"]) % 2 == 0)
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("nodes", [0, 12], ids=["chain", "tree"])
@pytest.mark.parametrize("offset", range(9))
async def test_a_decode_step_ends_with_the_first_token_that_ends_the_answer(offset, nodes, ahead):
    prompt = prompt_of(46, 20)
    answer = straightforward(FakeShard(), prompt, GREEDY, 40)
    index = next(at for at in range(offset, 40) if answer[at] not in answer[:at])
    driver, _, fake = drafted(nodes, is_sequential=ahead)
    if ahead:
        let_run_ahead(driver)
    client = await driver.open(prompt, stops=(answer[index], 96))
    await client.prefill()
    while answer[index] not in client.answer:
        await driver.decode(client, propose=7 if not nodes else 12)
    assert client.answer == answer[: index + 1]
    valid = len(prompt) + index
    assert fake.steps[-1].segments[0].start <= valid
    turn = client.tokens + prompt_of(47, 30)
    other = await driver.open(turn, keep=valid)
    await other.prefill()
    await driver.decode(other, propose=7)
    assert other.answer == straightforward(FakeShard(), turn, GREEDY, 8)
    assert driver.executor.close()


async def test_rows_that_were_computed_while_the_draft_was_away_are_a_gap_in_its_context():
    driver, draft, _ = drafted()
    request = RequestId(99)
    client = await driver.open(prompt_of(48, 70))
    await driver.perform(client.chunk(32))
    client.valid = 32
    (parked,) = await driver.perform(EffectRequest(request, UnloadModel("draft")))
    assert parked == ModelUnloaded(1000)
    await driver.perform(client.chunk(40))
    client.valid = 40
    (back,) = await driver.perform(EffectRequest(request, LoadModel("draft")))
    assert back == ModelLoaded(1000)
    await client.prefill()
    await driver.decode(client, propose=7)
    assert [(block_request.first, block_request.position) for block_request in draft.asked[0]] == [(40, 69)]
    await driver.perform(EffectRequest(request, UnloadModel("draft", keep=False)))
    assert draft.weights_state == "released"
    assert (await driver.decode(client, propose=7))[0].proposed == 0
    await driver.perform(EffectRequest(request, LoadModel("draft")))
    assert (await driver.decode(client, propose=7))[0].proposed == 0, "the last row is missing"
    assert (await driver.decode(client, propose=7))[0].proposed == 7
    assert client.answer == straightforward(FakeShard(), prompt_of(48, 70), GREEDY, len(client.answer))
    assert driver.executor.close()


@pytest.mark.parametrize("decode", [1, 5, 31, 32, 33, 70])
async def test_rows_that_were_decoded_one_by_one_are_followed_when_somebody_proposes_again(decode):
    driver, draft, _ = drafted()
    prompt = prompt_of(54, 40)
    client, other = await driver.open(prompt), await driver.open(prompt_of(55, 9), slot=1)
    for one in (client, other):
        await one.prefill()
    for number in range(decode):
        for one in (client, other) if number % 3 else (client,):
            await driver.decode(one, propose=0)
    assert draft.asked == []
    await driver.perform(EffectRequest(RequestId(99), UnloadModel("draft")))
    await driver.perform(EffectRequest(RequestId(99), LoadModel("draft")))
    assert len((await driver.decode(client, propose=7))[0].tokens) == 8
    await driver.perform(client.round(0), other.round(3))
    assert [
        (block_request.first, block_request.position)
        for block_requests in draft.asked
        for block_request in block_requests
    ] == [
        (0, 39 + decode),
        (0, 8 + len(other.answer)),
    ]
    assert driver.executor.close()


@pytest.mark.parametrize("decode", [20, 32, 70])
async def test_in_a_company_that_nobody_proposes_to_what_does_not_fit_a_backlog_is_forgotten(decode, monkeypatch):
    """Nothing is followed meanwhile, a prompt that comes between included; then there is a gap, and nothing else."""
    driver, draft, _ = drafted()
    prompts = [prompt_of(60 + slot, 9) for slot in range(2)] + [prompt_of(63, 60)]
    clients = [await driver.open(prompts[slot], slot=slot) for slot in range(2)]
    for one in clients:
        await one.prefill()
    extended, extend = list[int](), FakeDraft.extend
    monkeypatch.setattr(
        FakeDraft, "extend", lambda draft, step, *rest: extended.append(step.rows) or extend(draft, step, *rest)
    )
    for _ in range(decode):
        await driver.decode(*clients, propose=0)
    between = await driver.open(prompts[2], slot=2)
    for stop in (32, 59):
        await driver.perform(between.chunk(stop))
        between.valid = stop
        await driver.decode(*clients, propose=0)
    assert extended == []
    await driver.decode(*clients, between, propose=7)
    (block_requests,) = draft.asked
    assert [block_request.position for block_request in block_requests] == [10 + decode, 10 + decode, 59]
    for block_request in block_requests:
        assert min(block_request.position, 24) <= block_request.position - block_request.first <= 32
    for one, prompt in zip((*clients, between), prompts, strict=True):
        assert one.answer == straightforward(FakeShard(), prompt, GREEDY, len(one.answer))
    assert driver.executor.close()


async def test_rows_that_were_not_followed_yet_are_when_their_slot_is_continued_or_copied_from():
    driver, draft, _ = drafted()
    prompt = prompt_of(56, 40)
    client = await driver.open(prompt)
    await client.prefill()
    for _ in range(30):
        await driver.decode(client, propose=0)
    assert await agreed(driver, client.tokens[:60] + prompt_of(57, 9), slot=1, source=0, keep=60) == [8, 8, 8]
    assert await agreed(driver, client.tokens[:64] + prompt_of(58, 9), slot=0, keep=64) == [8, 8, 8]
    for _ in range(2):
        await driver.decode(client := await fresh(driver, prompt), propose=0)
        assert await agreed(driver, prompt_of(59, 20), slot=0) == [8, 8, 8], "rows of the one before"
    assert all(block_request.first == 0 for block_requests in draft.asked for block_request in block_requests)
    assert driver.executor.close()


async def fresh(driver: Driver, prompt):
    client = await driver.open(prompt)
    await client.prefill()
    return client


@pytest.mark.parametrize("where", ["extend", "propose"])
async def test_a_draft_that_finds_no_memory_proposes_nothing_and_costs_nothing_else(where):
    driver, draft, _ = drafted()
    draft.exhausted = {where}
    assert await agreed(driver, prompt_of(49, 40), count=4) == [1] * 4
    draft.exhausted = set()
    assert await agreed(driver, prompt_of(49, 40)) == [8, 8, 8]
    assert driver.executor.close()


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("unpark", DeviceFailed("out_of_memory", "no room for the draft")),
        ("file", DeviceFailed("io", "the draft's file has gone")),
    ],
)
async def test_an_unpark_that_fails_leaves_the_draft_parked_and_the_next_one_works(what, failure):
    driver, draft, _ = drafted()
    await driver.perform(EffectRequest(RequestId(1), UnloadModel("draft")))
    draft.exhausted = {what}
    assert await driver.perform(EffectRequest(RequestId(2), LoadModel("draft"))) == (failure,)
    assert draft.weights_state == "parked"
    assert await agreed(driver, prompt_of(50, 40), count=4) == [1] * 4
    draft.exhausted = set()
    assert isinstance((await driver.perform(EffectRequest(RequestId(3), LoadModel("draft"))))[0], ModelLoaded)
    assert await agreed(driver, prompt_of(50, 40)) == [8, 8, 8]
    assert driver.executor.close()


@usual_where(lambda places: places["is_sequential"] == places["sampling"])
@pytest.mark.parametrize("is_sequential", [False, True], ids=["at once", "in order"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_tree_is_agreed_to_at_least_as_far_as_its_chain(sampling, is_sequential):
    prompt, totals = prompt_of(51, 40), {}
    for nodes in (0, 22):
        driver, _, fake = drafted(nodes, noise=2.0, is_sequential=is_sequential)
        decode = await agreed(driver, prompt, propose=nodes or 7, sampling=sampling, count=120)
        totals[nodes] = len(decode)
        assert any(step.branches for step in fake.steps) == bool(nodes)
        assert driver.executor.close()
    assert totals[22] < totals[0]


async def test_a_tree_has_as_many_nodes_as_were_asked_for_and_a_narrow_decode_step_is_a_chain():
    driver, _, fake = drafted(22, noise=1.0)
    client = await driver.open(prompt_of(52, 30))
    await client.prefill()
    proposed = [(await driver.decode(client, propose=wanted))[0].proposed for wanted in (22, 12, 7, 3)]
    assert proposed == [22, 12, 7, 3]
    assert [step.branches for step in fake.steps[1:]] == [True, True, False, False]
    penalised = await driver.open(prompt_of(53, 30), PENALISED, slot=1)
    await penalised.prefill()
    assert (await driver.decode(penalised, propose=22))[0].proposed == 7, "penalties need the path before a token"
    assert driver.executor.close()


def test_a_token_beside_a_chain_that_was_chosen_in_order_has_no_children():
    rows = torch.tensor([[0.5, 0.4, 0.1], [0.7, 0.2, 0.1]]).log()

    def paths(*calls):
        sampler = Sampler(GREEDY, (), 3, rows.device)
        picker = ProposalPicker([ProposalRequest(sampler, 5, 0, 6, frozenset())], 22, 3)
        for call in calls:
            picker([call])
        [tree] = picker.trees()
        return tree.paths()[1:]

    in_order = paths(rows[:1], rows[1:])
    assert sorted(in_order) == [(0,), (0, 0), (0, 1), (0, 2), (1,), (2,)]
    assert (1, 0) in paths(rows), "predicted at once, a position does not depend on the tokens before it"


def test_what_is_kept_of_late_rows_is_what_the_target_left_of_them_even_behind_one_that_found_no_memory(monkeypatch):
    room, kept = DeferredRowBuffer((1, 3)), []
    for rows in (1, 2, 60, 5, 200, 1, 64, 1):
        hidden = {
            layer: torch.randn(8, max(rows, 4)).t() if rows == 2 else torch.randn(max(rows, 4), 8) for layer in (1, 3)
        }
        if rows == 200:
            with monkeypatch.context() as full:
                full.setattr(torch.Tensor, "new_empty", none_left)
                with pytest.raises(torch.OutOfMemoryError):
                    room.keep(hidden, rows)
            continue
        copies, first = room.keep(hidden, rows)
        kept.append((rows, copies, first, {layer: states.clone() for layer, states in hidden.items()}))
        hidden[1].zero_()
    for rows, copies, first, left in kept:
        assert all(torch.equal(copies[layer][first : first + rows], left[layer][:rows]) for layer in (1, 3))


def none_left(*_):
    raise torch.OutOfMemoryError
