"""Answers that keep to a grammar: always valid, and the same whatever is proposed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence

import jsonschema
import numpy as np
import pytest
import torch
from attrs import define, evolve, field

from adapters.device.executor import DeviceExecutor
from adapters.device.sampling.grammar_mask import Mask, build_forbidden_mask, refuse_grammars
from adapters.device.sampling.sampler import DeadEnd, Draw, Sampler, TokenPick, pick
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import StepMember, accept_proposals
from adapters.device.speculation.proposal_tree import Tree, chain, prune_tree
from adapters.text.grammars.grammar import Grammars, build_json_grammar
from adapters.text.tokenizer import Tokenizer
from effects.decode import Decoded
from effects.grammar import Grammar
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling
from tests.device.driver import Caller, Driver, drive
from tests.device.fake_shard import FakeShard, make_fake_shard
from tests.device.speculation.test_proposals import Oracle
from tests.schemas import schema_of
from tests.text import small

CPU = torch.device("cpu")
LONGEST = 900
SOME = Grammar("regex", "any")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small.write(tmp_path_factory.mktemp("small")))


@define
class Scripted:
    """A grammar that allows what a function of the path returns. said: the tokens of the answer that it got."""

    after: Callable[[tuple[int, ...]], Sequence[int]]
    said: list[int] = field(factory=list)
    asked: list[tuple[int, ...]] = field(factory=list)

    def mask(self, path):
        self.asked.append(path)
        tokens = self.after((*self.said, *path))
        return bits(tokens) if tokens else "the script is over"

    def count_allowed(self, path):
        found = (at for at in range(len(path)) if path[at] not in self.after((*self.said, *path[:at])))
        return next(found, len(path))

    def append(self, tokens):
        self.said += tokens


def bits(tokens: Sequence[int], size: int = 97) -> Mask:
    found = np.zeros(-(-size // 8), np.uint8)
    for token in tokens:
        found[token // 8] |= 1 << token % 8
    return found


def test_a_bit_a_token_becomes_what_may_not_follow() -> None:
    out = build_forbidden_mask([bits([0, 9, 96]), None, bits([3], 8)], 97, CPU)
    assert [row.logical_not().nonzero().flatten().tolist() for row in out] == [[0, 9, 96], list(range(97)), [3]]
    assert out.shape == (3, 97)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.3, top_k=2, seed=5)], ids=["greedy", "drawn"])
def test_the_likeliest_of_what_may_follow_is_picked(sampling: Sampling) -> None:
    logits = torch.linspace(-3, 3, 97).repeat(2, 1)
    rows = [
        Draw(Sampler(evolve(sampling, logprobs=3), (1,), 97, matching=Scripted(lambda _: [7, 40])), 1),
        Draw(Sampler(sampling, (1,), 97), 1),
    ]
    held, free = pick(logits, rows)
    assert isinstance(held, TokenPick)
    assert held.token in {7, 40}
    assert sampling.temperature or held.token == 40
    assert held.logprob is not None
    logprob, alternatives = held.logprob
    assert [token for token, _ in alternatives] == [40, 7], "no more than may follow"
    assert math.fsum(math.exp(value) for _, value in alternatives) == pytest.approx(1)
    assert logprob == dict(alternatives)[held.token]
    assert free == pick(logits[1:], rows[1:])[0]


def test_top_k_counts_what_may_follow() -> None:
    """Else the likeliest few of all tokens would be kept, and none of them may follow."""
    logits = torch.linspace(-3, 3, 97).repeat(1, 1)
    for more in ({"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9}):
        sampler = Sampler(Sampling(temperature=1, seed=2, **more), (1,), 97, matching=Scripted(lambda _: [0, 1]))
        (found,) = pick(logits, [Draw(sampler, 1)])
        assert isinstance(found, TokenPick)
        assert found.token in {0, 1}


def test_where_nothing_may_follow_nothing_is_picked_and_what_was_before_stays() -> None:
    sampler = Sampler(Sampling(), (1,), 97, matching=Scripted(lambda said: [5] if len(said) < 2 else []))
    logits = torch.zeros(3, 97)
    rows = [Draw(sampler, 1), Draw(sampler, 2, (5,)), Draw(sampler, 3, (5, 5))]
    found = pick(logits, rows)
    assert [type(one) for one in found] == [TokenPick, TokenPick, DeadEnd]
    assert "position 3: the script is over" in found[2].detail
    member = StepMember(0, 0, SlotState(RequestId(1), [9], 0, sampler), chain((9, 5, 5)))
    agreed = accept_proposals(member, found.__getitem__, 0)
    assert agreed.tokens == (5, 5)
    sampler.append([5, 5])
    end = accept_proposals(evolve(member, tree=chain((5,))), lambda _: pick(logits, [Draw(sampler, 3)])[0], 0)
    assert isinstance(end, DeviceFailed)
    assert end.kind == "dead_end"


def test_what_may_not_follow_is_not_verified() -> None:
    even = Scripted(lambda said: range(0, 97, 2) if len(said) < 3 else [])
    assert prune_tree(chain((1, 2, 4, 5, 6)), even.count_allowed) == chain((1, 2, 4))
    assert prune_tree(chain((1,)), even.count_allowed) == chain((1,))
    tree = Tree((1, 2, 4, 3, 8, 7, 6, 6), (-1, 0, 1, 1, 0, 4, 4, 6))
    assert prune_tree(tree, even.count_allowed) == Tree((1, 2, 4, 8, 6, 6), (-1, 0, 1, 0, 3, 4))


async def test_masks_are_asked_for_only_where_a_token_is_picked() -> None:
    asked = Scripted(lambda _: range(97))
    driver = drive(FakeShard())
    driver.executor = DeviceExecutor(evolve(driver.executor.parts, match_grammar=lambda _: asked))
    client = await driver.open([1, 2, 3], Sampling(grammar=SOME))
    await client.prefill()
    driver.executor = DeviceExecutor(evolve(driver.executor.parts, proposer=NeverRight()))
    await driver.decode(client, propose=5)
    assert asked.asked == [()]
    assert driver.executor.close()


class NeverRight(Oracle):
    """Proposes what is never picked."""

    def __init__(self) -> None:
        super().__init__({}, random.Random(1))

    def spoilt(self, request):
        return (request.state.tokens[-1], *([1] * request.most))


async def test_a_grammar_that_nobody_can_read_fails_its_own_request_only() -> None:
    driver = drive(FakeShard())
    held = await driver.open([1, 2, 3], Sampling(grammar=SOME))
    free = await driver.open([1, 2, 3], slot=1)
    await free.prefill()
    (failed,) = await driver.perform(held.chunk(2))
    assert isinstance(failed, DeviceFailed)
    assert "nothing here reads grammars" in failed.detail
    assert isinstance((await driver.decode(free))[0], Decoded)
    with pytest.raises(ValueError, match="reads grammars"):
        refuse_grammars(SOME)
    assert driver.executor.close()


async def answered(driver: Driver, client: Caller, propose: int = 0) -> list[int]:
    """Until the answer ends."""
    await client.prefill()
    while len(client.answer) < LONGEST:
        outcomes = await driver.decode(client, propose=propose)
        assert isinstance(outcomes[0], Decoded), outcomes
        if client.tokens[-1] in ENDS:
            return client.answer
    raise AssertionError(f"no end: {client.answer[-40:]}")


ENDS = (2, 0)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(10, 200, 10))])
async def test_200_schemas_are_kept_to_by_a_random_model_with_and_without_a_draft(
    tokenizer: Tokenizer, first: int
) -> None:
    """Proposals come in chains and in trees."""
    size, grammars, errors = tokenizer.size, Grammars(tokenizer), random.Random(first)
    plain = drive(make_fake_shard(vocab_size=size, capacity=1024))
    plain.executor = DeviceExecutor(evolve(plain.executor.parts, match_grammar=grammars.match))
    for seed in range(first, first + 10):
        schema = schema_of(seed)
        sampling = Sampling(temperature=errors.choice((0.0, 0.2, 1.0)), seed=seed, grammar=build_json_grammar(schema))
        prompt = errors.choices(range(size), k=5)
        client = await plain.open(prompt, sampling, stops=ENDS)
        answer = await answered(plain, client)
        text = tokenizer.decode(answer[:-1])
        jsonschema.validate(json.loads(text), schema)
        drafted = Driver(plain.executor, requests=plain.requests)
        oracle = Oracle({plain.requests + 1: client.tokens}, errors, branches=seed % 2 == 1)
        # The same shard, now with a proposer.
        drafted.executor = DeviceExecutor(evolve(plain.executor.parts, proposer=oracle))
        again = await drafted.open(prompt, sampling, 1, stops=ENDS)
        assert await answered(drafted, again, propose=7) == answer
        plain.requests = drafted.requests
    assert plain.executor.close()


async def test_answers_that_decode_together_each_keep_to_their_own(tokenizer: Tokenizer) -> None:
    driver = drive(make_fake_shard(vocab_size=tokenizer.size, capacity=1024))
    driver.executor = DeviceExecutor(evolve(driver.executor.parts, match_grammar=Grammars(tokenizer).match))
    schemas = [schema_of(seed) for seed in (7, 8, 9)]
    clients = [
        await driver.open([slot + 1, 5], Sampling(grammar=build_json_grammar(schema)), slot, stops=ENDS)
        for slot, schema in enumerate(schemas)
    ]
    free = await driver.open([9, 9], Sampling(), 3)
    alone = drive(make_fake_shard(vocab_size=tokenizer.size, capacity=1024))
    alone.executor = DeviceExecutor(evolve(alone.executor.parts, match_grammar=Grammars(tokenizer).match))
    for client in (*clients, free):
        await client.prefill()
    open_ = list(clients)
    while open_:
        await driver.decode(*open_, free)
        open_ = [client for client in open_ if client.tokens[-1] not in ENDS]
    for slot, (client, schema) in enumerate(zip(clients, schemas, strict=True)):
        jsonschema.validate(json.loads(tokenizer.decode(client.answer[:-1])), schema)
        single = await alone.open([slot + 1, 5], Sampling(grammar=build_json_grammar(schema)), stops=ENDS)
        assert await answered(alone, single) == client.answer
    assert driver.executor.close()
    assert alone.executor.close()
