"""UnparkingDraft, Prefilling, Speculating: the work that a client waits for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from attrs import evolve

from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import ModelLoaded, UnloadModel
from effects.snapshot import SaveSnapshot
from effects.stream import CloseStream, EmitTokens, ReportProgress
from states import generate, suffix_control
from states.machine import Transition
from states.reports import explain_no_proposals, make_report
from states.request_states import Done, Parking, Prefilling, Snapshotting, Speculating, UnparkingDraft
from states.scope import select_rows_to_keep
from tests.states.builders import (
    DRAFT,
    EVERYTHING,
    HERE,
    PLAIN,
    PROMPT,
    STORE,
    a,
    a_job,
    a_report,
    answering,
    knowing,
    leased,
    prefilled,
    some,
)

LEASED: dict[str, Any] = {"control": leased()}
EARLIER = evolve(STORE, keep_decoded=False)
BROKEN = DeviceFailed("broken", "CUDA error")
OUT_OF_MEMORY = DeviceFailed("out_of_memory", "no room for a chunk")


def test_an_unparked_draft_is_leased_and_the_work_begins() -> None:
    then = generate.start_with_draft(a(UnparkingDraft, some(DRAFT)), ModelLoaded(), knowing(DRAFT))
    assert then == Transition(a(Prefilling, some(DRAFT, **LEASED)), RunPrefill(HERE, 0, 8))
    then = generate.start_with_draft(a(UnparkingDraft, prefilled(DRAFT)), ModelLoaded(), knowing(DRAFT))
    assert then == Transition(a(Speculating, prefilled(DRAFT, **LEASED)), RunDecode(HERE, 20, 120, propose=3, steps=6))


def test_a_failed_unpark_goes_on_without_a_draft() -> None:
    then = generate.start_without_draft(a(UnparkingDraft, some(DRAFT)), OUT_OF_MEMORY, knowing(DRAFT))
    hold = some(DRAFT, speculation="unpark_out_of_memory")
    assert then == Transition(a(Prefilling, hold), RunPrefill(HERE, 0, 8))
    then = generate.start_without_draft(a(UnparkingDraft, prefilled(DRAFT)), OUT_OF_MEMORY, knowing(DRAFT))
    hold = prefilled(DRAFT, speculation="unpark_out_of_memory")
    assert then == Transition(a(Speculating, hold), RunDecode(HERE, 20, 120, propose=0, steps=6))
    assert make_report(knowing(DRAFT), then.state).speculation == "unpark_out_of_memory"


def test_prefill_goes_on_chunk_by_chunk_and_stops_before_the_last_token() -> None:
    then = generate.continue_prefill(a(Prefilling, some()), PrefillAdvanced(8), knowing())
    assert then == Transition(a(Prefilling, some(valid=8)), ReportProgress(8, 21, 0), RunPrefill(HERE, 8, 16))
    then = generate.continue_prefill(a(Prefilling, some(valid=8)), PrefillAdvanced(16), knowing())
    assert then == Transition(a(Prefilling, some(valid=16)), ReportProgress(16, 21, 0), RunPrefill(HERE, 16, 20))


def test_several_chunks_are_asked_for_at_once_where_shards_compute_side_by_side() -> None:
    wide = evolve(PLAIN, chunks_per_prefill=2)
    then = generate.continue_prefill(a(Prefilling, some()), PrefillAdvanced(2), knowing(wide))
    assert then == Transition(a(Prefilling, some(valid=2)), ReportProgress(2, 21, 0), RunPrefill(HERE, 2, 18))
    then = generate.continue_prefill(a(Prefilling, some()), PrefillAdvanced(8), knowing(wide))
    assert then == Transition(a(Prefilling, some(valid=8)), ReportProgress(8, 21, 0), RunPrefill(HERE, 8, 20))


def test_of_several_chunks_each_is_told_and_the_next_ones_are_asked_for_behind_the_last() -> None:
    then = generate.continue_prefill(
        a(Prefilling, some()), PrefillAdvanced(8, more=True), knowing(evolve(PLAIN, chunks_per_prefill=2))
    )
    assert then == Transition(a(Prefilling, some(valid=8)), ReportProgress(8, 21, 0))


def test_the_last_prompt_token_is_fed_by_the_first_round() -> None:
    then = generate.continue_prefill(a(Prefilling, some(valid=16)), PrefillAdvanced(20), knowing())
    assert then == Transition(a(Speculating, prefilled()), ReportProgress(20, 21, 0), RunDecode(HERE, 20, 120, steps=6))


def test_a_chunk_may_acknowledge_less_than_was_asked_for() -> None:
    then = generate.continue_prefill(a(Prefilling, some()), PrefillAdvanced(4), knowing())
    assert then == Transition(a(Prefilling, some(valid=4)), ReportProgress(4, 21, 0), RunPrefill(HERE, 4, 12))


def test_a_decode_step_emits_its_token_and_feeds_it_to_the_next() -> None:
    then = generate.accept_tokens(a(Speculating, prefilled()), Decoded((7,)), knowing())
    hold = prefilled(valid=21, answer=(7,), decode_steps=1)
    assert then == Transition(a(Speculating, hold), EmitTokens((7,)), RunDecode(HERE, 21, 7, steps=5))


def test_accepted_proposals_count_and_the_next_decode_step_proposes_no_further_than_the_limit() -> None:
    then = generate.accept_tokens(
        a(Speculating, prefilled(DRAFT, **LEASED)), Decoded((7, 8, 9), proposed=3), knowing(DRAFT)
    )
    learnt = suffix_control.update_control(LEASED["control"], Decoded((7, 8, 9), proposed=3))
    hold = prefilled(DRAFT, control=learnt, valid=23, answer=(7, 8, 9), decode_steps=1, proposed=3, accepted=2)
    assert then == Transition(a(Speculating, hold), EmitTokens((7, 8, 9)), RunDecode(HERE, 23, 9, propose=2, steps=3))
    cut_by_executor = make_report(knowing(DRAFT), then.state)
    assert (cut_by_executor.decode_steps, cut_by_executor.proposed, cut_by_executor.accepted) == (1, 3, 2)


def test_a_plain_step_leaves_what_is_known_of_proposals_as_it_was() -> None:
    before = a(Speculating, prefilled(DRAFT, **LEASED))
    after = generate.accept_tokens(before, Decoded((7,)), knowing(DRAFT)).state
    assert isinstance(after, Speculating)
    assert after.speculation is before.speculation


def test_logprobs_go_with_their_tokens() -> None:
    one, two = (-0.5, ((7, -0.5),)), (-1.5, ((8, -1.5),))
    then = generate.accept_tokens(
        a(Speculating, answering(answer=(7,) * 5)), Decoded((7, 8), logprobs=(one, two)), knowing()
    )
    assert then.effects[0] == EmitTokens((7,), (one,))


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_the_limit_cuts_a_decode_step_at_any_offset(room: int) -> None:
    before = prefilled(answer=(5,) * (6 - room), valid=26 - room, decode_steps=6 - room)
    then = generate.accept_tokens(a(Speculating, before), Decoded((7, 8, 9, 10)), knowing())
    after = evolve(before, valid=26, answer=before.answer + (7, 8, 9, 10)[:room], decode_steps=7 - room)
    assert then == Transition(a(Done, after), EmitTokens((7, 8, 9, 10)[:room]), CloseStream("length", a_report(after)))


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_stop_token_cuts_a_decode_step_at_any_offset(at: int) -> None:
    tokens = (*(7, 8, 9)[:at], 0, *(7, 8, 9)[at:])
    then = generate.accept_tokens(a(Speculating, prefilled()), Decoded(tokens), knowing())
    after = prefilled(valid=21 + at, answer=tokens[: at + 1], decode_steps=1)
    assert then == Transition(a(Done, after), EmitTokens(tokens[: at + 1]), CloseStream("stop", a_report(after)))


@pytest.mark.parametrize("cut_by_executor", [True, False], ids=["cut_by_the_executor", "cut_here"])
@pytest.mark.parametrize("room", range(1, 7))
def test_the_report_is_exact_wherever_a_decode_step_of_proposals_is_cut(room: int, cut_by_executor: bool) -> None:
    for stop, right in product(range(6), range(5)):
        check_cut_step(room, stop, right, cut_by_executor=cut_by_executor)


def check_cut_step(room: int, stop: int, right: int, *, cut_by_executor: bool) -> None:
    """Four proposals, some of them right, then the target's own pick; a stop token somewhere, and so many may come."""
    case = stop, right
    said = tuple(0 if at == stop else 7 + at for at in range(right + 1))
    ends = min(stop + 1, len(said))
    done = Decoded(said[:ends] if cut_by_executor else said, 4, accepted=min(right, ends) if cut_by_executor else right)
    before = prefilled(DRAFT, **LEASED, answer=(5,) * (6 - room), valid=26 - room, decode_steps=6 - room)
    then = generate.accept_tokens(a(Speculating, before), done, knowing(DRAFT))
    kept = said[: min(ends, room)]
    assert then.effects[0] == EmitTokens(kept), case
    ended = next((one for one in then.effects if isinstance(one, CloseStream)), None)
    figures = ended.report if ended else make_report(knowing(DRAFT), then.state)
    counts = figures.completion_tokens, figures.decode_steps, figures.proposed
    assert counts == (6 - room + len(kept), 7 - room, 4), case
    assert figures.accepted == min(right, len(kept)), (case, "proposals that became tokens of the answer, no others")
    assert (ended and ended.finish) == ("stop" if 0 in kept else "length" if len(kept) == room else None), case


def test_a_stop_token_that_is_the_last_one_allowed_is_a_stop() -> None:
    before = prefilled(valid=25, answer=(7,) * 5, decode_steps=5)
    after = prefilled(valid=26, answer=(7, 7, 7, 7, 7, 0), decode_steps=6)
    then = generate.accept_tokens(a(Speculating, before), Decoded((0,)), knowing())
    assert then == Transition(a(Done, after), EmitTokens((0,)), CloseStream("stop", a_report(after)))


def test_a_stop_token_behind_the_limit_is_never_seen() -> None:
    before = prefilled(valid=25, answer=(7,) * 5, decode_steps=5)
    after = prefilled(valid=26, answer=(7,) * 6, decode_steps=6)
    then = generate.accept_tokens(a(Speculating, before), Decoded((7, 0)), knowing())
    assert then == Transition(a(Done, after), EmitTokens((7,)), CloseStream("length", a_report(after)))


def test_one_token_may_be_all_that_is_wanted() -> None:
    job = a_job(max_tokens=1)
    after = prefilled(DRAFT, job=job, control=leased(), valid=21, answer=(7,), decode_steps=1)
    then = generate.start_with_draft(a(UnparkingDraft, prefilled(DRAFT, job=job)), ModelLoaded(), knowing(DRAFT))
    assert then.effects == (RunDecode(HERE, 20, 120, propose=0),)
    then = generate.accept_tokens(
        a(Speculating, prefilled(DRAFT, job=job, control=leased())), Decoded((7,)), knowing(DRAFT)
    )
    assert then == Transition(
        a(Parking, after), EmitTokens((7,)), CloseStream("length", a_report(after, DRAFT)), UnloadModel("draft")
    )


def test_the_stream_closes_before_the_snapshot_and_the_parking() -> None:
    before = prefilled(EVERYTHING, control=leased())
    after = evolve(before, valid=24, answer=(7, 8, 9, 0), decode_steps=1, proposed=3, accepted=3)
    then = generate.accept_tokens(a(Speculating, before), Decoded((7, 8, 9, 0), proposed=3), knowing(EVERYTHING))
    saving = SaveSnapshot(HERE, (*PROMPT, 7, 8, 9))
    closing = CloseStream("stop", a_report(after, EVERYTHING))
    assert then == Transition(a(Snapshotting, after), EmitTokens((7, 8, 9, 0)), closing, saving)


def test_where_decoding_differs_from_prefill_only_the_prompt_is_kept() -> None:
    before = prefilled(EARLIER)
    then = generate.accept_tokens(a(Speculating, before), Decoded((7, 8, 9, 0)), knowing(EARLIER))
    assert then.effects[-1] == SaveSnapshot(HERE, PROMPT[:20])
    known = evolve(before, stored=20)
    assert isinstance(
        generate.accept_tokens(a(Speculating, known), Decoded((7, 8, 9, 0)), knowing(EARLIER)).state, Done
    )


def test_a_failure_closes_the_stream_and_keeps_what_was_acknowledged() -> None:
    before = answering(STORE)
    then = generate.fail_generation(a(Speculating, before), OUT_OF_MEMORY, knowing(STORE))
    closing = CloseStream("failed", a_report(before, STORE), "no room for a chunk")
    assert then == Transition(a(Snapshotting, before), closing, SaveSnapshot(HERE, PROMPT[:20]))


def test_a_grammar_without_a_way_on_ends_the_answer_and_says_so() -> None:
    before = answering(STORE)
    then = generate.fail_generation(
        a(Speculating, before), DeviceFailed("dead_end", "nothing may follow"), knowing(STORE)
    )
    closing = CloseStream("dead_end", a_report(before, STORE), "nothing may follow")
    assert then == Transition(a(Snapshotting, before), closing, SaveSnapshot(HERE, PROMPT[:20]))


def test_a_slot_that_broke_keeps_nothing() -> None:
    before = answering(EVERYTHING, control=leased())
    forgotten = evolve(before, valid=0, reused=0)
    then = generate.fail_generation(a(Speculating, before), BROKEN, knowing(EVERYTHING))
    closing = CloseStream(
        "failed",
        evolve(a_report(before, EVERYTHING), cache=select_rows_to_keep(EVERYTHING, forgotten.remainder)),
        "CUDA error",
    )
    assert then == Transition(a(Parking, forgotten), closing, UnloadModel("draft"))
    then = generate.fail_generation(a(Prefilling, some(PLAIN, valid=8, reused=8)), BROKEN, knowing())
    closing = CloseStream("failed", a_report(some(valid=8, reused=8)), "CUDA error")
    assert then == Transition(a(Done, some(PLAIN)), closing)


def test_who_asked_for_trees_hears_that_there_were_none() -> None:
    settings = evolve(DRAFT, no_trees=True)
    state = a(Speculating, answering(settings))
    assert explain_no_proposals(knowing(DRAFT), state) == ""
    assert explain_no_proposals(knowing(settings), state) == "no_trees"
    declined = a(Speculating, answering(settings, speculation="declined"))
    assert explain_no_proposals(knowing(settings), declined) == "declined", "no chains either"
