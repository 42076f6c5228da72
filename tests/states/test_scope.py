"""Tests of what a scope keeps of a sequence, and of where checkpoints go."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from effects.decode import RunDecode
from effects.ids import SlotId
from effects.job import Job
from effects.prefill import RunPrefill
from effects.scope import Scope, Selection
from states.kept_rows import count_resumable_rows, find_own_state, get_kept_sequence
from states.phases import make_prefill_chunk, prefill_or_decode, start_prefill
from states.request_states import ProposesNothing
from states.scope import (
    CheckpointMark,
    find_next_mark,
    find_row_to_keep,
    find_state_row,
    has_passed_mark,
    select_rows_to_keep,
    should_keep_held_state,
)
from states.sequences import count_common_tokens, count_continuable_rows
from states.settings import Settings
from tests.states.builders import HERE, PROMPT, SHORT, STORE, Flat, a_job, a_report, answering, some

FULL, AUTO = Scope("full"), Scope("auto", 30)
LONG = evolve(STORE, min_tokens=9)
STATEFUL = evolve(STORE, stateful=True, chunk=8, max_context=256)


def kept_of(settings: Settings, scope: Scope, **changes: Any) -> tuple[str, int, int]:
    job = a_job(scope=scope, boundaries=changes.pop("boundaries", ()))
    picked = select_rows_to_keep(settings, some(settings, **{"job": job, "valid": 20, **changes}).remainder)
    assert picked.scope == str(scope)
    return picked.reason, picked.boundary, picked.rows


@pytest.mark.parametrize(
    ("settings", "scope", "changes", "expected"),
    [
        (evolve(STORE, store=False), FULL, {}, ("no_store", 0, 0)),
        (STORE, Scope("off"), {}, ("scope_off", 0, 0)),
        (STORE, FULL, {}, ("whole", 21, 20)),
        (STORE, FULL, {"answer": (7, 8, 9, 0), "valid": 24}, ("whole", 25, 24)),
        (STORE, FULL, {"valid": 0}, ("no_rows", 21, 0)),
        (STORE, FULL, {"valid": 9}, ("whole", 21, 8)),
        (LONG, FULL, {"valid": 9}, ("whole", 21, 8)),
        (LONG, FULL, {"valid": 8}, ("too_short", 21, 0)),
        (evolve(STORE, keep_decoded=False), FULL, {"answer": (7, 8, 9, 0), "valid": 24}, ("whole", 25, 20)),
        # fixed: no alignment to where messages open
        (STORE, Scope("fixed", 14), {"boundaries": (1, 9)}, ("fixed", 14, 12)),
        (STORE, Scope("fixed", 21), {}, ("fixed", 21, 20)),
        (STORE, Scope("fixed", 22), {}, ("longer_than_prompt", 0, 0)),
        (STORE, Scope("fixed", 3), {}, ("too_short", 3, 0)),
        (LONG, Scope("fixed", 8), {}, ("too_short", 8, 0)),
        (LONG, Scope("fixed", 9), {}, ("fixed", 9, 8)),
        (STORE, Scope("fixed", 16), {"valid": 11}, ("fixed", 16, 8)),
        # auto: down to where a message opens, or as it is where that is not known
        (STORE, AUTO, {"boundaries": (1, 9)}, ("nothing_shared", 0, 0)),
        (STORE, AUTO, {"shared": 15}, ("shared", 15, 12)),
        (STORE, AUTO, {"shared": 15, "boundaries": (1, 9, 13, 17)}, ("boundary", 13, 12)),
        (STORE, AUTO, {"shared": 13, "boundaries": (1, 9, 13, 17)}, ("boundary", 13, 12)),
        (STORE, AUTO, {"shared": 12, "boundaries": (1, 9, 13, 17)}, ("boundary", 9, 8)),
        (STORE, AUTO, {"shared": 5, "boundaries": (9, 13)}, ("no_boundary", 0, 0)),
        (STORE, AUTO, {"shared": 21, "boundaries": (1, 21)}, ("boundary", 21, 20)),
        (STORE, AUTO, {"shared": 3}, ("too_short", 3, 0)),
        (LONG, AUTO, {"shared": 15, "boundaries": (8, 16)}, ("too_short", 8, 0)),
        (LONG, AUTO, {"shared": 15, "boundaries": (9, 16)}, ("boundary", 9, 8)),
        (STORE, AUTO, {"shared": 15, "valid": 6}, ("shared", 15, 4)),
        # what compression rewrote: only what it left as it was, in whole messages
        (STORE, FULL, {"prompt": SHORT, "valid": 5}, ("whole", 6, 4)),
        (STORE, AUTO, {"prompt": SHORT, "valid": 5, "shared": 15}, ("rewritten", 0, 0)),
        (STORE, AUTO, {"prompt": SHORT, "valid": 5, "shared": 15, "boundaries": (4, 9)}, ("rewritten", 0, 0)),
        (STORE, AUTO, {"prompt": SHORT, "valid": 5, "shared": 3, "boundaries": (4, 9)}, ("rewritten", 0, 0)),
        (STORE, Scope("fixed", 20), {"prompt": SHORT, "valid": 5, "boundaries": (4, 9)}, ("rewritten", 0, 0)),
        (STORE, Scope("fixed", 20), {"prompt": SHORT, "valid": 5}, ("rewritten", 0, 0)),
        (STORE, Scope("fixed", 3), {"prompt": SHORT, "valid": 5, "boundaries": (4, 9)}, ("rewritten", 0, 0)),
    ],
)
def test_what_is_kept(
    settings: Settings, scope: Scope, changes: dict[str, Any], expected: tuple[str, int, int]
) -> None:
    assert kept_of(settings, scope, **changes) == expected


scopes = st.sampled_from((Scope("off"), FULL, AUTO, *(Scope("fixed", number) for number in (1, 4, 13, 30))))
places = st.sets(st.integers(1, 21)).map(lambda found: tuple(sorted(found)))
jobs = st.builds(Job, st.just(PROMPT), st.just(6), scope=scopes, boundaries=places)


@given(
    jobs, st.sampled_from((PROMPT, (*PROMPT[:11], 7, 7, 7))), st.integers(0, 21), st.integers(0, 20), st.integers(0, 12)
)
def test_nothing_is_kept_beyond_what_the_scope_allows(
    job: Job, prompt: tuple[int, ...], shared: int, valid: int, least: int
) -> None:
    scope, rewritten, settings = job.scope, prompt != PROMPT, evolve(STORE, min_tokens=least)
    hold = some(settings, job=job, prompt=prompt, valid=min(valid, len(prompt) - 1), shared=shared)
    rows = select_rows_to_keep(settings, hold.remainder).rows
    assert rows % 4 == 0
    assert rows <= count_resumable_rows(settings, hold.remainder)
    assert rows == 0 or rows + 4 > least
    if scope.kind == "off":
        assert rows == 0
    if scope.kind == "auto":
        assert rows <= shared
    if scope.kind == "fixed":
        assert rows <= scope.count
    if rewritten and scope.kind != "full":
        assert rows <= 11


def test_the_client_is_told_what_was_decided() -> None:
    hold = answering(STORE, job=a_job(scope=AUTO, boundaries=(1, 9)), shared=14)
    cache = a_report(hold, STORE).cache
    assert cache == Selection("auto:30", "boundary", 14, 9, 8)
    assert str(cache) == "auto:30 shared=14 selected=9 kept=8 (boundary)"


# Checkpoints.

Case: TypeAlias = tuple[Settings, Flat]


def stateful(scope: Scope = FULL, length: int = 100, boundaries: tuple[int, ...] = (), **changes: Any) -> Case:
    settings = evolve(STATEFUL, **{name: changes.pop(name) for name in tuple(changes) if hasattr(STATEFUL, name)})
    prompt = tuple(range(length))
    job = Job(prompt, 9, scope=scope, boundaries=boundaries)
    return settings, Flat(job, prompt, **changes)


def marks(settings: Settings, flat: Flat) -> list[int]:
    """All positions whose state prefill keeps beyond the device, if every chunk succeeds."""
    found = []
    target = len(flat.prompt) - 1
    while flat.valid < target:
        part = make_prefill_chunk(settings, *flat.early, target)
        assert flat.valid == part.start < part.stop <= target
        assert part.stop - part.start <= settings.chunk
        found += [find_state_row(settings, part.stop)] if part.checkpoint else []
        flat = evolve(flat, valid=part.stop)
    return found


def test_rows_behind_the_last_kept_state_need_no_forward_of_their_own() -> None:
    """The slot has the state at 96 until it has row 100, so a chunk that ends at 99 leaves it."""
    settings, flat = stateful()
    assert make_prefill_chunk(settings, *evolve(flat, valid=92).early, 99) == RunPrefill(HERE, 92, 99, checkpoint=True)
    whole_blocks = evolve(settings, keep_decoded=False)
    found = make_prefill_chunk(whole_blocks, *evolve(flat, valid=92).early, 99)
    assert found == RunPrefill(HERE, 92, 96, checkpoint=True), "a state is where a prefill has stopped"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (stateful(stateful=False, checkpoint_interval=10, shared_checkpoint_limit=50, boundaries=(1, 30, 90)), []),
        (stateful(store=False), []),
        (stateful(Scope("off")), []),
        (stateful(), [96]),  # the end of prefill, for the next turn
        (stateful(length=97), [96]),
        (stateful(length=96), [92]),
        (stateful(length=4), []),
        (stateful(length=98, boundaries=(1, 30, 95)), [92]),  # what follows where the answer opens may be left out
        (stateful(length=98, boundaries=(1, 30, 97)), [96]),
        (stateful(length=98, boundaries=(1, 30, 93)), [96]),  # further away than a block: that is not it
        (stateful(length=6, boundaries=(1,)), [4]),
        (stateful(length=5, boundaries=(2,)), []),  # no block before it
        (stateful(min_tokens=99), [96]),
        (stateful(min_tokens=100), []),
        (stateful(checkpoint_interval=32), [32, 64, 96]),
        (stateful(checkpoint_interval=33), [32, 64, 96]),  # 33, 66 and 99, each moved down
        (stateful(checkpoint_interval=33, min_tokens=34), [64, 96]),
        (stateful(checkpoint_interval=1, length=14), [4, 8, 12]),
        (stateful(checkpoint_interval=500), [96]),
        (stateful(checkpoint_interval=32, valid=32, reused=32), [64, 96]),
        (
            stateful(shared_checkpoint_limit=50, boundaries=(1, 30, 90)),
            [28, 96],
        ),  # what a new session of the same agent shares
        (stateful(shared_checkpoint_limit=30, boundaries=(1, 30, 90)), [28, 96]),
        (stateful(shared_checkpoint_limit=29, boundaries=(1, 30, 90)), [96]),
        (stateful(shared_checkpoint_limit=50, boundaries=(1, 30, 90), min_tokens=31), [96]),
        (stateful(shared_checkpoint_limit=99, boundaries=(1, 30, 90)), [28, 96]),  # the last boundary opens the answer
        (
            stateful(shared_checkpoint_limit=50, boundaries=(1, 30, 90), valid=8, reused=8),
            [96],
        ),  # this session is known
        (stateful(shared_checkpoint_limit=0, boundaries=(1, 30, 90)), [96]),
        (
            stateful(Scope("fixed", 50), checkpoint_interval=10, shared_checkpoint_limit=90, boundaries=(1, 30, 90)),
            [48],
        ),
        (stateful(Scope("fixed", 101)), []),
        (stateful(Scope("fixed", 100)), [96]),
        (stateful(AUTO, boundaries=(1, 30, 90), shared_checkpoint_limit=90), []),  # no request has come back yet
        (stateful(AUTO, boundaries=(1, 30, 90), shared=70), [28]),
        (stateful(AUTO, boundaries=(1, 30, 90), shared=70, valid=28, reused=28), []),
        (stateful(AUTO, shared=70), [68]),
    ],
)
def test_where_the_positional_state_is_kept(case: Case, expected: list[int]) -> None:
    assert marks(*case) == expected


def test_prefill_stops_where_the_state_is_kept() -> None:
    settings, flat = stateful(checkpoint_interval=32)
    assert make_prefill_chunk(settings, *evolve(flat, valid=28).early, 99) == RunPrefill(
        SlotId(0), 28, 32, checkpoint=True
    )
    assert make_prefill_chunk(settings, *evolve(flat, valid=96).early, 99) == RunPrefill(SlotId(0), 96, 99)
    settings, flat = stateful(length=200)
    assert make_prefill_chunk(settings, *flat.early, 199) == RunPrefill(SlotId(0), 0, 8)


def test_the_device_keeps_the_state_where_the_next_turn_comes_back_to_whatever_the_scope() -> None:
    for scope in (FULL, Scope("off"), Scope("fixed", 50), AUTO):
        settings, flat = stateful(scope, 98, boundaries=(1, 95), state_checkpoints=1, min_tokens=99)
        assert find_next_mark(settings, *evolve(flat, valid=60).early) == CheckpointMark(92, beyond_device=False)
        assert make_prefill_chunk(settings, *evolve(flat, valid=88).early, 97) == RunPrefill(SlotId(0), 88, 92)
    settings, flat = stateful(FULL, 98, boundaries=(1, 95), state_checkpoints=1)
    assert find_next_mark(settings, *flat.early) == CheckpointMark(92, beyond_device=True)
    assert find_next_mark(evolve(settings, stateful=False), *flat.early) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [32, 64, 96]),
        ({"checkpoint_interval": 33}, [32, 64, 96]),
        ({"checkpoint_interval": 0}, []),
        ({"min_tokens": 65}, [96]),
        ({"store": False}, []),
        ({"stateful": False}, []),
        ({"keep_decoded": False}, []),
        ({"scope": AUTO}, []),
    ],
)
def test_decoding_keeps_the_state_at_every_interval(changes: dict[str, Any], expected: list[int]) -> None:
    settings, flat = stateful(changes.pop("scope", FULL), length=5, **{"checkpoint_interval": 32, **changes})
    prompt = flat.early[1]
    for step in (1, 3, 4):
        steps = [(before, before + step) for before in range(20, 110, step)]
        assert [
            after // 4 * 4 for before, after in steps if has_passed_mark(settings, prompt, before, after)
        ] == expected
    # An answer runs unattended from one of these rows to the next.
    rows, at = list[int](), find_row_to_keep(settings, prompt, 20)
    while at is not None and at < 110:
        rows.append(at)
        at = find_row_to_keep(settings, prompt, at)
    assert rows == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (stateful(valid=96), True),  # the end of the prompt
        (stateful(valid=92), False),  # prefill passes its end later, and keeps it there
        (stateful(valid=0), False),
        (stateful(Scope("off"), valid=96), False),
        (stateful(store=False, valid=96), False),
        (stateful(stateful=False, valid=96), False),
        (stateful(min_tokens=97, valid=96), False),
        (stateful(length=98, boundaries=(1, 30, 95), valid=92), True),  # where the answer opens
        (stateful(length=98, boundaries=(1, 30, 95), valid=96), True),  # behind that, and all that the slot has
        (stateful(shared_checkpoint_limit=50, boundaries=(1, 30, 90), valid=28, reused=28), True),  # for new sessions
        (stateful(shared_checkpoint_limit=50, boundaries=(1, 30, 90), valid=24, reused=24), False),
        (stateful(checkpoint_interval=32, valid=64), True),
        (stateful(checkpoint_interval=32, valid=60), False),
        (stateful(Scope("fixed", 50), valid=48), True),
        (stateful(Scope("fixed", 50), valid=96), False),
        (stateful(AUTO, boundaries=(1, 30, 90), valid=28), False),  # nothing is shared
        (stateful(AUTO, boundaries=(1, 30, 90), shared=70, valid=28), True),
    ],
)
def test_the_state_that_a_slot_goes_on_from_is_kept_where_a_prefill_would_have_kept_it(
    case: Case, expected: bool
) -> None:
    settings, flat = case
    slot_lease, prompt = flat.early
    assert should_keep_held_state(settings, slot_lease, prompt) is expected
    if slot_lease.valid_rows < prompt.prefill_rows:
        effect_request = start_prefill(settings, slot_lease, prompt, ProposesNothing("")).effects[0]
        assert isinstance(effect_request, RunPrefill)
        assert effect_request.keeps_state_first is expected


def test_a_prompt_that_a_slot_has_to_its_end_is_kept_by_its_first_decode_step() -> None:
    for scope, expected in ((FULL, True), (Scope("off"), False)):
        settings, flat = stateful(scope, length=97, valid=96)
        effect_request = prefill_or_decode(settings, *flat.early, ProposesNothing("")).effects[0]
        assert isinstance(effect_request, RunDecode)
        assert (effect_request.position, effect_request.checkpoint) == (96, expected)


def test_of_a_rewritten_prompt_only_messages_that_stayed_are_cold_boundaries() -> None:
    settings, flat = stateful(shared_checkpoint_limit=80, boundaries=(1, 30, 60, 90))
    served = evolve(flat, prompt=(*flat.prompt[:40], *flat.prompt[70:]))
    assert marks(settings, served) == [28, 68]
    assert find_next_mark(settings, *served.early) == CheckpointMark(28, beyond_device=True)


# What a slot's rows are good for.


@pytest.mark.parametrize(
    ("rows", "prompt", "blocks"),
    [
        ((), PROMPT, 0),
        (PROMPT[:10], PROMPT, 8),
        (PROMPT[:20], PROMPT, 20),
        (PROMPT, PROMPT, 20),  # the last token is always computed
        ((*PROMPT[:10], 7), PROMPT, 8),
        ((7, *PROMPT[1:10]), PROMPT, 0),
    ],
)
def test_a_slot_has_whole_blocks_of_what_both_begin_with(
    rows: tuple[int, ...], prompt: tuple[int, ...], blocks: int
) -> None:
    assert count_continuable_rows(STORE, rows, prompt) == blocks


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        ({"valid": 0}, STATEFUL, 0),
        ({"valid": 16}, STATEFUL, 16),
        ({"valid": 19}, STATEFUL, 16),
        ({"valid": 19}, STORE, 0),  # of attention alone there is none
        ({"valid": 8, "ahead": 8}, STATEFUL, 8),
        ({"valid": 24, "answer": (7, 8, 9, 10)}, STATEFUL, 24),
        # where decoded rows are not believed, only a prefill that stopped there has left it there
        ({"valid": 16}, evolve(STATEFUL, keep_decoded=False), 16),
        ({"valid": 19}, evolve(STATEFUL, keep_decoded=False), 0),
        ({"valid": 24, "answer": (7, 8, 9, 10)}, evolve(STATEFUL, keep_decoded=False), 0),
    ],
)
def test_where_a_slot_itself_has_its_positional_state(
    changes: dict[str, Any], settings: Settings, expected: int
) -> None:
    left = some(settings, **changes).remainder
    assert find_own_state(settings, left) == expected
    rows = 20 if settings is not STATEFUL and left.answer else left.slot_lease.rows
    assert get_kept_sequence(settings, left) == (*PROMPT, *left.answer)[:rows], "and what it keeps"


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200), st.integers(0, 200))
def test_what_two_sequences_begin_with(one: list[int], other: list[int], same: int) -> None:
    first, second = tuple(one), (*one[:same], *other)
    expected = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert count_common_tokens(first, second) == (min(len(first), len(second)) if expected is None else expected)
