"""Texts without a match are searched after some steps only: how often, when a match is found, and what is archived."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposer import DecodingSlot
from adapters.device.speculation.step_copies import StepCopies
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from effects.decode import (
    FIRST_SEARCH_SHARE,
    FRUITLESS_TEXTS,
    LONGEST_SEARCH_GAP,
    SEARCH_SHARE,
    Copying,
    RunDecode,
    choose_search_gap,
)
from effects.ids import RequestId, SlotId

MATCHER = build_text_matcher()
pytestmark = [
    pytest.mark.skipif(MATCHER is None, reason="there is no compiled library"),
    pytest.mark.timeout(60),
]
RULE = Copying((3, 3, 3, 3, 3), 64, 8)
VOCAB = 1 << 30  # so large that no three random tokens come twice


@define(eq=False)
class CountedSearches(SuffixProposer):
    """Searches as usual, and notes which slots each search was for."""

    searches: list[tuple[int, ...]] = field(init=False, factory=list[tuple[int, ...]])

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        self.searches.append(tuple(slot for slot, _ in slots))
        return super().find_matches(slots)


@define(eq=False)
class Decoding:
    """Requests that decode together, and what is searched for them."""

    states: dict[int, SlotState]  # by slot
    proposer: CountedSearches = field(init=False)
    copies: StepCopies = field(init=False)

    def __attrs_post_init__(self) -> None:
        assert MATCHER is not None
        self.proposer = CountedSearches(MATCHER)
        self.copies = StepCopies(self.proposer, 1 << 20)

    def take_step(self, tokens: Sequence[int], *, rule: Copying | None = RULE, steps: int = 1 << 20) -> list[int]:
        """Give each request its next token, and return the matches. steps: left of the launch."""
        members = list[DecodingSlot]()
        for (slot, state), token in zip(self.states.items(), tokens, strict=True):
            effect = RunDecode(SlotId(slot), state.valid, state.tokens[-1], steps=steps, copying=rule)
            members.append(DecodingSlot(effect, state))
            state.tokens.append(token)
        return list(self.copies.find_matches(members))


def begin(texts: Sequence[Sequence[int]], stop: int = -1) -> Decoding:
    return Decoding({slot: make_state(text, slot, stop) for slot, text in enumerate(texts)})


def make_state(text: Sequence[int], request: int, stop: int = -1) -> SlotState:
    tokens = list(text)
    return SlotState(RequestId(request), tokens, len(tokens) - 1, None, stops=frozenset({stop}))  # type: ignore[arg-type]


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def test_gaps_grow_with_the_tokens_that_had_no_match():
    counts = (0, 15, 16, 32, 64, 128, 4096)
    assert [choose_search_gap(count, 1) for count in counts] == [1, 1, 2, 4, 8, 16, 16]


def test_gaps_grow_with_the_square_root_of_the_members():
    counts = (0, 3, 4, 8, 32, 128, 4096)
    assert [choose_search_gap(count, 16) for count in counts] == [1, 1, 2, 4, 16, 64, 64]


def test_gaps_of_a_text_that_has_never_had_a_match_begin_longer_and_grow_faster():
    counts = (0, 7, 8, 16, 64, 4096)
    assert [choose_search_gap(count, 1, has_matched=False) for count in counts] == [1, 1, 2, 4, 16, 16]
    assert [choose_search_gap(count, 16, has_matched=False) for count in counts] == [4, 4, 8, 16, 64, 64]


@pytest.mark.parametrize(("members", "most"), [(1, 36), (4, 22), (16, 13)])
def test_text_that_repeats_nothing_is_searched_in_few_steps(members: int, most: int):
    rng = random.Random(members)
    decoding = begin([draw(rng, 64) for _ in range(members)])
    for _ in range(256):
        assert decoding.take_step(draw(rng, members)) == [0] * members
    searches = decoding.proposer.searches
    assert most - 9 <= len(searches) <= most
    assert set(searches) == {tuple(range(members))}, "all members in the same steps"


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("unmatched", [3, 20, 50, 100, 300])
def test_a_match_is_found_late_by_an_eighth_of_the_tokens_without_one_and_the_first_by_a_quarter(
    unmatched: int, is_first: bool
):
    rng = random.Random(unmatched)
    prompt = draw(rng, 200)
    decoding = begin([prompt])
    if not is_first:
        assert [decoding.take_step([token])[0] for token in prompt[:5]] == [0, 0, 3, 4, 5]
    for token in draw(rng, unmatched):
        assert decoding.take_step([token]) == [0]
    matches = [decoding.take_step([token])[0] for token in prompt[50:150]]
    late = next(at for at, matched in enumerate(matches) if matched) - 2  # a match has three tokens at least
    share = FIRST_SEARCH_SHARE if is_first else SEARCH_SHARE
    assert 0 <= late <= max(0, min(unmatched // share, LONGEST_SEARCH_GAP))
    assert matches[late + 2 :] == [min(64, at + 1) for at in range(late + 2, 100)], "every step once there is a match"


def test_a_member_with_a_match_is_searched_in_each_step_and_the_others_are_not():
    rng = random.Random(2)
    prompt = draw(rng, 100)
    decoding = begin([prompt, draw(rng, 100)])
    for _ in range(130):
        decoding.take_step(draw(rng, 2))
    decoding.take_step([prompt[10], rng.randrange(VOCAB)])
    for token in prompt[11:40]:
        decoding.take_step([token, rng.randrange(VOCAB)])
    before = len(decoding.proposer.searches)
    for token in prompt[40:72]:
        found = decoding.take_step([token, rng.randrange(VOCAB)])
        assert found[0] > 0 == found[1]
    searches = decoding.proposer.searches[before:]
    assert len(searches) == 32
    assert searches.count((0, 1)) == 32 // LONGEST_SEARCH_GAP
    assert searches.count((0,)) == 32 - 32 // LONGEST_SEARCH_GAP


def test_an_answer_that_ends_between_two_searches_can_be_copied_by_the_next_request():
    rng = random.Random(3)
    decoding = begin([draw(rng, 50)], stop=7)
    answer = draw(rng, 150)
    for token in answer:
        decoding.take_step([token])
    searched = len(decoding.proposer.searches)
    assert decoding.take_step([7]) == [0]
    assert len(decoding.proposer.searches) == searched, "its last step is not one that is searched"
    decoding.states[1] = make_state([*draw(rng, 20), *answer[30:34]], 1)
    del decoding.states[0]
    assert decoding.take_step([answer[34]]) == [5]


def test_another_request_in_the_same_slot_is_searched_at_once():
    rng = random.Random(4)
    decoding = begin([draw(rng, 50)])
    for _ in range(200):
        decoding.take_step(draw(rng, 1))
    prompt = draw(rng, 50)
    decoding.states[0] = make_state([*prompt, *prompt[:2]], 1)
    assert decoding.take_step([prompt[2]]) == [3]


def test_steps_that_ask_for_no_match_are_noted_once_and_the_next_that_asks_is_searched():
    rng = random.Random(5)
    prompt = draw(rng, 50)
    decoding = begin([prompt])
    assert [decoding.take_step([token], rule=None) for token in prompt[:20]] == [[0]] * 20
    assert decoding.proposer.searches == []
    assert decoding.take_step([prompt[20]]) == [21]


def test_a_text_that_had_a_match_is_searched_before_its_launch_ends_and_another_one_is_not():
    """Only then may the core give it a rule by which it copies at once. Launches without rules are searched no more."""
    rng = random.Random(6)
    prompts = [draw(rng, 50), draw(rng, 50)]
    decoding = begin(prompts)
    for at in range(4):
        decoding.take_step([prompts[0][at], rng.randrange(VOCAB)])
    searched = len(decoding.proposer.searches)
    for at in range(4, 20):
        assert decoding.take_step([prompts[0][at], rng.randrange(VOCAB)], rule=None) == [0, 0]
    assert len(decoding.proposer.searches) == searched
    assert decoding.take_step([prompts[0][20], rng.randrange(VOCAB)], rule=None, steps=1) == [21, 0]
    assert decoding.proposer.searches[searched:] == [(0,)]
    decoding.states[0] = make_state(prompts[0], 2)
    decoding.take_step([prompts[0][0], rng.randrange(VOCAB)], rule=None, steps=1)
    assert len(decoding.proposer.searches) == searched + 1, "the slot has another request now"


def test_texts_that_are_never_searched_are_not_indexed():
    rng = random.Random(7)
    decoding = begin([draw(rng, 50), draw(rng, 50)])
    for _ in range(40):
        decoding.take_step(draw(rng, 2), rule=None, steps=1)
    assert decoding.proposer.searches == []
    assert decoding.proposer.nbytes == 0


def test_a_member_that_ends_makes_no_search_due():
    rng = random.Random(8)
    decoding = begin([draw(rng, 50) for _ in range(4)])
    for _ in range(130):
        decoding.take_step(draw(rng, 4))
    searched = len(decoding.proposer.searches)
    for left in (3, 2):
        del decoding.states[left]
        for _ in range(2):
            decoding.take_step(draw(rng, left))
    assert len(decoding.proposer.searches) == searched


def test_where_many_texts_had_no_match_the_next_ones_are_searched_as_seldom_as_any_until_one_has_a_match():
    rng = random.Random(9)
    decoding = begin([draw(rng, 50)])
    for request in range(1 + FRUITLESS_TEXTS):
        decoding.states[0] = make_state(draw(rng, 50), request)
        for _ in range(5):
            assert decoding.take_step(draw(rng, 1)) == [0]
    before = len(decoding.proposer.searches)
    prompt = draw(rng, 50)
    decoding.states[0] = make_state(prompt, 100)
    found = [decoding.take_step([token])[0] for token in prompt[:40]]
    first = next(at for at, matched in enumerate(found) if matched)
    assert first < LONGEST_SEARCH_GAP + 2
    assert found[first:] == list(range(first + 1, 41)), "each step from then on"
    assert len(decoding.proposer.searches) - before <= 40 - first + 1
    prompt = draw(rng, 50)
    decoding.states[0] = make_state(prompt, 101)
    assert [decoding.take_step([token])[0] for token in prompt[:4]] == [0, 0, 3, 4], "one had a match"
