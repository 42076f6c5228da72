"""Copies of earlier text: what is found, what is proposed, and that answers stay as they are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.device.speculation import suffix_proposer
from adapters.device.speculation.proposer import DecodingSlot, TextProposer
from adapters.device.speculation.step_copies import StepCopies
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.kernels.interfaces.text_matching import END_OF_TEXT, NO_BRANCH, IndexedText, TextMatcher
from effects.all import EffectRequest
from effects.decode import MATCH_CLASSES, Copying, Decoded, RunDecode, share_rows
from effects.grammar import Grammar
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.prefill import PrefillAdvanced, RunPrefill
from engine.tools.bench.forced_answer import force_answers
from tests.device.driver import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Caller,
    Driver,
    drive,
    let_run_ahead,
    prompt_of,
    straightforward,
)
from tests.device.fake_shard import FakeShard
from tests.pairs import usual_where

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
    search(texts[0], texts[1] if archive else None)
    return texts[0].matched, texts[0].copy(count)


def search(own: IndexedText, archive: IndexedText | None = None, tokens: Sequence[int] = ()) -> int:
    """Append tokens to a text, search it, and return the length of its match."""
    (matched,) = matcher().make_batch([(own, archive)]).match_appended([tokens])
    assert matched == own.matched
    return matched


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
        search(growing)
    search(growing)
    assert (growing.matched, growing.copy(4)) == match([token for part in parts for token in part])


def test_an_index_that_is_built_again_for_a_longer_text_finds_the_same():
    text = matcher().make_text()
    tokens = [token for start in range(0, 3000, 3) for token in (start, start + 1, start + 2)]
    text.append(tokens[:1000])
    search(text)
    text.append([*tokens[1000:], *tokens[500:520]])
    search(text)
    assert (text.matched, text.copy(2)) == (20, tuple(tokens[520:522]))


def test_a_text_that_is_indexed_beside_its_first_step_has_the_matches_of_one_that_is_not():
    prompt = [5, 6, 7, 8, 9, 5, 6, 7]
    found = []
    for is_indexed in (False, True):
        proposer, state = SuffixProposer(matcher()), a_state([*prompt])
        if is_indexed:
            StepCopies(proposer, 100).index_texts(
                [
                    DecodingSlot(RunDecode(SlotId(0), 7, 7, steps=2, copying=Copying((4,) * 4, 8, 8)), state),
                    DecodingSlot(RunDecode(SlotId(1), 7, 7, steps=2), a_state([*prompt], 2)),
                ]
            )
            assert list(proposer._texts) == [0]  # noqa: SLF001 - nobody asks for the other one's matches
            assert proposer._texts[0].read == len(prompt)  # noqa: SLF001
        state.tokens.append(8)
        found.append((proposer.find_matches([(0, state)]), proposer.copy(0, 3)))
    assert found[0] == found[1] == ([4], (9, 5, 6))


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
        assert proposer.copy(request, 3) == tuple(answer[15:18] if length else ())


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


def test_a_match_counts_for_the_text_that_it_was_found_in_only():
    copies = StepCopies(SuffixProposer(matcher()), 999)
    text = [1, 2, 3, 4, 1, 2, 3]
    state = a_state([*text])
    member = a_member(0, state, a_rule(2))
    assert copies.choose([member]).chains == {}, "nothing was searched yet"
    assert copies.find_matches([member]) == [3]
    assert copies.choose([member]).chains == {0: (4, 1)}
    assert copies.find_class(member.effect, a_state([*text], 2)) == -1
    assert copies.find_class(member.effect, state) == 0
    state.tokens.append(5)
    assert copies.find_class(member.effect, state) == -1
    assert copies.choose([member]).chains == {}


@pytest.mark.parametrize("archived", [False, True])
def test_one_more_token_gives_what_a_search_of_the_whole_text_gives(archived):
    """Texts of three kinds of tokens have matches everywhere, and some of them go on in the archive."""
    draw = random.Random(7)
    own = [draw.randrange(3) for _ in range(2100)]  # so many that the text grows, and is indexed in a long call
    archive = matcher().make_text()
    archive.append([draw.randrange(3) for _ in range(1500)])
    searched = archive if archived else None
    step_by_step = matcher().make_text()
    for count, token in enumerate(own, 1):
        matched = search(step_by_step, searched, [token])
        if count % 50:
            continue
        at_once = matcher().make_text()
        at_once.append(own[:count])
        search(at_once, searched)
        assert (matched, step_by_step.copy(31)) == (at_once.matched, at_once.copy(31))


def test_tokens_of_launches_that_copy_nothing_are_searched_and_archived_later():
    proposer = SuffixProposer(matcher())
    first = a_state([1, 2, 3], stops=frozenset({0}))
    copies = StepCopies(proposer, 999)
    for token in [*range(100, 140), 0]:
        first.tokens.append(token)
        assert copies.find_matches([a_member(0, first, None)]) == [0]
    later = a_state([9, *range(110, 115)], 2)
    assert copies.find_matches([a_member(0, later, None)]) == [0], "there is a match, but nobody asks for it"
    assert copies.choose([a_member(0, later, a_rule(4))]).chains == {}
    later.tokens += [115, 116]
    assert copies.find_matches([a_member(0, later, a_rule(4))]) == [7]
    assert copies.choose([a_member(0, later, a_rule(4))]).chains == {0: (117, 118, 119, 120)}
    assert copies.find_matches([a_member(0, later, None)]) == [0]
    assert copies.choose([a_member(0, later, a_rule(4))]).chains == {}, "the match is an old one now"


# --- what a step copies ---


def a_rule(*counts: int, rows: int = 64, steps: int = 9) -> Copying:
    return Copying((*counts, *(counts[-1:] * (len(MATCH_CLASSES) - len(counts)))), rows, steps)


def a_member(slot: int, state: SlotState, rule: Copying | None, steps: int = 50) -> DecodingSlot:
    return DecodingSlot(RunDecode(SlotId(slot), state.valid, state.tokens[-1], steps=steps, copying=rule), state)


def copies_of(*rules: Copying | None, stops: frozenset[int] = frozenset(), steps: int = 50, capacity: int = 999):
    """Return what is copied of one text in several slots. The text ends with a match of five tokens."""
    copies = StepCopies(SuffixProposer(matcher()), capacity)
    text = [*range(1, 40), 5, 6, 7, 8, 9]
    states = [a_state(list(text), request, stops=stops) for request in range(1, 1 + len(rules))]
    members = [a_member(slot, state, rules[slot], steps) for slot, state in enumerate(states)]
    copies.find_matches(members)
    found = copies.choose(members)
    assert not found.branches
    return found.chains


def test_as_many_tokens_are_copied_as_the_launch_says_for_the_match():
    assert copies_of(a_rule(1, 3, 9)) == {0: (10, 11, 12)}
    assert copies_of(None) == copies_of(a_rule(7, 0, 9)) == copies_of(a_rule(7, steps=0)) == {}


def test_copies_end_where_the_answer_or_the_slot_does():
    assert copies_of(a_rule(9), stops=frozenset({12})) == {0: (10, 11, 12)}
    assert copies_of(a_rule(9), steps=3) == {0: (10, 11)}
    assert copies_of(a_rule(9), capacity=46) == {0: (10, 11)}


def test_no_request_is_looked_up_where_the_last_search_found_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = StepCopies(SuffixProposer(matcher()), 999)
    states = [a_state([*range(first, first + 40)], first) for first in (1, 101)]
    members = [a_member(slot, state, a_rule(9)) for slot, state in enumerate(states)]
    asked = list[int]()
    look = StepCopies.find_class
    monkeypatch.setattr(
        StepCopies, "find_class", lambda copies, effect, state: asked.append(effect.slot) or look(copies, effect, state)
    )
    assert copies.find_matches(members) == [0, 0]
    assert (copies.choose(members).chains, asked) == ({}, [])
    states[1].tokens += range(105, 109)
    assert copies.find_matches(members[1:]) == [4]
    assert (copies.choose(members).chains, asked) == ({1: tuple(range(109, 118))}, [0, 1])
    states[1].tokens.append(7000)
    assert copies.find_matches(members) == [0, 0]
    assert (copies.choose(members).chains, asked) == ({}, [0, 1])


def test_a_request_that_leaves_with_a_match_is_looked_up_once_more_and_no_further(monkeypatch: pytest.MonkeyPatch):
    copies = StepCopies(SuffixProposer(matcher()), 999)
    states = [a_state([*range(first, first + 40)], first) for first in (1, 101)]
    members = [a_member(slot, state, a_rule(9)) for slot, state in enumerate(states)]
    states[1].tokens += range(105, 109)
    assert copies.find_matches(members) == [0, 4]
    assert copies.has_matching_text
    states[0].tokens.append(50)
    assert copies.find_matches(members[:1]) == [0]
    assert copies.has_matching_text, "the other one may come back"
    assert copies.choose(members[:1]).chains == {}
    assert not copies.has_matching_text
    for token in (109, 110):
        states[1].tokens.append(token)
        assert copies.find_matches(members)[1] == token - 104
    assert copies.choose(members).chains == {1: tuple(range(111, 120))}, "it has come back"


def test_all_members_share_the_rows_of_a_step():
    assert copies_of(a_rule(4, rows=8), None, a_rule(4, rows=8)) == {0: (10, 11, 12), 2: (10, 11)}
    assert copies_of(a_rule(4, rows=4), a_rule(4, rows=4), a_rule(4, rows=4)) == {0: (10,)}
    assert copies_of(a_rule(4, rows=2), a_rule(4, rows=2)) == {}


def test_nobody_gets_more_rows_than_it_wants_and_no_row_is_left_over():
    assert share_rows([9, 2, 9], 7) == [3, 2, 2]
    assert share_rows([3, 31], 32) == [3, 29]
    assert share_rows([4, 4], 0) == share_rows([4, 4], -3) == [0, 0]
    draw = random.Random(5)
    for _ in range(300):
        wanted = [draw.randrange(32) for _ in range(draw.randrange(9))]
        rows = draw.randrange(80)
        shares = share_rows(wanted, rows)
        assert sum(shares) == min(rows, sum(wanted))
        assert all(share <= own for share, own in zip(shares, wanted, strict=True))
        cut = [share for share, own in zip(shares, wanted, strict=True) if share < own]
        assert not cut or max(shares) <= min(cut) + 1, "nobody gets more while somebody else lacks rows"


# --- with an executor ---


def copying(client: Caller, rule: Copying | None, steps: int = 1) -> EffectRequest:
    effect_request = client.round()
    return EffectRequest(effect_request.request, evolve(effect_request.effect, copying=rule, steps=steps))


async def answer_with_copies(driver: Driver, clients: list[Caller], count: int, steps: int) -> list[Decoded]:
    """All in one launch after the other. Returns all outcomes."""
    found = list[Decoded]()
    while min(len(client.answer) for client in clients) < count:
        effect_requests = [copying(client, a_rule(3, 7, steps=4), steps) for client in clients]
        for client, outcome in zip(clients, await driver.perform(*effect_requests), strict=True):
            assert isinstance(outcome, Decoded)
            found.append(outcome)
            client.take(outcome)
    return found


@usual_where(lambda places: places["count"] == (places["sampling"] + places["ahead"]) % 2)
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("count", [1, 3])
async def test_copies_never_change_the_answer(shard, sampling, ahead, count):
    prompts = [prompt_of(30, 12) * 3, prompt_of(31, 20), prompt_of(32, 5) * 8][:count]
    plain = drive(shard)
    answers = [await plain.answer(prompt, sampling, 90) for prompt in prompts]
    driver = Driver(DeviceExecutor(evolve(plain.executor.parts, text_proposer=SuffixProposer(matcher()))))
    if ahead:
        let_run_ahead(driver)
    driver.requests = 100
    clients = [await driver.open(prompt, sampling, slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    outcomes = await answer_with_copies(driver, clients, 40, 20)
    for client, expected_answer in zip(clients, answers, strict=True):
        assert client.answer[:40] == expected_answer[:40]
    assert all(one.steps <= len(one.tokens) <= 20 for one in outcomes)
    assert all(one.rows > count for one in outcomes if one.copied)
    assert driver.executor.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
async def test_a_launch_goes_on_whether_copies_are_right_wrong_or_missing(ahead):
    """The fake model picks from what it has read, so it repeats neither the prompt nor itself for long."""
    fake = FakeShard()
    plain = drive(fake)
    prompt = prompt_of(33, 12)
    answer = await plain.answer(prompt, count=40)
    driver = Driver(DeviceExecutor(evolve(plain.executor.parts, text_proposer=SuffixProposer(matcher()))))
    if ahead:
        let_run_ahead(driver)
    driver.requests = 100
    steps = list[Decoded]()
    client = await driver.open(prompt)
    await client.prefill()
    (done,) = await driver.perform(copying(client, a_rule(7, steps=99), steps=40))
    steps.append(done)
    assert [*done.tokens] == answer[: len(done.tokens)]
    assert len(done.tokens) == 40, "one launch gave all of them"
    assert driver.executor.close()


async def test_a_launch_ends_after_as_many_steps_with_copies_as_it_may_have(shard):
    match_grammar = force_answers({"a": tuple(prompt_of(35, 6)) * 9}, shard.spec.vocab_size)
    driver = drive(shard, text_proposer=SuffixProposer(matcher()), match_grammar=match_grammar)
    client = await driver.open(prompt_of(30, 9), Sampling(grammar=Grammar("regex", "a")))
    await client.prefill()
    outcomes = []
    for _ in range(6):
        (done,) = await driver.perform(copying(client, a_rule(3, steps=1), steps=8))
        client.take(done)
        outcomes.append(done)
    assert max(one.proposed for one in outcomes) <= 3, "one step with copies at most"
    assert any(one.proposed for one in outcomes)
    assert driver.executor.close()


async def test_a_grammar_is_obeyed_beside_copies_in_one_call(shard):
    """The compiled step gets a mask for each row; what it picks is what the separate calls pick."""
    answer = tuple(prompt_of(35, 6)) * 5
    match_grammar = force_answers({"a": answer}, shard.spec.vocab_size)
    sampling = Sampling(grammar=Grammar("regex", "a"))
    found = []
    driver = drive(shard, match_grammar=match_grammar)
    for native in (True, False):
        parts = evolve(driver.executor.parts, text_proposer=SuffixProposer(matcher()))
        driver = Driver(DeviceExecutor(parts), driver.requests)
        if not native:
            driver.executor.decoding.native = None
        client = await driver.open(prompt_of(36, 9), sampling)
        await client.prefill()
        (done,) = await driver.perform(copying(client, a_rule(7, steps=99), steps=len(answer)))
        found.append(evolve(done, ns=0))
        assert done.tokens == answer
        assert done.accepted > 10
    assert driver.executor.close()
    assert found[0] == found[1]


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


@define
class Script(TextProposer):
    """Matches at chosen lengths of the text, and what it copies is wrong."""

    at: frozenset[tuple[int, int]]  # slot, and its tokens
    copied: list[int] = field(factory=list[int])  # slots, in the order in which they copied
    lengths: dict[int, int] = field(factory=dict[int, int])

    def find_matches(self, slots):
        self.lengths |= {slot: len(state.tokens) for slot, state in slots}
        return [40 * ((slot, len(state.tokens)) in self.at) for slot, state in slots]

    def index_texts(self, slots):
        """There is no text."""

    def note_tokens(self, slots):
        self.find_matches(slots)

    def copy(self, slot, count):
        self.copied.append(slot)
        return (0,) * count

    def find_branch(self, slot, chain, count):
        return NO_BRANCH

    def count_on_branch(self, slot):
        return 0


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("matches", [False, True], ids=["no match", "a match"])
async def test_a_launch_whose_members_have_changed_goes_on_until_there_is_a_match(ahead, matches):
    """The first request ends after 4 tokens. After 7, nothing is copied for the second one: the launch ends there."""
    fake, prompts = FakeShard(), (prompt_of(50, 20), prompt_of(51, 20))
    answers = [straightforward(fake, prompt, GREEDY, 30) for prompt in prompts]
    text = Script(frozenset({(1, 27)} if matches else ()))
    driver = drive(fake, text_proposer=text)
    if ahead:
        let_run_ahead(driver)
    clients = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    steps = [copying(client, a_rule(3, 7, steps=9), count) for client, count in zip(clients, (4, 20), strict=True)]
    first, second = await driver.perform(*steps)
    assert [*first.tokens] == answers[0][:4]
    assert [*second.tokens] == answers[1][: len(second.tokens)]
    # The step behind the one with the match was launched before that one was read.
    assert len(second.tokens) == (7 + ahead if matches else 20)
    assert text.copied == []
    assert driver.executor.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
async def test_while_no_member_has_ended_a_match_is_copied_within_the_launch(ahead):
    fake, prompts = FakeShard(), (prompt_of(50, 20), prompt_of(51, 20))
    answers = [straightforward(fake, prompt, GREEDY, 30) for prompt in prompts]
    matching = frozenset({(1, 27), (1, 28), (1, 29)})  # as long as a step that was launched before is not counted
    text = Script(matching)
    driver = drive(fake, text_proposer=text)
    if ahead:
        let_run_ahead(driver)
    clients = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    outcomes = await driver.perform(*[copying(client, a_rule(3, 7, steps=9), 12) for client in clients])
    for answer, done in zip(answers, outcomes, strict=True):
        assert [*done.tokens] == answer[:12]
    assert set(text.copied) == {1}
    assert driver.executor.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answered", [1, 7, 50])
async def test_a_launch_that_takes_a_prompt_along_copies_nothing_and_ends_at_a_match(answered):
    """No member has ended or joined, but the core planned no copies beside a prompt."""
    fake, prompts = FakeShard(), (prompt_of(50, 20), prompt_of(51, 20))
    answers = [straightforward(fake, prompt, GREEDY, 30) for prompt in prompts]
    text = Script(frozenset({(1, 20 + answered)}))
    driver = drive(fake, text_proposer=text)
    let_run_ahead(driver)
    clients = [await driver.open(prompt, slot=slot) for slot, prompt in enumerate(prompts)]
    for client in clients:
        await client.prefill()
    late = await driver.open(prompt_of(52, 70), slot=2)
    steps = [copying(client, a_rule(3, 7, steps=9), 12) for client in clients]
    along = EffectRequest(late.request, RunPrefill(late.slot, 0, 69, forward_rows=16))
    *outcomes, read = await driver.perform(*steps, along)
    # The step behind the one with the match was launched before that one was read.
    taken = min(answered + 1, 12)
    for answer, done in zip(answers, outcomes, strict=True):
        assert [*done.tokens] == answer[:taken]
    assert text.copied == []
    assert read == PrefillAdvanced(min(14 * taken, 69))
    assert driver.executor.close()


# --- answers of earlier servers ---


@define
class Kept:
    """Implements `AnswerKeeper` in memory."""

    answers: list[tuple[str, Tokens]] = field(factory=list)
    taken: list[str] = field(factory=list)

    def take_answers(self, salt: str, most: int) -> Sequence[Tokens]:
        assert most < suffix_proposer.MOST_ARCHIVED, "an archive would drop the older ones again"
        self.taken.append(salt)
        found = [tokens for own, tokens in self.answers if own == salt]
        self.answers = [one for one in self.answers if one[0] != salt]
        return found

    def keep_answer(self, tokens: Tokens, salt: str) -> None:
        self.answers.append((salt, tokens))


def test_a_request_copies_the_answers_of_an_earlier_server_with_its_salt_only():
    kept = Kept([("a", tuple(range(100, 140))), ("b", tuple(range(200, 240)))])
    proposer = SuffixProposer(matcher(), kept)
    assert proposer.find_matches([(0, a_state([9, *range(200, 205)], salt="a"))]) == [0]
    later = a_state([9, *range(110, 115)], 2, salt="a")
    assert proposer.find_matches([(1, later)]) == [5]
    assert proposer.copy(1, 3) == (115, 116, 117)
    assert proposer.find_matches([(0, a_state([9, *range(200, 205)], 3, salt="b"))]) == [5]
    assert kept.taken == ["a", "b"]


def test_answers_with_tokens_that_the_vocabulary_has_not_are_left_out():
    kept = Kept([("", (1, 2, 3, 4, 99)), ("", (-5, 1, 2, 3, 5)), ("", (1, 2, 3, 6)), ("", ())])
    proposer = SuffixProposer(matcher(), kept, vocab_size=50)
    assert proposer.find_matches([(0, a_state([9, 1, 2, 3]))]) == [3]
    assert proposer.copy(0, 2) == (6,)


def test_answers_are_kept_when_they_end_or_when_the_server_does_unless_their_request_says_no():
    kept = Kept()
    proposer = SuffixProposer(matcher(), kept)
    ended = a_state([1, 2], 1, salt="a", stops=frozenset({0}))
    private = a_state([1, 2], 2, stops=frozenset({0}), keeps_answer=False)
    running = a_state([1, 2], 3)
    states = [(0, ended), (1, private), (2, running)]
    proposer.find_matches(states)
    for _, state in states:
        state.tokens += range(100, 130)
    ended.tokens.append(0)
    private.tokens.append(0)
    proposer.find_matches(states)
    assert kept.answers == [("a", (1, 2, *range(100, 130), 0))]
    assert proposer.find_matches([(1, a_state([9, 105, 106, 107], 4))]) == [3], "within this server it is copied"
    proposer.archive_all()
    proposer.archive_all()
    assert kept.answers[1:] == [("", (1, 2, *range(100, 130)))]
