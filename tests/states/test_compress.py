"""Tests of a compression: LoadingScorer, Compressing and UnloadingScorer, and every way in which the prompt stays
whole.
"""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from effects.compression import Compressed, Compression, PromptPart
from effects.ids import DeviceFailed, SlotId
from effects.job import Job
from effects.lookup import FindPrefix
from effects.prefill import OpenSlot, RunPrefill
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.scope import Scope
from effects.stream import CloseStream
from states import compress, lookup, policy
from states.events import Admitted, Cancelled, ForRequest, SlotEmptied, Submitted
from states.rates import Rates
from states.reports import make_report
from states.request_states import (
    Compressing,
    Done,
    LoadingScorer,
    LookingUp,
    Parking,
    Prefilling,
    SlotLease,
    UnloadingScorer,
    UnparkingDraft,
    Yielding,
)
from states.residency import Resolved
from states.settings import DecisionContext, Settings
from states.world import make_world
from tests.states.builders import (
    EVERYTHING,
    HERE,
    LONG_ENOUGH,
    ONE,
    PFLASH,
    PLAIN,
    PROMPT,
    SHORT,
    STATEFUL,
    Flat,
    a,
    a_job,
    a_waiting,
    advance,
    knowing,
    some,
)

NO_ROOM = DeviceFailed("out_of_memory", "")
MADE = PromptCompressed(SHORT, ((0, 4),), ((0, 1),), 7)
TOLD = Compressed(21, "", ((0, 4),), ((0, 1),), 250, 7)
RELEASE = UnloadModel("scorer", keep=False)


def opening(keep: int = 0, prompt: Any = PROMPT) -> OpenSlot:
    return OpenSlot(HERE, HERE, keep, prompt, a_job().sampling, (0,))


def shortened(settings: Settings, **changes: Any) -> Flat:
    return some(settings, **{"prompt": SHORT, "compressed": True, "compression": TOLD, **changes})


def whole(settings: Settings, why: str, ns: int = 0) -> Flat:
    return some(settings, compressed=True, compression=Compressed(21, why, ns=ns))


def test_the_first_piece_says_all_that_there_is_to_say() -> None:
    parts = (PromptPart("user", 1, 20, protected=True),)
    hold = some(PFLASH, job=a_job(compression=evolve(LONG_ENOUGH, parts=parts)))
    then = compress.start_scoring(a(LoadingScorer, hold), ModelLoaded(name="scorer"), knowing(PFLASH))
    assert then.state == a(Compressing, hold)
    assert then.effects == (CompressPrompt(0, PROMPT, keep=5, most=58, parts=parts),)
    then = compress.continue_scoring(a(Compressing, hold), PromptScored(8), knowing(PFLASH))
    assert then.effects == (CompressPrompt(8),)


def test_the_drafter_is_given_back_before_anything_is_served() -> None:
    then = compress.adopt_compressed_prompt(a(Compressing, some(EVERYTHING)), MADE, knowing(EVERYTHING))
    assert (then.state, then.effects) == (a(UnloadingScorer, shortened(EVERYTHING)), (RELEASE,))
    then = compress.serve_released_prompt(then.state, ModelUnloaded(), knowing(EVERYTHING))
    assert then.state == a(LookingUp, shortened(EVERYTHING))
    assert then.effects == (opening(0, SHORT), FindPrefix(SHORT, 0))


def test_a_drafter_that_cannot_be_sent_away_costs_no_answer() -> None:
    then = compress.serve_released_prompt(a(UnloadingScorer, shortened(PFLASH)), NO_ROOM, knowing(PFLASH))
    assert then.state == a(Prefilling, shortened(PFLASH))
    assert then.effects == (opening(0, SHORT), RunPrefill(HERE, 0, 5))


def test_it_is_kept_where_the_policy_says_so() -> None:
    keeps = evolve(PFLASH, residency=Resolved("persistent", "keep", "keep"))
    then = compress.give_up_compression(a(Compressing, some(keeps)), NO_ROOM, knowing(keeps))
    assert then.effects == (UnloadModel("scorer", keep=True),)


def test_only_rows_that_the_compressed_prompt_shares_stay_valid() -> None:
    before = some(PFLASH, valid=8, reused=8, tier="device", miss="")
    then = compress.adopt_compressed_prompt(a(Compressing, before), MADE, knowing(PFLASH))
    assert then.state.slot_lease == SlotLease(HERE, 4, 4, "device", 0)


def test_of_another_prompt_that_is_served_the_state_stays_where_both_agree() -> None:
    stateful = evolve(STATEFUL, scorer_max_tokens=1000)
    for valid, stays in ((4, 4), (8, 0)):
        before = some(stateful, valid=valid, reused=valid, tier="device", ahead=4, miss="")
        then = compress.adopt_compressed_prompt(a(Compressing, before), MADE, knowing(stateful))
        assert then.state.slot_lease == SlotLease(HERE, stays, stays, "device" if stays else "none", 4 - stays)


def test_a_compressed_prompt_is_not_compared_again_and_what_was_shared_is_remembered() -> None:
    asked = a_job(scope=Scope("auto", 30))
    then = compress.adopt_compressed_prompt(
        a(Compressing, some(EVERYTHING, job=asked, shared=14)), MADE, knowing(EVERYTHING)
    )
    then = compress.serve_released_prompt(then.state, ModelUnloaded(), knowing(EVERYTHING))
    assert then.state == a(LookingUp, shortened(EVERYTHING, job=asked, shared=14))
    assert then.effects[-1] == FindPrefix(SHORT, 0), "its window is not asked again"


@pytest.mark.parametrize("prompt", [PROMPT, (*PROMPT, 7)])
def test_what_is_not_shorter_is_served_as_it_came(prompt: tuple[int, ...]) -> None:
    then = compress.adopt_compressed_prompt(
        a(Compressing, some(PFLASH)), PromptCompressed(prompt, (), ns=3), knowing(PFLASH)
    )
    assert then.state == a(UnloadingScorer, whole(PFLASH, "not_shorter", 3))
    then = compress.serve_released_prompt(then.state, ModelUnloaded(), knowing(PFLASH))
    assert then.state == a(Prefilling, whole(PFLASH, "not_shorter", 3))
    assert then.effects == (opening(), RunPrefill(HERE, 0, 8))


def test_a_failed_compression_serves_the_prompt_verbatim_and_says_why() -> None:
    then = compress.give_up_compression(a(Compressing, some(PFLASH)), NO_ROOM, knowing(PFLASH))
    assert then.state == a(UnloadingScorer, whole(PFLASH, "drafter_out_of_memory"))
    then = compress.serve_without_scorer(a(LoadingScorer, some(PFLASH)), NO_ROOM, knowing(PFLASH))
    assert then.state == a(Prefilling, whole(PFLASH, "drafter_out_of_memory"))
    reported = make_report(knowing(PFLASH), then.state).compression
    assert reported == Compressed(21, "drafter_out_of_memory")


TIGHT = evolve(PFLASH, max_context=20)


@pytest.mark.parametrize(
    ("prompt", "finish"), [(whole(TIGHT, "not_shorter"), "too_long"), (whole(TIGHT, "drafter_broken"), "uncompressed")]
)
def test_a_prompt_that_fits_in_no_form_is_refused_with_its_reason(prompt: Flat, finish: str) -> None:
    then = compress.serve_released_prompt(a(UnloadingScorer, prompt), ModelUnloaded(), knowing(TIGHT))
    assert isinstance(then.state, Done)
    [closing] = then.effects
    assert isinstance(closing, CloseStream)
    assert closing.finish == finish
    assert closing.report.compression == prompt.compression


def test_a_prompt_that_does_not_fit_as_it_is_opens_a_slot_with_what_does() -> None:
    then = lookup.admit_request(a_waiting(), Admitted(HERE, HERE, 0), knowing(TIGHT))
    assert then.effects == (opening(0, PROMPT[:20]), LoadModel("scorer"))
    then = compress.start_scoring(then.state, ModelLoaded(name="scorer"), knowing(TIGHT))
    assert then.effects[0].most == 14, "room for the answer"


def test_who_leaves_while_the_drafter_is_given_back_waits_for_that_only() -> None:
    before = a(UnloadingScorer, shortened(PFLASH))
    then = compress.cancel_while_releasing(before, Cancelled("client_gone"), knowing(PFLASH))
    assert isinstance(then.state, Parking)
    assert then.state.remainder.leased_model == "scorer"
    assert then.effects == (CloseStream("cancelled", make_report(knowing(PFLASH), before), "client_gone"),)


def test_who_loses_its_slot_meanwhile_waits_for_another_and_for_the_last_time() -> None:
    then = compress.recover_while_releasing(a(UnloadingScorer, shortened(PFLASH)), SlotEmptied(), knowing(PFLASH))
    assert isinstance(then.state, Yielding)
    assert then.state.remainder.prompt.heard_tokens == ()
    slot_lease, prompt = shortened(PFLASH).early
    then = compress.recover_while_releasing(
        UnloadingScorer(slot_lease, evolve(prompt, heard_tokens=())), SlotEmptied(), knowing(PFLASH)
    )
    assert isinstance(then.state, Parking)
    assert then.effects[0].finish == "lost"


def test_the_gate_is_told_of_in_the_report() -> None:
    known = knowing(PFLASH)
    assert make_report(known, a(UnparkingDraft, some(PFLASH, job=a_job(compression=Compression())))).compression is None
    short = some(PFLASH, valid=12, reused=12)
    assert make_report(known, a(UnparkingDraft, short)).compression == Compressed(21, "below_threshold")
    assert make_report(knowing(PLAIN), a(UnparkingDraft, some(PLAIN))).compression == Compressed(21, "no_drafter")
    remembered = some(PFLASH, prompt=SHORT, compressed=True)
    assert make_report(known, a(UnparkingDraft, remembered)).compression == Compressed(21, keep=250)


def test_what_scoring_takes_is_learned_and_what_speaks_against_it_fades() -> None:
    job: Job = a_job()
    world = make_world(evolve(PFLASH, rates=Rates(prefill=(10,))))
    for event in (Submitted(job), ModelLoaded(9, name="scorer"), PromptCompressed(SHORT, ((0, 4),), ns=2100)):
        world, _ = advance(world, ForRequest(ONE, event))
    assert world.rates.scoring == 100
    assert world.models["scorer"].leases == (ONE,)
    world, _ = advance(world, ForRequest(ONE, ModelUnloaded(9)))
    assert world.models["scorer"].location == "released"
    slow = DecisionContext(world.settings, world.rates)
    assert policy.decide_compression(slow, a_waiting().prompt, 20) == policy.Decision(go=False, reason="does_not_pay")
    world, _ = advance(make_world(evolve(PFLASH, rates=world.rates)), ForRequest(ONE, Submitted(job)))
    assert isinstance(world.requests[ONE], Prefilling)
    assert world.rates.scoring == 97
    assert world.slots.slots[SlotId(0)].holder == ONE
