"""Copies of several requests that decode together: what they cost the others, in a simulation of a whole batch.

The time of a step follows from its members and rows, as it was measured with 16 streams of the demo on two cores of a
Xeon without AMX: a plain step of 16 takes 1,000, its part that does not depend on the members 400, each copied row 27,
and the core 160 more for the outcomes of a step with copies. All requests begin together, and the batch has ended when
the last one has. So a request that copies gains, and the others must not lose what it gains.
"""

from __future__ import annotations

import pytest
from attrs import define, evolve

from effects.decode import Decoded, find_match_class, share_rows
from states import copy_records, speculation_control
from states import suffix_control as control
from states.copy_branches import estimate_copy_prices
from states.rates import Rates, TimedStep
from states.speculation_plan import Plan, SpeculationControl
from states.step_prices import UNIT, Shape
from tests.states.builders import PLAIN

SETTINGS = evolve(PLAIN, max_copied=31, batch_rows=64)
MEMBERS = 16
TOKENS = 256  # of an answer
LONG, SHORT = 40, 9  # tokens of matches: all copies after the long ones are right, and five or six after the short ones
HOST = 160


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
class Batch:
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
    took = plain = 0
    for _ in range(batches):
        members = [Member(matched, start(rates, matched)) for matched in matches]
        batch = Batch(members, rates, shared)
        took, rates = batch.serve(), batch.rates
        plain = TOKENS * time_step(MEMBERS, 0)
    return took / plain


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
