"""Checkpoints on the device: which states get one, which have to make room, and what a slot does with them."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.all import EffectRequest
from effects.ids import CheckpointId, DeviceFailed, SlotId
from effects.prefill import PrefillAdvanced, RunPrefill
from states import checkpoints, slot_admission, slots
from states.checkpoints import EMPTY, StateCheckpoint
from states.events import Admitted
from states.request_states import Draining, Prefilling, State
from states.settings import DecisionContext, Settings
from states.slots import Slot, Slots
from tests.states.builders import HERE, ONE, PROMPT, STATEFUL, TWO, a, a_house, a_job, some, waiting_for

OTHER = tuple(range(500, 540))
FIRST, SECOND = SlotId(0), SlotId(1)


def house(*held: Slot, kept: tuple[StateCheckpoint, ...] = ()) -> Slots:
    return evolve(a_house(*held, waiting=(ONE,)), checkpoints=kept)


def admitted(
    before: Slots, settings: Settings = STATEFUL, **more: State
) -> tuple[Admitted, tuple[StateCheckpoint, ...]]:
    requests = {**waiting_for(a_job()), **({TWO: more["two"]} if more else {})}
    launched = {TWO: RunPrefill(FIRST, 16, 20)} if more else {}
    after, admission = slot_admission.admit_next(before, requests, launched, DecisionContext(settings))
    assert admission is not None
    return admission[1], after.checkpoints


@pytest.mark.parametrize(
    ("length", "live", "kept", "expected"),
    [
        (20, 20, (), Admitted(FIRST, FIRST, 20, 20)),  # the slot's own, at its end
        (20, 0, (), Admitted(FIRST, FIRST, 20, 0)),  # rows, and no state
        (20, 0, (8, 16), Admitted(FIRST, FIRST, 20, 16, CheckpointId(1))),
        (20, 16, (8, 16), Admitted(FIRST, FIRST, 20, 16)),
        (12, 12, (8,), Admitted(FIRST, FIRST, 12, 12)),
    ],
)
def test_a_prompt_goes_on_from_the_last_state_that_it_agrees_with(
    length: int, live: int, kept: tuple[int, ...], expected: Admitted
) -> None:
    before = house(
        Slot(PROMPT[:length], None, 1, state_position=live), kept=tuple(StateCheckpoint(FIRST, at) for at in kept)
    )
    assert admitted(before)[0] == expected


def test_a_tail_that_the_prompt_left_costs_the_state_behind_it_and_no_rows() -> None:
    """This happens where a template leaves out the reasoning of an earlier turn."""
    idle = Slot((*PROMPT[:18], 7, 8), None, 1, state_position=20)
    event, left = admitted(
        house(idle, kept=(StateCheckpoint(FIRST, 16), StateCheckpoint(FIRST, 20), StateCheckpoint(FIRST, 8)))
    )
    assert event == Admitted(FIRST, FIRST, 16, 16, CheckpointId(0))
    assert left == (StateCheckpoint(FIRST, 16, last_turn=9), EMPTY, StateCheckpoint(FIRST, 8)), (
        "the place behind the tail is of no use"
    )
    assert admitted(house(idle, kept=(StateCheckpoint(FIRST, 8),)))[0] == Admitted(FIRST, FIRST, 16, 8, CheckpointId(0))
    without = evolve(STATEFUL, store=False)
    assert admitted(house(idle, kept=(StateCheckpoint(FIRST, 8),)), without)[0] == Admitted(
        FIRST, FIRST, 8, 8, CheckpointId(0)
    ), "no request would bring the state behind more rows"


def test_rows_and_state_may_come_from_two_slots() -> None:
    before = house(Slot(PROMPT[:8], None, 5), Slot(PROMPT[:16], None, 4), kept=(StateCheckpoint(FIRST, 8),))
    assert admitted(before)[0] == Admitted(SECOND, SECOND, 16, 8, CheckpointId(0))


def test_a_state_further_on_is_worth_more_than_rows() -> None:
    before = house(Slot(PROMPT[:12], None, 5, state_position=12), Slot(PROMPT[:16], None, 4))
    assert admitted(before)[0] == Admitted(FIRST, FIRST, 12, 12)


def test_of_a_busy_slot_only_places_can_be_gone_on_from() -> None:
    busy = a(Prefilling, some(STATEFUL, valid=16))
    before = house(Slot(holder=TWO), Slot(OTHER, None, 1, state_position=40), kept=(StateCheckpoint(FIRST, 8),))
    assert admitted(before, two=busy)[0] == Admitted(SECOND, FIRST, 16, 8, CheckpointId(0))
    assert admitted(evolve(before, checkpoints=()), two=busy)[0] == Admitted(SECOND, FIRST, 16, 0)


def test_a_slot_that_is_used_for_something_else_hands_its_places_on_to_who_keeps_the_same() -> None:
    """The system prompt of an agent, say."""
    kept = (StateCheckpoint(FIRST, 8), StateCheckpoint(FIRST, 24), StateCheckpoint(SECOND, 4), EMPTY)
    sequences = (OTHER, (*OTHER[:12], 1, 2, 3))
    assert checkpoints.hand_over(kept, FIRST, 0, sequences) == (
        StateCheckpoint(SECOND, 8),
        EMPTY,
        StateCheckpoint(SECOND, 4),
        EMPTY,
    )
    assert checkpoints.hand_over(kept, FIRST, 8, sequences) == (
        StateCheckpoint(FIRST, 8),
        EMPTY,
        StateCheckpoint(SECOND, 4),
        EMPTY,
    )
    taken = (StateCheckpoint(FIRST, 8), StateCheckpoint(SECOND, 8))
    assert checkpoints.hand_over(taken, FIRST, 0, sequences) == (EMPTY, StateCheckpoint(SECOND, 8)), "one is enough"


@pytest.mark.parametrize(("other", "expected"), [("a", StateCheckpoint(SECOND, 8)), ("b", EMPTY), ("", EMPTY)])
def test_a_job_of_another_salt_leaves_places_to_who_keeps_the_same(other: str, expected: StateCheckpoint) -> None:
    """The slot that the job continues from itself does not say for whom the checkpoints are."""
    idle = Slot(OTHER, None, 1, "a"), Slot(OTHER, None, 5, other)
    event, left = admitted(house(*idle, kept=(StateCheckpoint(FIRST, 8),)))
    assert (event.slot, event.keep, left) == (FIRST, 0, (expected,))


def test_a_slot_that_goes_takes_its_places_along() -> None:
    kept = (StateCheckpoint(FIRST, 8), StateCheckpoint(SECOND, 8), StateCheckpoint(FIRST, 4))
    before = evolve(a_house(Slot((), ONE), Slot(OTHER)), checkpoints=kept)
    assert slots.forget_rows(before, FIRST).checkpoints == (EMPTY, StateCheckpoint(SECOND, 8), EMPTY)
    assert slots.requeue_holder(before, ONE, FIRST).checkpoints == (EMPTY, StateCheckpoint(SECOND, 8), EMPTY)
    after = slots.release_slot(before, ONE, some(STATEFUL, valid=7).remainder, STATEFUL)
    assert after.checkpoints == (EMPTY, StateCheckpoint(SECOND, 8), StateCheckpoint(FIRST, 4))
    assert (after.slots[0].tokens, after.slots[0].state_position) == (PROMPT[:7], 4)


@pytest.mark.parametrize(
    ("kept", "turn", "expected"),
    [
        ((), 9, None),
        ((EMPTY,), 9, 0),
        ((StateCheckpoint(FIRST, 8, 9), EMPTY), 9, 1),
        (
            (StateCheckpoint(FIRST, 8, 9), StateCheckpoint(FIRST, 12, 9)),
            9,
            1,
        ),  # 4 tokens behind another are worth less than 8, or 16
        ((StateCheckpoint(FIRST, 8, 9), StateCheckpoint(SECOND, 12, 9)), 9, 0),
        # It counts for a third of 12, as no request has used it for two turns.
        ((StateCheckpoint(FIRST, 8, 9), StateCheckpoint(SECOND, 12, 7)), 9, 1),
        (
            (StateCheckpoint(FIRST, 24, 9), StateCheckpoint(SECOND, 30, 9)),
            9,
            None,
        ),  # 4 more tokens are not worth either of them
    ],
)
def test_who_makes_room_saves_least_for_its_age(
    kept: tuple[StateCheckpoint, ...], turn: int, expected: int | None
) -> None:
    assert checkpoints.choose_checkpoint(kept, FIRST, 28, turn) == expected


def test_a_chunk_that_stops_where_the_state_is_kept_gets_a_place_and_fills_it_when_it_is_computed() -> None:
    flat = some(STATEFUL, valid=16)
    stop, effect_request = a(Prefilling, flat), EffectRequest(ONE, RunPrefill(HERE, 16, 20, checkpoint=True))
    before = evolve(a_house(Slot((), ONE)), checkpoints=(StateCheckpoint(HERE, 8, 1), StateCheckpoint(HERE, 4, 9)))
    after, launched = slots.assign_checkpoint(before, effect_request, {ONE: stop}, STATEFUL)
    assert launched == EffectRequest(ONE, RunPrefill(HERE, 16, 20, checkpoint=True, device_checkpoint=CheckpointId(0)))
    assert after.checkpoints == (EMPTY, StateCheckpoint(HERE, 4, 9)), (
        "the slot that had it cannot continue from it any more"
    )
    for state, fills in (
        (stop, True),
        (a(Draining, flat, 1), True),  # cancelled meanwhile: the rows are there all the same
        (Draining(flat.remainder, 1, rows_lost=True), False),
    ):
        now = slots.record_checkpoint(after, launched, PrefillAdvanced(20), {ONE: state}, STATEFUL)
        assert now.checkpoints[0] == (StateCheckpoint(HERE, 20, 9) if fills else EMPTY)
    assert slots.record_checkpoint(after, launched, DeviceFailed("out_of_memory", ""), {ONE: stop}, STATEFUL) == after
    elsewhere = EffectRequest(ONE, RunPrefill(HERE, 12, 16))
    assert slots.assign_checkpoint(before, elsewhere, {ONE: a(Prefilling, some(STATEFUL, valid=12))}, STATEFUL) == (
        before,
        elsewhere,
    )


def test_a_chunk_keeps_the_state_that_the_slot_has_within_it() -> None:
    """The slot has the state at the end of its last block until it has another block."""
    flat = some(STATEFUL, valid=16)
    effect_request = EffectRequest(ONE, RunPrefill(HERE, 16, 22, checkpoint=True))
    before = evolve(a_house(Slot((), ONE)), checkpoints=(EMPTY,))
    after, launched = slots.assign_checkpoint(before, effect_request, {ONE: a(Prefilling, flat)}, STATEFUL)
    now = slots.record_checkpoint(after, launched, PrefillAdvanced(22), {ONE: a(Prefilling, flat)}, STATEFUL)
    assert now.checkpoints == (StateCheckpoint(HERE, 20, 9),)


def test_a_state_that_is_computed_again_is_kept_once() -> None:
    """A compressed prompt may begin as the one before did, and go on from nowhere."""
    before = evolve(a_house(Slot((), ONE)), checkpoints=(StateCheckpoint(HERE, 20, 1), EMPTY))
    effect_request = EffectRequest(ONE, RunPrefill(HERE, 16, 20, checkpoint=True))
    assert slots.assign_checkpoint(
        before, effect_request, {ONE: a(Prefilling, some(STATEFUL, valid=16))}, STATEFUL
    ) == (
        before,
        effect_request,
    )
