"""Restoring: rows come from two sides at once, in any order, with gaps and failures."""

from __future__ import annotations

from attrs import evolve

from effects.decode import RunDecode
from effects.ids import DeviceFailed, LeaseId, SlotId, StoreFailed
from effects.lookup import PrefixFound
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import LoadModel
from effects.restore import BlocksRestored
from effects.snapshot import SaveSnapshot
from effects.stream import Abandon, CloseStream, ReportProgress
from states import lookup, restore
from states.machine import Transition
from states.reports import make_report
from states.request_states import (
    Done,
    Draining,
    LoadingScorer,
    LookingUp,
    Prefilling,
    Restoring,
    Snapshotting,
    Speculating,
)
from tests.states.builders import (
    EVERYTHING,
    HERE,
    PROMPT,
    STATEFUL,
    STORE,
    a,
    a_restoring,
    knowing,
    some,
)

OUT_OF_MEMORY = DeviceFailed("out_of_memory", "no room for a chunk")


def test_rows_restored_first_wait_for_the_front() -> None:
    then = restore.accept_restored_rows(a_restoring(), BlocksRestored(8, 20, 99), knowing(STORE))
    assert then == Transition(a_restoring(loading=False, loaded=True))


def test_both_sides_join_without_a_gap() -> None:
    then = restore.accept_computed_rows(a_restoring(loading=False, loaded=True), PrefillAdvanced(8), knowing(STORE))
    hold = some(STORE, valid=20, reused=12, tier="disk", miss="")
    assert then == Transition(a(Speculating, hold), RunDecode(HERE, 20, 120, steps=6))


def test_a_computed_front_waits_for_the_rows() -> None:
    then = restore.accept_computed_rows(a_restoring(), PrefillAdvanced(8), knowing(STORE))
    waiting = a_restoring(some(STORE, valid=8), computing=False)
    assert then == Transition(waiting, ReportProgress(8, 21, 0))
    hold = some(STORE, valid=20, reused=12, tier="disk", miss="")
    assert restore.accept_restored_rows(waiting, BlocksRestored(8, 20, 99), knowing(STORE)) == Transition(
        a(Speculating, hold), RunDecode(HERE, 20, 120, steps=6)
    )


def test_a_long_front_is_computed_chunk_after_chunk_also_when_the_rows_are_there() -> None:
    long = a_restoring(load_start=16)
    then = restore.accept_computed_rows(long, PrefillAdvanced(8), knowing())
    assert then == Transition(
        a_restoring(some(STORE, valid=8), load_start=16), ReportProgress(8, 21, 0), RunPrefill(HERE, 8, 16)
    )
    loaded = evolve(long, loading=False, loaded=True)
    then = restore.accept_computed_rows(loaded, PrefillAdvanced(8), knowing(STORE))
    assert then == Transition(
        a_restoring(some(STORE, valid=8), load_start=16, loading=False, loaded=True),
        ReportProgress(8, 21, 0),
        RunPrefill(HERE, 8, 16),
    )


def test_rows_restored_with_nothing_to_compute_go_straight_on() -> None:
    then = restore.accept_restored_rows(
        a(Restoring, some(STORE), 0, 16, "host"), BlocksRestored(0, 16, 99), knowing(STORE)
    )
    hold = some(STORE, valid=16, reused=16, tier="host", miss="")
    assert then == Transition(a(Prefilling, hold), RunPrefill(HERE, 16, 20))


def test_the_tier_of_a_report_is_where_most_rows_came_from() -> None:
    before = some(STORE, valid=12, reused=12, tier="device", miss="")
    then = restore.accept_restored_rows(
        a(Restoring, before, 12, 16, "disk"), BlocksRestored(12, 16, 99), knowing(STORE)
    )
    assert then.state == a(Prefilling, evolve(before, valid=16, reused=16))


def test_a_failed_restore_is_a_miss() -> None:
    then = restore.continue_without_restored_rows(
        a(Restoring, some(STORE), 0, 16, "disk"), StoreFailed("io", "EIO"), knowing(STORE)
    )
    assert then == Transition(a(Prefilling, some(STORE, miss="restore_io")), RunPrefill(HERE, 0, 8))


def test_a_failed_restore_keeps_the_front_that_is_being_computed() -> None:
    then = restore.continue_without_restored_rows(a_restoring(load_start=16), StoreFailed("io", "EIO"), knowing(STORE))
    lost = a_restoring(some(STORE, miss="restore_io"), load_start=16, loading=False)
    assert then == Transition(lost)
    then = restore.accept_computed_rows(lost, PrefillAdvanced(8), knowing(STORE))
    assert then == Transition(a(Prefilling, some(STORE, valid=8, miss="restore_io")), RunPrefill(HERE, 8, 16))


def test_after_a_failed_restore_the_gate_looks_again_at_what_is_missing() -> None:
    then = restore.continue_without_restored_rows(
        a(Restoring, some(EVERYTHING), 0, 12, "disk"), StoreFailed("io", "EIO"), knowing(EVERYTHING)
    )
    assert then == Transition(a(LoadingScorer, some(EVERYTHING, miss="restore_io")), LoadModel("scorer"))


def test_rows_that_were_not_acknowledged_are_computed() -> None:
    then = restore.accept_restored_rows(
        a(Restoring, some(STORE), 0, 20, "disk"), BlocksRestored(0, 12, 99), knowing(STORE)
    )
    hold = some(STORE, valid=12, reused=12, tier="disk", miss="")
    assert then == Transition(a(Prefilling, hold), RunPrefill(HERE, 12, 20))


def test_a_gap_in_front_of_the_restored_rows_is_computed_while_the_front_is() -> None:
    then = restore.accept_restored_rows(a_restoring(), BlocksRestored(12, 20, 99), knowing(STORE))
    gap = a_restoring(load_start=12, loading=False, loaded=True)
    assert then == Transition(gap)
    then = restore.accept_computed_rows(gap, PrefillAdvanced(8), knowing(STORE))
    assert then == Transition(
        a_restoring(some(STORE, valid=8), load_start=12, loading=False, loaded=True),
        ReportProgress(8, 21, 0),
        RunPrefill(HERE, 8, 12),
    )


def test_rows_behind_a_gap_that_nobody_fills_are_lost() -> None:
    then = restore.accept_restored_rows(
        a(Restoring, some(STORE), 0, 20, "disk"), BlocksRestored(4, 20, 99), knowing(STORE)
    )
    assert then == Transition(a(Prefilling, some(STORE, miss="restore_incomplete")), RunPrefill(HERE, 0, 8))


def test_an_acknowledgement_of_nothing_is_a_miss() -> None:
    then = restore.accept_restored_rows(
        a(Restoring, some(STORE), 0, 20, "disk"), BlocksRestored(0, 3, 99), knowing(STORE)
    )
    assert then == Transition(a(Prefilling, some(STORE, miss="restore_incomplete")), RunPrefill(HERE, 0, 8))


def test_a_front_that_fails_while_rows_are_loaded_drains_the_load() -> None:
    then = restore.fail_front(a_restoring(), OUT_OF_MEMORY, knowing(STORE))
    closing = CloseStream("failed", make_report(knowing(STORE), a_restoring()), "no room for a chunk")
    assert then == Transition(a(Draining, some(STORE), 1), closing, Abandon())


def test_a_front_that_fails_after_the_load_ends_the_request() -> None:
    state = a_restoring(loading=False, loaded=True)
    closing = CloseStream("failed", make_report(knowing(STORE), a_restoring()), "no room for a chunk")
    assert restore.fail_front(state, OUT_OF_MEMORY, knowing(STORE)) == Transition(a(Done, some(STORE)), closing)
    part = some(STORE, valid=8)
    then = restore.fail_front(
        a_restoring(part, load_start=16, loading=False, loaded=True), OUT_OF_MEMORY, knowing(STORE)
    )
    assert then == Transition(
        a(Snapshotting, part),
        CloseStream("failed", make_report(knowing(STORE), a_restoring(part)), "no room for a chunk"),
        SaveSnapshot(HERE, PROMPT[:8]),
    )


def test_rows_that_could_not_be_restored_are_not_taken_for_kept() -> None:
    hold = some(STORE, stored=20)
    then = restore.continue_without_restored_rows(
        a(Restoring, hold, 0, 16, "disk"), StoreFailed("broken", "checksum"), knowing(STORE)
    )
    assert then.state.prompt.stored_rows == 0
    then = restore.accept_restored_rows(a(Restoring, hold, 0, 20, "disk"), BlocksRestored(0, 12, 99), knowing(STORE))
    assert (then.state.slot_lease.valid_rows, then.state.prompt.stored_rows) == (12, 0)
    then = restore.accept_restored_rows(a(Restoring, hold, 0, 20, "disk"), BlocksRestored(0, 20, 99), knowing(STORE))
    assert (then.state.slot_lease.valid_rows, then.state.prompt.stored_rows) == (20, 20)


def test_rows_without_the_state_at_their_end_are_none() -> None:
    hold = some(STATEFUL, stored=20)
    then = restore.accept_restored_rows(a(Restoring, hold, 0, 20, "disk"), BlocksRestored(0, 12, 99), knowing(STATEFUL))
    after = evolve(hold, miss="restore_incomplete", stored=0)
    assert then == Transition(a(Prefilling, after), RunPrefill(HERE, 0, 8))


def test_a_state_that_was_overwritten_in_part_is_none_and_the_rows_are_computed_again() -> None:
    had = some(STATEFUL, valid=4, reused=4, tier="device", ahead=8, stored=20)
    then = restore.continue_without_restored_rows(
        a(Restoring, had, 12, 20, "disk"), StoreFailed("lost", "half of it"), knowing(STATEFUL)
    )
    after = some(STATEFUL, miss="restore_lost")
    assert then == Transition(a(Prefilling, after), RunPrefill(HERE, 0, 8))


def test_rows_of_another_slot_are_never_named() -> None:
    hold = some(STORE, slot=SlotId(1))
    then = lookup.use_found_prefix(a(LookingUp, hold), PrefixFound(LeaseId(5), 20, "disk"), knowing(STORE))
    assert {effect.slot for effect in then.effects} == {SlotId(1)}


def test_rows_that_the_slot_had_count_with_the_state_that_comes_behind_them() -> None:
    had = some(STATEFUL, valid=4, reused=4, tier="device", ahead=12, stored=16)
    then = restore.accept_restored_rows(
        a(Restoring, had, 16, 16, "disk"), BlocksRestored(16, 16, 99), knowing(STATEFUL)
    )
    hold = evolve(had, valid=16, reused=16, ahead=0, miss="")
    assert then == Transition(a(Prefilling, hold), RunPrefill(HERE, 16, 20, checkpoint=True))
    then = restore.accept_restored_rows(a(Restoring, had, 8, 8, "disk"), BlocksRestored(8, 8, 99), knowing(STATEFUL))
    assert then.state.slot_lease == evolve(hold, valid=8, reused=8).early[0], "what is computed now overwrites the rest"
    none = evolve(had, valid=0, reused=0, tier="none")
    then = restore.accept_restored_rows(
        a(Restoring, none, 12, 20, "disk"), BlocksRestored(12, 20, 99), knowing(STATEFUL)
    )
    assert (then.state.slot_lease.valid_rows, then.state.slot_lease.reused_rows, then.state.slot_lease.tier) == (
        20,
        20,
        "device",
    )
    bare = evolve(none, ahead=4)
    then = restore.accept_restored_rows(a(Restoring, bare, 4, 20, "disk"), BlocksRestored(4, 20, 99), knowing(STATEFUL))
    assert then.state.slot_lease.tier == "disk"
