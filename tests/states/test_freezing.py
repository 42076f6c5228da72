"""Freezing: messages that have aged are shortened once, and what is served only grows until more of them are."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from effects.compression import Compressed, Compression, PromptPart, select_tokens
from effects.ids import DeviceFailed
from effects.job import Job
from effects.job import find_aged_messages as aged_of
from effects.prompt_compression import CompressPrompt, KeepFrozen, PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded
from effects.scope import Scope
from effects.stream import CloseStream
from states import compress, policy
from states.events import ForRequest, Submitted
from states.kept_rows import make_prompt
from states.phases import make_report
from states.rates import Rates
from states.request_states import Compressing, Done, Prefilling, UnloadingScorer
from states.scope import map_served_boundaries, select_rows_to_keep
from states.settings import DecisionContext, Settings
from states.world import make_world
from tests.states.builders import ONE, PFLASH, PROMPT, STORE, Flat, a, a_job, a_waiting, advance, knowing, some
from tests.states.test_compress import RELEASE

SYSTEM, HOT = PromptPart("system", 0, 6), PromptPart("user", 16, 21)
FIRST = PromptPart("user", 6, 11, keep=400, name="first")
SECOND = PromptPart("assistant", 11, 16, keep=400, name="second")
PARTS = (SYSTEM, FIRST, SECOND, HOT)
ALWAYS = Compression("always", keep=400, parts=PARTS, continues=True, freeze=True, least=10)
KEPT = ((6, 7), (10, 11), (11, 12), (15, 16))  # the ends of both
SERVED = (*PROMPT[:7], *PROMPT[10:12], *PROMPT[15:])


def job(**changes: Any) -> Job:
    return a_job(compression=evolve(ALWAYS, **changes))


def known_to(first: bool, second: bool = False) -> tuple[PromptPart, ...]:
    """Return the parts of the conversation, of which the first, or the second too, was frozen before."""
    ends = ((0, 1), (4, 5))
    return (
        SYSTEM,
        evolve(FIRST, kept=ends if first else None),
        evolve(SECOND, kept=ends if second else None),
        HOT,
    )


@pytest.mark.parametrize(
    ("settings", "changes", "state", "expected"),
    [
        (PFLASH, {}, {}, (True, "aged")),
        (STORE, {}, {}, (False, "no_drafter")),
        (PFLASH, {"mode": "auto", "threshold": 10}, {}, (True, "aged")),
        (PFLASH, {"mode": "auto", "threshold": 11}, {}, (False, "below_threshold")),
        (PFLASH, {"least": 11}, {}, (False, "too_few_aged")),
        (PFLASH, {"parts": known_to(first=True)}, {}, (False, "too_few_aged")),
        (PFLASH, {"parts": known_to(first=True), "least": 5}, {}, (True, "aged")),
        (PFLASH, {"parts": known_to(first=True, second=True), "least": 0}, {}, (False, "nothing_aged")),
        (PFLASH, {}, {"compression_tried": True}, (False, "already_tried")),
        (PFLASH, {}, {"heard_tokens": (7,)}, (False, "answer_begun")),
        (PFLASH, {}, {"heard_tokens": ()}, (True, "aged")),
        (evolve(PFLASH, max_context=20), {"mode": "auto", "threshold": 99}, {}, (True, "does_not_fit")),
        (evolve(PFLASH, max_context=20), {"least": 11}, {}, (True, "does_not_fit")),
        # what is no conversation that goes on is for the other gate
        (PFLASH, {"continues": False}, {}, (True, "always")),
        (PFLASH, {"continues": False, "mode": "auto", "threshold": 21}, {}, (False, "below_threshold")),
        (PFLASH, {"continues": False, "mode": "auto", "threshold": 20}, {}, (True, "long")),
        (PFLASH, {"continues": False, "tools": True}, {}, (False, "tools")),
        (PFLASH, {"continues": False, "parts": ()}, {}, (True, "always")),
        (evolve(PFLASH, max_context=20), {"continues": False}, {}, (True, "does_not_fit")),
        (PFLASH, {"freeze": False}, {}, (False, "continues")),
        (PFLASH, {"mode": "off"}, {}, (False, "off")),
    ],
)
def test_the_gate(settings: Settings, changes: Any, state: Any, expected: tuple[bool, str]) -> None:
    asked = job(**changes)
    prompt = evolve(make_prompt(asked), **state)
    assert policy.decide_compression(knowing(settings), prompt, prompt.prefill_rows) == policy.Decision(*expected)


@pytest.mark.parametrize(
    ("scorer", "prefill", "missing", "pays"),
    [
        (0, 0, 5, True),  # nothing is known
        (0, 100, 5, False),  # a scorer that was never timed is taken to be as slow as the model
        (0, 100, 20, False),
        (10, 100, 20, True),  # nothing is kept: 10 tokens scored and 14 computed instead of 20
        (10, 100, 15, True),
        (10, 100, 9, False),  # what is kept would be computed again
        (49, 100, 20, True),
        (61, 100, 20, False),
    ],
)
def test_auto_freezes_what_fits_only_where_this_very_turn_gains(
    scorer: int, prefill: int, missing: int, pays: bool
) -> None:
    known = DecisionContext(PFLASH, Rates(prefill=(prefill,) if prefill else (), scoring=scorer))
    prompt = make_prompt(job(mode="auto", threshold=10))
    assert policy.decide_compression(known, prompt, missing) == policy.Decision(
        pays, "aged" if pays else "does_not_pay"
    )
    assert policy.decide_compression(known, make_prompt(job()), missing).go, "always is always"


def test_a_one_off_is_compressed_as_a_whole_although_messages_are_frozen_here() -> None:
    prompt = make_prompt(evolve(job(continues=False), one_off=True))
    assert policy.decide_compression(knowing(PFLASH), prompt, prompt.prefill_rows).go


def frozen(flat: Flat, settings: Settings = PFLASH, kept: Any = KEPT) -> Any:
    return compress.adopt_compressed_prompt(a(Compressing, flat), PromptCompressed((), kept, ns=9), knowing(settings))


def test_all_that_has_aged_is_asked_for_at_once_and_nothing_else() -> None:
    then = compress.start_scoring(
        a(compress.LoadingScorer, some(PFLASH, job=job())), ModelLoaded(name="scorer"), knowing(PFLASH)
    )
    assert then.effects == (CompressPrompt(0, PROMPT, parts=(FIRST, SECOND), apart=True),)


def test_what_they_were_frozen_to_is_kept_by_name_and_served() -> None:
    then = frozen(some(PFLASH, job=job(), valid=8, reused=8, tier="device"))
    ends = ((0, 1), (4, 5))
    assert then.effects == (KeepFrozen((("first", ends), ("second", ends))), RELEASE)
    spans = ((0, 7), (10, 12), (15, 21))
    assert isinstance(then.state, UnloadingScorer)
    assert then.state.prompt.tokens == SERVED == select_tokens(PROMPT, spans)
    assert then.state.prompt.compression == Compressed(21, "", spans, (), 400, 9)
    assert then.state.slot_lease.valid_rows == 4, "whole blocks of what stayed the same"
    report = make_report(knowing(PFLASH), then.state)
    assert (report.prompt_tokens, report.compression) == (len(SERVED), then.state.prompt.compression)


def test_the_next_request_is_served_what_they_were_frozen_to_from_the_start() -> None:
    asked = job(parts=known_to(first=True, second=True))
    prompt = make_prompt(asked)
    assert prompt.tokens == SERVED
    assert not prompt.compression_tried
    world, _ = advance(make_world(PFLASH), ForRequest(ONE, Submitted(asked)))
    assert isinstance(world.requests[ONE], Prefilling)
    assert world.requests[ONE].prompt.tokens == SERVED


def test_only_those_that_are_new_are_shortened_later_and_the_others_stay_as_they_are() -> None:
    flat = some(
        PFLASH, job=job(parts=known_to(first=True), least=5), prompt=make_prompt(job(parts=known_to(True))).tokens
    )
    then = frozen(flat, kept=((11, 12), (15, 16)))
    assert then.effects[0] == KeepFrozen((("second", ((0, 1), (4, 5))),))
    assert then.state.prompt.tokens == SERVED


def test_a_message_of_which_nothing_could_be_left_out_is_remembered_as_such() -> None:
    then = frozen(some(PFLASH, job=job()), kept=((6, 11), (11, 16)))
    assert then.effects[0] == KeepFrozen((("first", ((0, 5),)), ("second", ((0, 5),))))
    assert then.state.prompt.tokens == PROMPT
    assert then.state.prompt.compression.why_not == "not_shorter"


def test_a_drafter_that_fails_costs_nothing_that_was_frozen_before() -> None:
    asked = job(parts=known_to(first=True), least=5)
    before = make_prompt(asked)
    flat = some(PFLASH, job=asked, prompt=before.tokens, compression=before.compression)
    then = compress.give_up_compression(a(Compressing, flat), DeviceFailed("out_of_memory", ""), knowing(PFLASH))
    assert then.state.prompt.tokens == before.tokens
    assert then.state.prompt.compression.why_not == "drafter_out_of_memory"
    assert then.state.prompt.compression.kept == ((0, 7), (10, 21))


def test_a_conversation_that_does_not_fit_even_frozen_is_too_long_and_not_the_drafters_fault() -> None:
    tight = evolve(PFLASH, max_context=20)
    then = frozen(some(tight, job=job()), settings=tight, kept=((6, 11), (11, 16)))
    then = compress.serve_released_prompt(then.state, ModelUnloaded(), knowing(tight))
    assert isinstance(then.state, Done)
    assert isinstance(then.effects[0], CloseStream)
    assert then.effects[0].finish == "too_long"


def test_scoring_messages_goes_on_piece_by_piece_and_teaches_what_it_takes() -> None:
    world, _ = advance(make_world(PFLASH), ForRequest(ONE, Submitted(job())))
    for event in (ModelLoaded(9, name="scorer"), PromptScored(8), PromptCompressed((), KEPT, ns=2100)):
        world, _ = advance(world, ForRequest(ONE, event))
    assert world.rates.scoring == 210, "of ten tokens"
    assert world.models["scorer"].leases == (ONE,)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (Scope("full"), ("whole", len(SERVED), 12)),
        (Scope("auto", 30), ("frozen", 6, 4)),
        (Scope("fixed", 20), ("frozen", 6, 4)),
        (Scope("fixed", 3), ("frozen", 0, 0)),
    ],
)
def test_fixed_scopes_keep_the_system_prompt_that_stayed(scope: Scope, expected: tuple[str, int, int]) -> None:
    asked = evolve(job(parts=known_to(True, True)), scope=scope, boundaries=(6, 11, 16))
    flat = some(STORE, job=asked, prompt=SERVED, valid=14, shared=20, compression=make_prompt(asked).compression)
    picked = select_rows_to_keep(STORE, flat.remainder)
    assert (picked.reason, picked.boundary, picked.rows) == expected


def test_messages_open_where_they_are_now() -> None:
    asked = evolve(job(parts=known_to(True, True)), boundaries=(1, 6, 9, 11, 16, 21))
    assert map_served_boundaries(make_prompt(asked)) == (1, 6, 8, 10, 15), "one that was left out is nowhere"
    assert map_served_boundaries(make_prompt(evolve(job(), boundaries=(1, 6)))) == (1, 6)
    assert map_served_boundaries(a_waiting().prompt) == a_waiting().prompt.job.boundaries


ROOMY = evolve(PFLASH, max_context=4096)


def turn(messages: int, memo: dict[str, Any], length: int) -> tuple[int, ...]:
    """Return the tokens that are served of the next request of a conversation, with messages of `length` tokens."""
    prompt, parts = tuple((7 * at) % 31 + 1 for at in range(messages * length)), list[PromptPart]()
    for at in range(messages):
        aged = 1 <= at < messages - 2
        name = f"message {at}" if aged else ""
        parts.append(PromptPart("user", at * length, (at + 1) * length, False, 400 * aged, name, memo.get(name)))
    how = Compression("auto", 3 * length, 400, tuple(parts), continues=messages > 1, freeze=True)
    asked = make_prompt(Job(prompt, 1, compression=how))
    if not policy.decide_compression(knowing(ROOMY), asked, 0).go:
        return asked.tokens
    kept = tuple((part.start, part.start + 2) for part in aged_of(asked.job))
    then = frozen(Flat(asked.job, asked.tokens, compression=asked.compression), ROOMY, kept)
    memo |= dict(then.effects[0].frozen)
    served: tuple[int, ...] = then.state.prompt.tokens
    return served


@pytest.mark.parametrize("length", [3, 8])
def test_from_turn_to_turn_the_prompt_only_grows_unless_more_is_frozen(length: int) -> None:
    memo: dict[str, Any] = {}
    before, freezings = tuple[int, ...](), 0
    for number in range(1, 20):
        known = len(memo)
        served = turn(2 * number - 1, memo, length)
        if len(memo) > known:
            freezings += 1
            assert len(memo) - known >= 3, "not one by one"
            assert served[:length] == before[:length], "the system prompt"
        else:
            assert served[: len(before)] == before
        before = served
    assert 5 < freezings < 11
