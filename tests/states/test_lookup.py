"""From a submitted job to the prompt that will be served: New, Waiting, LookingUp."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.compression import Compression
from effects.decode import RunDecode
from effects.ids import CheckpointId, LeaseId, SlotId, StoreFailed
from effects.job import Report, Sampling
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel
from effects.restore import RestoreBlocks
from effects.scope import Scope
from effects.stream import CloseStream, ReportProgress
from states import lookup
from states.events import Admitted, Cancelled, Rejected, Submitted
from states.machine import Transition
from states.request_states import (
    Done,
    LoadingScorer,
    LookingUp,
    New,
    Prefilling,
    Restoring,
    Speculating,
    UnparkingDraft,
)
from tests.states.builders import (
    DRAFT,
    EVERYTHING,
    HERE,
    PFLASH,
    PROMPT,
    STATEFUL,
    STORE,
    a,
    a_job,
    a_waiting,
    knowing,
    some,
)

LEASE = LeaseId(5)
THERE = SlotId(1)


def opening(keep: int = 0, prompt: tuple[int, ...] = PROMPT, source: SlotId = HERE) -> OpenSlot:
    return OpenSlot(HERE, source, keep, prompt, Sampling(), a_job().stop_tokens)


def found(length: int, **changes: object) -> PrefixFound:
    return evolve(PrefixFound(LEASE, length, "disk"), **changes)


def test_a_submitted_job_waits_and_the_client_hears_that_it_was_accepted() -> None:
    assert lookup.submit_request(New(), Submitted(a_job()), knowing()) == Transition(
        a_waiting(), ReportProgress(0, 21, 0)
    )


def test_a_full_queue_closes_the_stream_at_once() -> None:
    closing = CloseStream("queue_full", Report(0), "3 requests are waiting already")
    assert lookup.refuse_request(New(), Rejected(3), knowing()) == Transition(Done(), closing)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("client_gone", "cancelled"), ("deadline", "deadline"), ("stop_string", "stop"), ("shutdown", "shutdown")],
)
def test_a_cancelled_request_leaves_the_queue_with_its_reason(reason: str, finish: str) -> None:
    then = lookup.cancel_waiting(a_waiting(), Cancelled(reason), knowing())
    assert then == Transition(Done(), CloseStream(finish, Report(21), reason))


def test_an_admitted_request_with_nothing_on_the_device_prefills_from_the_start() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 0), knowing())
    assert then == Transition(a(Prefilling, some()), opening(), RunPrefill(HERE, 0, 8))


def test_an_admitted_request_continues_from_the_rows_of_another_slot() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, THERE, 16), knowing())
    hold = some(valid=16, reused=16, tier="device", miss="")
    assert then == Transition(a(Prefilling, hold), opening(16, source=THERE), RunPrefill(HERE, 16, 20))


def test_a_prompt_that_is_all_there_goes_straight_to_its_first_round() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 20), knowing())
    hold = some(valid=20, reused=20, tier="device", miss="")
    assert then == Transition(a(Speculating, hold), opening(20), RunDecode(HERE, 20, 120, steps=6))


def test_a_prompt_of_one_token_has_nothing_to_prefill() -> None:
    job = a_job(prompt=(7,))
    then = lookup.admit_request(a_waiting(job), Admitted(HERE, HERE, 0), knowing(EVERYTHING))
    hold = some(EVERYTHING, job=job, prompt=(7,))
    assert then == Transition(a(UnparkingDraft, hold), opening(prompt=(7,)), LoadModel("draft"))
    then = lookup.admit_request(a_waiting(job), Admitted(HERE, HERE, 0), knowing())
    assert then == Transition(
        a(Speculating, evolve(hold, speculation="no_draft")),
        opening(prompt=(7,)),
        RunDecode(HERE, 0, 7, steps=6),
    )


def test_the_stores_are_asked_for_more_than_the_device_has() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 8), knowing(STORE))
    hold = some(STORE, valid=8, reused=8, tier="device", miss="")
    assert then == Transition(a(LookingUp, hold), opening(8), FindPrefix(PROMPT, 8))


def test_where_prompts_may_be_compressed_the_memo_is_asked_too() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 0), knowing(EVERYTHING))
    assert then == Transition(a(LookingUp, some(EVERYTHING)), opening(), FindPrefix(PROMPT, 0))
    verbatim = a_job(compression=Compression())
    then = lookup.admit_request(a_waiting(verbatim), Admitted(HERE, HERE, 0), knowing(EVERYTHING))
    assert then == Transition(a(LookingUp, some(EVERYTHING, job=verbatim)), opening(), FindPrefix(PROMPT, 0))


def test_a_long_prompt_is_compressed_and_a_draft_is_fetched_before_prefill() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 0), knowing(PFLASH))
    assert then == Transition(a(LoadingScorer, some(PFLASH)), opening(), LoadModel("scorer"))
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 0), knowing(DRAFT))
    assert then == Transition(a(UnparkingDraft, some(DRAFT)), opening(), LoadModel("draft"))


def test_a_hit_is_restored_up_to_the_last_grain_before_the_last_token() -> None:
    then = lookup.use_found_prefix(a(LookingUp, some(STORE)), found(21), knowing(STORE))
    hold = some(STORE, stored=21)
    assert then == Transition(a(Restoring, hold, 0, 20, "disk"), opening(), RestoreBlocks(LEASE, HERE, 0, 20))


def test_a_hit_is_restored_behind_what_the_device_has() -> None:
    hold = some(STORE, valid=8, reused=8, tier="device", miss="")
    then = lookup.use_found_prefix(a(LookingUp, hold), found(16), knowing(STORE))
    restoring = a(Restoring, evolve(hold, stored=16), 8, 16, "disk")
    assert then == Transition(restoring, opening(8), RestoreBlocks(LEASE, HERE, 8, 16))


def test_the_front_is_computed_while_the_rest_is_loaded() -> None:
    hold = some(STORE)
    then = lookup.use_found_prefix(a(LookingUp, hold), found(20), knowing(STORE, prefill=(100,), loads={"disk": 100}))
    restoring = a(Restoring, evolve(hold, stored=20), 8, 20, "disk", computing=True)
    assert then == Transition(restoring, opening(), RestoreBlocks(LEASE, HERE, 8, 20), RunPrefill(HERE, 0, 8))


def test_the_front_is_computed_chunk_by_chunk() -> None:
    hold = some(STORE)
    then = lookup.use_found_prefix(a(LookingUp, hold), found(20), knowing(STORE, prefill=(100,), loads={"disk": 250}))
    restoring = a(Restoring, evolve(hold, stored=20), 16, 20, "disk", computing=True)
    assert then == Transition(restoring, opening(), RestoreBlocks(LEASE, HERE, 16, 20), RunPrefill(HERE, 0, 8))


def test_a_store_that_is_slower_than_computing_is_let_go() -> None:
    hold = some(STORE)
    then = lookup.use_found_prefix(a(LookingUp, hold), found(20), knowing(STORE, prefill=(1,), loads={"disk": 1000}))
    prefilling = a(Prefilling, evolve(hold, miss="recompute_is_quicker", stored=20))
    assert then == Transition(prefilling, ReleasePrefix(LEASE), opening(), RunPrefill(HERE, 0, 8))


def test_a_hit_that_adds_nothing_is_let_go() -> None:
    hold = some(DRAFT, valid=16, reused=16, tier="device", miss="")
    then = lookup.use_found_prefix(a(LookingUp, hold), found(16), knowing(evolve(STORE, max_proposals=3)))
    assert then == Transition(
        a(UnparkingDraft, evolve(hold, stored=16)), ReleasePrefix(LEASE), opening(16), LoadModel("draft")
    )


def test_a_hit_that_leaves_too_much_missing_is_let_go_and_the_prompt_compressed() -> None:
    then = lookup.use_found_prefix(a(LookingUp, some(EVERYTHING)), found(8), knowing(EVERYTHING))
    compressing = a(LoadingScorer, some(EVERYTHING, miss="compression_is_quicker", stored=8))
    assert then == Transition(compressing, ReleasePrefix(LEASE), opening(), LoadModel("scorer"))


def test_a_continuation_is_not_compressed() -> None:
    then = lookup.use_found_prefix(a(LookingUp, some(EVERYTHING)), found(12), knowing(EVERYTHING))
    restoring = a(Restoring, some(EVERYTHING, stored=12), 0, 12, "disk")
    assert then == Transition(restoring, opening(), RestoreBlocks(LEASE, HERE, 0, 12))


def test_a_miss_keeps_its_reason_and_goes_on() -> None:
    then = lookup.continue_after_miss(a(LookingUp, some(STORE)), PrefixMissed("empty_store"), knowing(STORE))
    assert then == Transition(a(Prefilling, some(STORE, miss="empty_store")), RunPrefill(HERE, 0, 8))


AUTO = a_job(scope=Scope("auto", 30), boundaries=(1, 9))


def test_auto_asks_what_is_shared_even_where_all_is_on_the_device() -> None:
    then = lookup.admit_request(a_waiting(AUTO), Admitted(HERE, HERE, 20), knowing(STORE))
    hold = some(STORE, job=AUTO, valid=20, reused=20, tier="device", miss="")
    assert then == Transition(a(LookingUp, hold), opening(20), FindPrefix(PROMPT, 20, prompts_to_compare=30))
    then = lookup.continue_after_miss(
        a(LookingUp, hold), PrefixMissed("diverged_at:8", shared=14, length=8), knowing(STORE)
    )
    known = evolve(hold, shared=14, stored=8)
    assert then == Transition(a(Speculating, known), RunDecode(HERE, 20, 120, steps=6))
    assert lookup.continue_without_store(a(LookingUp, hold), StoreFailed("io", ""), knowing(STORE)) == Transition(
        a(Speculating, hold), RunDecode(HERE, 20, 120, steps=6)
    )


def test_positional_state_is_loaded_whole_or_not_at_all() -> None:
    hold = some(STORE)
    event = found(20, checkpoints=(20,))
    then = lookup.use_found_prefix(a(LookingUp, hold), event, knowing(STATEFUL, prefill=(100,), loads={"disk": 90}))
    restoring = a(Restoring, evolve(hold, stored=20), 0, 20, "disk")
    assert then == Transition(restoring, opening(), RestoreBlocks(LEASE, HERE, 0, 20))
    slow = lookup.use_found_prefix(a(LookingUp, hold), event, knowing(STATEFUL, prefill=(100,), loads={"disk": 110}))
    assert isinstance(slow.state, Prefilling)


def test_a_slot_with_positional_state_keeps_its_rows_and_asks_for_the_state_behind_them() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, THERE, 16, 8, CheckpointId(2)), knowing(STATEFUL))
    hold = some(STATEFUL, valid=8, reused=8, tier="device", ahead=8, miss="")
    opened = evolve(opening(16), source=THERE, state=8, device_checkpoint=CheckpointId(2))
    assert then == Transition(a(LookingUp, hold), opened, FindPrefix(PROMPT, 8, rows=16))
    then = lookup.use_found_prefix(a(LookingUp, hold), found(16, checkpoints=(12, 16)), knowing(STATEFUL))
    restoring = a(Restoring, evolve(hold, stored=16), 16, 16, "disk")
    assert then == Transition(restoring, evolve(opening(16), state=8), RestoreBlocks(LEASE, HERE, 16, 16))


def test_a_slot_with_rows_and_no_state_is_no_hit() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 16), knowing(STATEFUL))
    hold = some(STATEFUL, ahead=16)
    assert then == Transition(a(LookingUp, hold), opening(16), FindPrefix(PROMPT, 0, rows=16))
    then = lookup.continue_after_miss(a(LookingUp, hold), PrefixMissed("no_checkpoint:0"), knowing(STATEFUL))
    assert then == Transition(a(Prefilling, evolve(hold, ahead=0, miss="no_checkpoint:0")), RunPrefill(HERE, 0, 8))


def test_a_failed_lookup_is_a_miss() -> None:
    then = lookup.continue_without_store(
        a(LookingUp, some(STORE)), StoreFailed("timed_out", "slow disk"), knowing(STORE)
    )
    assert then == Transition(a(Prefilling, some(STORE, miss="lookup_timed_out")), RunPrefill(HERE, 0, 8))
