"""Draining, Snapshotting and Parking: what happens to a request after its stream is closed."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from effects.decode import Decoded
from effects.ids import DeviceFailed, LeaseId, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import PrefillAdvanced
from effects.residency import ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored
from effects.scope import Scope
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream
from states import request_end
from states.events import Cancelled, Event
from states.kept_rows import find_own_state, get_kept_sequence
from states.machine import Transition, step
from states.phases import end_request, make_report
from states.request_states import (
    Compressing,
    Done,
    Draining,
    LoadingScorer,
    LookingUp,
    Parking,
    Prefilling,
    SlotLease,
    Snapshotting,
    Speculating,
    UnparkingDraft,
    get_remainder,
)
from states.settings import DecisionContext
from states.table import TABLE
from tests.states.builders import (
    DRAFT,
    EVERYTHING,
    HERE,
    PROMPT,
    STATEFUL,
    STORE,
    a,
    a_job,
    a_restoring,
    answering,
    knowing,
    leased,
    prefilled,
    some,
)

GONE = Cancelled("client_gone")
ABANDONED = DeviceFailed("abandoned", "")
KNOWN = knowing(STORE)


def settle(hold: Any, event: Event, known: DecisionContext = KNOWN, flying: int = 1) -> Any:
    return step(TABLE, a(Draining, hold, flying), event, known)


@pytest.mark.parametrize("state", [LookingUp, LoadingScorer, Compressing, UnparkingDraft, Prefilling, Speculating])
def test_a_cancellation_closes_the_stream_at_once_and_drains(state: Any) -> None:
    hold = answering()
    before = a(state, hold)
    then = request_end.cancel_and_drain(before, GONE, knowing())
    closing = CloseStream("cancelled", make_report(knowing(), before), "client_gone")
    assert then == Transition(Draining(get_remainder(before), 1), closing, Abandon())


def test_a_stop_string_is_a_stop() -> None:
    before = a(Speculating, answering())
    then = request_end.cancel_and_drain(before, Cancelled("stop_string"), knowing())
    closing = CloseStream("stop", make_report(knowing(), before), "stop_string")
    assert then == Transition(a(Draining, answering(), 1), closing, Abandon())


@pytest.mark.parametrize(("loading", "computing", "flying"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_draining_waits_for_both_lanes(loading: bool, computing: bool, flying: int) -> None:
    then = request_end.cancel_and_drain_both(a_restoring(loading=loading, computing=computing), GONE, knowing(STORE))
    closing = CloseStream("cancelled", make_report(knowing(STORE), a_restoring()), "client_gone")
    assert then == Transition(a(Draining, some(STORE), flying), closing, Abandon())


def test_a_lease_that_arrives_too_late_is_released() -> None:
    then = settle(some(STORE), PrefixFound(LeaseId(5), 20, "disk"))
    assert then == Transition(a(Done, some(STORE)), ReleasePrefix(LeaseId(5)))


@pytest.mark.parametrize("event", [PrefixMissed("empty_store"), StoreFailed("io", "")])
def test_an_answer_that_changes_nothing_ends_the_drain(event: Event) -> None:
    assert settle(some(STORE), event) == Transition(a(Done, some(STORE)))


def test_rows_that_were_computed_before_the_lookup_are_kept() -> None:
    hold = some(STORE, valid=8, reused=4)
    assert settle(hold, PrefixMissed("empty_store")) == Transition(
        a(Snapshotting, hold), SaveSnapshot(HERE, PROMPT[:8])
    )


def test_a_draft_that_arrives_too_late_is_given_back() -> None:
    assert settle(some(DRAFT), ModelLoaded(), knowing(DRAFT)) == Transition(
        a(Parking, some(DRAFT, control=leased())), UnloadModel("draft")
    )


def test_a_chunk_that_was_running_is_kept() -> None:
    hold = some(STORE, valid=16)
    assert settle(some(STORE, valid=8), PrefillAdvanced(16)) == Transition(
        a(Snapshotting, hold), SaveSnapshot(HERE, PROMPT[:16])
    )


def test_of_a_decode_step_that_was_running_the_row_of_the_token_it_fed_is_kept() -> None:
    before = answering(DRAFT, control=leased())
    assert settle(before, Decoded((9, 10)), knowing(DRAFT)) == Transition(
        a(Parking, evolve(before, valid=23)), UnloadModel("draft")
    )
    assert evolve(before, valid=23).remainder.valid_tokens == (*PROMPT, 7, 8)


def test_positional_state_takes_the_sequence_along_past_what_the_client_saw() -> None:
    before = answering(evolve(DRAFT, stateful=True), control=leased())
    left = settle(before, Decoded((9, 10)), knowing(evolve(DRAFT, stateful=True))).state.remainder
    assert (left.slot_lease.valid_rows, left.valid_tokens) == (24, (*PROMPT, 7, 8, 9))


def test_rows_without_their_state_stay_with_what_is_brought_behind_them() -> None:
    before = some(STATEFUL, valid=4, reused=4, tier="device", ahead=12)
    left = settle(before, BlocksRestored(8, 8, 99), knowing(STATEFUL)).state.remainder
    assert left.slot_lease == SlotLease(HERE, 8, 8, "device", 8)
    assert (get_kept_sequence(STATEFUL, left), find_own_state(STATEFUL, left)) == (PROMPT[:16], 8)
    left = settle(before, StoreFailed("io", ""), knowing(STATEFUL)).state.remainder
    assert (get_kept_sequence(STATEFUL, left), find_own_state(STATEFUL, left)) == (PROMPT[:16], 4)
    left = settle(before, StoreFailed("lost", ""), knowing(STATEFUL)).state.remainder
    assert (get_kept_sequence(STATEFUL, left), find_own_state(STATEFUL, left)) == (PROMPT[:16], 0)


def test_the_end_of_an_answer_is_kept_with_the_state_there() -> None:
    for valid, checkpoint, settings in (
        (24, True, STATEFUL),
        (22, True, STATEFUL),
        (22, False, STORE),
        (22, False, evolve(STATEFUL, keep_decoded=False)),
    ):
        then = end_request(settings, answering(settings, valid=valid, answer=(7, 8, 9, 10)).remainder)
        assert then.effects == (SaveSnapshot(HERE, (*PROMPT, 7, 8, 9)[: valid // 4 * 4], checkpoint),) or not checkpoint
        assert [effect.checkpoint for effect in then.effects] == [checkpoint]
    fixed = answering(STATEFUL, job=a_job(scope=Scope("fixed", 9)))
    assert end_request(STATEFUL, fixed.remainder).effects == (SaveSnapshot(HERE, PROMPT[:8]),), (
        "that is not where it is"
    )


def test_both_sides_answer_in_any_order_and_what_joins_is_kept() -> None:
    first = settle(some(STORE), PrefillAdvanced(8), flying=2)
    assert first == Transition(a(Draining, some(STORE, valid=8), 1))
    hold = some(STORE, valid=20, reused=12)
    assert step(TABLE, first.state, BlocksRestored(8, 20, 99), KNOWN) == Transition(a(Done, hold))


def test_restored_rows_behind_a_gap_are_not_kept() -> None:
    first = settle(some(STORE), BlocksRestored(8, 20, 99), flying=2)
    assert first == Transition(a(Draining, some(STORE), 1))
    hold = some(STORE, valid=8)
    assert step(TABLE, first.state, PrefillAdvanced(8), KNOWN) == Transition(
        a(Snapshotting, hold), SaveSnapshot(HERE, PROMPT[:8])
    )
    assert step(TABLE, first.state, ABANDONED, KNOWN) == Transition(a(Done, some(STORE)))


def test_restored_rows_are_not_snapshotted_again() -> None:
    hold = some(STORE, valid=20, reused=20)
    assert settle(some(STORE), BlocksRestored(0, 20, 99)) == Transition(a(Done, hold))


def test_a_failed_load_leaves_the_computed_front() -> None:
    first = settle(some(STORE), StoreFailed("abandoned", ""), flying=2)
    assert first == Transition(a(Draining, some(STORE), 1))


def test_an_abandoned_effect_leaves_what_was_acknowledged_and_a_broken_slot_nothing() -> None:
    hold = prefilled(STORE)
    assert settle(hold, ABANDONED) == Transition(a(Snapshotting, hold), SaveSnapshot(HERE, PROMPT[:20]))
    assert settle(hold, DeviceFailed("broken", "")) == Transition(a(Done, evolve(hold, valid=0)))
    assert settle(hold, DeviceFailed("broken", ""), flying=2) == Transition(a(Draining, evolve(hold, valid=0), 1))


def test_after_the_snapshot_the_draft_is_given_back_or_nothing_is_left_to_do() -> None:
    saved = SnapshotSaved(20, 99)
    drafted = prefilled(EVERYTHING, control=leased())
    assert request_end.end_after_snapshot(a(Snapshotting, drafted), saved, knowing(EVERYTHING)) == Transition(
        a(Parking, drafted), UnloadModel("draft")
    )
    assert request_end.end_after_snapshot(a(Snapshotting, prefilled()), saved, knowing(EVERYTHING)) == Transition(
        a(Done, prefilled())
    )


def test_a_failed_snapshot_loses_time_and_nothing_else() -> None:
    hold = prefilled(STORE)
    assert request_end.end_after_failed_snapshot(
        a(Snapshotting, hold), DeviceFailed("out_of_memory", ""), knowing(STORE)
    ) == Transition(a(Done, hold))
    assert request_end.end_after_failed_snapshot(
        a(Snapshotting, hold), DeviceFailed("broken", ""), knowing(STORE)
    ) == Transition(a(Done, evolve(hold, valid=0)))
    drafted = prefilled(EVERYTHING, control=leased())
    then = request_end.end_after_failed_snapshot(
        a(Snapshotting, drafted), DeviceFailed("out_of_memory", ""), knowing(EVERYTHING)
    )
    assert then == Transition(a(Parking, drafted), UnloadModel("draft"))


@pytest.mark.parametrize(
    ("kind", "valid"),
    [
        ("abandoned", 20),
        ("out_of_memory", 20),
        ("dead_end", 20),
        ("io", 0),
        ("timed_out", 0),
        ("broken", 0),
        ("lost", 0),
    ],
)
def test_a_slot_is_believed_only_after_failures_that_say_nothing_about_it(kind: Any, valid: int) -> None:
    hold = prefilled()
    failure = DeviceFailed(kind, "")
    assert settle(hold, failure, knowing()) == Transition(a(Done, evolve(hold, valid=valid)))
    assert request_end.end_after_failed_snapshot(a(Snapshotting, hold), failure, knowing()) == Transition(
        a(Done, evolve(hold, valid=valid))
    )


@pytest.mark.parametrize("event", [ModelUnloaded(), DeviceFailed("io", "")])
def test_parking_is_the_last_thing_whatever_comes_of_it(event: Any) -> None:
    assert request_end.finish_parking(a(Parking, prefilled(DRAFT)), event, knowing(DRAFT)) == Transition(
        a(Done, prefilled(DRAFT))
    )


@pytest.mark.parametrize(
    "state",
    [a(Draining, some(), 2), a(Snapshotting, some()), a(Parking, some())],
    ids=lambda state: type(state).__name__,
)
def test_a_cancellation_behind_the_clients_back_changes_nothing(state: Any) -> None:
    assert step(TABLE, state, GONE, KNOWN) == Transition(state)
