"""When to copy earlier text: what a match is worth by its length, and which launches end for it."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, SlotId
from effects.stream import StopLaunch
from states import copy_launches, launch_choice, speculation_control
from states import suffix_control as control
from states.events import EffectOutcome, ForLaunch
from states.launch_prices import UNIT
from states.rates import Rates
from states.request_states import MayPropose, Speculating
from states.settings import Settings
from states.speculation_control import Plan
from states.world import World, make_world
from tests.states.builders import ONE, PLAIN, TWO, a, a_job, advance, answering

COPYING = evolve(PLAIN, max_copied=7, batch_rows=64)
CHEAP = Rates(
    decode=((0, 1, 0, 1000, 0), (0, 2, 0, 1000, 0)), copy_times=((0, 1, 4, 1100, 1000), (0, 1, 8, 1200, 1000))
)


def copier(matched: int, **changes):
    return evolve(control.make_control(COPYING, CHEAP), widths=(), gains=(), matched=matched, **changes)


def plan_for(*matches: int, rates: Rates = CHEAP) -> Plan:
    prices = launch_choice.launch_prices.estimate_prices(control.merge_copy_times(rates), 0, len(matches), 64)
    return control.plan_copies([(7, copier(matched)) for matched in matches], prices, rates, 64)


@pytest.mark.parametrize(
    ("matched", "group"), [(0, -1), (2, -1), (3, 0), (4, 0), (5, 1), (9, 2), (16, 2), (17, 3), (33, 4), (64, 4)]
)
def test_matches_are_told_apart_by_their_length(matched: int, group: int) -> None:
    assert control.find_class(matched) == group
    assert control.has_match(copier(matched)) == (group >= 0)


def test_a_longer_match_is_worth_more_at_first() -> None:
    gains = control.list_prior_gains((3, 7))
    assert [row[2] for row in gains] == sorted(row[2] for row in gains)
    assert plan_for(40).proposals == (7,)
    assert plan_for(0).proposals == (0,)


def test_who_has_no_match_proposes_nothing_beside_one_that_has() -> None:
    assert plan_for(40, 0).proposals == (7, 0)


def test_an_outcome_teaches_the_class_of_the_match_before_it() -> None:
    before = copier(40, plan=Plan((7,), 1200, source="suffix"))
    after = control.update_control(before, Decoded((1,), 7, accepted=0, matched=4))
    assert after.matched == 4
    assert after.copied[:4] == before.copied[:4]
    assert after.copied[4][0] == 1
    assert all(now < then for now, then in zip(after.copied[4][1:], before.copied[4][1:], strict=True))
    assert after.account == before.account + 1010 - 1200, "the account pays for it as for a draft's proposals"


def test_copies_teach_nothing_of_a_draft_and_the_other_way_round() -> None:
    both = control.make_control(evolve(COPYING, max_proposals=7), CHEAP)
    copied = control.update_control(
        evolve(both, matched=9, plan=Plan((7,), 1200, source="suffix")), Decoded((1,), 7, accepted=0)
    )
    assert copied.gains == both.gains
    drafted = control.update_control(evolve(both, matched=9, plan=Plan((7,), 1200)), Decoded((1,), 7, accepted=0))
    assert drafted.copied == both.copied
    assert drafted.gains != both.gains


def test_the_source_is_taken_that_gives_more_for_its_time() -> None:
    both = control.make_control(evolve(COPYING, max_proposals=7), CHEAP)
    plain, draft = Plan((0,)), Plan((7,), 1500)
    copies = Plan((7,), 1200, source="suffix")
    likely, unlikely = evolve(both, matched=40), evolve(both, matched=3)
    assert control.choose_source(draft, copies, [likely]) is copies
    assert control.choose_source(draft, copies, [evolve(unlikely, copied=((0, 0, 0),) * 5)]) is draft
    assert control.choose_source(plain, copies, [unlikely]) is copies
    assert control.choose_source(draft, evolve(copies, proposals=(0,)), [likely]) is draft
    assert control.choose_source(evolve(draft, is_trial=True), copies, [likely]) is copies


def test_trials_of_copies_rest_apart_from_those_of_a_draft() -> None:
    trial = Plan((3,), 1100, is_trial=True, source="suffix")
    rates = control.record_step(evolve(CHEAP, copy_next_trial_gap=4, next_trial_gap=8), trial)
    assert (rates.copy_steps_until_trial, rates.copy_next_trial_gap) == (4, 8)
    assert (rates.steps_until_trial, rates.next_trial_gap) == (0, 8)
    plain = control.record_step(rates, Plan((0,)))
    assert plain.copy_steps_until_trial == 3


def test_times_of_copies_are_kept_beside_those_of_a_draft() -> None:
    shape = launch_choice.Shape(0, 1, 8)
    rates = control.record_copy_time(evolve(CHEAP, decode=((0, 1, 0, 1000, 0), (0, 1, 8, 9000, 1000))), shape, 900)
    assert rates.decode == ((0, 1, 0, 1000, 0), (0, 1, 8, 9000, 1000))
    assert rates.copy_times == ((0, 1, 4, 1100, 1000), (0, 1, 8, 1050, 1000))


def test_copies_that_are_never_right_cost_no_more_than_the_account() -> None:
    rates, lost = CHEAP, 0
    state = copier(40)
    for _ in range(2000):
        prices = launch_choice.launch_prices.estimate_prices(control.merge_copy_times(rates), 0, 1, 64)
        plan = control.plan_copies([(7, state)], prices, rates, 64)
        rates = control.record_step(rates, plan)
        done = Decoded((1,), sum(plan.proposals), accepted=0, matched=40)
        state = evolve(state, plan=plan)
        rates = speculation_control.record_speculation_outcome(COPYING, rates, plan, done)
        if done.proposed:
            rates = control.record_copies(COPYING, rates, state, done)
        state = control.update_control(state, done)
        lost += plan.price - UNIT
    assert lost <= 5 * UNIT + 2000 * 10
    assert state.account >= 0


# --- in the world ---


def decoding(settings: Settings, *requests) -> World:
    """These requests decode in one launch that continues alone."""
    world = evolve(make_world(settings), rates=CHEAP)
    slots = world.slots
    states, effect_requests = {}, []
    for number, request in enumerate(requests):
        flat = answering(settings, slot=SlotId(number), job=a_job(max_tokens=40))
        state = a(Speculating, flat)
        states[request] = evolve(state, speculation=MayPropose(copier(0), "no_match"))
        effect_requests.append(EffectRequest(request, RunDecode(SlotId(number), 22, 8, steps=30)))
        slots = evolve(
            slots,
            slots=tuple(evolve(one, holder=request) if at == number else one for at, one in enumerate(slots.slots)),
        )
    plan = Plan((0,) * len(effect_requests))
    lane = launch_choice.start_launch(world.lanes[MAIN], tuple(effect_requests), plan, step_count=30)
    return evolve(world, slots=slots, requests=states, lanes={**world.lanes, MAIN: lane})


def outcome(matched: int) -> Decoded:
    return Decoded((9,), ns=1000, accepted=0, more=True, matched=matched)


def test_a_launch_without_proposals_ends_when_a_copy_would_pay() -> None:
    world = decoding(COPYING, ONE)
    world, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome(0)),)))
    assert EffectRequest(ONE, StopLaunch()) not in outs
    world, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome(40)),)))
    assert outs[-1] == EffectRequest(ONE, StopLaunch())
    world, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome(41)),)))
    assert EffectRequest(ONE, StopLaunch()) not in outs, "once"
    world, outs = advance(world, ForLaunch((EffectOutcome(ONE, evolve(outcome(42), more=False)),)))
    (launch,) = [out for out in outs if isinstance(out, Launch)]
    (effect_request,) = launch.effect_requests
    assert isinstance(effect_request.effect, RunDecode)
    assert (effect_request.effect.propose, effect_request.effect.source) == (7, "suffix")


def test_a_request_with_a_match_joins_a_plain_launch_without_proposals() -> None:
    world = decoding(COPYING, ONE, TWO)
    lane, waiting = world.lanes[MAIN], EffectRequest(TWO, RunDecode(SlotId(1), 22, 8, propose=5, steps=6))
    lane = evolve(lane, running=lane.running[:1], waiting=(waiting,), plan=Plan((0,)))
    joined, states = copy_launches.join_launch(lane, world.requests, COPYING)
    assert joined.running[1] == EffectRequest(TWO, RunDecode(SlotId(1), 22, 8, steps=6))
    assert [state.speculation.control.plan.proposals for state in states.values()] == [(0, 0), (0, 0)]


def test_a_launch_goes_on_where_a_match_is_not_worth_its_price() -> None:
    world = decoding(COPYING, ONE, TWO)
    dear = evolve(CHEAP, copy_times=((0, 2, 4, 4000, 1000), (0, 2, 8, 5000, 1000)), copy_steps_until_trial=9)
    world = evolve(world, rates=dear)
    _, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome(4)), EffectOutcome(TWO, outcome(0)))))
    assert not any(isinstance(out, EffectRequest) and isinstance(out.effect, StopLaunch) for out in outs)
