"""Copies of several requests that decode together: what they cost the others, in a simulation of a whole batch.

The time of a step follows from its members and rows, as it was measured with 16 streams of the demo on two cores of a
Xeon without AMX. A plain step of 16 takes 1,000, of which 400 do not depend on the members. Each copied row takes 27.
The core needs 160 more for the outcomes of a step with copies. All requests begin together, and the batch has ended
when the last one has. So a request that copies gains, and the others must not lose what it gains.
"""

from __future__ import annotations

import pytest
from attrs import define, evolve

from effects.decode import Decoded, find_match_class, share_rows
from states import copy_records, speculation_control, step_prices
from states import suffix_control as control
from states.copy_branches import estimate_copy_prices
from states.rates import Rates, TimedStep
from states.speculation_plan import CopyPrices, Plan, SpeculationControl
from states.step_prices import UNIT, Shape
from tests.states.builders import PLAIN

SETTINGS = evolve(PLAIN, max_copied=31, batch_rows=64)
MEMBERS = 16
TOKENS = 256  # of an answer
LONG = 40  # tokens of a match after which all copies are right
SHORT = 9  # of one after which five or six are
HOST = 160
MEASURED = (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, MEMBERS, 0, 8000, 0))


def time_step(members: int, copied: int) -> int:
    """Return what the device takes."""
    return 400 + 600 * members // MEMBERS + 27 * copied


@define
class Member:
    """A request of the batch. matched: the match after each of its steps; 0: it never copies."""

    matched: int
    state: SpeculationControl
    tokens: int = 0


@define
class BatchModel:
    """Serves 16 requests, of which the first ones copy."""

    members: list[Member]
    rates: Rates
    shared: bool = True  # the rows of a step are shared evenly; else the first members get them
    time: int = 0

    def serve(self) -> int:
        """Return the time until all have ended."""
        while self.members:
            self.launch()
        return self.time

    def launch(self) -> None:
        """Take the steps of one launch: up to the last step with copies of its rule, or until a member ends."""
        count = len(self.members)
        prices = estimate_copy_prices(self.rates, Shape(0, count), 64)
        states = [member.state for member in self.members]
        plan = control.plan_copies(Plan((0,) * count, steps=1 << 30), states, prices, self.rates, 64)
        self.rates = copy_records.record_launch_begin(self.rates, plan)
        rule = next((one for one in plan.copying if one is not None), None)
        left = rule.steps if rule else 0
        for step in range(plan.steps):
            left -= self.take_step(plan, left > 0)
            if len(self.members) < count or (rule and not left):
                return
            if step == 0 and prices.chains.needs_plain_step:
                return

    def take_step(self, plan: Plan, may_copy: bool) -> bool:
        """Take a step, and return whether something was copied."""
        count = len(self.members)
        wanted = [0] * count
        if may_copy and plan.copying:
            rules = [one for one in plan.copying if one is not None]
            for at, (member, rule) in enumerate(zip(self.members, rules, strict=True)):
                if member.matched:
                    wanted[at] = min(rule.counts[find_match_class(member.matched)], TOKENS - member.tokens - 1)
            free = rules[0].rows - count
            if self.shared:
                wanted = share_rows(wanted, free)
            else:
                for at, most in enumerate(wanted):
                    wanted[at] = min(most, free)
                    free -= wanted[at]
        copied = sum(wanted)
        ns = time_step(count, copied)
        self.time += ns + (HOST if copied else 0)
        rows = count + copied if copied else 0
        for at, (member, proposed) in enumerate(zip(self.members, wanted, strict=True)):
            right = proposed if member.matched == LONG else min(proposed, 5 + at % 2)
            done = Decoded(
                (1,) * (1 + right), proposed, ns=ns, accepted=right, matched=member.matched, copied=proposed, rows=rows
            )
            self.learn(member, done, evolve(plan, proposals=(0,) * count), is_first=at == 0)
        self.members = [member for member in self.members if member.tokens < TOKENS]
        return copied > 0

    def learn(self, member: Member, done: Decoded, plan: Plan, *, is_first: bool) -> None:
        """Let the member and the server learn from an outcome, as the world does."""
        count = len(plan.proposals)
        if is_first:
            self.rates = copy_records.record_further_steps(self.rates, plan, done, 1)
            if done.rows:
                shape = Shape(0, count, done.rows)
                self.rates = copy_records.record_copy_time(self.rates, shape, done.ns, branched=False)
        self.rates = speculation_control.record_speculation_outcome(SETTINGS, self.rates, plan, done)
        state = evolve(member.state, plan=plan)
        if done.copied:
            self.rates = copy_records.record_copies(SETTINGS, self.rates, state, done, count)
        member.state = control.update_control(state, done)
        member.tokens += len(done.tokens)


def serve_batch(matches: list[int], *, shared: bool = True, batches: int = 3) -> float:
    """Return what a batch takes over a plain one, once the server knows what copies cost and give."""
    decode = tuple(TimedStep(0, count, 0, time_step(count, 0), 0) for count in range(1, MEMBERS + 1))
    copy_times = tuple(TimedStep(0, 1, rows, 440 + 27 * rows, 437) for rows in (4, 8, 16, 32))
    rates = Rates(decode=decode, copy_times=copy_times)
    took = 0
    for _ in range(batches):
        members = [Member(matched, start(rates, matched)) for matched in matches]
        batch = BatchModel(members, rates, shared)
        took = batch.serve()
        rates = batch.rates
    return took / (TOKENS * time_step(MEMBERS, 0))


def start(rates: Rates, matched: int) -> SpeculationControl:
    return evolve(control.make_control(SETTINGS, rates), widths=(), gains=(), matched=matched)


def test_a_batch_in_which_all_copy_ends_sooner_because_all_have_a_share() -> None:
    assert serve_batch([LONG] * MEMBERS) < 0.7
    assert serve_batch([LONG] * MEMBERS, shared=False) > 0.99, "the first ones gain, and soon the others cannot pay"


@pytest.mark.parametrize("copying", [1, 2, 3, 5, 8, 12])
def test_a_batch_in_which_few_copy_takes_no_longer_than_a_plain_one(copying: int) -> None:
    for matched in (LONG, SHORT):
        assert serve_batch([matched] * copying + [0] * (MEMBERS - copying)) < 1.01


def test_nothing_is_copied_for_a_gain_that_the_others_lose_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = [SHORT] + [0] * (MEMBERS - 1)
    assert serve_batch(one) < 1.001
    monkeypatch.setattr(control, "COPIED_VALUE", UNIT)
    assert serve_batch(one) > 1.02


# --- prices of steps whose copied rows are all that they cost ---


def price_list(copy_times: tuple[TimedStep, ...], members: int = 16) -> tuple[int, ...]:
    plain = (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, members, 0, 8000, 0))
    return estimate_copy_prices(Rates(decode=plain, copy_times=copy_times), Shape(0, members), 64).chains.prices


def test_a_step_between_two_that_were_timed_lies_between_their_times() -> None:
    wide = TimedStep(0, 16, 64, 20000, 8000)
    assert price_list((wide,)) == (1000, 1000, 1000, 1500, 2500)
    assert price_list((TimedStep(0, 16, 32, 10000, 8000), wide)) == (1000, 1000, 1000, 1250, 2500)
    assert price_list((TimedStep(0, 13, 64, 20000, 8000),), 13)[2] == 1088, "three rows more than a plain step has"
    single = step_prices.estimate_prices((*MEASURED, TimedStep(0, 16, 64, 20000, 8000)), 0, 16, 64)
    assert single.prices[3:] == (2500, 2500), "a draft costs time besides its rows, so a wider step is the measure"


def test_a_guess_asks_what_as_many_rows_more_cost_a_single_request() -> None:
    alone = (TimedStep(0, 1, 16, 3000, 1000), TimedStep(0, 1, 32, 5000, 1000))
    assert price_list(alone)[3:] == (1265, 1765), "17 and 49 rows of a single request take 3,125 and 7,125"


def test_the_first_step_at_a_guessed_price_ends_its_launch_and_is_charged_what_it_took() -> None:
    rates = Rates(decode=MEASURED, copy_times=(TimedStep(0, 1, 32, 1300, 1000),))
    members = [start(rates, LONG) for _ in range(MEMBERS)]
    prices = estimate_copy_prices(rates, Shape(0, MEMBERS), 64)
    plan = control.plan_copies(Plan((0,) * MEMBERS), members, prices, rates, 64)
    assert [one.steps for one in plan.copying if one] == [1] * MEMBERS
    done = Decoded((1, 2), 1, copied=1, rows=32, ns=20000)
    assert speculation_control.charge_step(plan, done) == prices.chains.price_of(32) + UNIT
    known = copy_records.record_copy_time(rates, Shape(0, MEMBERS, 64), 9000, branched=False)
    prices = estimate_copy_prices(known, Shape(0, MEMBERS), 64)
    plan = control.plan_copies(Plan((0,) * MEMBERS), members, prices, known, 64)
    assert min(one.steps for one in plan.copying if one) > 1
    assert not prices.chains.doubted_buckets


def test_a_launch_goes_on_where_too_few_members_match_for_the_rows_whose_price_was_guessed() -> None:
    """Four members may have 64 rows together. With short matches they have fewer, whose price is known."""
    alone = (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 4, 0, 2000, 0))
    rates = Rates(decode=alone, copy_times=(TimedStep(0, 1, 32, 1100, 1000),))
    rates = copy_records.record_copy_time(rates, Shape(0, 4, 32), 2500, branched=False)
    prices = estimate_copy_prices(rates, Shape(0, 4), 64)
    assert prices.chains.doubted_buckets == {64}
    assert plan_steps([start(rates, LONG) for _ in range(4)], prices, rates) == 1
    for matched in ([SHORT, SHORT, 0, 0], [SHORT, 0, 0, 0], [0] * 4):
        assert plan_steps([start(rates, one) for one in matched], prices, rates) > 1


def plan_steps(members: list[SpeculationControl], prices: CopyPrices, rates: Rates) -> int:
    plan = control.plan_copies(Plan((0,) * len(members)), members, prices, rates, 64)
    return min(one.steps for one in plan.copying if one)


@pytest.mark.parametrize(
    ("accepted", "copiers", "paid"), [(3, 16, True), (1, 16, False), (15, 1, False), (45, 1, True)]
)
def test_each_member_that_copies_bears_its_part_of_what_the_step_cost(accepted: int, copiers: int, paid: bool) -> None:
    """The step of 64 rows costs 16 members 1.2 plain steps more, so 19.2 of 48 copied tokens have to be right."""
    proposed = 48 // copiers
    done = Decoded((1,) * (accepted + 1), proposed, copied=proposed, rows=64, accepted=accepted)
    assert copy_records.has_paid(done, 2200, MEMBERS) == paid


def test_copies_of_several_requests_have_to_pay_by_a_margin_and_those_of_one_do_not() -> None:
    for members, gain, pays in ((1, 500, True), (16, 6000, False), (16, 7500, True)):
        terms = control.CopyTerms(members, CopyPrices(), 5 * UNIT, UNIT * members, 64, is_trial_due=False)
        assert terms.would_pay(gain, 1300) == pays
        assert terms.could_pay(control.CopyOption(2, 15, 1300))
