"""The lessons of launches that may copy text: how often copies are right, and what steps with them take.

`states/measured_rates.py` and the world call this for outcomes and launches. `states/suffix_control.py` decides by it.
"""

from __future__ import annotations

from attrs import evolve

from effects.decode import Decoded, find_match_class
from states import speculation_control
from states.copy_branches import merge_plain_times
from states.rates import INITIAL_ACCOUNT, DecodeTimes, Rates
from states.settings import Settings
from states.speculation_control import LONGEST_TRIAL_GAP, REFILL, SERVER_MEMORY
from states.speculation_plan import Plan, SpeculationControl
from states.step_prices import UNIT, Shape, record_step_time
from states.suffix_control import find_server_gains, list_copy_widths, update_class_gains


def record_steps(rates: Rates, plan: Plan, count: int) -> Rates:
    """Return the rates after this many steps of a launch have begun. Steps that copied something are not among them."""
    for _ in range(count):
        rates = speculation_control.record_step(rates, plan)
    return count_down_to_trial(rates, count)


def record_plain_steps(rates: Rates, plan: Plan, count: int, decode: DecodeTimes) -> Rates:
    """Return the rates with other times of decode steps, and after so many steps in which nothing was proposed.

    This is `record_steps` for nearly all steps where proposals do not pay. It makes the rates anew once, if at all.
    """
    account = max(rates.account, min(rates.account + REFILL * count, INITIAL_ACCOUNT))
    until_trial = max(0, rates.steps_until_trial - count) if plan.reason else rates.steps_until_trial
    until_copies = max(0, rates.copy_steps_until_trial - count)
    counted = account, until_trial, until_copies
    if decode is rates.decode and counted == (
        rates.account,
        rates.steps_until_trial,
        rates.copy_steps_until_trial,
    ):
        return rates
    return rates.with_steps(decode, *counted)


def count_down_to_trial(rates: Rates, count: int) -> Rates:
    """Return the rates after this many decode steps, each of which brings the next try of copies nearer."""
    if not rates.copy_steps_until_trial:
        return rates
    return evolve(rates, copy_steps_until_trial=max(0, rates.copy_steps_until_trial - count))


def record_launch_begin(rates: Rates, plan: Plan) -> Rates:
    """Return the rates after a launch has begun, which begins its first step.

    If only copies are proposed, it is not known yet whether this step will copy. `record_further_steps` counts it then.
    """
    return rates if copies_alone(plan) else record_steps(rates, plan, 1)


def record_further_steps(rates: Rates, plan: Plan, done: Decoded, count: int) -> Rates:
    """Return the rates after an outcome of a launch's first member, whose outcomes stand for the steps of all members.

    count: steps that were not recorded yet. It is not used if only copies are proposed: then the outcome itself says
    how many steps it reports, and whether they copied (`Decoded.rows`).
    """
    if not copies_alone(plan):
        return record_steps(rates, plan, count)
    return count_down_to_trial(rates, done.steps) if done.rows else record_steps(rates, plan, done.steps)


def copies_alone(plan: Plan) -> bool:
    """Return whether the launch may copy text while no draft proposes anything."""
    return bool(plan.copying) and not any(plan.proposals)


def record_copies(settings: Settings, rates: Rates, control: SpeculationControl, done: Decoded, members: int) -> Rates:
    """Return the rates after an outcome whose proposals were copied.

    A trial that fails doubles the steps between trials. One that pays halves them, and the next may follow at once.

    control: the control of the request that copied, before the outcome. members: the number of requests in the launch.
    """
    widths = list_copy_widths(settings)
    copied = update_class_gains(find_server_gains(widths, rates), widths, control.matched, done, SERVER_MEMORY)
    plan = control.plan
    if find_match_class(control.matched) not in plan.copy_trials:
        return evolve(rates, copied=copied)
    paid = has_paid(done, speculation_control.charge_step(plan, done), members)
    gap = rates.copy_next_trial_gap
    following = max(1, gap // 2) if paid else min(2 * gap, LONGEST_TRIAL_GAP)
    return evolve(rates, copied=copied, copy_steps_until_trial=0 if paid else gap, copy_next_trial_gap=following)


def has_paid(done: Decoded, charge: int, members: int) -> bool:
    """Return whether the tokens that a member copied were worth their part of what the step cost beyond a plain one.

    The rows of a step beyond one for each member are copies. A member bears the same part of the cost as it has of
    these rows.

    charge: of the step. members: the number of requests in the launch.
    """
    extra_rows = max(done.proposed, done.rows - members)
    return UNIT * done.accepted * extra_rows > done.proposed * members * (charge - UNIT)


def record_copy_time(rates: Rates, shape: Shape, took_ns: int, *, branched: bool) -> Rates:
    """Return the rates after a step with copies took this long. branched: some of them had a branch."""
    if branched:
        return evolve(rates, branch_times=with_step_time(rates, rates.branch_times, shape, took_ns))
    return evolve(rates, copy_times=with_step_time(rates, rates.copy_times, shape, took_ns))


def with_step_time(rates: Rates, known: DecodeTimes, shape: Shape, took_ns: int) -> DecodeTimes:
    """Return these times of steps with copies after one more of them."""
    times = record_step_time(merge_plain_times(rates, known), shape, took_ns)
    return tuple(step_time for step_time in times if step_time.rows)
