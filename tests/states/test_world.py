"""The fold: admission, refusal, cancellation and turns, as sequences of events and what is asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from attrs import evolve

from effects.all import Effect, EffectRequest, Launch
from effects.compression import Compressed
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, PROMPTS, DeviceFailed, LaneId, RequestId, SlotId
from effects.job import Report
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill, group_prefills
from effects.prompt_compression import CompressPrompt, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.scope import Selection
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from states import launch_choice
from states import speculation_control as control
from states.events import Cancelled, Event, ForEngine, ForModel, ForRequest, SlotsLost, Submitted
from states.invariants import check_world
from states.lane import choose_lane
from states.machine import IllegalEvent
from states.phases import make_report
from states.rates import DecodeTimes, Rates, TimedStep
from states.recover import LOST_TWICE
from states.request_states import Draining, Prefilling, Recovering, Speculating
from states.residency import Residence
from states.settings import Settings
from states.slots import Slot
from states.world import Output, World, make_world
from tests.states.builders import (
    DRAFT,
    HERE,
    ONE,
    PLAIN,
    PROMPT,
    SCOPED,
    THREE,
    TWO,
    a,
    a_job,
    a_waiting,
    advance,
    knowing,
    some,
)

SMALL = evolve(PLAIN, slots=1, max_queue=1)
GONE = Cancelled("client_gone")


def after(settings: Settings, *events: tuple[RequestId, Event]) -> tuple[World, tuple[Output, ...]]:
    """The world after these events, and what the last one asked for."""
    world, outs = make_world(settings), tuple[Output, ...]()
    for request, event in events:
        world, outs = advance(world, ForRequest(request, event))
        check_world(world)
    return world, outs


def submitted(request: RequestId, **changes: Any) -> tuple[RequestId, Event]:
    return request, Submitted(a_job(**changes))


def alone(request: RequestId, effect: Any) -> Launch:
    return Launch((EffectRequest(request, effect),))


def test_a_request_is_admitted_and_launched_in_the_event_that_submits_it() -> None:
    world, outs = after(PLAIN, submitted(ONE))
    assert outs == (
        EffectRequest(ONE, ReportProgress(0, 21, 0)),
        EffectRequest(ONE, OpenSlot(HERE, HERE, 0, PROMPT, a_job().sampling, a_job().stop_tokens)),
        alone(ONE, RunPrefill(HERE, 0, 8)),
    )
    assert world.requests == {ONE: a(Prefilling, some())}
    assert world.slots.slots == (Slot(holder=ONE), Slot())


def test_a_full_house_lets_wait_and_a_full_queue_refuses() -> None:
    world, outs = after(SMALL, submitted(ONE), submitted(TWO))
    assert outs == (EffectRequest(TWO, ReportProgress(0, 21, 0)),)
    assert world.requests[TWO] == a_waiting()
    refused, outs = advance(world, ForRequest(THREE, Submitted(a_job())))
    assert outs == (EffectRequest(THREE, CloseStream("queue_full", Report(0), "1 requests are waiting already")),)
    assert refused == world


def test_without_a_queue_a_free_slot_is_still_given() -> None:
    world, _ = after(evolve(SMALL, max_queue=0), submitted(ONE))
    assert isinstance(world.requests[ONE], Prefilling)


def test_a_cancelled_place_in_the_queue_is_free_again() -> None:
    world, outs = after(SMALL, submitted(ONE), submitted(TWO), (TWO, GONE))
    assert outs == (EffectRequest(TWO, CloseStream("cancelled", Report(21), "client_gone")),)
    assert (world.slots.waiting, list(world.requests)) == ((), [ONE])


NOT_KEPT = Selection("full", "no_store")


def test_the_next_in_the_queue_gets_the_slot_in_the_event_that_frees_it() -> None:
    short = {"prompt": (1,), "max_tokens": 1}
    world, outs = after(SMALL, submitted(ONE, **short), submitted(TWO), (ONE, Decoded((7,))))
    report = {"miss": "nothing_shared_on_device", "speculation": "no_draft"}
    closing = Report(prompt_tokens=1, completion_tokens=1, decode_steps=1, cache=NOT_KEPT, **report)
    closing = evolve(closing, compression=Compressed(1, "no_drafter"))
    assert outs == (
        EffectRequest(ONE, EmitTokens((7,))),
        EffectRequest(ONE, CloseStream("length", closing)),
        EffectRequest(TWO, OpenSlot(HERE, HERE, 0, PROMPT, a_job().sampling, a_job().stop_tokens)),
        alone(TWO, RunPrefill(HERE, 0, 8)),
    )
    assert world.slots.slots == (Slot(holder=TWO, last_release=1),)


def test_a_finished_request_leaves_nothing_but_the_rows_of_its_slot() -> None:
    short = {"prompt": (1, 2), "max_tokens": 1}
    world, _ = after(PLAIN, submitted(ONE, **short), (ONE, PrefillAdvanced(1)), (ONE, Decoded((7,))))
    fresh = make_world(PLAIN)
    kept = evolve(fresh.slots, slots=(Slot((1, 2), None, 1), Slot()), release_count=1)
    assert world.lanes[MAIN].waiting == world.lanes[MAIN].running == ()
    assert world == evolve(fresh, slots=kept, lanes=world.lanes, pacing=world.pacing)


def test_a_cancellation_of_somebody_who_left_or_never_came_changes_nothing() -> None:
    world, _ = after(PLAIN, submitted(ONE))
    assert advance(world, ForRequest(TWO, GONE)) == (world, ())


def test_a_cancelled_request_that_only_waits_for_the_device_is_gone_at_once() -> None:
    world, outs = after(PLAIN, submitted(ONE), submitted(TWO, salt="another"), (TWO, GONE))
    closing = CloseStream("cancelled", make_report(knowing(), a(Prefilling, some())), "client_gone")
    assert outs == (EffectRequest(TWO, closing), EffectRequest(TWO, Abandon()))
    assert list(world.requests) == [ONE]


def test_a_cancelled_request_whose_work_runs_drains_until_it_answers() -> None:
    world, _ = after(PLAIN, submitted(ONE), (ONE, GONE))
    assert world.requests == {ONE: a(Draining, some(), 1)}
    again, outs = advance(world, ForRequest(ONE, GONE))
    assert (again, outs) == (world, ())
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(8)))
    assert outs == ()
    assert world.requests == {}
    assert world.slots.slots[0] == Slot(PROMPT[:8], None, 1)


def test_two_decode_steps_that_wait_become_one_launch() -> None:
    one, two, other = submitted(ONE, prompt=(1,)), submitted(TWO, prompt=(2,)), submitted(THREE)
    world, outs = after(evolve(PLAIN, slots=4), other, one, two, (THREE, PrefillAdvanced(8)))
    first, second = EffectRequest(ONE, RunDecode(SlotId(1), 0, 1)), EffectRequest(TWO, RunDecode(SlotId(2), 0, 2))
    assert outs[-1] == Launch((first, second)), "of one step, since the prompt has more"
    world, outs = advance(world, ForRequest(TWO, Decoded((8,))))
    assert outs == (EffectRequest(TWO, EmitTokens((8,))),), "the batch has not come back yet"
    world, outs = advance(world, ForRequest(ONE, Decoded((9,))))
    assert outs[-1] == Launch((EffectRequest(THREE, RunPrefill(HERE, 8, 16)),)), "in turn"


def test_who_decodes_joins_the_launch_that_goes_on_and_leaves_it_alone() -> None:
    joins = partial(Launch, joins=True)
    world, outs = after(evolve(PLAIN, slots=4), submitted(ONE, prompt=(1,)), submitted(TWO, prompt=(2,)))
    assert outs[-1] == joins((EffectRequest(TWO, RunDecode(SlotId(1), 0, 2, steps=6)),))
    world, outs = advance(world, ForRequest(ONE, Decoded((7, 8), steps=2, accepted=0, more=True)))
    assert outs == (EffectRequest(ONE, EmitTokens((7, 8))),)
    world, outs = advance(world, ForRequest(TWO, Decoded((9,), more=True)))
    world, outs = advance(world, ForRequest(ONE, Decoded((0,))))
    assert [type(out.effect) for out in outs] == [EmitTokens, CloseStream], "the other one is at it"
    world, outs = advance(world, ForRequest(*submitted(THREE, prompt=(3,))))
    assert outs[-1] == joins((EffectRequest(THREE, RunDecode(SlotId(2), 0, 3, steps=6)),))
    world, outs = advance(world, ForRequest(*submitted(RequestId(4))))
    assert outs[-1] == EffectRequest(TWO, StopLaunch()), "a prompt waits for the lane"
    world, outs = advance(world, ForRequest(THREE, Decoded((9,))))
    assert outs == (EffectRequest(THREE, EmitTokens((9,))),), "no request joins a launch that was asked to end"


def test_a_launch_goes_on_until_somebody_waits_for_the_lane() -> None:
    world, outs = after(PLAIN, submitted(ONE, prompt=(1,), max_tokens=9))
    assert outs[-1] == alone(ONE, RunDecode(HERE, 0, 1, steps=9))
    world, outs = advance(world, ForRequest(ONE, Decoded((7,), more=True)))
    assert outs == (EffectRequest(ONE, EmitTokens((7,))),), "it is under way"
    world, outs = advance(world, ForRequest(*submitted(TWO)))
    assert outs[-1] == EffectRequest(ONE, StopLaunch())
    world, outs = advance(world, ForRequest(*submitted(THREE)))
    assert EffectRequest(ONE, StopLaunch()) not in outs, "once"
    world, outs = advance(world, ForRequest(ONE, Decoded((8, 9), steps=2, accepted=0)))
    assert outs == (EffectRequest(ONE, EmitTokens((8, 9))), alone(TWO, RunPrefill(SlotId(1), 0, 8)))
    state = world.requests[ONE]
    assert isinstance(state, Speculating)
    assert (state.answer.decode_steps, state.slot_lease.valid_rows) == (3, 3)


def test_an_outcome_that_goes_on_behind_an_end_is_a_bug() -> None:
    world, _ = after(PLAIN, submitted(ONE, prompt=(1,), max_tokens=2))
    with pytest.raises(AssertionError):
        advance(world, ForRequest(ONE, Decoded((7, 8), steps=2, accepted=0, more=True)))


def test_what_a_launch_that_goes_on_brings_behind_the_client_stays_in_the_slot() -> None:
    world, _ = after(PLAIN, submitted(ONE, prompt=(1,), max_tokens=9), (ONE, Decoded((7,), more=True)), (ONE, GONE))
    world, outs = advance(world, ForRequest(ONE, Decoded((8,), more=True)))
    assert outs == ()
    world, _ = advance(world, ForRequest(ONE, Decoded((9,))))
    assert world.requests == {}
    assert world.slots.slots[0].tokens == (1, 7, 8)


def test_every_step_that_a_launch_takes_alone_counts_in_the_accounts() -> None:
    poor = evolve(DRAFT, rates=Rates(decode=(TimedStep(0, 1, 0, 800, 0), TimedStep(0, 1, 4, 1000, 0)), account=200))
    one_by_one, _ = after(poor, submitted(ONE, prompt=(1,), max_tokens=40))
    (asked,) = one_by_one.lanes[MAIN].running
    assert isinstance(asked.effect, RunDecode)
    assert (asked.effect.propose, asked.effect.steps) == (0, 5), "5 at 10 each can bear 250"
    at_once, _ = advance(one_by_one, ForRequest(ONE, Decoded((7, 7, 7), steps=3, accepted=0)))
    for _ in range(3):
        one_by_one, _ = advance(one_by_one, ForRequest(ONE, Decoded((7,))))
    assert at_once.rates == one_by_one.rates


def test_a_draft_that_stays_is_leased_without_a_word() -> None:
    world, outs = after(DRAFT, submitted(ONE, prompt=(1,)))
    assert world.models["draft"].leases == (ONE,)
    assert outs[-1] == alone(ONE, RunDecode(HERE, 0, 1, propose=3))


def test_a_draft_is_brought_in_once_for_two_and_leaves_with_the_last() -> None:
    one, two = {"prompt": (1,), "max_tokens": 2}, {"prompt": (2,), "max_tokens": 2}
    events = submitted(ONE, **one), submitted(TWO, **two), (ONE, ModelLoaded(9))
    world, outs = after(SCOPED, *events)
    assert world.models["draft"] == Residence("loaded", (ONE, TWO), size_bytes=9, moved_bytes=9, loads=1)
    decode_steps = (
        EffectRequest(ONE, RunDecode(HERE, 0, 1, propose=1)),
        EffectRequest(TWO, RunDecode(SlotId(1), 0, 2, propose=1)),
    )
    assert outs == (Launch(decode_steps),)
    world, _ = after(SCOPED, *events, (ONE, Decoded((7, 8), 1)))
    assert list(world.requests) == [ONE, TWO], "the batch is not back yet"
    world, outs = after(SCOPED, *events, (ONE, Decoded((7, 8), 1)), (TWO, Decoded((7, 8), 1)))
    assert list(world.requests) == [TWO]
    assert outs[-1] == alone(TWO, UnloadModel("draft"))
    world, _ = advance(world, ForRequest(TWO, ModelUnloaded(9)))
    assert not world.requests
    assert world.models["draft"] == Residence("parked", size_bytes=9, moved_bytes=18, loads=1, parks=1)


def test_a_second_device_is_a_place_in_the_settings() -> None:
    """A prompt is scored on it while another one is computed on the target's; each lane has its own queue."""
    two_lanes = LaneId(1)
    apart = evolve(PLAIN, scorer_max_tokens=1000, scorer_lane=two_lanes)
    world, outs = after(apart, submitted(ONE, prompt=(1,)), submitted(TWO))
    assert outs[-1] == Launch((EffectRequest(TWO, LoadModel("scorer")),), two_lanes)
    world, outs = advance(world, ForRequest(TWO, ModelLoaded(9, name="scorer")))
    assert outs == (Launch((EffectRequest(TWO, CompressPrompt(0, PROMPT, keep=5, most=58)),), two_lanes),)
    assert [effect_request.request for effect_request in world.lanes[MAIN].running] == [ONE]
    world, outs = advance(world, ForRequest(TWO, PromptScored(8)))
    assert outs == (Launch((EffectRequest(TWO, CompressPrompt(8)),), two_lanes),)
    world, _ = advance(world, ForRequest(TWO, GONE))
    world, outs = advance(world, ForRequest(TWO, PromptScored(16)))
    assert outs == (Launch((EffectRequest(TWO, UnloadModel("scorer", keep=False)),), two_lanes),)
    world, _ = advance(world, ForRequest(TWO, ModelUnloaded(9)))
    assert list(world.requests) == [ONE]
    assert world.lanes[two_lanes].running == ()


def test_a_wide_prefill_goes_beside_decode_steps_and_its_last_rows_with_them() -> None:
    """A decoding request runs unattended, and is stopped for the new one. Few rows need no lane of their own."""
    two_lanes = evolve(PLAIN, prompt_lane_min_rows=8, chunk=16)
    world, outs = after(two_lanes, submitted(ONE, prompt=(1, 2)), (ONE, PrefillAdvanced(1)), submitted(TWO))
    assert outs[-1] == Launch((EffectRequest(TWO, RunPrefill(SlotId(1), 0, 16)),), PROMPTS)
    (step,) = world.lanes[MAIN].running
    assert isinstance(step.effect, RunDecode)
    world, outs = advance(world, ForRequest(ONE, Decoded((7,), more=True)))
    assert [out for out in outs if isinstance(out, Launch)] == [], "nothing waits for the lane"
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(16)))
    check_world(world)
    assert EffectRequest(ONE, StopLaunch()) in outs
    assert world.lanes[PROMPTS].waiting == world.lanes[PROMPTS].running == ()
    world, outs = advance(world, ForRequest(ONE, Decoded((7,))))
    launches = [out for out in outs if isinstance(out, Launch)]
    assert launches[0].lane == MAIN


WAYS = evolve(
    PLAIN, prompt_lane_min_rows=8, chunk=16, chunks_per_prefill=4
)  # several chunks at once, on a lane of their own


def launches_of(outs: tuple[Output, ...]) -> list[tuple[LaneId, Effect]]:
    return [
        (out.lane, effect_request.effect)
        for out in outs
        if isinstance(out, Launch)
        for effect_request in out.effect_requests
    ]


def test_a_prompt_that_has_its_lane_to_itself_is_read_in_one_launch_until_somebody_joins_it() -> None:
    """A second prompt gets the next turn, and then both take turns of two chunks."""
    world, outs = after(WAYS, submitted(ONE, prompt=tuple(range(100))))
    assert launches_of(outs) == [(PROMPTS, RunPrefill(SlotId(0), 0, 64))]
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(16, more=True)))
    assert launches_of(outs) == []
    world, outs = advance(world, ForRequest(*submitted(TWO, prompt=tuple(range(50, 90)))))
    check_world(world)
    assert outs[-1] == EffectRequest(ONE, StopLaunch())
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(32, more=True)))
    assert EffectRequest(ONE, StopLaunch()) not in outs, "once"
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(32)))
    assert launches_of(outs) == [(PROMPTS, RunPrefill(SlotId(1), 0, 32))], "it is done sooner"
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(16, more=True)))
    assert launches_of(outs) == []
    check_world(world)
    world, outs = advance(world, ForRequest(TWO, PrefillAdvanced(32)))
    assert launches_of(outs) == [(MAIN, RunPrefill(SlotId(1), 32, 39)), (PROMPTS, RunPrefill(SlotId(0), 32, 96))]
    check_world(world)


def test_prompts_that_wait_for_their_lane_share_a_launch_and_those_that_fit_together_a_forward() -> None:
    """A chunk is 32 rows. The first prompt is being computed while the others come."""
    settings = evolve(WAYS, slots=8, max_queue=8, chunk=32)
    world, _ = after(settings, submitted(ONE, prompt=tuple(range(33))))
    for number, rows in ((2, 10), (3, 30), (4, 9), (5, 12), (6, 40)):
        prompt = tuple(range(1000 * number, 1000 * number + rows + 1))
        world, _ = advance(world, ForRequest(*submitted(RequestId(number), prompt=prompt)))
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(32)))
    check_world(world)
    [launch] = [out for out in outs if isinstance(out, Launch) and out.lane == PROMPTS]
    assert [one.request for one in launch.effect_requests] == [4, 2, 5, 3]
    effects = [one.effect for one in launch.effect_requests if isinstance(one.effect, RunPrefill)]
    assert [len(group) for group in group_prefills(effects, 32)] == [3, 1]
    assert [one.request for one in world.lanes[PROMPTS].waiting] == [6], "more than a chunk goes alone"
    for number, rows in ((4, 9), (2, 10), (5, 12), (3, 30)):
        assert world.pacing.demand.has_prefill_backlog
        world, outs = advance(world, ForRequest(RequestId(number), PrefillAdvanced(rows)))
        check_world(world)
    assert launches_of(outs)[-1] == (PROMPTS, RunPrefill(SlotId(5), 0, 32)), "the last 8 rows are for the other lane"
    assert not world.pacing.demand.has_prefill_backlog


@pytest.mark.parametrize(
    ("tokens", "stop", "lane"),
    [
        (9, 8, MAIN),
        (24, 16, PROMPTS),
        (26, 25, PROMPTS),
        (49, 48, PROMPTS),
        (54, 48, PROMPTS),
        (57, 48, PROMPTS),
        (58, 57, PROMPTS),
    ],
)
def test_of_several_chunks_the_last_is_none_that_decode_steps_share_their_memory_with(
    tokens: int, stop: int, lane: LaneId
) -> None:
    _, outs = after(WAYS, submitted(ONE, prompt=tuple(range(tokens))))
    assert launches_of(outs) == [(lane, RunPrefill(SlotId(0), 0, stop))]


def test_chunks_as_narrow_as_decode_steps_are_never_several() -> None:
    with pytest.raises(ValueError, match="16 rows are too few"):
        evolve(WAYS, prompt_lane_min_rows=16)


def test_decode_steps_that_begin_beside_a_prefill_are_beside_it_as_those_it_began_beside() -> None:
    """And have ended before it does."""
    decode_events = (submitted(ONE, prompt=(1, 2), max_tokens=9), (ONE, PrefillAdvanced(1)), (ONE, Decoded((7,) * 9)))
    world, _ = after(WAYS, submitted(TWO), *decode_events)
    assert not world.lanes[MAIN].running
    world, _ = advance(world, ForRequest(TWO, PrefillAdvanced(16, ns=160_000)))
    assert world.rates.prefill == ()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_decode_steps_that_end_before_a_prefill_does_were_beside_it_all_the_same(when: str) -> None:
    ends = (ONE, Decoded((7,) * 9))
    decode_events = (submitted(ONE, prompt=(1, 2), max_tokens=9), (ONE, PrefillAdvanced(1)))
    order = (submitted(TWO), ends) if when == "meanwhile" else (ends, submitted(TWO))
    world, _ = after(WAYS, *decode_events, *order)
    assert not world.lanes[MAIN].running
    world, _ = advance(world, ForRequest(TWO, PrefillAdvanced(16, ns=160_000)))
    assert world.rates.prefill == (() if when == "meanwhile" else (10_000,))


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "together with decode steps"])
def test_what_a_prefill_takes_beside_decode_steps_says_nothing_of_what_it_takes(busy: bool) -> None:
    two_lanes, decode_events = (
        evolve(PLAIN, prompt_lane_min_rows=8, chunk=16),
        (submitted(ONE, prompt=(1, 2)), (ONE, PrefillAdvanced(1))),
    )
    world, _ = after(two_lanes, *(decode_events if busy else ()), submitted(TWO))
    world, _ = advance(world, ForRequest(TWO, PrefillAdvanced(16, ns=160_000)))
    assert world.rates.prefill == (() if busy else (10_000,))


@pytest.mark.parametrize(
    ("effect", "lane"),
    [
        (RunPrefill(SlotId(0), 64, 192), MAIN),
        (RunPrefill(SlotId(0), 64, 193), PROMPTS),
        (RunPrefill(SlotId(0), 64, 193, logprobs=0), MAIN),
        (RunDecode(SlotId(0), 500, 7), MAIN),
    ],
    ids=["as wide as decode steps may be", "wider", "logits are wanted", "a decode step"],
)
def test_which_forwards_have_a_lane_of_their_own(effect: Effect, lane: LaneId) -> None:
    assert choose_lane(evolve(PLAIN, prompt_lane_min_rows=128), effect) == lane
    assert choose_lane(PLAIN, effect) == MAIN


@pytest.mark.parametrize("other", [{"stateful": True}, {"max_proposals": 4}], ids=str)
def test_what_has_more_than_rows_to_keep_in_step_has_one_lane(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with positional state or with a draft"):
        evolve(PLAIN, prompt_lane_min_rows=128, **other)


def test_a_draft_that_is_lost_proposes_nothing_says_why_and_is_there_again() -> None:
    """For who has it, and for who comes meanwhile."""
    world, _ = after(DRAFT, submitted(ONE), (ONE, PrefillAdvanced(8)), (ONE, PrefillAdvanced(16)))
    world, outs = advance(world, ForModel("draft", there=False))
    check_world(world)
    assert (outs, world.models["draft"].location) == ((), "lost")
    world, outs = advance(world, ForRequest(ONE, PrefillAdvanced(20)))
    check_world(world)
    assert list_proposals(outs) == [0]
    assert make_report(knowing(DRAFT), world.requests[ONE]).speculation == "draft_lost"
    world, _ = advance(world, ForModel("draft", there=True))
    assert world.models["draft"].location == "loaded"
    world, outs = advance(world, ForRequest(ONE, Decoded((7,))))
    check_world(world)
    assert list_proposals(outs) == [3]
    assert not make_report(knowing(DRAFT), world.requests[ONE]).speculation


def test_a_draft_that_was_sent_away_has_nothing_to_lose() -> None:
    parked = make_world(SCOPED)
    assert parked.models["draft"].location == "parked"
    for there in (False, True):
        assert advance(parked, ForModel("draft", there=there)) == (parked, ())


def list_proposals(outs: tuple[Output, ...]) -> list[int]:
    """List how much each decode step proposes that was launched."""
    effect_requests = [
        effect_request for out in outs if isinstance(out, Launch) for effect_request in out.effect_requests
    ]
    return [
        effect_request.effect.propose
        for effect_request in effect_requests
        if isinstance(effect_request.effect, RunDecode)
    ]


def test_slots_that_are_lost_are_empty_and_their_requests_wait_for_one_again() -> None:
    world, _ = after(PLAIN, submitted(ONE), (ONE, PrefillAdvanced(8)))
    world, outs = advance(world, ForEngine(SlotsLost((HERE, SlotId(1), HERE))))
    check_world(world)
    assert outs == (EffectRequest(ONE, Abandon()),)
    assert isinstance(world.requests[ONE], Recovering)
    world, outs = advance(world, ForRequest(ONE, DeviceFailed("lost", "the device died")))
    check_world(world)
    opening, launch = outs
    assert isinstance(opening, EffectRequest)
    assert isinstance(opening.effect, OpenSlot)
    assert opening.effect.keep == 0
    assert launch == alone(ONE, RunPrefill(HERE, 0, 8))
    world, outs = advance(world, ForEngine(SlotsLost((HERE,))))
    assert isinstance(world.requests[ONE], Draining)
    closing = outs[0]
    assert isinstance(closing, EffectRequest)
    assert isinstance(closing.effect, CloseStream)
    assert (closing.effect.finish, closing.effect.detail) == ("lost", LOST_TWICE)
    world, _ = advance(world, ForRequest(ONE, PrefillAdvanced(8)))
    assert (world.requests, world.slots.slots[HERE].tokens) == ({}, ()), "what comes in after a loss is not believed"


def test_a_slot_that_nobody_holds_is_forgotten_and_one_that_there_is_not_is_a_bug() -> None:
    short = {"prompt": (1, 2), "max_tokens": 1}
    world, _ = after(PLAIN, submitted(ONE, **short), (ONE, PrefillAdvanced(1)), (ONE, Decoded((7,))))
    assert world.slots.slots[HERE].tokens
    world, outs = advance(world, ForEngine(SlotsLost((HERE,))))
    assert (world.slots.slots[HERE].tokens, outs) == ((), ())
    for slot in (SlotId(2), SlotId(-1)):
        with pytest.raises(IllegalEvent, match="no slot"):
            advance(world, ForEngine(SlotsLost((slot,))))


def test_a_failed_unpark_is_tried_again_for_the_next_one() -> None:
    failed = DeviceFailed("out_of_memory", "no room")
    one, two = {"prompt": (1,)}, {"prompt": (2,)}
    world, outs = after(SCOPED, submitted(ONE, **one), submitted(TWO, **two), (ONE, failed))
    assert world.models["draft"] == Residence("parked", failures=1, error="out_of_memory: no room")
    assert outs == (alone(ONE, RunDecode(HERE, 0, 1)),)
    _, outs = advance(world, ForRequest(ONE, Decoded((7,))))
    assert outs[-1] == alone(TWO, LoadModel("draft"))


def test_a_launch_tells_once_what_such_launches_cost() -> None:
    start: DecodeTimes = (TimedStep(0, 1, 0, 800, 0), TimedStep(0, 1, 4, 1000, 0))
    measured = evolve(SCOPED, residency=DRAFT.residency, rates=Rates(decode=start))
    one, two = submitted(ONE, prompt=(1,), max_tokens=20), submitted(TWO, prompt=(2,), max_tokens=20)
    first = (ONE, Decoded((7, 8), 3, ns=2600))
    world, outs = after(measured, one, first)
    assert world.rates.decode == start, "the draft caught up"
    assert outs[-1] == alone(ONE, RunDecode(HERE, 2, 8, 3, steps=4))
    assert advance(world, ForRequest(ONE, Decoded((7, 8), 3, ns=1800)))[0].rates.decode == (
        TimedStep(0, 1, 0, 800, 0),
        TimedStep(0, 1, 4, 1025, 800),
    )
    assert advance(world, ForRequest(ONE, Decoded((7, 8), 2, ns=1800)))[0].rates.decode == start, "it proposed less"
    quick = after(measured, one, (ONE, Decoded((7, 8), 3, ns=960)))[0]
    assert quick.rates.decode == (TimedStep(0, 1, 0, 800, 0), TimedStep(0, 1, 4, 980, 800)), (
        "it caught up, and was quicker even so"
    )
    world, outs = after(measured, one, two, (ONE, Decoded((7, 8), 3, ns=1000)))
    assert outs[-1] == Launch(
        (EffectRequest(ONE, RunDecode(HERE, 2, 8)), EffectRequest(TWO, RunDecode(SlotId(1), 0, 2)))
    ), "measured first"
    for request, ns in ((ONE, 1200), (TWO, 1210)):
        world, outs = advance(world, ForRequest(request, Decoded((7,), ns=ns)))
    assert world.rates.decode == (*start, TimedStep(0, 2, 0, 1200, 0))
    assert outs[-1] == Launch(
        (EffectRequest(ONE, RunDecode(HERE, 3, 7, 3)), EffectRequest(TWO, RunDecode(SlotId(1), 1, 7, 3)))
    )
    caught_up, later = (3000, 3010), (1500, 1510)
    for both, known in ((caught_up, ()), (later, (TimedStep(0, 2, 8, 1500, 1200),))):
        for request, ns in zip((ONE, TWO), both, strict=True):
            world, outs = advance(world, ForRequest(request, Decoded((7, 8, 9), 3, ns=ns)))
        assert world.rates.decode == (*start, TimedStep(0, 2, 0, 1200, 0), *known), "once, by the first"


@pytest.mark.parametrize(
    ("plain", "slow", "quick", "first"),
    [
        (5000, 5000, 1000, 1),  # it was held up when it was timed: any draft would look free
        (4900, 5000, 1000, launch_choice.PLAIN_STEP_INTERVAL),
        (5000, 90_000, 80_000, 1),  # the machine has become slower, and stays so
    ],
)
def test_what_proposals_are_compared_with_is_measured_again(plain: int, slow: int, quick: int, first: int) -> None:
    measured = evolve(
        DRAFT, max_context=1024, rates=Rates(decode=(TimedStep(0, 1, 0, plain, 0), TimedStep(0, 1, 4, 5000, 0)))
    )
    world, _ = after(measured, submitted(ONE, prompt=(1,), max_tokens=600))
    proposed = list[int]()
    for _ in range(140):
        (asked,) = world.lanes[MAIN].running
        assert isinstance(asked.effect, RunDecode)
        proposed.append(asked.effect.propose)
        done = Decoded((7,) * (1 + proposed[-1]), proposed[-1], ns=slow if proposed[-1] else quick)
        world, _ = advance(world, ForRequest(ONE, done))
    assert proposed.index(0) == first
    assert sum(map(bool, proposed)) > 65, "no more than every second one is plain"
    assert quick > plain or world.rates.decode[0] < TimedStep(0, 1, 0, 3001, 0)


def test_what_an_answer_has_taught_about_the_draft_goes_on_to_the_next() -> None:
    world, _ = after(DRAFT, submitted(ONE, prompt=(1,), max_tokens=2), (ONE, Decoded((7,), 1)), (ONE, Decoded((7,))))
    assert ONE not in world.requests
    assert world.rates.gains[0] < control.make_control(DRAFT, Rates()).gains[0]
    assert world.rates.account == Rates().account - 200 + 2 * control.REFILL
    assert world.rates.seen == 1


def test_why_nothing_is_proposed_is_told() -> None:
    poor = evolve(DRAFT, rates=Rates(decode=(TimedStep(0, 1, 0, 800, 0), TimedStep(0, 1, 4, 1000, 0)), account=0))
    world, outs = after(poor, submitted(ONE, prompt=(1,)))
    assert outs[-1] == alone(ONE, RunDecode(HERE, 0, 1, steps=6))
    assert world.requests[ONE].speculation.reason == "loss_limit"  # type: ignore[union-attr]


def test_a_request_decides_by_the_rates_as_they_are() -> None:
    slow = evolve(
        DRAFT, rates=Rates(decode=(TimedStep(0, 1, 0, 800, 0), TimedStep(0, 1, 4, 3200, 0)), steps_until_trial=9)
    )
    world, outs = after(slow, submitted(ONE, prompt=(1,)))
    assert outs[-1] == alone(ONE, RunDecode(HERE, 0, 1, steps=6)), "four tokens in the time of four decode steps"
    assert world.requests[ONE].speculation.reason == "does_not_pay"  # type: ignore[union-attr]
    world, _ = after(evolve(slow, batch_rows=1), submitted(ONE, prompt=(1,)))
    assert world.requests[ONE].speculation.reason == "never_pays", "a launch has room for no proposal"  # type: ignore[union-attr]
    assert world.models["draft"].leases == ()


@pytest.mark.parametrize(
    ("request_id", "event"),
    [(TWO, Decoded((1,))), (ONE, Decoded((1,))), (ONE, Submitted(a_job())), (ONE, ModelLoaded())],
)
def test_what_cannot_happen_is_a_bug(request_id: RequestId, event: Event) -> None:
    world, _ = after(PLAIN, submitted(ONE))
    with pytest.raises(IllegalEvent):
        advance(world, ForRequest(request_id, event))


def test_the_world_before_an_event_is_untouched_by_it() -> None:
    world, _ = after(PLAIN, submitted(ONE), submitted(TWO))
    copy = evolve(world, requests=dict(world.requests))
    advance(world, ForRequest(ONE, PrefillAdvanced(8)))
    assert world == copy


def test_an_invariant_that_breaks_says_which() -> None:
    world, _ = after(PLAIN, submitted(ONE))
    with pytest.raises(AssertionError, match="slots and requests disagree"):
        check_world(evolve(world, requests={}))
    with pytest.raises(AssertionError, match="a lane works for a request without a slot"):
        check_world(evolve(world, requests={}, slots=make_world(PLAIN).slots))
    with pytest.raises(AssertionError, match="leased and not loaded"):
        check_world(evolve(world, models={"draft": Residence("parked", (ONE,))}))
    idle = evolve(world.lanes[MAIN], running=(), waiting=world.lanes[MAIN].running)
    with pytest.raises(AssertionError, match="a lane idles"):
        check_world(evolve(world, lanes={MAIN: idle}))
