"""Tests of the report where a prompt diverges from the rows that slots keep. A request reports it once, at its end."""

from __future__ import annotations

import pytest

from effects.all import EffectRequest
from effects.compression import Compressed
from effects.ids import SlotId, Tokens
from effects.job import Report
from effects.ports import MAX_DIVERGED_TOKENS, Divergence
from effects.prefill import OpenSlot
from engine.core.cache_misses import CacheMisses, explain_miss
from states.request_states import Speculating
from states.slots import Slot, Slots, get_resident_tokens
from states.world import World
from tests.states.builders import HERE, ONE, PLAIN, PROMPT, TWO, a, a_job, answering

LONG: Tokens = tuple(range(1000, 1200))


def a_world(*slots: Slot) -> World:
    return World(PLAIN, Slots(slots))


def an_opening(prompt: Tokens, keep: int = 0, source: int = 0, salt: str = "") -> EffectRequest:
    return EffectRequest(ONE, OpenSlot(HERE, SlotId(source), keep, prompt, a_job().sampling, salt=salt))


@pytest.mark.parametrize(
    ("kept", "keep", "expected"),
    [
        ((*PROMPT[:10], 7, 8, 9), 8, Divergence(10, (7, 8, 9), "device")),
        ((7, 8, 9), 0, Divergence(0, (7, 8, 9), "device")),
        ((*PROMPT[:10], *LONG), 8, Divergence(10, LONG[:MAX_DIVERGED_TOKENS], "device")),
        ((*PROMPT[:18], 7, 8, 9, 10), 16, Divergence(18, (7, 8, 9, 10), "device")),
        ((*PROMPT, 7, 8), 20, None),  # whole blocks are there
        (PROMPT[:10], 8, None),  # it ends there
        ((), 0, None),
    ],
)
def test_the_place_is_told_token_by_token(kept: Tokens, keep: int, expected: Divergence | None) -> None:
    misses = CacheMisses({}, PLAIN)
    misses.observe((an_opening(PROMPT, keep),), a_world(Slot(kept)))
    assert misses.find_divergence(ONE, Report(len(PROMPT), keep)) == expected
    assert misses.find_divergence(ONE, Report(len(PROMPT), keep)) is None, "it has been reported"


def test_of_several_the_likest_is_told_and_only_of_the_same_salt() -> None:
    near, far = (*PROMPT[:3], 9), (*PROMPT[:2], 9)
    house = a_world(Slot(far), Slot(near, salt="a"), Slot((5,)))
    for salt, expected in (("", Divergence(2, (9,), "device")), ("a", Divergence(3, (9,), "device")), ("b", None)):
        misses = CacheMisses({}, PLAIN)
        misses.observe((an_opening(PROMPT, salt=salt),), house)
        assert misses.find_divergence(ONE, Report(len(PROMPT))) == expected


def test_the_sequence_of_a_busy_slot_counts_with_its_answer() -> None:
    busy = a(Speculating, answering(job=a_job()))
    house = World(PLAIN, Slots((Slot(), Slot(holder=TWO))), {TWO: busy})
    rows = get_resident_tokens(house.slots.slots[1], house.requests, PLAIN)
    prompt = (*rows[:-1], 77, *PROMPT)
    misses = CacheMisses({}, PLAIN)
    misses.observe((an_opening(prompt, source=1),), house)
    assert misses.find_divergence(ONE, Report(len(prompt))) == Divergence(len(rows) - 1, rows[-1:], "device")


def test_what_the_store_found_further_on_wins_and_what_was_restored_is_no_miss() -> None:
    slot, stored = Divergence(2, (9,), "device"), Divergence(14, (8,), "disk")
    for restored, expected in ((0, stored), (14, stored), (16, None)):
        misses = CacheMisses({ONE: stored}, PLAIN)
        misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:2], 9))))
        assert misses.find_divergence(ONE, Report(len(PROMPT), restored)) == expected
        assert not misses.lookup_divergences
    misses = CacheMisses({ONE: evolved(stored)}, PLAIN)
    misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:2], 9))))
    assert misses.find_divergence(ONE, Report(len(PROMPT))) == slot
    misses = CacheMisses({ONE: stored}, PLAIN)
    assert misses.find_divergence(ONE, Report(len(PROMPT), compression=Compressed(100))) is None, (
        "places of another prompt"
    )


def evolved(stored: Divergence) -> Divergence:
    return Divergence(1, stored.tokens, stored.tier)


def test_only_the_first_slot_that_a_request_opens_counts() -> None:
    misses = CacheMisses({}, PLAIN)
    misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:2], 9))))
    misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:5], 9))))
    assert misses.find_divergence(ONE, Report(len(PROMPT))) == Divergence(2, (9,), "device")


FAR = Divergence(10, (7,), "device")


@pytest.mark.parametrize(
    ("said", "restored", "diverged", "expected"),
    [
        ("", 0, None, ""),
        ("empty_store", 0, None, "empty_store"),
        ("empty_store", 0, FAR, "diverged_at:10"),
        ("empty_store", 8, None, ""),  # it goes on behind all that is kept
        ("empty_store", 8, FAR, "diverged_at:10"),
        ("diverged_at:8", 8, None, ""),
        ("diverged_at:4", 8, None, ""),  # the device had more than the store
        ("diverged_at:4", 8, FAR, "diverged_at:10"),
        ("diverged_at:12", 8, None, "diverged_at:12"),
        ("no_checkpoint:4", 8, None, ""),
        ("no_checkpoint:12", 8, None, "no_checkpoint:12"),
        ("recompute_is_quicker", 8, None, "recompute_is_quicker"),
        ("restore_broken", 8, FAR, "restore_broken"),
        ("lookup_io", 8, None, "lookup_io"),
        ("diverged_at:20", 20, None, ""),  # of 21 tokens, 20 are whole blocks: all was there
        ("empty_store", 20, None, ""),
        ("recompute_is_quicker", 20, None, ""),
    ],
)
def test_only_what_could_have_been_there_is_missed(
    said: str, restored: int, diverged: Divergence | None, expected: str
) -> None:
    assert len(PROMPT) == 21
    assert explain_miss(Report(len(PROMPT), restored, miss=said), diverged, PLAIN) == expected


def test_where_a_prompt_was_compressed_the_reason_stays() -> None:
    report = Report(len(PROMPT), 16, compression=Compressed(100), miss="empty_store")
    assert explain_miss(report, None, PLAIN) == "empty_store"


def test_a_prompt_of_which_all_whole_blocks_were_there_diverges_from_nothing() -> None:
    misses = CacheMisses({ONE: Divergence(20, (5,), "disk")}, PLAIN)
    assert misses.find_divergence(ONE, Report(len(PROMPT), 20)) is None
