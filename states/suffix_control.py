"""When to propose tokens that are copied from earlier text, and how many: what a match is worth, by its length.

Problem. A copy costs no forward of a draft, only a wider forward of the target. But there is something to copy in some
steps only: where the text ends as it did at an earlier position. Many such matches are chance. After three equal tokens
the next ones are often others, and after thirty they are nearly always the same. Whether there is a match is known only
when a step has ended, and the executor cannot wait for the core between two steps.

Idea. The core decides in advance. A launch comes with a rule for each member: how many tokens to copy after a match of
each class of lengths (`Copying`, MATCH_CLASSES). The executor finds the match after a step and obeys the rule in the
next one. A step without a match, or with one that is not worth copying, is a plain step or one of the draft. So a
launch goes on while copies are right, wrong or missing.

* Every outcome reports the match behind its tokens (`Decoded.matched`; 0 as well where the text was not searched after
  that step, see `effects.decode.choose_search_gap`), and whether its own proposals were copied
  (`Decoded.copied`). Copied proposals come from the match that the outcome before it reported. So gains are learned for
  each class of matches, of each request and of all requests together (`Rates.copied`).
* Rules hold for the members that the launch begins with, because prices depend on their number. Once one has ended or
  joined, nothing is copied, and the next match that a rule would copy from ends the launch.
* A class of matches is worth copying if the tokens that are expected are worth more than the time of the wider forward,
  by a margin (COPIED_VALUE). That is estimated as if no other member copied in that step.
* If several members copy in one step, they share its rows evenly (`effects.decode.share_rows`), since all pay for it.
* A price that was guessed is doubted: its first step with copies ends the launch, and is charged what it took.
* Times of steps with copies are kept apart from those of a draft (`Rates.copy_times`).
* The accounts of `states/speculation_control.py` pay for copies as well. `Copying.steps` is the number of steps that
  they can pay for even if no copy is right. After these steps the core decides again.
* Classes that are not expected to pay are tried now and then. One countdown serves all classes and requests: 1, 2, 4
  ... up to 512 decode steps lie between two trials. A trial that fails doubles this number. A trial that pays halves
  it, and the next trial may follow at once.
* A copied chain may have a branch, where the model verifies trees (`states/copy_branches.py`).

With a draft, a request copies where that gives more tokens for the time than the draft's proposals would.

Example. A request answers with a file of its prompt. At first the server expects 0.62 of 3 copied tokens to be right
after a match of 3 tokens, so such a step gives 1.62 tokens at a price of 1.1. From earlier requests it has learned that
after a match of 5 tokens or more some 10 of 15 copied tokens are right: 11 tokens at a price of 2. So the rule is to
copy 3 tokens after matches of 3 or 4, and 15 after longer ones. The first match has 3 tokens. The 3 tokens copied are
right, and the target adds one. Now the match has 7 tokens, so the next step copies 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from attrs import evolve

from effects.decode import MATCH_CLASSES, Decoded, find_match_class
from states import speculation_control
from states.copy_branches import (
    count_branch_tokens,
    count_chain_accepted,
    estimate_tree_gain,
    update_branch_gain,
)
from states.copy_choice import ClassChoice, CopyOption, count_likely_rows, make_rule
from states.rates import ClassGains, Rates
from states.settings import Settings
from states.speculation_control import (
    FRUITLESS_STEPS,
    REFILL,
    REQUEST_MEMORY,
    count_bearable_steps,
    estimate_chain_gain,
    find_balance,
    list_bucket_widths,
    rate_drafts,
    update_gains,
)
from states.speculation_plan import CopyPrices, Plan, SpeculationControl
from states.step_prices import UNIT, round_up_to_bucket

# How likely the next copied token is right, in thousandths, before anything is known of a class.
PRIOR_ACCEPTANCES = (400, 600, 750, 850, 900)
# Least decode steps for each member before the core decides again where nothing is copied. Ends of launches cost time.
REVIEW_STEPS = 64
# The worth of a copied token, in thousandths, where several requests decode together. If one of n ends a step sooner, a
# step gets shorter by less than an n-th. And prices leave out the core's work for outcomes with copies: 1.4 ms for 16.
COPIED_VALUE = 700


def list_copy_widths(settings: Settings) -> tuple[int, ...]:
    """List the numbers of copied tokens that are worth considering, as `speculation_control.list_widths` does."""
    return list_bucket_widths(min(settings.max_copied, settings.batch_rows - 1))


@cache
def list_prior_gains(widths: tuple[int, ...]) -> tuple[ClassGains, ...]:
    """Return what is expected of every class before anything is known."""
    return tuple(
        ClassGains(0, tuple(estimate_chain_gain(width, acceptance) for width in widths))
        for acceptance in PRIOR_ACCEPTANCES
    )


def make_control(settings: Settings, rates: Rates, *, has_draft: bool = True) -> SpeculationControl:
    """Return the control of a request that has proposed nothing yet, for a draft, for copies, or for both."""
    control = speculation_control.make_control(settings, rates)
    copy_widths = list_copy_widths(settings)
    if not copy_widths:
        return control
    # `evolve` would take four times as long, and each request of a server that copies gets here.
    return SpeculationControl(
        control.widths if has_draft else (),
        control.gains if has_draft else (),
        control.branching,
        account=control.account,
        copy_widths=copy_widths,
        copied=find_first_gains(copy_widths, rates.copied),
        max_branch=settings.max_branch,
    )


def find_server_gains(widths: tuple[int, ...], copied: tuple[ClassGains, ...]) -> tuple[ClassGains, ...]:
    """Return what copies have gained in all requests (`Rates.copied`), or the prior gains."""
    is_known = len(copied) == len(MATCH_CLASSES) and all(len(gains.gains) == len(widths) for gains in copied)
    return copied if is_known else list_prior_gains(widths)


@lru_cache(maxsize=4)
def find_first_gains(widths: tuple[int, ...], copied: tuple[ClassGains, ...]) -> tuple[ClassGains, ...]:
    """Return the gains that a new request starts from: those of all requests, but it has had no steps itself."""
    return tuple(
        ClassGains(0, class_gains.gains, class_gains.branch_gain) for class_gains in find_server_gains(widths, copied)
    )


def teaches_nothing(control: SpeculationControl, done: Decoded) -> bool:
    """Return whether an outcome only earns what every plain step earns, so that the control may stay as it is.

    Most outcomes are like that where proposals do not pay, and a new control for each takes 2 us a token.
    """
    return not (done.proposed or done.rows or done.matched != control.matched or control.plan.charges_plain_steps)


def settle(control: SpeculationControl, tokens: int) -> SpeculationControl:
    """Return the control with what plain steps have earned since `control.settled`. tokens: that the answer has."""
    if tokens == control.settled:
        return control
    return control.with_account(control.account + REFILL * (tokens - control.settled), tokens)


def update_control(control: SpeculationControl, done: Decoded) -> SpeculationControl:
    """Return a request's control after one more outcome. It has to be settled up to the tokens of this outcome.

    `evolve` would take four times as long.
    """
    gains, seen = speculation_control.update_draft_gains(control, done)
    copied = control.copied
    if done.copied:
        copied = update_class_gains(copied, control.copy_widths, control.matched, done, REQUEST_MEMORY)
    balance = speculation_control.update_balance(control.account, control.plan, done)
    return SpeculationControl(
        *(control.widths, gains, control.branching, seen, balance, control.plan),
        *(control.copy_widths, copied, done.matched, control.max_branch, control.settled + len(done.tokens)),
    )


def update_class_gains(
    copied: tuple[ClassGains, ...], widths: tuple[int, ...], matched: int, done: Decoded, memory: int
) -> tuple[ClassGains, ...]:
    """Return the gains after one more step with copies. matched: the length of the match before that step."""
    at = find_match_class(matched)
    if at < 0:
        return copied
    before = copied[at]
    counts = done.copied, count_chain_accepted(done)
    now = update_gains(SpeculationControl(widths, before.gains), before.seen, counts, memory)
    branch_gain = update_branch_gain(before, widths, done, memory)
    return (*copied[:at], ClassGains(min(before.seen + 1, memory), now, branch_gain), *copied[at + 1 :])


# --- what the members of a launch copy ---


class CopyTerms(NamedTuple):
    """The figures common to the members of a launch when their copies are chosen.

    balance: what a step may cost beyond a plain one. tokens_without_copies: the tokens that a step gives in the time of
    a plain step if nothing is copied, in thousandths: one of each member, or more with a draft.
    """

    members: int
    prices: CopyPrices
    balance: int
    tokens_without_copies: int
    row_limit: int
    is_trial_due: bool

    def price_of(self, rows: int, *, branched: bool) -> int:
        """Return the price of a step of this many rows. branched: some copies have a branch."""
        return (self.prices.branches if branched else self.prices.chains).price_of(rows)

    def would_pay(self, gain: int, price: int) -> bool:
        """Return whether a step of this price is worth it, if one member gains that many tokens."""
        value = COPIED_VALUE * gain // UNIT if self.members > 1 else gain
        beats_draft = rate_copies(self.members, gain, price) > self.tokens_without_copies
        return beats_draft and rate_copies(self.members, value, price) > UNIT * self.members

    def could_pay(self, option: CopyOption) -> bool:
        """Return whether copies would pay at all if all were right. If so, they are tried now and then."""
        return rate_copies(self.members, UNIT * option.width, option.price) > self.tokens_without_copies


def plan_copies(
    plan: Plan,
    controls: Sequence[SpeculationControl | None],
    prices: CopyPrices,
    rates: Rates,
    row_limit: int,
    *,
    first: int = 0,
) -> Plan:
    """Return the plan of a launch with what each member copies. plan: what a draft proposes, if there is one.

    `Plan.steps` of the result counts steps of any kind, and is at most that of `plan`. `Copying.steps` limits those
    with proposals besides. row_limit: rows of a step; 0: a plain step is due. first: members before this one copy
    nothing.
    """
    has_draft = any(plan.proposals)
    plain_ns = prices.chains.plain_ns
    if prices.chains.needs_plain_step or not row_limit:
        return plan if has_draft else evolve(plan, plain_ns=plain_ns, steps=1)
    members = len(controls)
    balance, is_self_funded = find_balance(controls, rates)
    tokens_without_copies = max(UNIT * members, rate_drafts(plan, controls))
    terms = CopyTerms(members, prices, balance, tokens_without_copies, row_limit, rates.copy_steps_until_trial == 0)
    # New members know the same, so they copy the same.
    ruled = [None if at < first else control for at, control in enumerate(controls)]
    known = [
        None if control is None else (control.copy_widths, control.copied, control.max_branch) for control in ruled
    ]
    of_known = dict(zip(known, ruled, strict=True))
    choices = {
        key: choose_counts(control, terms) for key, control in of_known.items() if control and control.copy_widths
    }
    chosen = [choices.get(key, []) for key in known]
    widest = [max((choice.width for choice in choices), default=0) for choices in chosen]
    could_pay = any(choice.could_pay for choices in chosen for choice in choices)
    # A trial of a draft may be due before the next trial of copies, so the plan of a draft never holds longer for them.
    steps = min(plan.steps, max(REVIEW_STEPS * members, rates.copy_steps_until_trial)) if could_pay else plan.steps
    if not any(widest):
        if has_draft:
            return plan
        return evolve(plan, plain_ns=plain_ns, steps=steps, reason=plan.reason or "does_not_pay")
    branched = any(choice.branch for choices in chosen for choice in choices)
    rows = limit_rows(members + sum(widest), members + max(widest), terms, branched=branched)
    step_count = count_bearable_steps(max(plan.price, terms.price_of(rows, branched=branched)), balance)
    likely_rows = max(members + 1, count_likely_rows(controls, chosen))
    is_price_doubted = round_up_to_bucket(min(rows, likely_rows)) in prices.chains.doubted_buckets
    if is_price_doubted or (branched and prices.branches.doubted_buckets):
        step_count = 1  # the first step tells what such steps cost
    if has_draft:
        step_count = min(step_count, plan.steps)
    copying = tuple(make_rule(choices, rows, step_count) for choices in chosen)
    trials = frozenset(group for choices in chosen for group, choice in enumerate(choices) if choice.is_trial)
    return evolve(
        plan,
        copying=copying,
        copy_prices=prices,
        copy_trials=trials,
        plain_ns=plain_ns,
        self_funded=is_self_funded,
        steps=steps,
    )


def choose_counts(control: SpeculationControl, terms: CopyTerms) -> list[ClassChoice]:
    """Choose how many tokens a member copies after matches of each class."""
    options = list_copy_options(control.copy_widths, terms)
    trees = list_tree_options(control, options, terms)
    found = list[ClassChoice]()
    for known in control.copied:
        gains = {option: known.gains[option.at] for option in options}
        if known.branch_gain:
            gains |= {tree: estimate_tree_gain(known, control.copy_widths, tree.at, tree.branch) for tree in trees}
        rates = {option: rate_copies(terms.members, gain, option.price) for option, gain in gains.items()}
        best = max(rates, key=rates.__getitem__, default=None)
        if best is not None and terms.would_pay(gains[best], best.price):
            found.append(ClassChoice(best.width, best.branch))
            continue
        trial = next((option for option in options if terms.could_pay(option)), None)
        if trial is not None and terms.is_trial_due:
            found.append(ClassChoice(trial.width, is_trial=True))
        else:
            found.append(ClassChoice(0, could_pay=trial is not None))
    return found


def list_copy_options(widths: Sequence[int], terms: CopyTerms) -> list[CopyOption]:
    """List the numbers of tokens that one member may copy, ascending, as far as they fit the rows of the step.

    The accounts can pay for one step with the cheapest number of which no copy is right, or FRUITLESS_STEPS of others.
    """
    options = [
        CopyOption(at, width, terms.price_of(terms.members + width, branched=False))
        for at, width in enumerate(widths)
        if terms.members + width <= terms.row_limit
    ]
    cheapest = options[0].price if options else UNIT
    return [
        option
        for option in options
        if option.price - UNIT <= terms.balance
        and (option.price == cheapest or FRUITLESS_STEPS * (option.price - UNIT) <= terms.balance)
    ]


def list_tree_options(control: SpeculationControl, chains: Sequence[CopyOption], terms: CopyTerms) -> list[CopyOption]:
    """List the trees that one member may copy: as many tokens as each of these chains, some of them on a branch.

    The accounts can pay for FRUITLESS_STEPS such steps of which no copy is right. If it is not known what trees cost,
    only a request that decodes alone may find out.
    """
    if not control.max_branch or (terms.members > 1 and terms.prices.branches.doubted_buckets):
        return []
    options = [
        chain._replace(
            price=terms.price_of(terms.members + chain.width, branched=True),
            branch=count_branch_tokens(chain.width, control.max_branch),
        )
        for chain in chains
    ]
    return [option for option in options if option.branch and FRUITLESS_STEPS * (option.price - UNIT) <= terms.balance]


def rate_copies(members: int, gain: int, price: int) -> int:
    """Return the tokens that a step gives in the time of a plain step, in thousandths, if one member gains that."""
    return UNIT * (UNIT * members + gain) // price


def limit_rows(wanted: int, least: int, terms: CopyTerms, *, branched: bool) -> int:
    """Return the most rows of a step in which several members copy.

    They are halved until the accounts can pay for FRUITLESS_STEPS such steps of which no copy is right. wanted: rows
    if each member copies the most that was chosen for it. least: if only the one with most does; it is always allowed.
    """
    rows = min(wanted, terms.row_limit)
    while rows > least and FRUITLESS_STEPS * (terms.price_of(rows, branched=branched) - UNIT) > terms.balance:
        rows = max(least, rows // 2)
    return rows
