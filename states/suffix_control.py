"""When to propose tokens that are copied from earlier text, and how many: what a match is worth, by its length.

Problem. A copy costs no forward of a draft, only a wider forward of the target. But there is something to copy in some
steps only: where the text ends as it did at an earlier position. Many such matches are chance. After three equal tokens
the next ones are often others, and after thirty they are nearly always the same.

Idea. The executor reports with every outcome how many tokens before the next one agree with an earlier position
(`Decoded.matched`). `states/speculation_control.py` plans, charges and rests as for a draft. What differs is this:

* A request may propose only after an outcome with a match. Other steps are plain, and as quick as without a draft.
* Gains are kept for each class of match lengths (CLASS_STARTS), of each request and of all requests (`Rates.copied`).
* Times of steps with copies are kept apart from those of a draft (`Rates.copy_times`), and so are the trials.
* A plain launch that runs unattended is stopped when copies would pay (`copy_launches.should_stop_to_copy`).

Where there is a draft as well, both are planned for, and `choose_source` takes the plan that gives more tokens for its
time. The accounts are common to both.

Example. One request answers with a file of its prompt. Its first tokens match nothing, so its launch runs unattended.
The fourth one makes a match of 3. A copy of 3 tokens is worth 1.62 at a price of 1.3, so the launch is stopped and 3
tokens are proposed. They are right, the match has 7 tokens then, and the next step proposes 15.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from heapq import merge
from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded
from states import speculation_control
from states.launch_prices import UNIT, DecodeTimes, LaunchPrices, Shape, record_launch_time
from states.rates import Rates
from states.settings import Settings
from states.speculation_control import (
    REQUEST_MEMORY,
    SERVER_MEMORY,
    Plan,
    SpeculationControl,
    estimate_chain_gain,
    list_bucket_widths,
    update_gains,
)

# For each class, the decode steps with a match of that class, then the proposals that are expected to be right of each
# width, in thousandths.
ClassGains: TypeAlias = tuple[tuple[int, ...], ...]
ProposalLimits: TypeAlias = Sequence[tuple[int, SpeculationControl | None]]

CLASS_STARTS = (3, 5, 9, 17, 33)  # tokens: the shortest match of each class
# How likely the next copied token is right, in thousandths, before anything is known of a class.
PRIOR_ACCEPTANCES = (400, 600, 750, 850, 900)


def list_copy_widths(settings: Settings) -> tuple[int, ...]:
    """List the numbers of copied tokens that are worth considering, as `speculation_control.list_widths` does."""
    return list_bucket_widths(min(settings.max_copied, settings.batch_rows - 1))


@cache
def list_prior_gains(widths: tuple[int, ...]) -> ClassGains:
    """Return what is expected of every class before anything is known."""
    return tuple((0, *(estimate_chain_gain(width, acceptance) for width in widths)) for acceptance in PRIOR_ACCEPTANCES)


def make_control(settings: Settings, rates: Rates) -> SpeculationControl:
    """Return the control of a request that has proposed nothing yet, for a draft, for copies, or for both."""
    control = speculation_control.make_control(settings, rates)
    widths = list_copy_widths(settings)
    if not widths:
        return control
    return evolve(control, copy_widths=widths, copied=forget_steps(find_server_gains(widths, rates)))


def find_server_gains(widths: tuple[int, ...], rates: Rates) -> ClassGains:
    """Return what copies have gained in all requests, or the prior gains."""
    is_known = len(rates.copied) == len(CLASS_STARTS) and all(len(gains) == 1 + len(widths) for gains in rates.copied)
    return rates.copied if is_known else list_prior_gains(widths)


def forget_steps(copied: ClassGains) -> ClassGains:
    """Return the gains as a new request starts from them: it has had no steps itself."""
    return tuple((0, *gains) for _, *gains in copied)


def find_class(matched: int) -> int:
    """Return the class of a match of this many tokens."""
    return bisect_right(CLASS_STARTS, matched) - 1


def update_control(control: SpeculationControl, done: Decoded) -> SpeculationControl:
    """Return a request's control after one more outcome."""
    after = speculation_control.update_draft_part(control, done)
    if not control.copy_widths:
        return after
    copied = control.copied
    if done.proposed and control.plan.source == "suffix":
        copied = update_class_gains(copied, control.copy_widths, control.matched, done, REQUEST_MEMORY)
    return evolve(after, copy_widths=control.copy_widths, copied=copied, matched=done.matched)


def update_class_gains(
    copied: ClassGains, widths: tuple[int, ...], matched: int, done: Decoded, memory: int
) -> ClassGains:
    """Return the gains after one more step with copies. matched: the length of the match before that step."""
    at = find_class(matched)
    if at < 0:
        return copied
    seen, *gains = copied[at]
    now = update_gains(SpeculationControl(widths, tuple(gains)), seen, done, memory)
    return (*copied[:at], (min(seen + 1, memory), *now), *copied[at + 1 :])


# --- which members of a launch copy, and how much ---


def view_as_draft(control: SpeculationControl) -> SpeculationControl:
    """Return the control as that of a draft whose gains are those of the present match."""
    gains = control.copied[find_class(control.matched)][1:]
    # `seen` is never 0: copies need not catch up with anything.
    return SpeculationControl(control.copy_widths, gains, seen=1, account=control.account, plan=control.plan)


def has_match(control: SpeculationControl | None) -> bool:
    """May the request copy in its next step?"""
    return control is not None and control.matched >= CLASS_STARTS[0] and bool(control.copy_widths)


def find_widest(control: SpeculationControl) -> int:
    """Return the most tokens that the request may propose in its next step, from a draft or as a copy."""
    return max((*control.widths, *(control.copy_widths if has_match(control) else ())), default=0)


def plan_copies(wanted: ProposalLimits, prices: LaunchPrices, rates: Rates, row_limit: int) -> Plan:
    """Choose what each member copies. The arguments are those of `speculation_control.plan_launch`."""
    copying = [
        (min(most, control.copy_widths[-1]), view_as_draft(control))
        if control is not None and has_match(control)
        else (0, control)
        for most, control in wanted
    ]
    own_trials = evolve(rates, steps_until_trial=rates.copy_steps_until_trial, next_trial_gap=rates.copy_next_trial_gap)
    plan = speculation_control.plan_launch(copying, prices, own_trials, row_limit)
    return evolve(plan, source="suffix")


def choose_source(drafted: Plan, copied: Plan, controls: Sequence[SpeculationControl | None]) -> Plan:
    """Return the plan that gives more tokens for its time. A trial gives way to what pays."""
    if not any(copied.proposals):
        return drafted
    if not any(drafted.proposals):
        return copied
    return max(drafted, copied, key=lambda plan: (not plan.is_trial, rate_plan(plan, controls)))


def rate_plan(plan: Plan, controls: Sequence[SpeculationControl | None]) -> int:
    """Return the tokens that a plan gives in the time of a plain launch, in thousandths."""
    tokens = UNIT * len(controls)
    for propose, control in zip(plan.proposals, controls, strict=True):
        if propose and control is not None:
            own = view_as_draft(control) if plan.source == "suffix" else control
            tokens += speculation_control.estimate_gain(own, propose)
    return UNIT * tokens // plan.price


def merge_copy_times(rates: Rates) -> DecodeTimes:
    """Return the times of plain launches and of those with copies, in the format of `Rates.decode`."""
    return tuple(merge((one for one in rates.decode if not one[2]), rates.copy_times))


# --- what a launch teaches all requests ---


def record_step(rates: Rates, plan: Plan) -> Rates:
    """Return the rates after a step has begun. Trials of copies are counted apart from those of a draft."""
    if plan.source == "suffix" and any(plan.proposals):
        own_trials = evolve(
            rates, steps_until_trial=rates.copy_steps_until_trial, next_trial_gap=rates.copy_next_trial_gap
        )
        after = speculation_control.record_step(own_trials, plan)
        return evolve(
            after,
            steps_until_trial=rates.steps_until_trial,
            next_trial_gap=rates.next_trial_gap,
            copy_steps_until_trial=after.steps_until_trial,
            copy_next_trial_gap=after.next_trial_gap,
        )
    after = speculation_control.record_step(rates, plan)
    if not after.copy_steps_until_trial:
        return after
    return evolve(after, copy_steps_until_trial=after.copy_steps_until_trial - 1)


def record_copies(settings: Settings, rates: Rates, control: SpeculationControl, done: Decoded) -> Rates:
    """Return the rates after an outcome of a member that copied. control: the member's, before the outcome."""
    widths = list_copy_widths(settings)
    copied = update_class_gains(find_server_gains(widths, rates), widths, control.matched, done, SERVER_MEMORY)
    return evolve(rates, copied=copied)


def record_copy_time(rates: Rates, shape: Shape, took_ns: int) -> Rates:
    """Return the rates after a launch with copies took this long."""
    times = record_launch_time(merge_copy_times(rates), shape, took_ns)
    return evolve(rates, copy_times=tuple(one for one in times if one[2]))
