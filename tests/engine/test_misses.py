"""Where a prompt leaves what slots keep, told at its end."""

from __future__ import annotations

import pytest

from effects.all import Ask
from effects.compression import Compressed
from effects.ids import SlotId, Tokens
from effects.job import Report
from effects.ports import DIVERGED, Divergence
from effects.prefill import OpenSlot
from engine.misses import Misses
from states.life import Speculating
from states.slots import Slot, Slots, resident
from states.world import World
from tests.states.builders import HERE, ONE, PLAIN, PROMPT, TWO, a, a_job, answering

LONG: Tokens = tuple(range(1000, 1200))


def a_world(*slots: Slot) -> World:
    return World(PLAIN, Slots(slots))


def an_opening(prompt: Tokens, keep: int = 0, source: int = 0, salt: str = "") -> Ask:
    return Ask(ONE, OpenSlot(HERE, SlotId(source), keep, prompt, a_job().sampling, salt=salt))


@pytest.mark.parametrize(
    ("kept", "keep", "expected"),
    [
        ((*PROMPT[:10], 7, 8, 9), 8, Divergence(10, (7, 8, 9), "device")),
        ((7, 8, 9), 0, Divergence(0, (7, 8, 9), "device")),
        ((*PROMPT[:10], *LONG), 8, Divergence(10, LONG[:DIVERGED], "device")),
        ((*PROMPT[:18], 7, 8, 9, 10), 16, Divergence(18, (7, 8, 9, 10), "device")),
        ((*PROMPT, 7, 8), 20, None),  # whole blocks are there
        (PROMPT[:10], 8, None),  # it ends there
        ((), 0, None),
    ],
)
def test_the_place_is_told_token_by_token(kept: Tokens, keep: int, expected: Divergence | None) -> None:
    misses = Misses({})
    misses.observe((an_opening(PROMPT, keep),), a_world(Slot(kept)))
    assert misses.told(ONE, Report(len(PROMPT), keep)) == expected
    assert misses.told(ONE, Report(len(PROMPT), keep)) is None, "it has been told"


def test_of_several_the_likest_is_told_and_only_of_the_same_salt() -> None:
    near, far = (*PROMPT[:3], 9), (*PROMPT[:2], 9)
    house = a_world(Slot(far), Slot(near, salt="a"), Slot((5,)))
    for salt, expected in (("", Divergence(2, (9,), "device")), ("a", Divergence(3, (9,), "device")), ("b", None)):
        misses = Misses({})
        misses.observe((an_opening(PROMPT, salt=salt),), house)
        assert misses.told(ONE, Report(len(PROMPT))) == expected


def test_the_sequence_of_a_busy_slot_counts_with_its_answer() -> None:
    busy = a(Speculating, answering(job=a_job()))
    house = World(PLAIN, Slots((Slot(), Slot(holder=TWO))), {TWO: busy})
    rows = resident(house.slots.slots[1], house.requests, PLAIN)
    prompt = (*rows[:-1], 77, *PROMPT)
    misses = Misses({})
    misses.observe((an_opening(prompt, source=1),), house)
    assert misses.told(ONE, Report(len(prompt))) == Divergence(len(rows) - 1, rows[-1:], "device")


def test_what_the_store_found_further_on_wins_and_what_was_restored_is_no_miss() -> None:
    slot, stored = Divergence(2, (9,), "device"), Divergence(14, (8,), "disk")
    for restored, expected in ((0, stored), (14, stored), (16, None)):
        misses = Misses({ONE: stored})
        misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:2], 9))))
        assert misses.told(ONE, Report(len(PROMPT), restored)) == expected
        assert not misses.stored
    misses = Misses({ONE: evolved(stored)})
    misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:2], 9))))
    assert misses.told(ONE, Report(len(PROMPT))) == slot
    misses = Misses({ONE: stored})
    assert misses.told(ONE, Report(len(PROMPT), compression=Compressed(100))) is None, "places of another prompt"


def evolved(stored: Divergence) -> Divergence:
    return Divergence(1, stored.tokens, stored.tier)


def test_only_the_first_slot_that_a_request_opens_counts() -> None:
    misses = Misses({})
    misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:2], 9))))
    misses.observe((an_opening(PROMPT),), a_world(Slot((*PROMPT[:5], 9))))
    assert misses.told(ONE, Report(len(PROMPT))) == Divergence(2, (9,), "device")
