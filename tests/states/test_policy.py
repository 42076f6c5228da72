"""Truth tables of the decisions."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from effects.grammar import Grammar
from effects.job import Job, Sampling
from effects.packed_tokens import pack_tokens
from effects.scope import Scope
from states import policy
from states.compress import replace_served_tokens
from states.kept_rows import count_usable_tokens
from states.policy import Decision
from states.rates import Rates
from states.sequences import count_common_blocks, count_common_packed_blocks, round_down_to_block
from states.settings import DecisionContext, Settings
from tests.states.builders import (
    DRAFT,
    EVERYTHING,
    LONG_ENOUGH,
    PFLASH,
    PLAIN,
    PROMPT,
    SHORT,
    STORE,
    a_job,
    knowing,
    some,
)

NO, YES = False, True
AUTO = a_job(scope=Scope("auto", 30))


LONG = tuple(range(policy.SHORT_PROMPT + 1))


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({}, Decision(NO, "continues")),  # or it is not known: a completion's prompt is no conversation
        ({"opens": True}, Decision(YES, "short")),
        ({"opens": True, "prompt": LONG[1:]}, Decision(YES, "short")),
        ({"opens": True, "prompt": LONG}, Decision(NO, "long")),
        ({"one_off": True}, Decision(YES, "declared")),
        ({"one_off": True, "prompt": LONG}, Decision(YES, "declared")),
        ({"one_off": False, "opens": True}, Decision(NO, "declared")),
    ],
)
def test_one_off(changes: dict[str, Any], decision: Decision) -> None:
    assert policy.decide_one_off(a_job(**changes)) == decision


def asking(**changes: Any) -> Job:
    return a_job(compression=evolve(LONG_ENOUGH, **changes))


@pytest.mark.parametrize(
    ("settings", "changes", "missing", "decision"),
    [
        (PLAIN, {}, 99, Decision(NO, "no_drafter")),
        (PFLASH, {"job": asking(mode="off")}, 99, Decision(NO, "off")),
        (PLAIN, {"job": asking(mode="off")}, 99, Decision(NO, "off")),
        (PFLASH, {"job": asking(continues=True)}, 99, Decision(NO, "continues")),
        (PFLASH, {"job": asking(tools=True)}, 99, Decision(NO, "tools")),
        (PFLASH, {"job": asking(continues=True, mode="always")}, 99, Decision(NO, "continues")),
        (
            PFLASH,
            {"job": a_job(sampling=Sampling(grammar=Grammar("json_schema", "{}")))},
            99,
            Decision(NO, "structured"),
        ),
        (PFLASH, {"job": a_job(prompt_logprobs=0)}, 99, Decision(NO, "logprobs")),
        (evolve(PFLASH, scorer_max_tokens=20), {}, 99, Decision(NO, "beyond_drafter")),
        (evolve(PFLASH, scorer_max_tokens=21), {}, 99, Decision(YES, "long")),
        (PFLASH, {"compressed": True}, 99, Decision(NO, "already_tried")),
        (PFLASH, {}, 11, Decision(NO, "below_threshold")),
        (PFLASH, {}, 12, Decision(YES, "long")),
        (PFLASH, {"job": asking(mode="always")}, 1, Decision(YES, "always")),
        (evolve(PFLASH, max_context=26), {}, 1, Decision(YES, "does_not_fit")),
        (evolve(PFLASH, max_context=27), {}, 1, Decision(NO, "below_threshold")),
        (evolve(PFLASH, max_context=26), {"job": asking(tools=True)}, 1, Decision(NO, "tools")),
    ],
)
def test_compress(settings: Settings, changes: dict[str, Any], missing: int, decision: Decision) -> None:
    assert policy.decide_compression(DecisionContext(settings), some(settings, **changes).early[1], missing) == decision


@pytest.mark.parametrize(
    ("scorer", "missing", "decision"),
    [
        (0, 20, Decision(YES, "long")),  # never measured: tried
        (7, 20, Decision(YES, "long")),  # 147 to score 21 and 50 for the five that are kept, against 200
        (8, 20, Decision(NO, "does_not_pay")),
        (7, 19, Decision(NO, "does_not_pay")),
    ],
)
def test_compression_is_weighed_against_computing(scorer: int, missing: int, decision: Decision) -> None:
    known = DecisionContext(PFLASH, Rates(prefill=(10,), scoring=scorer))
    assert policy.decide_compression(known, some(PFLASH).early[1], missing) == decision


@pytest.mark.parametrize(
    ("settings", "changes", "decision"),
    [
        (PLAIN, {}, Decision(NO, "no_drafter")),
        (PFLASH, {"job": asking(mode="off")}, Decision(NO, "off")),
        (PFLASH, {"compressed": True}, Decision(NO, "already_tried")),
        (PFLASH, {"prompt": SHORT}, Decision(YES, "allowed")),
    ],
)
def test_shorten(settings: Settings, changes: dict[str, Any], decision: Decision) -> None:
    assert policy.decide_shortening(settings, some(settings, **changes).early[1]) == decision


@pytest.mark.parametrize(
    ("settings", "changes", "decision"),
    [
        (PLAIN, {}, Decision(NO, "no_store")),
        (STORE, {"job": a_job(scope=Scope("off"))}, Decision(NO, "scope_off")),
        (STORE, {"valid": 20}, Decision(NO, "on_device")),
        (STORE, {"valid": 16}, Decision(YES, "ask")),
        (STORE, {"valid": 16, "prompt": PROMPT[:20]}, Decision(NO, "on_device")),  # the last token is always computed
        (STORE, {"prompt": PROMPT[:4]}, Decision(NO, "on_device")),
        (STORE, {"prompt": PROMPT[:5]}, Decision(YES, "ask")),
        (STORE, {"valid": 20, "job": AUTO}, Decision(YES, "compare")),  # and join those that others are compared with
        (STORE, {"valid": 20, "job": AUTO, "compressed": True}, Decision(NO, "on_device")),
        (PLAIN, {"valid": 20, "job": AUTO}, Decision(NO, "no_store")),
    ],
)
def test_lookup(settings: Settings, changes: dict[str, Any], decision: Decision) -> None:
    assert policy.decide_lookup(settings, *some(settings, **changes).early) == decision


@pytest.mark.parametrize(("changes", "window"), [({}, 0), ({"job": AUTO}, 30), ({"job": AUTO, "compressed": True}, 0)])
def test_the_prompt_as_it_came_is_compared_with_the_recent_ones(changes: dict[str, Any], window: int) -> None:
    assert policy.count_prompts_to_compare(some(STORE, **changes).early[1]) == window


@pytest.mark.parametrize(
    ("settings", "changes", "decision"),
    [
        (PLAIN, {}, Decision(NO, "no_draft")),
        (DRAFT, {"job": a_job(speculate=False)}, Decision(NO, "declined")),
        (DRAFT, {}, Decision(YES, "draft")),
    ],
)
def test_speculate(settings: Settings, changes: dict[str, Any], decision: Decision) -> None:
    assert policy.decide_speculation(knowing(settings), some(settings, **changes).job) == decision


ANSWERED = {"valid": 24, "answer": (1, 2, 3, 4)}
SHARED = a_job(scope=Scope("auto", 30), boundaries=(1, 9))


@pytest.mark.parametrize(
    ("settings", "changes", "decision"),
    [
        (PLAIN, {"valid": 20}, Decision(NO, "no_store")),
        (STORE, {"valid": 20, "job": a_job(scope=Scope("off"))}, Decision(NO, "scope_off")),
        (STORE, {"valid": 0}, Decision(NO, "no_rows")),
        (STORE, {"valid": 3}, Decision(NO, "too_short")),
        (STORE, {"valid": 4}, Decision(YES, "new_rows")),
        (STORE, {"valid": 19, "stored": 16}, Decision(NO, "nothing_new")),
        (STORE, {"valid": 20, "stored": 16}, Decision(YES, "new_rows")),
        (STORE, {"valid": 20, "reused": 20}, Decision(YES, "new_rows")),  # kept on the device, and nowhere else
        (STORE, {**ANSWERED, "stored": 20}, Decision(YES, "new_rows")),
        (evolve(STORE, keep_decoded=False), {**ANSWERED, "stored": 20}, Decision(NO, "nothing_new")),
        (evolve(STORE, keep_decoded=False), {**ANSWERED, "stored": 16}, Decision(YES, "new_rows")),
        (STORE, {"valid": 20, "job": SHARED}, Decision(NO, "nothing_shared")),
        (STORE, {"valid": 20, "job": SHARED, "shared": 11, "stored": 4}, Decision(YES, "new_rows")),
        (STORE, {"valid": 20, "job": SHARED, "shared": 11, "stored": 8}, Decision(NO, "nothing_new")),
    ],
)
def test_snapshot(settings: Settings, changes: dict[str, Any], decision: Decision) -> None:
    assert policy.decide_snapshot(settings, some(settings, **changes).remainder) == decision


@pytest.mark.parametrize(("tokens", "position"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_cache_positions_are_multiples_of_the_grain(tokens: int, position: int) -> None:
    assert round_down_to_block(PLAIN, tokens) == position


@pytest.mark.parametrize(("prompt", "kept", "worth"), [(21, 21, 20), (21, 19, 16), (20, 20, 16), (5, 9, 4), (4, 9, 0)])
def test_the_last_prompt_token_is_always_computed(prompt: int, kept: int, worth: int) -> None:
    assert count_usable_tokens(PLAIN, some(prompt=PROMPT[:prompt]).early[1], kept) == worth


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ((), (), 0),
        (PROMPT, PROMPT, 20),
        (PROMPT[:8], PROMPT, 8),
        (PROMPT[:11], PROMPT, 8),
        (PROMPT, SHORT, 4),
        ((9, *PROMPT[1:]), PROMPT, 0),
        ((*PROMPT[:7], 9), PROMPT, 4),
    ],
)
def test_a_common_prefix_is_counted_in_whole_grains(one: tuple[int, ...], other: tuple[int, ...], shared: int) -> None:
    assert count_common_blocks(4, one, other) == count_common_blocks(4, other, one) == shared


@given(
    common=st.integers(0, 400),
    tails=st.tuples(st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 1), max_size=80)),
    block_size=st.sampled_from((1, 2, 4, 16)),
)
def test_packed_tokens_have_as_many_blocks_in_common_as_the_tokens(
    common: int, tails: tuple[list[int], list[int]], block_size: int
) -> None:
    one, other = (tuple(range(common)) + tuple(tail) for tail in tails)
    exactly = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    packed = count_common_packed_blocks(block_size, pack_tokens(one), pack_tokens(other))
    assert packed == count_common_blocks(block_size, one, other) == exactly // block_size * block_size


def test_another_prompt_keeps_the_rows_that_both_share() -> None:
    before = some(EVERYTHING, valid=12, reused=8, tier="device")
    after = evolve(before, prompt=SHORT, compressed=True, valid=4, reused=4)
    assert replace_served_tokens(EVERYTHING, *before.early, SHORT) == after.early
