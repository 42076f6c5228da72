"""Draining, Snapshotting, Parking: what happens behind the client's back."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from effects.decode import Decoded
from effects.draft import DraftParked, DraftUnparked, ParkDraft
from effects.ids import DeviceFailed, LeaseId, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.pflash import PromptCompressed
from effects.prefill import PrefillAdvanced
from effects.restore import BlocksRestored
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream
from states import ending
from states.life import (
    Cancelled,
    Compressing,
    Done,
    Draining,
    Event,
    LookingUp,
    Parking,
    Prefilling,
    Snapshotting,
    Speculating,
    Unparking,
)
from states.machine import Then, step
from states.scope import report
from states.table import TABLE
from tests.states.builders import (
    DRAFT,
    EVERYTHING,
    HERE,
    PROMPT,
    SHORT,
    STORE,
    a_draining,
    a_hold,
    a_prefilled,
    a_restoring,
    an_answering,
)

GONE = Cancelled("client_gone")
ABANDONED = DeviceFailed("abandoned", "")


def settle(hold: Any, event: Event, flying: int = 1) -> Any:
    return step(TABLE, a_draining(hold, flying), event)


@pytest.mark.parametrize("state", [LookingUp, Compressing, Unparking, Prefilling, Speculating])
def test_a_cancellation_closes_the_stream_at_once_and_drains(state: Any) -> None:
    hold = an_answering()
    then = ending.drain(state(hold), GONE)
    assert then == Then(Draining(hold, 1), CloseStream("cancelled", report(hold), "client_gone"), Abandon())


def test_a_stop_string_is_a_stop() -> None:
    hold = an_answering()
    then = ending.drain(Speculating(hold), Cancelled("stop_string"))
    assert then == Then(Draining(hold, 1), CloseStream("stop", report(hold), "stop_string"), Abandon())


@pytest.mark.parametrize(("loading", "computing", "flying"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_draining_waits_for_both_lanes(loading: bool, computing: bool, flying: int) -> None:
    then = ending.drain_both(a_restoring(loading=loading, computing=computing), GONE)
    hold = a_hold(STORE)
    assert then == Then(Draining(hold, flying), CloseStream("cancelled", report(hold), "client_gone"), Abandon())


def test_a_lease_that_arrives_too_late_is_released() -> None:
    then = settle(a_hold(STORE), PrefixFound(LeaseId(5), 20, "disk"))
    assert then == Then(Done(a_hold(STORE)), ReleasePrefix(LeaseId(5)))


@pytest.mark.parametrize("event", [PrefixMissed("empty_store"), StoreFailed("io", ""), PromptCompressed(SHORT, ())])
def test_an_answer_that_changes_nothing_ends_the_drain(event: Event) -> None:
    assert settle(a_hold(STORE), event) == Then(Done(a_hold(STORE)))


def test_rows_that_were_computed_before_the_lookup_are_kept() -> None:
    hold = a_hold(STORE, valid=8, restored=4)
    assert settle(hold, PrefixMissed("empty_store")) == Then(Snapshotting(hold), SaveSnapshot(HERE, PROMPT[:8]))


def test_a_draft_that_arrives_too_late_is_given_back() -> None:
    assert settle(a_hold(DRAFT), DraftUnparked()) == Then(Parking(a_hold(DRAFT, draft=True)), ParkDraft())


def test_a_chunk_that_was_running_is_kept() -> None:
    hold = a_hold(STORE, valid=16)
    assert settle(a_hold(STORE, valid=8), PrefillAdvanced(16)) == Then(
        Snapshotting(hold), SaveSnapshot(HERE, PROMPT[:16])
    )


def test_of_a_decode_step_that_was_running_the_row_of_the_token_it_fed_is_kept() -> None:
    before = an_answering(DRAFT, draft=True)
    assert settle(before, Decoded((9, 10))) == Then(Parking(evolve(before, valid=23)), ParkDraft())
    assert evolve(before, valid=23).rows == (*PROMPT, 7, 8)


def test_positional_state_takes_the_sequence_along_past_what_the_client_saw() -> None:
    before = an_answering(evolve(DRAFT, stateful=True), draft=True)
    hold = settle(before, Decoded((9, 10))).state.hold
    assert (hold.valid, hold.rows) == (24, (*PROMPT, 7, 8, 9))


def test_both_sides_answer_in_any_order_and_what_joins_is_kept() -> None:
    first = settle(a_hold(STORE), PrefillAdvanced(8), flying=2)
    assert first == Then(a_draining(a_hold(STORE, valid=8)))
    hold = a_hold(STORE, valid=20, restored=12)
    assert step(TABLE, first.state, BlocksRestored(8, 20, 99)) == Then(Done(hold))


def test_restored_rows_behind_a_gap_are_not_kept() -> None:
    first = settle(a_hold(STORE), BlocksRestored(8, 20, 99), flying=2)
    assert first == Then(a_draining(a_hold(STORE)))
    hold = a_hold(STORE, valid=8)
    assert step(TABLE, first.state, PrefillAdvanced(8)) == Then(Snapshotting(hold), SaveSnapshot(HERE, PROMPT[:8]))
    assert step(TABLE, first.state, ABANDONED) == Then(Done(a_hold(STORE)))


def test_restored_rows_are_not_snapshotted_again() -> None:
    hold = a_hold(STORE, valid=20, restored=20)
    assert settle(a_hold(STORE), BlocksRestored(0, 20, 99)) == Then(Done(hold))


def test_a_failed_load_leaves_the_computed_front() -> None:
    first = settle(a_hold(STORE), StoreFailed("abandoned", ""), flying=2)
    assert first == Then(a_draining(a_hold(STORE)))


def test_an_abandoned_effect_leaves_what_was_acknowledged_and_a_broken_slot_nothing() -> None:
    hold = a_prefilled(STORE)
    assert settle(hold, ABANDONED) == Then(Snapshotting(hold), SaveSnapshot(HERE, PROMPT[:20]))
    assert settle(hold, DeviceFailed("broken", "")) == Then(Done(evolve(hold, valid=0)))
    assert settle(hold, DeviceFailed("broken", ""), flying=2) == Then(a_draining(evolve(hold, valid=0)))


def test_after_the_snapshot_the_draft_is_given_back_or_nothing_is_left_to_do() -> None:
    saved = SnapshotSaved(20, 99)
    drafted = a_prefilled(EVERYTHING, draft=True)
    assert ending.snapshotted(Snapshotting(drafted), saved) == Then(Parking(drafted), ParkDraft())
    assert ending.snapshotted(Snapshotting(a_prefilled()), saved) == Then(Done(a_prefilled()))


def test_a_failed_snapshot_loses_time_and_nothing_else() -> None:
    hold = a_prefilled(STORE)
    assert ending.unsaved(Snapshotting(hold), DeviceFailed("out_of_memory", "")) == Then(Done(hold))
    assert ending.unsaved(Snapshotting(hold), DeviceFailed("broken", "")) == Then(Done(evolve(hold, valid=0)))
    drafted = a_prefilled(EVERYTHING, draft=True)
    then = ending.unsaved(Snapshotting(drafted), DeviceFailed("io", ""))
    assert then == Then(Parking(drafted), ParkDraft())


@pytest.mark.parametrize("event", [DraftParked(), DeviceFailed("io", "")])
def test_parking_is_the_last_thing_whatever_comes_of_it(event: Any) -> None:
    assert ending.parked(Parking(a_prefilled(DRAFT)), event) == Then(Done(a_prefilled(DRAFT)))


@pytest.mark.parametrize(
    "state",
    [a_draining(a_hold(), 2), Snapshotting(a_hold()), Parking(a_hold())],
    ids=lambda state: type(state).__name__,
)
def test_a_cancellation_behind_the_clients_back_changes_nothing(state: Any) -> None:
    assert step(TABLE, state, GONE) == Then(state)
