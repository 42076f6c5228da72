"""When to copy earlier text: what a match is worth by its length, and how launches go on that may copy."""

from __future__ import annotations

import random

import pytest
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import MATCH_CLASSES, Copying, Decoded, RunDecode, find_match_class
from effects.ids import MAIN, RequestId, SlotId
from effects.stream import StopLaunch
from states import copy_records, launch_choice, speculation_control
from states import suffix_control as control
from states.copy_branches import estimate_copy_prices
from states.copy_choice import ClassChoice
from states.events import EffectOutcome, ForLaunch
from states.lane import can_join, get_decode_effects
from states.rates import ClassGains, Rates, TimedStep
from states.request_states import MayPropose, Speculating
from states.settings import Settings
from states.speculation_plan import CopyPrices, Plan, SpeculationControl
from states.step_prices import UNIT, Shape, StepPrices
from states.world import World, make_world
from tests.states.builders import ONE, PLAIN, TWO, a, a_job, advance, answering

COPYING = evolve(PLAIN, max_copied=7, batch_rows=64)
CHEAP = Rates(
    decode=(TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 2, 0, 1000, 0)),
    copy_times=(TimedStep(0, 1, 4, 1100, 1000), TimedStep(0, 1, 8, 1200, 1000)),
)
LONG = len(MATCH_CLASSES) - 1  # the class of the longest matches
PRICES = StepPrices(1, 1000, (1100, 1200, 2000))


def copier(matched: int = 0, **changes):
    return evolve(control.make_control(COPYING, CHEAP), widths=(), gains=(), matched=matched, **changes)


def plan_for(*controls, rates: Rates = CHEAP, plan: Plan | None = None, row_limit: int = 64) -> Plan:
    prices = estimate_copy_prices(rates, Shape(0, len(controls)), 64)
    plain = Plan((0,) * len(controls), steps=launch_choice.UNLIMITED_STEPS)
    return control.plan_copies(plan or plain, controls, prices, rates, row_limit)


def counts_of(plan: Plan) -> list[tuple[int, ...]]:
    return [() if one is None else one.counts for one in plan.copying]


def worthless(*groups: int) -> tuple[ClassGains, ...]:
    """Gains of which those of some classes are none."""
    prior = control.list_prior_gains((3, 7))
    return tuple(ClassGains(16, (0, 0)) if at in groups else known for at, known in enumerate(prior))


@pytest.mark.parametrize(
    ("matched", "group"), [(0, -1), (2, -1), (3, 0), (4, 0), (5, 1), (9, 2), (16, 2), (17, 3), (33, 4), (64, 4)]
)
def test_matches_are_told_apart_by_their_length(matched: int, group: int) -> None:
    assert find_match_class(matched) == group


def test_a_longer_match_is_worth_more_at_first() -> None:
    gains = control.list_prior_gains((3, 7))
    assert [known.gains[1] for known in gains] == sorted(known.gains[1] for known in gains)
    (counts,) = counts_of(plan_for(copier()))
    assert list(counts) == sorted(counts)
    assert counts[LONG] == 7


def test_a_launch_may_copy_as_often_as_the_accounts_bear_it_without_a_gain() -> None:
    plan = plan_for(copier(account=1000))
    (rule,) = plan.copying
    assert rule is not None
    assert rule.rows == 8
    assert rule.steps == speculation_control.count_bearable_steps(1200, 1000) == 5
    assert plan_for(copier(account=50)).copying == (), "less than one step is left"


def test_what_does_not_pay_is_not_copied_and_looked_at_again_after_some_steps() -> None:
    resting = evolve(CHEAP, copy_steps_until_trial=100)
    plan = plan_for(copier(copied=worthless(0)), rates=resting)
    (counts,) = counts_of(plan)
    assert counts[0] == 0
    assert counts[LONG] == 7
    assert plan.steps == 100
    plan = plan_for(copier(copied=worthless(*range(5))), rates=resting)
    assert (plan.copying, plan.reason, plan.steps) == ((), "does_not_pay", 100)


@pytest.mark.parametrize("groups", [(0,), tuple(range(5))], ids=["most classes are copied", "nothing is copied"])
@pytest.mark.parametrize(("draft_steps", "steps"), [(4, 4), (400, 300)])
def test_a_launch_ends_at_the_first_trial_that_is_due_of_a_draft_or_of_copies(
    groups: tuple[int, ...], draft_steps: int, steps: int
) -> None:
    resting = evolve(CHEAP, copy_steps_until_trial=300)
    draft = Plan((0,), steps=draft_steps, reason="does_not_pay")
    plan = plan_for(copier(copied=worthless(*groups)), plan=draft, rates=resting)
    assert bool(plan.copying) == (groups == (0,))
    assert (plan.steps, plan.reason) == (steps, "does_not_pay")


@pytest.mark.parametrize("groups", [(0,), tuple(range(5))], ids=["most classes are copied", "nothing is copied"])
def test_a_draft_whose_trial_is_due_in_four_steps_is_tried_then_though_text_may_be_copied(
    groups: tuple[int, ...],
) -> None:
    settings = evolve(COPYING, max_proposals=7)
    rates = evolve(CHEAP, steps_until_trial=4, copy_steps_until_trial=300)
    known = evolve(control.make_control(settings, rates), gains=(0, 0), copied=worthless(*groups))
    state = evolve(a(Speculating, answering(settings, job=a_job(max_tokens=400))), speculation=MayPropose(known))
    step = EffectRequest(ONE, RunDecode(SlotId(0), 22, 8, propose=7, steps=390))
    plan = launch_choice.plan_proposals([step], {ONE: state}, rates, 64, 1)
    assert not any(plan.proposals)
    assert bool(plan.copying) == (groups == (0,))
    assert plan.steps == 4
    assert launch_choice.choose_step_counts(get_decode_effects([step]), plan, settings) == [4]


def test_a_launch_that_could_never_gain_is_not_ended_to_look_again() -> None:
    dear = evolve(CHEAP, copy_times=(TimedStep(0, 1, 4, 9000, 1000), TimedStep(0, 1, 8, 20000, 1000)))
    many = [copier() for _ in range(16)]
    rates = evolve(dear, decode=(TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 16, 0, 1000, 0)))
    plan = plan_for(*many, rates=rates)
    assert (plan.copying, plan.steps) == ((), launch_choice.UNLIMITED_STEPS)


def test_what_does_not_pay_is_tried_when_a_trial_is_due() -> None:
    plan = plan_for(copier(copied=worthless(0, 1)))
    (counts,) = counts_of(plan)
    assert counts[:2] == (3, 3), "the cheapest number"
    assert plan.copy_trials == {0, 1}


def test_a_trial_that_pays_brings_the_next_one_nearer_and_another_moves_it_away() -> None:
    plan = evolve(plan_for(copier(copied=worthless(0))), copy_prices=CopyPrices(PRICES))
    tried = copier(3, plan=plan)
    rates = evolve(CHEAP, copy_next_trial_gap=4)
    wrong = copy_records.record_copies(COPYING, rates, tried, Decoded((1,), 3, accepted=0, copied=3, rows=4), 1)
    assert (wrong.copy_steps_until_trial, wrong.copy_next_trial_gap) == (4, 8)
    right = copy_records.record_copies(COPYING, rates, tried, Decoded((1, 2, 3, 4), 3, copied=3, rows=4), 1)
    assert (right.copy_steps_until_trial, right.copy_next_trial_gap) == (0, 2)
    other = copy_records.record_copies(
        COPYING, rates, evolve(tried, matched=40), Decoded((1,), 3, accepted=0, copied=3, rows=4), 1
    )
    assert other.copy_next_trial_gap == 4, "a step that was expected to pay is no trial"
    waited = copy_records.record_further_steps(wrong, plan, Decoded((1,), 3, accepted=0, copied=3, rows=4), 0)
    assert waited.copy_steps_until_trial == 3


def test_a_step_is_planned_as_if_the_other_members_copied_nothing() -> None:
    """One of sixteen with seven tokens more is not worth a forward that takes half as long again."""
    times = (TimedStep(0, 1, 4, 1100, 1000), TimedStep(0, 1, 8, 1200, 1000), TimedStep(0, 16, 32, 1500, 1000))
    rates = Rates(decode=(TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 16, 0, 1000, 0)), copy_times=times)
    plan = plan_for(*[copier() for _ in range(16)], rates=evolve(rates, copy_steps_until_trial=9))
    assert plan.copying == ()


def test_the_rows_of_a_step_in_which_all_copy_stay_within_what_the_accounts_bear() -> None:
    times = (TimedStep(0, 2, 8, 1100, 1000), TimedStep(0, 2, 16, 4000, 1000))
    plan = plan_for(copier(), copier(), rates=evolve(CHEAP, copy_times=times))
    assert [max(counts) for counts in counts_of(plan)] == [3, 3]
    assert {one.rows for one in plan.copying if one} == {8}


def test_a_plain_step_comes_first_where_its_time_is_not_known() -> None:
    plan = plan_for(copier(), copier(), copier())
    assert (plan.copying, plan.steps) == ((), 1)
    assert plan_for(copier(), row_limit=0).steps == 1


def test_an_outcome_teaches_the_class_of_the_match_before_it() -> None:
    before = copier(40, plan=Plan((0,), copy_prices=CopyPrices(PRICES)))
    after = control.update_control(before, Decoded((1,), 7, accepted=0, matched=4, copied=7, rows=8))
    assert after.matched == 4
    assert after.copied[:4] == before.copied[:4]
    assert after.copied[4].seen == 1
    assert all(now < then for now, then in zip(after.copied[4].gains, before.copied[4].gains, strict=True))
    assert after.account == before.account + 1010 - 1200, "the account pays the price of the step's rows"


def test_a_plain_step_of_a_launch_that_may_copy_is_charged_as_one() -> None:
    plan = Plan((0,), copy_prices=CopyPrices(PRICES))
    assert speculation_control.charge_step(plan, Decoded((1,))) == UNIT
    assert speculation_control.charge_step(plan, Decoded((1,), rows=16)) == 2000, "another member copied"
    doubted = evolve(plan, copy_prices=CopyPrices(evolve(PRICES, doubted_buckets=frozenset({8}))), plain_ns=100)
    assert speculation_control.charge_step(doubted, Decoded((1,), rows=8, ns=150)) == 1500


@pytest.mark.parametrize("seed", range(20))
def test_plain_steps_that_are_settled_later_earn_what_each_of_them_would_have(seed: int) -> None:
    rng = random.Random(seed)
    plans = [Plan((0,)), Plan((7, 0), 1400), Plan((0,), plain_ns=4, charges_measured_time=True)]
    plans = [evolve(plan, copy_prices=CopyPrices(PRICES)) for plan in plans]
    outcomes = [Decoded((1,)), Decoded((1, 2, 3), steps=3), Decoded((1,), ns=5, matched=4)]
    outcomes += [Decoded((1, 2), 7, accepted=1, copied=7, rows=8), Decoded((1,), 7, accepted=0), Decoded((1,), rows=8)]
    at_once = later = control.make_control(evolve(COPYING, max_proposals=7), CHEAP).with_plan(plans[0])
    tokens = kept = 0
    for _ in range(200):
        if rng.random() < 0.1:
            plan = rng.choice(plans)
            at_once, later = at_once.with_plan(plan), later.with_plan(plan)
        done = outcomes[rng.choice((0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5))]
        at_once = control.update_control(at_once, done)
        if control.teaches_nothing(later, done):
            kept += 1
        else:
            later = control.update_control(control.settle(later, tokens), done)
        tokens += len(done.tokens)
        assert control.settle(later, tokens) == at_once
    assert kept


@pytest.mark.parametrize("seed", range(20))
def test_plain_steps_teach_the_same_at_once_and_one_by_one(seed: int) -> None:
    """`record_plain_steps` makes rates anew once for what `record_steps` does step by step."""
    rng = random.Random(seed)
    both = evolve(
        CHEAP,
        account=rng.choice((0, 4985, 4995, 5000, 7000)),
        steps_until_trial=rng.choice((0, 1, 5, 90)),
        copy_steps_until_trial=rng.choice((0, 2, 90)),
    )
    times = (TimedStep(0, 1, 0, 1234, 0),)
    for reason in ("", "does_not_pay"):
        for count in (0, 1, 3, 40):
            plan = Plan((0,), reason=reason)
            expected = copy_records.record_steps(both, plan, count)
            assert copy_records.record_plain_steps(both, plan, count, both.decode) == expected
            found = copy_records.record_plain_steps(both, plan, count, times)
            assert found == evolve(expected, decode=times)
    rested = evolve(CHEAP, account=5000)
    assert copy_records.record_plain_steps(rested, Plan((0,)), 3, rested.decode) is rested


@pytest.mark.parametrize("done", [Decoded((1,), matched=4), Decoded((1,), rows=8), Decoded((1,), 3, accepted=0)])
def test_an_outcome_that_is_not_of_a_plain_step_teaches_something(done: Decoded) -> None:
    assert control.teaches_nothing(copier(), Decoded((1,)))
    assert not control.teaches_nothing(copier(), done)
    for plan in (Plan((3, 0), 1400), Plan((0,), charges_measured_time=True), Plan((0,), price_doubted=True)):
        assert not control.teaches_nothing(copier(plan=plan), Decoded((1,)))


def test_copies_teach_nothing_of_a_draft_and_the_other_way_round() -> None:
    both = control.make_control(evolve(COPYING, max_proposals=7), CHEAP)
    plan = Plan((7,), 1200, copy_prices=CopyPrices(PRICES))
    copied = control.update_control(evolve(both, matched=9, plan=plan), Decoded((1,), 7, accepted=0, copied=7, rows=8))
    assert copied.gains == both.gains
    assert copied.copied != both.copied
    drafted = control.update_control(evolve(both, matched=9, plan=plan), Decoded((1,), 7, accepted=0))
    assert drafted.copied == both.copied
    assert drafted.gains != both.gains


def test_a_member_copies_only_where_that_gives_more_than_its_draft() -> None:
    both = control.make_control(evolve(COPYING, max_proposals=7), CHEAP)
    draft = Plan((7,), 1200, steps=5)
    resting = evolve(CHEAP, copy_steps_until_trial=9)
    good = plan_for(evolve(both, gains=(2000, 4000)), plan=draft, rates=resting)
    (counts,) = counts_of(good)
    assert counts[0] == 0
    assert counts[LONG] == 7
    assert good.proposals == (7,), "the draft proposes where nothing is copied"
    (rule,) = good.copying
    assert rule is not None
    assert rule.steps <= 5, "the accounts bear both kinds of steps"
    better = plan_for(evolve(both, gains=(3000, 7000)), plan=draft)
    assert better is draft


def test_times_of_copies_are_kept_beside_those_of_a_draft() -> None:
    shape = launch_choice.Shape(0, 1, 8)
    rates = copy_records.record_copy_time(
        evolve(CHEAP, decode=(TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 1, 8, 9000, 1000))), shape, 900, branched=False
    )
    assert rates.decode == (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 1, 8, 9000, 1000))
    assert rates.copy_times == (TimedStep(0, 1, 4, 1100, 1000), TimedStep(0, 1, 8, 1050, 1000))


@pytest.mark.parametrize("matched", [3, 40])
def test_copies_that_are_never_right_cost_no_more_than_the_account(matched: int) -> None:
    rates, lost, steps = CHEAP, 0, 0
    state = copier(matched)
    while steps < 2000:
        plan = plan_for(state, rates=rates)
        state = evolve(state, plan=plan)
        rates = copy_records.record_launch_begin(rates, plan)
        rule = plan.copying[0] if plan.copying else None
        for _ in range(rule.steps if rule else min(plan.steps, 2000)):
            width = rule.counts[find_match_class(matched)] if rule else 0
            rows = 1 + width if width else 0
            done = Decoded((1,), width, accepted=0, matched=matched, copied=width, rows=rows)
            rates = copy_records.record_further_steps(rates, plan, done, 1)
            rates = speculation_control.record_speculation_outcome(COPYING, rates, plan, done)
            if width:
                rates = copy_records.record_copies(COPYING, rates, state, done, 1)
            lost += speculation_control.charge_step(plan, done) - UNIT
            state = control.update_control(state, done)
            steps += 1
    assert 0 < lost <= 5 * UNIT + steps * 10
    assert state.account >= 0


# --- in the world ---


def decoding(settings: Settings, *requests) -> World:
    """These requests are about to be launched together."""
    world = evolve(make_world(settings), rates=CHEAP)
    slots = world.slots
    states, effect_requests = {}, []
    for number, request in enumerate(requests):
        flat = answering(settings, slot=SlotId(number), job=a_job(max_tokens=40))
        state = a(Speculating, flat)
        states[request] = evolve(state, speculation=MayPropose(copier(), "no_match"))
        effect_requests.append(EffectRequest(request, RunDecode(SlotId(number), 22, 8, steps=30)))
        slots = evolve(
            slots,
            slots=tuple(evolve(one, holder=request) if at == number else one for at, one in enumerate(slots.slots)),
        )
    lane = launch_choice.start_launch(world.lanes[MAIN], tuple(effect_requests), Plan((0,) * len(requests)))
    return evolve(world, slots=slots, requests=states, lanes={**world.lanes, MAIN: lane})


def outcome(matched: int = 0, *, more: bool = True, **changes) -> Decoded:
    return Decoded((9,), ns=1000, accepted=0, more=more, matched=matched, **changes)


def launch_one(world: World) -> tuple[World, RunDecode]:
    """End the launch, and return the only member of the next one."""
    world, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome(more=False)),)))
    (launch,) = [out for out in outs if isinstance(out, Launch)]
    (effect_request,) = launch.effect_requests
    assert isinstance(effect_request.effect, RunDecode)
    return world, effect_request.effect


def test_a_launch_comes_with_what_to_copy_and_goes_on_whatever_matches() -> None:
    world, effect = launch_one(decoding(COPYING, ONE))
    assert isinstance(effect.copying, Copying)
    assert effect.propose == 0
    assert effect.copying.counts[LONG] == 7
    assert world.lanes[MAIN].runs_unattended
    for matched in (0, 3, 40):
        world, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome(matched)),)))
        assert not any(isinstance(out, EffectRequest) and isinstance(out.effect, StopLaunch) for out in outs)
    right = Decoded(tuple(range(100, 108)), 7, ns=1500, more=True, matched=41, copied=7, rows=8)
    world, _ = advance(world, ForLaunch((EffectOutcome(ONE, right),)))
    state = world.requests[ONE]
    assert isinstance(state, Speculating)
    assert isinstance(state.speculation, MayPropose)
    assert state.speculation.reason == "", "something was copied"
    assert TimedStep(0, 1, 8, 1209, 1000) in world.rates.copy_times, "a slower time counts a 32nd"
    assert world.rates.copied[LONG].seen == 1
    assert world.lanes[MAIN].proposing_steps == 1
    world, _ = advance(world, ForLaunch((EffectOutcome(ONE, outcome(3)),)))
    assert world.lanes[MAIN].proposing_steps == 0, "its time is measured, so the next one is not due for a while"


def join(world: World, *, rates: Rates = CHEAP) -> tuple[World, RunDecode]:
    """Let TWO join the launch of ONE, and return its decode step."""
    lane = world.lanes[MAIN]
    waiting = (EffectRequest(TWO, RunDecode(SlotId(1), 22, 8, steps=6)),)
    requests = {**world.requests, TWO: world.requests[ONE]}
    joined, launched = launch_choice.join_launch(evolve(lane, waiting=waiting), requests, COPYING, rates)
    (effect_request,) = launched
    assert joined.running == (*lane.running, effect_request)
    assert (joined.waiting, joined.member_count, len(joined.plan.proposals)) == ((), 2, 2)
    assert isinstance(effect_request.effect, RunDecode)
    assert effect_request.effect.steps == 6
    return evolve(world, lanes={**world.lanes, MAIN: joined}, requests=requests), effect_request.effect


def test_a_request_that_joins_a_launch_gets_a_rule_of_its_own() -> None:
    """Also where no step of so many members was timed: the rule only says what is worth another launch."""
    world, _ = launch_one(decoding(COPYING, ONE))
    waiting = (EffectRequest(TWO, RunDecode(SlotId(1), 22, 8, steps=6)),)
    assert can_join(evolve(world.lanes[MAIN], waiting=waiting), COPYING)
    for rates in (CHEAP, evolve(CHEAP, decode=(TimedStep(0, 1, 0, 1000, 0),))):
        after, effect = join(world, rates=rates)
        assert effect.copying is not None
        assert effect.copying.counts[LONG] == 7
        assert after.lanes[MAIN].plan.copy_prices.chains.members == 2
        assert after.lanes[MAIN].runs_unattended


def test_only_a_request_that_joins_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have their rules already, and each takes some 40 us. All have other gains here."""
    world, _ = launch_one(decoding(COPYING, ONE))
    lane = world.lanes[MAIN]
    running = tuple(EffectRequest(RequestId(10 + at), RunDecode(SlotId(2 + at), 22, 8, steps=6)) for at in range(3))
    lane = evolve(
        lane, running=(*lane.running, *running), waiting=(EffectRequest(TWO, RunDecode(SlotId(1), 22, 8, 6)),)
    )
    state = world.requests[ONE]
    assert isinstance(state, Speculating)
    assert isinstance(state.speculation, MayPropose)
    requests = dict(world.requests)
    for at, request in enumerate((TWO, *(one.request for one in running))):
        own = evolve(state.speculation.control, copied=worthless(at))
        requests[request] = evolve(state, speculation=evolve(state.speculation, control=own))
    planned = list[object]()
    choose = control.choose_counts

    def count(known: SpeculationControl, terms: control.CopyTerms) -> list[ClassChoice]:
        planned.append((known.copied, terms.members))
        return choose(known, terms)

    monkeypatch.setattr(control, "choose_counts", count)
    joined, (launched,) = launch_choice.join_launch(lane, requests, COPYING, CHEAP)
    assert planned == [(worthless(0), 5)]
    assert isinstance(launched.effect, RunDecode)
    assert launched.effect.copying is not None
    assert launched.effect.copying.counts[LONG] == 7
    assert joined.plan.considers_copies


def test_a_request_that_joins_where_nothing_is_worth_copying_gets_no_rule() -> None:
    world, _ = launch_one(decoding(COPYING, ONE))
    dear = (TimedStep(0, 1, 4, 9000, 1000), TimedStep(0, 1, 8, 20000, 1000))
    before = world.lanes[MAIN].plan
    after, effect = join(world, rates=evolve(CHEAP, copy_times=dear, copy_steps_until_trial=9))
    assert effect.copying is None
    assert after.lanes[MAIN].plan == evolve(before, proposals=(0, 0)), "what was launched before is charged by it"


def test_the_members_of_a_launch_that_may_copy_end_one_by_one() -> None:
    world, _ = launch_one(decoding(COPYING, ONE))
    world, _ = join(world)
    world, outs = advance(world, ForLaunch((EffectOutcome(ONE, outcome()), EffectOutcome(TWO, outcome(more=False)))))
    assert not any(isinstance(out, EffectRequest) and isinstance(out.effect, StopLaunch) for out in outs)
    lane = world.lanes[MAIN]
    assert lane.runs_unattended
    assert [one.request for one in lane.running][:1] == [ONE]


def test_a_review_comes_later_where_there_are_more_members() -> None:
    rates = evolve(CHEAP, decode=(*CHEAP.decode, TimedStep(0, 4, 0, 1000, 0)), copy_steps_until_trial=9)
    for members in (1, 2, 4):
        plan = plan_for(*[copier(copied=worthless(*range(5))) for _ in range(members)], rates=rates)
        assert (plan.copying, plan.steps) == ((), control.REVIEW_STEPS * members)
