"""Copies of earlier text: what is found, what is proposed, and that answers stay as they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.device.speculation import suffix_proposer
from adapters.device.speculation.proposer import DraftRequest
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.kernels.text_matching import END_OF_TEXT, TextMatcher
from effects.all import EffectRequest
from effects.decode import Decoded
from effects.ids import RequestId
from tests.device.driver import GREEDY, PENALISED, SAMPLED, Caller, Driver, drive, let_run_ahead, prompt_of
from tests.device.fake_shard import FakeShard

MATCHER = build_text_matcher()
pytestmark = pytest.mark.skipif(MATCHER is None, reason="there is no compiled library")
TEXTS = st.lists(st.integers(1, 3), min_size=1, max_size=18)  # so short that no place is left out


def matcher() -> TextMatcher:
    assert MATCHER is not None
    return MATCHER


def match(own: list[int], archive: list[int] | None = None, count: int = 4) -> tuple[int, tuple[int, ...]]:
    texts = [matcher().make_text() for _ in range(2)]
    texts[0].append(own)
    if archive:
        texts[1].append(archive)
    found = matcher().match([(texts[0], texts[1] if archive else None)])
    return found.lengths[0], found.copy(0, count)


def a_state(tokens: list[int], request: int = 1, **named: Any) -> SlotState:
    return SlotState(RequestId(request), tokens, len(tokens) - 1, None, **named)  # type: ignore[arg-type]


def expected(own: list[int]) -> tuple[int, int | None]:
    """The longest match of three tokens or more, and what followed most of its places, the newest of them first."""
    lengths = {
        index: next(n for n in range(index + 1) if n == index or own[index - 1 - n] != own[-1 - n])
        for index in range(len(own))
    }
    best = max(lengths.values())
    if best < 3:
        return 0, None
    indices = [index for index in reversed(range(len(own))) if lengths[index] == best]
    return best, Counter(own[index] for index in indices).most_common(1)[0][0]


@given(TEXTS)
def test_the_longest_match_goes_on_as_most_of_its_places_did(own):
    length, copied = match(own, count=1)
    assert (length, *copied) == tuple(part for part in expected(own) if part is not None)


def test_a_text_goes_on_with_its_own_copy():
    assert match([9, 5, 6, 7, 5, 6, 7], count=8) == (3, (5, 6, 7, 5, 6, 7, 5, 6))


def test_a_match_counts_no_more_than_64_tokens():
    length, copied = match([*range(100), *range(99)], count=3)
    assert (length, copied) == (64, (99, 0, 1))


def test_other_texts_are_searched_for_what_is_longer_and_copied_to_their_end():
    other = [1, 2, 3, 4, 8, 9, END_OF_TEXT, 2, 3, 4]
    assert match([2, 3, 4, 7, 1, 2, 3, 4], other) == (4, (8, 9))
    assert match([1, 2, 3, 4, 7, 1, 2, 3, 4], other) == (4, (7, 1, 2, 3)), "the text itself goes before them"
    assert match([5, 8, 9, 2, 3], [8, 9, END_OF_TEXT, 2, 3]) == (0, ()), "no text goes on in another one"


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_a_text_that_grows_is_searched_like_one_that_came_at_once(parts):
    growing = matcher().make_text()
    for part in parts:
        growing.append(part)
        matcher().match([(growing, None)])
    found = matcher().match([(growing, None)])
    assert (found.lengths[0], found.copy(0, 4)) == match([token for part in parts for token in part])


def test_an_index_that_is_built_again_for_a_longer_text_finds_the_same():
    text = matcher().make_text()
    tokens = [token for start in range(0, 3000, 3) for token in (start, start + 1, start + 2)]
    text.append(tokens[:1000])
    matcher().match([(text, None)])
    text.append([*tokens[1000:], *tokens[500:520]])
    found = matcher().match([(text, None)])
    assert (found.lengths[0], found.copy(0, 2)) == (20, tuple(tokens[520:522]))


def test_an_answer_is_copied_for_a_later_request_of_the_same_salt_only():
    proposer = SuffixProposer(matcher())
    answer = list(range(100, 140))
    first = a_state([1, 2, 3], salt="a", stops=frozenset({0}))
    proposer.find_matches([(0, first)])
    first.tokens += [*answer, 0]
    assert proposer.find_matches([(0, first)]) == [0], "it has ended"
    for request, (salt, length) in enumerate([("a", 5), ("b", 0), ("", 0)], 2):
        later = a_state([9, *answer[10:15]], request, salt=salt)
        assert proposer.find_matches([(request, later)]) == [length]
    (tree,) = proposer.propose([DraftRequest(2, a_state([9, *answer[10:15]], 2, salt="a"), 7, 3)])
    assert tree.tokens == (answer[14], *answer[15:18]), "as many as there is room for"


def test_an_answer_without_a_stop_token_is_archived_when_its_slot_is_opened_again():
    proposer = SuffixProposer(matcher())
    first = a_state([1, 2, 3])
    proposer.find_matches([(0, first)])
    first.tokens += range(100, 140)
    proposer.find_matches([(0, first)])
    assert proposer.find_matches([(1, a_state([9, 105, 106, 107], 2))]) == [0]
    proposer.find_matches([(0, a_state([8], 3))])
    assert proposer.find_matches([(1, a_state([9, 105, 106, 107], 4))]) == [3]


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix_proposer, "MOST_ARCHIVED", 128)
    proposer = SuffixProposer(matcher())
    sizes = set()
    for request in range(1, 60):
        state = a_state([1, 2], request, salt=str(request % 20), stops=frozenset({0}))
        proposer.find_matches([(0, state)])
        state.tokens += [*range(request, request + 40), 0]
        proposer.find_matches([(0, state)])
        sizes.add(proposer.nbytes)
    assert max(sizes) <= (1 + suffix_proposer.MOST_SALTS) * 1024 * 12
    newest = a_state([7, *range(60, 64)], 99, salt=str(59 % 20))
    assert proposer.find_matches([(1, newest)]) == [4]


def test_nothing_is_proposed_behind_a_token_that_ends_the_answer():
    proposer = SuffixProposer(matcher())
    state = a_state([1, 2, 3, 4, 0, 5, 1, 2, 3], stops=frozenset({0}))
    (tree,) = proposer.propose([DraftRequest(0, state, 7, 7)])
    assert tree.tokens == (3, 4, 0)


# --- with an executor ---


def copying(client: Caller, propose: int, steps: int = 1) -> EffectRequest:
    effect_request = client.round(propose)
    return EffectRequest(effect_request.request, evolve(effect_request.effect, source="suffix", steps=steps))


async def answer_with_copies(driver: Driver, clients: list[Caller], count: int) -> None:
    """As the engine does it: who has a match copies, and the others go on plainly."""
    while min(len(client.answer) for client in clients) < count:
        effect_requests = [copying(client, 7 if client.done and client.done[-1].matched else 0) for client in clients]
        for client, outcome in zip(clients, await driver.perform(*effect_requests), strict=True):
            assert isinstance(outcome, Decoded)
            client.take(outcome)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_copies_never_change_the_answer(shard, sampling, ahead):
    prompts = [prompt_of(30, 12) * 3, prompt_of(31, 20), prompt_of(32, 5) * 8]
    plain = drive(shard)
    answers = [await plain.answer(prompt, sampling, 60) for prompt in prompts]
    driver = Driver(DeviceExecutor(evolve(plain.executor.parts, text_proposer=SuffixProposer(matcher()))))
    if ahead:
        let_run_ahead(driver)
    driver.requests = 100
    clients = [await driver.open(prompt, sampling, slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    await answer_with_copies(driver, clients, 40)
    for client, told in zip(clients, answers, strict=True):
        assert client.answer[:40] == told[:40]
    assert driver.executor.close()


async def test_a_launch_goes_on_alone_while_its_copies_are_right():
    """The fake model repeats a text, so that copies are right until the text ends."""
    fake = FakeShard()
    driver = drive(fake, text_proposer=SuffixProposer(matcher()))
    prompt = prompt_of(33, 12)
    told = await driver.answer(prompt, count=40)
    client = await driver.open([*prompt, *told[:20], 1, 2, *prompt], slot=1)
    await client.prefill()
    (first,) = await driver.perform(client.round())
    client.take(first)
    assert first.matched == 0 or first.matched >= 3
    (done,) = await driver.perform(copying(client, 3, steps=5))
    assert done.steps <= 5
    assert done.accepted <= done.proposed <= 15
    assert driver.executor.close()


async def test_plain_steps_that_run_ahead_say_what_matches(shard):
    driver = drive(shard, text_proposer=SuffixProposer(matcher()))
    let_run_ahead(driver)
    client = await driver.open(prompt_of(34, 6) * 6)
    await client.prefill()
    effect_request = client.round()
    (done,) = await driver.perform(EffectRequest(effect_request.request, evolve(effect_request.effect, steps=8)))
    tokens = [*client.tokens, *done.tokens]
    assert done.matched == expected(tokens)[0]
    assert driver.executor.close()
