"""Tests of what the device does next: turns, batches, and a draft that several requests share."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import Copying, Decoded, RunDecode
from effects.ids import RequestId, SlotId
from effects.prefill import RunPrefill
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from states import lane, launch_choice
from states import speculation_control as control
from states.events import EffectOutcome
from states.lane import Lane
from states.rates import DecodeTimes, Rates, TimedStep
from states.request_states import Generated, MayPropose, Prefilling, ProposesNothing, SlotLease, Speculating, State
from states.residency import Models, Residence
from states.speculation_plan import Plan
from tests.states.builders import DRAFT, ONE, PLAIN, SCOPED, TWO, a, prefilled

NOBODY: Models = {"draft": Residence()}


def chunk(request: int) -> EffectRequest:
    return EffectRequest(RequestId(request), RunPrefill(SlotId(request), 0, 8))


def a_decode(request: int, propose: int = 0) -> EffectRequest:
    return EffectRequest(RequestId(request), RunDecode(SlotId(request), 20, 7, propose))


def alone(request: int, steps: int, propose: int = 0) -> EffectRequest:
    return EffectRequest(RequestId(request), RunDecode(SlotId(request), 20, 7, propose, steps=steps))


def unpark(request: int) -> EffectRequest:
    return EffectRequest(RequestId(request), LoadModel("draft"))


def park(request: int) -> EffectRequest:
    return EffectRequest(RequestId(request), UnloadModel("draft"))


def choose(*waiting: EffectRequest, decode_last: bool = False, models: Models = NOBODY, settings: Any = DRAFT) -> Any:
    return launch_choice.choose_launch(Lane(waiting, (), decode_last), models, settings, {}, Rates())


def launched(*waiting: EffectRequest, **changes: Any) -> tuple[EffectRequest, ...]:
    after, _, chosen = choose(*waiting, **changes)
    assert isinstance(chosen, Launch)
    assert after.running == chosen.effect_requests
    assert sorted((*after.waiting, *after.running), key=waiting.index) == list(waiting)
    assert after.last_was_decode == isinstance(chosen.effect_requests[0].effect, RunDecode)
    return chosen.effect_requests


def test_an_idle_lane_without_work_and_a_busy_one_choose_nothing() -> None:
    assert choose() == (Lane(), {"draft": Residence()}, None)
    busy = Lane((a_decode(1),), (chunk(2),))
    assert launch_choice.choose_launch(busy, {"draft": Residence()}, DRAFT, {}, Rates()) == (
        busy,
        {"draft": Residence()},
        None,
    )


def test_decode_steps_come_first_and_then_take_turns_with_everything_else() -> None:
    assert launched(chunk(1), a_decode(2)) == (a_decode(2),)
    assert launched(chunk(1), a_decode(2), decode_last=True) == (chunk(1),)
    assert launched(chunk(1), decode_last=True) == (chunk(1),)
    assert launched(a_decode(2), decode_last=True) == (a_decode(2),)


def test_of_a_prefill_of_several_chunks_one_runs_where_somebody_decodes() -> None:
    many = EffectRequest(RequestId(1), RunPrefill(SlotId(1), 8, 40, checkpoint=True))
    assert launched(many) == (many,)
    assert launched(many, chunk(2)) == (many,)
    (one,) = launch_choice.choose_launch(Lane((many, a_decode(2)), (), True), NOBODY, DRAFT, {}, Rates())[
        2
    ].effect_requests  # type: ignore[union-attr]
    assert one == EffectRequest(RequestId(1), RunPrefill(SlotId(1), 8, 8 + DRAFT.chunk))


@pytest.mark.parametrize(
    ("target", "rates", "changes", "rows"),
    [
        (0, Rates(prefill=(10,)), {}, 256),
        (2000, Rates(), {}, 256),  # nothing is known
        (3000, Rates(prefill=(10,)), {}, 256),
        (2000, Rates(prefill=(10,)), {}, 128),
        (2000, Rates(prefill=(10,), decode=(TimedStep(0, 1, 0, 900, 0),)), {}, 64),
        (1, Rates(prefill=(10,)), {}, 64),  # a part in four of a chunk at least
        (1, Rates(prefill=(10,)), {"block_size": 128}, 128),
        (1, Rates(prefill=(10,)), {"keep_decoded": False, "block_size": 256}, 256),  # bits depend on the chunk
    ],
)
def test_a_prefill_between_decode_steps_is_as_short_as_the_latency_target_asks(
    target: int, rates: Rates, changes: Any, rows: int
) -> None:
    settings = evolve(evolve(PLAIN, chunk=256, block_size=64, latency_target_ns=target), **changes)
    lane_ = Lane((a_decode(ONE), a_prompt(TWO, 0, 1000)), last_was_decode=True)
    chosen = launch_choice.choose_launch(lane_, NOBODY, settings, {}, rates)[2]
    assert chosen == Launch((a_prompt(TWO, 0, rows),))


def test_everything_but_decode_steps_goes_alone_and_in_order_of_arrival() -> None:
    assert launched(chunk(2), chunk(1), unpark(3), models={"draft": Residence("parked")}) == (chunk(2),)


MIXED = evolve(DRAFT, chunk=64, mixed_rows=16)


def a_prompt(request: int, start: int, stop: int, **changes: Any) -> EffectRequest:
    return EffectRequest(RequestId(request), RunPrefill(SlotId(request), start, stop, **changes))


def test_decode_steps_take_the_next_rows_of_a_prompt_with_them_and_propose_nothing() -> None:
    waiting = Lane((a_prompt(1, 4, 68), a_decode(2, 3), a_decode(3)), (), last_was_decode=True, proposing_steps=5)
    after, _, chosen = launch_choice.choose_launch(waiting, NOBODY, MIXED, {}, Rates())
    assert chosen == Launch((a_decode(2), a_decode(3), a_prompt(1, 4, 18))), "as many as fill the forward"
    assert after == Lane((), chosen.effect_requests, True, 3, 5, control.Plan((0, 0)))


def test_a_mixed_launch_costs_its_members_what_a_plain_one_does() -> None:
    requests = decoding(2, 3, **SURE)
    after, _, _ = launch_choice.choose_launch(
        Lane((a_prompt(1, 0, 64), a_decode(2, 3), a_decode(3))), NOBODY, MIXED, requests, Rates()
    )
    dear = control.Plan((0, 3), 1200)
    before = requests | reading(r1=64)
    before |= launch_choice.with_launch_plan(evolve(after, plan=dear), before)
    known = before | launch_choice.with_launch_plan(after, before)
    controls = [launch_choice.find_control(known, effect_request) for effect_request in after.running]
    assert after.plan == control.Plan((0, 0))
    assert [each and each.plan for each in controls] == [after.plan, after.plan, None]


@pytest.mark.parametrize(("decoding", "rows"), [(1, 16), (2, 16), (3, 32), (4, 32), (7, 64), (8, 64), (9, 64)], ids=str)
def test_most_of_a_mixed_forward_is_the_prompts(decoding: int, rows: int) -> None:
    members = [a_decode(number) for number in range(2, 2 + decoding)][: MIXED.batch_rows]
    chosen = choose(a_prompt(1, 0, 64), *members, settings=MIXED)[2]
    assert chosen == Launch((*members, a_prompt(1, 0, rows - len(members))))


def test_a_prompt_with_positional_state_gives_a_mixed_forward_a_block_at_most() -> None:
    members = [a_decode(number) for number in range(2, 9)]
    stateful = evolve(MIXED, stateful=True, block_size=32)
    assert choose(a_prompt(1, 0, 64), *members, settings=stateful)[2] == Launch((*members, a_prompt(1, 0, 32)))


def test_a_mixed_forward_is_wider_where_several_prompts_wait() -> None:
    """So fewer steps of those who decode delay the first tokens. 64 rows, a chunk, are the most."""
    prompts = (a_prompt(1, 0, 64), a_prompt(2, 0, 64))
    wide, widest = a_prompt(1, 0, 2 * MIXED.mixed_rows - 1), a_prompt(1, 0, MIXED.chunk - 1)
    assert choose(*prompts, a_decode(3), settings=MIXED)[2] == Launch((a_decode(3), wide))
    almost_all = evolve(MIXED, mixed_rows=48)
    assert choose(*prompts, a_decode(3), settings=almost_all)[2] == Launch((a_decode(3), widest))
    usual = a_prompt(1, 0, MIXED.mixed_rows - 1)
    apart = evolve(MIXED, stateful=True, commits_per_segment=True)
    assert choose(*prompts, a_decode(3), settings=apart)[2] == Launch((a_decode(3), usual)), "a GPU's is wide enough"
    away = {"draft": Residence("parked")}
    chosen = choose(prompts[0], unpark(4), a_decode(3), models=away, settings=MIXED)[2]
    assert chosen == Launch((a_decode(3), usual)), "a model that comes and goes is no prompt"


def test_a_prompt_that_ends_sooner_leaves_rows_of_a_mixed_forward_empty() -> None:
    assert choose(a_prompt(1, 60, 63), a_decode(2), settings=MIXED)[2] == Launch((a_decode(2), a_prompt(1, 60, 63)))


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        (a_prompt(1, 0, 8), evolve(MIXED, mixed_rows=0)),
        (a_prompt(1, 0, 8, keeps_state_first=True), evolve(MIXED, stateful=True)),
        (a_prompt(1, 0, 8), evolve(MIXED, chunk=4, batch_rows=4)),  # a forward is full of decode steps
        (a_prompt(1, 0, 8, logprobs=0), MIXED),
        (unpark(1), MIXED),
    ],
    ids=["turned off", "a state to keep first", "narrow", "logprobs", "no prompt"],
)
def test_what_cannot_go_with_decode_steps_takes_turns_with_them(asked: EffectRequest, settings: Any) -> None:
    members = tuple(a_decode(number) for number in range(2, 6))
    away = {"draft": Residence("parked")}
    for decode_last in (False, True):
        chosen = choose(asked, *members, decode_last=decode_last, models=away, settings=settings)[2]
        assert isinstance(chosen, Launch)
        assert {type(effect_request.effect) for effect_request in chosen.effect_requests} == {
            type(asked.effect) if decode_last else RunDecode
        }


def reading(**missing: int) -> dict[RequestId, State]:
    """Requests whose prompts lack so many rows."""
    states = dict[RequestId, State]()
    for name, rows in missing.items():
        prompt = evolve(a(Prefilling, prefilled(DRAFT)).prompt, tokens=(7,) * (rows + 1))
        states[RequestId(int(name[1:]))] = Prefilling(SlotLease(SlotId(0)), prompt, ProposesNothing(""))
    return states


def test_of_prompts_the_one_that_is_done_soonest_goes_first_and_now_and_then_the_one_that_waited_longest() -> None:
    requests, waiting, found = reading(r1=900, r2=30, r3=40), Lane((chunk(1), chunk(2), chunk(3))), list[int]()
    for _ in range(9):
        waiting, _, chosen = launch_choice.choose_launch(waiting, NOBODY, DRAFT, requests, Rates())
        assert isinstance(chosen, Launch)
        found.append(chosen.effect_requests[0].request)
        waiting = evolve(waiting, waiting=(*waiting.waiting, *chosen.effect_requests), running=())
    assert found == [2, 2, 1, 2, 2, 3, 2, 2, 1]


def test_however_many_shorter_prompts_wait_two_of_their_turns_overtake_the_longest_waiting_one() -> None:
    requests, waiting, found = reading(r1=900, r2=30, r3=40, r4=50), Lane(tuple(map(chunk, (1, 2, 3, 4)))), list[int]()
    for _ in range(3):
        waiting, _, chosen = launch_choice.choose_launch(waiting, NOBODY, DRAFT, requests, Rates())
        assert isinstance(chosen, Launch)
        found.append(chosen.effect_requests[0].request)
        waiting = evolve(waiting, waiting=(*waiting.waiting, *chosen.effect_requests), running=())
    assert found == [2, 2, 1]


def test_what_is_no_prompt_keeps_its_place_before_shorter_prompts() -> None:
    requests = reading(r2=900, r3=30)
    away = {"draft": Residence("parked")}
    assert launch_choice.choose_launch(Lane((unpark(1), chunk(2), chunk(3))), away, DRAFT, requests, Rates())[
        2
    ] == Launch((unpark(1),))
    assert launch_choice.choose_launch(Lane((chunk(2), unpark(1), chunk(3))), away, DRAFT, requests, Rates())[
        2
    ] == Launch((chunk(3),))


def test_decode_steps_that_wait_go_as_one_batch_in_order_of_arrival() -> None:
    assert launched(a_decode(3), chunk(2), a_decode(1)) == (a_decode(3), a_decode(1))


@pytest.mark.parametrize(("waiting", "taken"), [(1, 1), (8, 8), (9, 8), (17, 8)])
def test_a_batch_has_a_limit_in_rows(waiting: int, taken: int) -> None:
    decode_steps = [a_decode(number) for number in range(waiting)]
    assert launched(*decode_steps) == tuple(decode_steps[:taken])


CHEAP = (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 1, 16, 1100, 0))
DEAR = (
    TimedStep(0, 1, 0, 1000, 0),
    TimedStep(0, 1, 4, 1200, 0),
    TimedStep(0, 1, 8, 2000, 0),
    TimedStep(0, 1, 16, 4000, 0),
)


def decoding(*requests: int, decode_steps: DecodeTimes = CHEAP, **changes: Any) -> dict[RequestId, State]:
    known = evolve(
        control.make_control(evolve(DRAFT, max_proposals=15, batch_rows=64), Rates(decode=decode_steps)), **changes
    )
    return {RequestId(n): a(Speculating, prefilled(DRAFT, control=known)) for n in requests}


def proposed(requests: dict[RequestId, State], rows: int, *wanted: int, decode_steps: DecodeTimes = CHEAP) -> list[int]:
    """Plain decode steps of several take as long as of one here, which has been measured."""
    effect_requests = tuple(a_decode(request, most) for request, most in zip(requests, wanted, strict=True))
    rates = Rates(decode=(*decode_steps, *(TimedStep(0, members, 0, 1000, 0) for members in (2, 3, 4))))
    _, _, chosen = launch_choice.choose_launch(
        Lane(effect_requests), {"draft": Residence()}, evolve(DRAFT, batch_rows=rows), requests, rates
    )
    assert isinstance(chosen, Launch)
    return [
        effect_request.effect.propose
        for effect_request in chosen.effect_requests
        if isinstance(effect_request.effect, RunDecode)
    ]


SURE = {"gains": (2900, 6500, 13000)}


def test_decode_steps_that_go_together_propose_what_fits_together() -> None:
    assert proposed(decoding(1, **SURE), 16, 15) == [15]
    assert proposed(decoding(1, 2, **SURE), 64, 15, 15) == [15, 15]
    assert proposed(decoding(1, 2, **SURE), 16, 15, 15) == [7, 7]
    assert proposed(decoding(1, 2, 3, 4, **SURE), 16, 15, 2, 0, 15) == [3, 2, 0, 3]
    assert proposed(decoding(1, 2, 3, 4, **SURE), 8, 15, 15, 15, 15) == [3, 0, 0, 0]
    assert proposed(decoding(1, 2, 3, 4, **SURE), 4, 15, 15, 15, 15) == [0, 0, 0, 0]


def test_decode_steps_that_go_together_propose_less_where_rows_are_dear() -> None:
    some = {"gains": (2100, 3500, 3500), "decode_steps": DEAR}
    assert proposed(decoding(1, **some), 64, 15, decode_steps=DEAR) == [3]
    assert proposed(decoding(1, 2, **some), 64, 15, 0, decode_steps=DEAR) == [3, 0]
    assert proposed(decoding(1, 2, 3, 4, **some), 64, 15, 15, 15, 0, decode_steps=DEAR) == [3, 0, 0, 0]


def test_every_so_often_a_step_is_plain_to_compare_the_others_with() -> None:
    requests, waiting = decoding(1, **SURE), Lane((a_decode(1, 15),))
    rates, settings, found = Rates(decode=CHEAP), evolve(DRAFT, batch_rows=64), list[int]()
    for _ in range(2 * launch_choice.PLAIN_STEP_INTERVAL + 2):
        after, _, chosen = launch_choice.choose_launch(waiting, {"draft": Residence()}, settings, requests, rates)
        assert isinstance(chosen, Launch)
        found.append(chosen.effect_requests[0].effect.propose)  # type: ignore[union-attr]
        waiting = evolve(after, waiting=waiting.waiting, running=())
    assert found == ([15] * launch_choice.PLAIN_STEP_INTERVAL + [0]) * 2


def known_plans(requests: dict[RequestId, State], plan: control.Plan) -> dict[RequestId, tuple[control.Plan, str]]:
    """Return the launch's plan as each request with a draft knows it, and the reason why it does not propose."""
    effect_requests = tuple(
        a_decode(request, propose) for request, propose in zip(requests, plan.proposals, strict=True)
    )
    known = launch_choice.with_launch_plan(
        Lane((), effect_requests, last_was_decode=True, member_count=len(effect_requests), plan=plan), requests
    )
    drafted = {
        request: state.speculation
        for request, state in known.items()
        if isinstance(state, Speculating) and isinstance(state.speculation, MayPropose)
    }
    return {request: (one.control.plan, one.reason) for request, one in drafted.items()}


def test_who_has_a_draft_is_told_what_the_launch_costs_and_why_nothing_is_proposed() -> None:
    requests = decoding(1, 2, **SURE)
    requests[RequestId(3)] = a(Speculating, prefilled(DRAFT))
    rests, some = (
        control.Plan((0, 0, 0), reason="loss_limit"),
        control.Plan((0, 3, 0), 1200, reason="does_not_pay"),
    )
    assert known_plans(requests, rests) == {ONE: (rests, "loss_limit"), TWO: (rests, "loss_limit")}
    assert known_plans(requests, some) == {ONE: (some, "does_not_pay"), TWO: (some, "")}
    measuring = control.Plan((0, 0, 0))
    known = launch_choice.with_launch_plan(
        Lane((), tuple(map(a_decode, requests)), last_was_decode=True, member_count=3, plan=rests), requests
    )
    assert known_plans(requests | known, measuring) == {}, "one plan of plain steps charges the same as another"
    known |= launch_choice.with_launch_plan(
        Lane((), tuple(map(a_decode, requests)), last_was_decode=True, member_count=3, plan=some), requests | known
    )
    assert known_plans(requests | known, measuring) == {ONE: (measuring, "does_not_pay"), TWO: (measuring, "")}


def test_the_last_token_that_there_is_room_for_says_nothing_about_a_draft() -> None:
    (state,) = decoding(1, **SURE).values()
    assert isinstance(state, Speculating)
    full = evolve(state, answer=Generated((7,) * (state.prompt.job.max_tokens - 1)))
    plan = control.Plan((0,), reason="does_not_pay")
    assert known_plans({ONE: full}, plan) == {ONE: (plan, "")}


def test_the_lane_is_free_once_the_whole_batch_has_answered() -> None:
    running = Lane((chunk(3),), (a_decode(1), a_decode(2)), last_was_decode=True)
    half = lane.record_outcome(running, EffectOutcome(TWO, Decoded((7,))), ends_together=True)
    assert half == evolve(running, running=(a_decode(1),))
    assert lane.record_outcome(half, EffectOutcome(ONE, Decoded((7,))), ends_together=True).running == ()


@pytest.mark.parametrize("together", [True, False])
def test_a_member_that_ends_ends_a_launch_where_all_stay_together(together: bool) -> None:
    running = Lane((), (alone(1, 30), alone(2, 30)), last_was_decode=True, member_count=2, runs_unattended=True)
    half = lane.record_outcome(running, EffectOutcome(TWO, Decoded((7,))), ends_together=together)
    assert half == evolve(running, running=(alone(1, 30),), runs_unattended=not together)


@pytest.mark.parametrize("copying", [(), (Copying((3,) * 5, 8, 4), None)], ids=["trial awaited", "some copy"])
def test_where_text_may_be_copied_the_members_that_go_on_are_counted_from_their_next_step_on(copying: Any) -> None:
    plan = Plan((0, 0), reason="does_not_pay", copying=copying)
    more = EffectOutcome(TWO, Decoded((7,), more=True))
    running = Lane((), (alone(1, 30), alone(2, 30)), last_was_decode=True, member_count=2, runs_unattended=True)
    running = evolve(running, plan=plan)
    half = lane.record_outcome(running, EffectOutcome(ONE, Decoded((7,))), ends_together=False)
    assert half == evolve(running, running=(alone(2, 30),))
    assert not lane.is_first_of_step(half, TWO), "the step had two members"
    after = lane.record_outcome(half, more, ends_together=False)
    assert after == evolve(half, member_count=1)
    assert lane.is_first_of_step(after, TWO)
    alike = lane.record_outcome(evolve(half, plan=Plan((0, 0))), more, ends_together=False)
    assert alike.member_count == 2, "without copies nothing is counted"


@pytest.mark.parametrize(
    ("changes", "settings", "joins"),
    [
        ({}, PLAIN, True),
        ({"plan": Plan((0, 0), copying=(Copying((3,) * 5, 8, 4), None))}, PLAIN, True),
        ({}, DRAFT, False),  # proposals are decided for all members together
        ({"runs_unattended": False}, PLAIN, False),  # it was asked to end, or it has one step
        ({"last_was_decode": False}, PLAIN, False),  # a prompt's rows have the lane
        ({"waiting": ()}, PLAIN, False),
        ({"running": ()}, PLAIN, False),
        ({"waiting": (alone(3, 30), chunk(4))}, PLAIN, False),  # it ends soon, for a prompt
        ({}, evolve(PLAIN, batch_rows=2), False),
    ],
)
def test_who_decodes_joins_those_who_do(changes: Any, settings: Any, joins: bool) -> None:
    busy = Lane(
        (alone(3, 30),), (alone(1, 30), alone(2, 9)), last_was_decode=True, member_count=2, runs_unattended=True
    )
    busy = evolve(busy, **changes)
    assert lane.can_join(busy, settings) == joins
    if joins:
        assert lane.join_waiting(busy, busy.waiting, busy.plan) == evolve(
            busy, waiting=(), running=(*busy.running, alone(3, 30)), member_count=3
        )


@pytest.mark.parametrize(
    ("waiting", "steps"),
    [
        ((alone(1, 30),), 30),
        ((alone(1, 30), alone(2, 9)), 9),  # it is not known which effect would come next without the one that ends
        ((alone(1, 999),), 999),
        ((alone(1, 30), chunk(2)), 1),
        ((alone(1, 30), alone(2, 30), chunk(3)), 1),
    ],
)
def test_decode_steps_go_on_alone_while_nobody_waits_and_nobody_ends(
    waiting: tuple[EffectRequest, ...], steps: int
) -> None:
    after, _, chosen = choose(*waiting)
    assert isinstance(chosen, Launch)
    assert {
        effect_request.effect.steps
        for effect_request in chosen.effect_requests
        if isinstance(effect_request.effect, RunDecode)
    } == {steps}
    assert after.runs_unattended == (steps > 1)


def test_without_a_draft_each_has_as_many_steps_as_it_may() -> None:
    waiting = alone(1, 999), alone(2, 1), alone(3, 9)
    after, _, chosen = choose(*waiting, settings=PLAIN)
    assert chosen == Launch(waiting)
    assert after.runs_unattended
    assert choose(*waiting, chunk(4), settings=PLAIN)[2] == Launch(tuple(alone(number, 1) for number in (1, 2, 3)))


def test_more_members_than_fit_a_launch_take_turns() -> None:
    full = tuple(alone(number, 30) for number in range(DRAFT.batch_rows + 1))
    chosen = choose(*full)[2]
    assert isinstance(chosen, Launch)
    assert {
        effect_request.effect.steps
        for effect_request in chosen.effect_requests
        if isinstance(effect_request.effect, RunDecode)
    } == {1}


def test_a_launch_that_goes_on_keeps_the_lane_and_counts_its_steps() -> None:
    running = Lane((), (a_decode(1, 3), a_decode(2, 3)), last_was_decode=True, member_count=2, proposing_steps=1)
    on = lane.record_outcome(running, EffectOutcome(ONE, Decoded((7, 8), 3, more=True)), ends_together=True)
    assert on == evolve(running, proposing_steps=2)
    assert lane.record_outcome(on, EffectOutcome(TWO, Decoded((7,), 3, more=True)), ends_together=True) == on, (
        "once a step"
    )
    assert lane.record_outcome(on, EffectOutcome(ONE, Decoded((7,), 3)), ends_together=True).proposing_steps == 2


def test_a_place_in_the_queue_can_be_given_up_and_work_on_the_device_cannot() -> None:
    busy = Lane((chunk(1), chunk(3)), (a_decode(2),))
    assert lane.remove_abandoned(busy, ONE) == (evolve(busy, waiting=(chunk(3),)), True)
    assert lane.remove_abandoned(busy, TWO) == (busy, False)
    assert lane.enqueue_effect(busy, chunk(4)).waiting == (chunk(1), chunk(3), chunk(4))


def test_a_draft_that_is_there_is_shared_without_a_launch_and_before_anything_else() -> None:
    there, shared = {"draft": Residence("loaded", (ONE,))}, {"draft": Residence("loaded", (ONE, TWO))}
    assert choose(chunk(1), a_decode(3), unpark(2), models=there) == (
        Lane((chunk(1), a_decode(3))),
        shared,
        EffectOutcome(TWO, ModelLoaded()),
    )


def test_moving_weights_takes_a_turn_like_a_chunk() -> None:
    away = {"draft": Residence("parked")}
    assert launched(a_decode(1), unpark(2), models=away, settings=SCOPED) == (a_decode(1),)
    assert launched(a_decode(1), unpark(2), decode_last=True, models=away, settings=SCOPED) == (unpark(2),)
    last = {"draft": Residence("loaded", (TWO,))}
    assert launched(a_decode(1), park(2), decode_last=True, models=last, settings=SCOPED) == (park(2),)


def test_a_draft_is_not_sent_away_while_somebody_waits_for_it() -> None:
    last, two = {"draft": Residence("loaded", (ONE,))}, {"draft": Residence("loaded", (ONE, TWO))}
    after, models, chosen = choose(park(1), unpark(2), models=last, settings=SCOPED)
    assert (after, models, chosen) == (Lane((park(1),)), two, EffectOutcome(TWO, ModelLoaded()))
    left = {"draft": Residence("loaded", (TWO,))}
    assert launch_choice.choose_launch(after, models, SCOPED, {}, Rates())[1:] == (
        left,
        EffectOutcome(ONE, ModelUnloaded()),
    )
