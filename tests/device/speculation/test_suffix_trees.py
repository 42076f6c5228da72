"""Branches of copied chains: which second-place continuation is found, and that answers stay as they are."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.device.speculation import suffix_proposer
from adapters.device.speculation.proposal_tree import Tree, chain, fork_chain
from adapters.device.speculation.proposer import DecodingSlot
from adapters.device.speculation.step_copies import StepCopies
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.kernels.interfaces.text_matching import END_OF_TEXT, IndexedText, TextMatcher
from effects.all import EffectRequest
from effects.decode import MATCH_CLASSES, Copying, Decoded, RunDecode, make_copying
from effects.grammar import Grammar
from effects.ids import RequestId, SlotId
from effects.job import Sampling
from engine.tools.bench.forced_answer import force_answers
from tests.device.driver import GREEDY, PENALISED, SAMPLED, Caller, Driver, drive, let_run_ahead, prompt_of
from tests.pairs import usual_where

MATCHER = build_text_matcher()
pytestmark = pytest.mark.skipif(MATCHER is None, reason="there is no compiled library")
TEXTS = st.lists(st.integers(1, 3), min_size=1, max_size=18)  # so short that no place is left out
CHAIN = 6
# After 1, 2, 3 it has gone on with 4, 5, 6 twice, and once with 4, 8, 9.
TWO_WAYS = [1, 2, 3, 4, 8, 9, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


def matcher() -> TextMatcher:
    assert MATCHER is not None
    return MATCHER


def searched(own: list[int], archive: list[int] | None = None) -> IndexedText:
    texts = [matcher().make_text() for _ in range(2)]
    texts[0].append(own)
    if archive:
        texts[1].append(archive)
    matcher().make_batch([(texts[0], texts[1] if archive else None)]).match_appended([()])
    return texts[0]


def a_state(tokens: list[int], request: int = 1, **named: Any) -> SlotState:
    return SlotState(RequestId(request), tokens, len(tokens) - 1, None, **named)  # type: ignore[arg-type]


def count_common(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


def expected(own: list[int], copied: list[int]) -> tuple[int, list[int]]:
    """The second place of a short text, found by comparing every position."""
    lengths: dict[tuple[int, int], int] = {}
    firsts: dict[tuple[int, int], int] = {}
    votes = Counter[tuple[int, int]]()
    for place in range(len(own) - 1, 0, -1):
        matched = count_common(own[:place][::-1], own[::-1])
        fork = count_common(own[place:], copied)
        if matched < 3 or fork == len(copied) or place + fork >= len(own):
            continue
        kind = fork, own[place + fork]
        votes[kind] += 1
        if matched > lengths.get(kind, 0):
            lengths[kind], firsts[kind] = matched, place
    if not votes:
        return 0, []
    fork, token = max(votes, key=lambda kind: (lengths[kind], votes[kind], -kind[0]))
    start = firsts[fork, token] + fork
    return fork, own[start : start + 7]


@given(TEXTS)
def test_the_second_place_is_that_of_the_longest_match_which_goes_on_otherwise(own):
    text = searched(own)
    copied = list(text.copy(CHAIN))
    fork, branch = text.find_branch(len(copied), 7)
    wanted_fork, wanted = expected(own, copied) if copied else (0, [])
    assert bool(branch) == bool(wanted)
    if wanted:
        best = {(fork, branch[0]), (wanted_fork, wanted[0])}
        assert len(best) == 1 or is_tie(own, copied, best)
    assert not branch or copied[fork] != branch[0]


def is_tie(own: list[int], copied: list[int], kinds: set[tuple[int, int]]) -> bool:
    """Are these ways to go on equally good? Then the newest one counts."""
    rank = {}
    for kind in kinds:
        places = [
            place
            for place in range(1, len(own))
            if count_common(own[place:], copied) == kind[0] and own[place + kind[0] :][:1] == [kind[1]]
        ]
        lengths = [count_common(own[:place][::-1], own[::-1]) for place in places]
        rank[kind] = max(lengths), sum(length >= 3 for length in lengths), kind[0]
    return len(set(rank.values())) == 1


def test_a_branch_leaves_the_chain_where_texts_differ():
    text = searched(TWO_WAYS)
    assert text.copy(4) == (4, 5, 6, 7)
    assert text.find_branch(4, 7) == (1, (8, 9, 7, 1, 2, 3, 4))
    assert text.find_branch(4, 2) == (1, (8, 9))
    assert text.find_branch(1, 2).tokens == (), "the chain ends before they differ"
    assert text.find_branch(4, 0).tokens == ()


def test_a_branch_comes_from_an_earlier_answer_where_the_text_itself_has_none():
    own = [1, 2, 3, 4, 5, 0, 1, 2, 3]
    text = searched(own, [2, 3, 4, 9, END_OF_TEXT, 7])
    assert (text.matched, text.copy(2)) == (3, (4, 5))
    assert text.find_branch(2, 7).tokens == ()
    text = searched(own, [1, 2, 3, 4, 9, 9, END_OF_TEXT, 7])
    assert text.find_branch(2, 7) == (1, (9, 9)), "no branch goes on in another text"


def test_what_is_proposed_no_more_can_be_read_after_its_archive_is_gone(monkeypatch):
    """The branch of the last match is computed once more when the next tokens are there."""
    monkeypatch.setattr(suffix_proposer, "MOST_ARCHIVED", 64)
    proposer = SuffixProposer(matcher())
    answers = [[1, 2, 3, 4, 9, 9, *range(20, 40), 0], [5, 2, 3, 4, 8, 8, *range(50, 90), 0]]
    for request, answer in enumerate(answers, 1):
        state = a_state([7], request, stops=frozenset({0}))
        proposer.find_matches([(1, state)])
        if request == 1:
            state.tokens += answer
            proposer.find_matches([(1, state)])
        else:
            asked = a_state([6, 1, 2, 3, 4, 5, 6, 6, 1, 2, 3], 9)
            assert proposer.find_matches([(0, asked)]) == [4]
            assert proposer.copy(0, 2) == (4, 5)
            state.tokens += answer
            proposer.find_matches([(1, state)])
            gc.collect()
            asked.tokens += [4, 9]
            proposer.find_matches([(0, asked)])
            assert proposer.count_on_branch(0) == 1


@pytest.mark.parametrize(
    ("came", "on_branch"),
    [((4, 8), 1), ((4, 7), 0), ((4, 5, 8), 0), ((8,), 0), ((4, 5, 6, 7, 1), 0), ((4,), 0)],
    ids=["second place", "neither", "later", "earlier", "all right", "not over yet"],
)
def test_a_chain_tells_whether_its_branch_would_have_been_right(came, on_branch):
    proposer = SuffixProposer(matcher())
    state = a_state(list(TWO_WAYS))
    proposer.find_matches([(0, state)])
    assert proposer.copy(0, 4) == (4, 5, 6, 7)
    state.tokens += came
    proposer.find_matches([(0, state)])
    assert proposer.count_on_branch(0) == on_branch
    proposer.find_matches([(0, state)])
    assert proposer.count_on_branch(0) == 0, "nothing was copied since"


@pytest.mark.parametrize(("came", "on_branch"), [((4, 8, 9, 0), 2), ((4, 8, 0), 1), ((4, 8, 9, 7), 2), ((4, 5, 0), 0)])
def test_a_tree_tells_how_many_tokens_of_its_branch_were_right(came, on_branch):
    proposer = SuffixProposer(matcher())
    state = a_state(list(TWO_WAYS))
    proposer.find_matches([(0, state)])
    assert proposer.copy(0, 4) == (4, 5, 6, 7)
    assert proposer.find_branch(0, 4, 2) == (1, (8, 9))
    state.tokens += came
    proposer.find_matches([(0, state)])
    assert proposer.count_on_branch(0) == on_branch


# --- what a step copies ---


@pytest.mark.parametrize("fork", range(4))
def test_a_chain_with_a_branch_is_a_tree_in_depth_first_order(fork):
    tree = fork_chain((9, 1, 2, 3), fork, (7, 8))
    assert (tree.size, tree.chain_length, tree.has_branches) == (5, 3 if fork < 3 else 5, fork < 3)
    assert tree.paths()[-1] == (*(1, 2, 3)[:fork], 7, 8)
    assert tree.find_child(fork, 7) == 4
    assert [one.count for one in tree.chain_segments(0, 10)] == ([4, 2] if fork < 3 else [6])
    assert fork_chain((9, 1, 2), 1, ()) == chain((9, 1, 2))


def copies_of(rule: Copying, count: int = 1, *, stops=frozenset(), steps=50, capacity=999) -> dict[int, Tree]:
    copies = StepCopies(SuffixProposer(matcher()), capacity)
    states = [a_state(list(TWO_WAYS), request, stops=stops) for request in range(count)]
    members = [
        DecodingSlot(RunDecode(SlotId(slot), state.valid, state.tokens[-1], steps=steps, copying=rule), state)
        for slot, state in enumerate(states)
    ]
    copies.find_matches(members)
    found = copies.choose(members)
    return {slot: found.build_tree(slot, TWO_WAYS[-1]) for slot in found.chains}


def a_rule(chain_width: int, branch: int, rows: int = 64) -> Copying:
    every = len(MATCH_CLASSES)
    return Copying((chain_width,) * every, rows, 9, (branch,) * every)


def test_a_branch_gets_the_rows_that_the_chain_leaves():
    whole = fork_chain((3, 4, 5, 6, 7), 1, (8, 9))
    assert copies_of(a_rule(4, 2)) == {0: whole}
    assert copies_of(a_rule(4, 2, rows=6)) == {0: fork_chain((3, 4, 5, 6, 7), 1, (8,))}
    assert copies_of(a_rule(4, 2, rows=5)) == {0: chain((3, 4, 5, 6, 7))}
    assert copies_of(a_rule(4, 2, rows=9), 2) == {0: chain((3, 4, 5, 6, 7)), 1: chain((3, 4, 5, 6))}


def test_a_tree_is_no_deeper_than_the_answer_or_the_slot_goes_on():
    for limits in ({"steps": 3}, {"capacity": len(TWO_WAYS) + 2}):
        assert copies_of(a_rule(4, 3), **limits) == {0: fork_chain((3, 4, 5), 1, (8,))}
    assert copies_of(a_rule(4, 3), steps=2) == {0: chain((3, 4))}
    assert copies_of(a_rule(4, 3), stops=frozenset({9})) == {0: fork_chain((3, 4, 5, 6, 7), 1, (8, 9))}
    assert copies_of(a_rule(4, 3), stops=frozenset({4})) == {0: chain((3, 4))}


# --- with an executor ---


def copying(client: Caller, rule: Copying, steps: int) -> EffectRequest:
    effect_request = client.round()
    return EffectRequest(effect_request.request, evolve(effect_request.effect, copying=rule, steps=steps))


@usual_where(lambda places: places["count"] == (places["sampling"] + places["ahead"]) % 2)
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("count", [1, 3])
async def test_trees_never_change_the_answer(shard, sampling, ahead, count):
    prompts = [prompt_of(30, 12) * 3, prompt_of(31, 20) + prompt_of(31, 14) * 2, prompt_of(32, 5) * 8][:count]
    plain = drive(shard)
    answers = [await plain.answer(prompt, sampling, 90) for prompt in prompts]
    driver = Driver(DeviceExecutor(evolve(plain.executor.parts, text_proposer=SuffixProposer(matcher()))))
    if ahead:
        let_run_ahead(driver)
    driver.requests = 100
    clients = [await driver.open(prompt, sampling, slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    outcomes = list[Decoded]()
    while min(len(client.answer) for client in clients) < 60:
        found = await driver.perform(*[copying(client, a_rule(5, 3), 20) for client in clients])
        for client, outcome in zip(clients, found, strict=True):
            assert isinstance(outcome, Decoded)
            outcomes.append(outcome)
            client.take(outcome)
    for client, answer in zip(clients, answers, strict=True):
        assert client.answer[:60] == answer[:60]
    assert driver.executor.close()


@pytest.mark.parametrize("way", ["first", "second"])
async def test_a_branch_is_verified_and_its_tokens_are_kept(shard, way):
    """The text has gone on in two ways, twice in the first one."""
    ways = {"first": prompt_of(40, 6), "second": prompt_of(41, 6)}
    lead = prompt_of(42, 5)
    prompt = [*lead, *ways["second"], *lead, *ways["first"], *lead, *ways["first"], 1]
    answer = (*lead, *ways[way])
    driver = drive(
        shard,
        text_proposer=SuffixProposer(matcher()),
        match_grammar=force_answers({"a": answer}, shard.spec.vocab_size),
    )
    client = await driver.open(prompt, Sampling(grammar=Grammar("regex", "a")))
    await client.prefill()
    outcomes = []
    while len(client.answer) < len(answer):
        (done,) = await driver.perform(copying(client, make_copying(9, 3, 1), len(answer) - len(client.answer)))
        client.take(done)
        outcomes.append(done)
    assert tuple(client.answer) == answer
    (tree,) = [one for one in outcomes if one.branched]
    assert (tree.proposed, tree.copied, tree.rows) == (9, 6, 10)
    # Where steps run ahead of the host, a match is found one token later.
    before_branch = 1 if shard.spec.runs_ahead else 2
    assert (tree.on_branch, tree.accepted) == ((3, before_branch + 3) if way == "second" else (0, 6))
    assert driver.executor.close()
