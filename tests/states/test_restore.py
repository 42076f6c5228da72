"""Restoring: rows come from two sides at once, in any order, with gaps and failures."""

from __future__ import annotations

from attrs import evolve

from effects.decode import RunDecode
from effects.ids import DeviceFailed, LeaseId, SlotId, StoreFailed
from effects.lookup import PrefixFound
from effects.pflash import CompressPrompt
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored
from effects.snapshot import SaveSnapshot
from effects.stream import Abandon, CloseStream, ReportProgress
from states import lookup, restore
from states.life import Compressing, Done, Draining, LookingUp, Prefilling, Restoring, Snapshotting, Speculating
from states.machine import Then
from states.scope import report
from tests.states.builders import EVERYTHING, HERE, PROMPT, STORE, a_hold, a_restoring

OUT_OF_MEMORY = DeviceFailed("out_of_memory", "no room for a chunk")


def test_rows_restored_first_wait_for_the_front() -> None:
    then = restore.loaded(a_restoring(), BlocksRestored(8, 20, 99))
    assert then == Then(a_restoring(loading=False, loaded=True))


def test_both_sides_join_without_a_gap() -> None:
    then = restore.advanced(a_restoring(loading=False, loaded=True), PrefillAdvanced(8))
    hold = a_hold(STORE, valid=20, restored=12, tier="disk", miss="")
    assert then == Then(Speculating(hold), RunDecode(HERE, 20, 120))


def test_a_computed_front_waits_for_the_rows() -> None:
    then = restore.advanced(a_restoring(), PrefillAdvanced(8))
    waiting = a_restoring(hold=a_hold(STORE, valid=8), computing=False)
    assert then == Then(waiting, ReportProgress(8, 21, 0))
    hold = a_hold(STORE, valid=20, restored=12, tier="disk", miss="")
    assert restore.loaded(waiting, BlocksRestored(8, 20, 99)) == Then(Speculating(hold), RunDecode(HERE, 20, 120))


def test_a_long_front_is_computed_chunk_after_chunk_also_when_the_rows_are_there() -> None:
    long = a_restoring(front=16)
    then = restore.advanced(long, PrefillAdvanced(8))
    assert then == Then(evolve(long, hold=a_hold(STORE, valid=8)), ReportProgress(8, 21, 0), RunPrefill(HERE, 8, 16))
    loaded = evolve(long, loading=False, loaded=True)
    then = restore.advanced(loaded, PrefillAdvanced(8))
    assert then == Then(evolve(loaded, hold=a_hold(STORE, valid=8)), ReportProgress(8, 21, 0), RunPrefill(HERE, 8, 16))


def test_rows_restored_with_nothing_to_compute_go_straight_on() -> None:
    then = restore.loaded(Restoring(a_hold(STORE), 0, 16, "host"), BlocksRestored(0, 16, 99))
    hold = a_hold(STORE, valid=16, restored=16, tier="host", miss="")
    assert then == Then(Prefilling(hold), RunPrefill(HERE, 16, 20))


def test_the_tier_of_a_report_is_where_most_rows_came_from() -> None:
    before = a_hold(STORE, valid=12, restored=12, tier="device", miss="")
    then = restore.loaded(Restoring(before, 12, 16, "disk"), BlocksRestored(12, 16, 99))
    assert then.state == Prefilling(evolve(before, valid=16, restored=16))


def test_a_failed_restore_is_a_miss() -> None:
    then = restore.lost(Restoring(a_hold(STORE), 0, 16, "disk"), StoreFailed("io", "EIO"))
    assert then == Then(Prefilling(a_hold(STORE, miss="restore_io")), RunPrefill(HERE, 0, 8))


def test_a_failed_restore_keeps_the_front_that_is_being_computed() -> None:
    then = restore.lost(a_restoring(front=16), StoreFailed("io", "EIO"))
    lost = a_restoring(front=16, hold=a_hold(STORE, miss="restore_io"), loading=False)
    assert then == Then(lost)
    then = restore.advanced(lost, PrefillAdvanced(8))
    assert then == Then(Prefilling(a_hold(STORE, valid=8, miss="restore_io")), RunPrefill(HERE, 8, 16))


def test_after_a_failed_restore_the_gate_looks_again_at_what_is_missing() -> None:
    then = restore.lost(Restoring(a_hold(EVERYTHING), 0, 12, "disk"), StoreFailed("io", "EIO"))
    assert then == Then(Compressing(a_hold(EVERYTHING, miss="restore_io")), CompressPrompt(PROMPT, 250))


def test_rows_that_were_not_acknowledged_are_computed() -> None:
    then = restore.loaded(Restoring(a_hold(STORE), 0, 20, "disk"), BlocksRestored(0, 12, 99))
    hold = a_hold(STORE, valid=12, restored=12, tier="disk", miss="")
    assert then == Then(Prefilling(hold), RunPrefill(HERE, 12, 20))


def test_a_gap_in_front_of_the_restored_rows_is_computed_while_the_front_is() -> None:
    then = restore.loaded(a_restoring(), BlocksRestored(12, 20, 99))
    gap = a_restoring(front=12, loading=False, loaded=True)
    assert then == Then(gap)
    then = restore.advanced(gap, PrefillAdvanced(8))
    assert then == Then(evolve(gap, hold=a_hold(STORE, valid=8)), ReportProgress(8, 21, 0), RunPrefill(HERE, 8, 12))


def test_rows_behind_a_gap_that_nobody_fills_are_lost() -> None:
    then = restore.loaded(Restoring(a_hold(STORE), 0, 20, "disk"), BlocksRestored(4, 20, 99))
    assert then == Then(Prefilling(a_hold(STORE, miss="restore_incomplete")), RunPrefill(HERE, 0, 8))


def test_an_acknowledgement_of_nothing_is_a_miss() -> None:
    then = restore.loaded(Restoring(a_hold(STORE), 0, 20, "disk"), BlocksRestored(0, 3, 99))
    assert then == Then(Prefilling(a_hold(STORE, miss="restore_incomplete")), RunPrefill(HERE, 0, 8))


def test_a_front_that_fails_while_rows_are_loaded_drains_the_load() -> None:
    then = restore.failed(a_restoring(), OUT_OF_MEMORY)
    closing = CloseStream("failed", report(a_hold(STORE)), "no room for a chunk")
    assert then == Then(Draining(a_hold(STORE), 1), closing, Abandon())


def test_a_front_that_fails_after_the_load_ends_the_request() -> None:
    state = a_restoring(loading=False, loaded=True)
    closing = CloseStream("failed", report(a_hold(STORE)), "no room for a chunk")
    assert restore.failed(state, OUT_OF_MEMORY) == Then(Done(a_hold(STORE)), closing)
    part = a_hold(STORE, valid=8)
    then = restore.failed(evolve(state, front=16, hold=part), OUT_OF_MEMORY)
    assert then == Then(
        Snapshotting(part), CloseStream("failed", report(part), "no room for a chunk"), SaveSnapshot(HERE, PROMPT[:8])
    )


def test_rows_that_could_not_be_restored_are_not_taken_for_kept() -> None:
    hold = a_hold(STORE, stored=20)
    then = restore.lost(Restoring(hold, 0, 16, "disk"), StoreFailed("broken", "checksum"))
    assert then.state.hold.stored == 0
    then = restore.loaded(Restoring(hold, 0, 20, "disk"), BlocksRestored(0, 12, 99))
    assert (then.state.hold.valid, then.state.hold.stored) == (12, 0)
    then = restore.loaded(Restoring(hold, 0, 20, "disk"), BlocksRestored(0, 20, 99))
    assert (then.state.hold.valid, then.state.hold.stored) == (20, 20)


def test_rows_without_the_state_at_their_end_are_none() -> None:
    hold = a_hold(evolve(STORE, stateful=True), stored=20)
    then = restore.loaded(Restoring(hold, 0, 20, "disk"), BlocksRestored(0, 12, 99))
    after = evolve(hold, miss="restore_incomplete", stored=0)
    assert then == Then(Prefilling(after), RunPrefill(HERE, 0, 8))


def test_rows_of_another_slot_are_never_named() -> None:
    hold = a_hold(STORE, slot=SlotId(1))
    then = lookup.found(LookingUp(hold), PrefixFound(LeaseId(5), 20, "disk"))
    assert {effect.slot for effect in then.effects} == {SlotId(1)}
