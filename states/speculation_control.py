"""When to speculate and how wide: what a decode step costs, against the tokens it is likely to give.

Problem. A draft proposes tokens, and the target checks all of them in one forward. Proposals that are right make an
answer faster. Wrong ones make it slower, because the draft and the wider forward take time. How often proposals are
right differs from request to request and changes within an answer, and a step is shared by several requests. And an
answer must never be much slower than it would be without a draft.

Idea. Tokens and times are integers in thousandths (UNIT): of a token, and of a plain step. A plain step is one of the
same requests in which no request proposes anything. A launch of several steps counts once for each of them. Three
things are known, all learned from earlier steps:

* prices: what a step of a shape costs (`states/step_prices.py`, from `Rates.decode`);
* gains: how many proposals of each width are expected to be right. Each request has its own estimate, which starts from
  that of all requests together (`Rates.gains`);
* accounts: how much time may still be lost. The server has one account (`Rates.account`), and every request has one
  (`SpeculationControl.account`).

`plan_launch` lists the ways in which the next step could propose. It takes the one that gives most tokens for its time,
if that is more than a plain step gives. If none gives more, one request tries proposals now and then. The number of
plain steps between two trials doubles each time, up to LONGEST_TRIAL_GAP. A step that is expected to pay halves it.

Invariants. No step begins that would cost more than is left on the server's account, or on that of any member, even if
every proposal were wrong. There is one exception: members may lose again what they have gained themselves. If every
member's account has 2,000 more than it began with, a step may lose 2,000 although the server's account is empty. What a
step gains is paid in, and what it loses is taken out (`update_balance`). Every token also earns REFILL, which is one
percent of a plain step. So an answer of N tokens takes at most 5 + 0.01 N plain steps longer than without a draft,
since no account begins with more than 5.

Example. A plain step of one request takes 20 ms. With 3 proposals it takes 25 ms, so its price is 1,250. If 1.8 of the
3 are expected to be right, it gives 2,800 thousandths of a token for 1,250, or 2,240 in the time of a plain step. That
is more than 1,000, so the request proposes 3. docs/SPECULATION.md derives all this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

from attrs import evolve, frozen

from effects.decode import Decoded
from states.rates import INITIAL_ACCOUNT, Rates
from states.settings import Settings
from states.speculation_plan import Plan, SpeculationControl
from states.step_prices import SMALLEST_BUCKET, UNIT, StepPrices, round_up_to_bucket

REFILL = 10  # thousandths of a plain step that every token pays into an account: one percent
PRIOR_STEPS = 8  # weight of the estimate that a request, or the server, starts from, in decode steps
REQUEST_MEMORY = 16  # decode steps that a request's estimate rests on at most, about
SERVER_MEMORY = 64  # decode steps that the estimate of all requests rests on at most, about
LONGEST_TRIAL_GAP = 512  # plain steps between two trials, at most
FRUITLESS_STEPS = 4  # without gain that the account must bear, or an option dearer than the cheapest is not taken
MAX_SERVER_ACCOUNT = 64 * UNIT  # of what all answers have gained, at most so much may be lost again
PRIOR_ACCEPTANCE = 600  # thousandths: how likely the next token is proposed rightly, before anything is known


def list_widths(settings: Settings) -> tuple[int, ...]:
    """List the numbers of proposals worth considering: those that fill a forward up to its bucket, and the maximum."""
    most = min(settings.tree or settings.max_proposals, settings.batch_rows - 1) if settings.max_proposals else 0
    return list_bucket_widths(most)


@cache
def list_bucket_widths(most: int) -> tuple[int, ...]:
    """List the numbers of proposals below `most` that fill a forward of one request up to a bucket, and `most`."""
    all_buckets = ((SMALLEST_BUCKET << step) - 1 for step in range(most.bit_length()))
    full = [width for width in all_buckets if width < most]
    return (*full, most) if most > 0 else ()


# --- how often a draft is right ---


def make_control(settings: Settings, rates: Rates) -> SpeculationControl:
    """Return the control of a request that has proposed nothing yet: it is expected to do as all others did."""
    widths = list_widths(settings)
    is_known = len(rates.gains) == len(widths)
    gains = rates.gains if is_known else tuple(map(estimate_chain_gain, widths))
    return SpeculationControl(widths, gains, branching=settings.tree > 0, account=min(rates.account, INITIAL_ACCOUNT))


@cache
def estimate_chain_gain(width: int, acceptance: int = PRIOR_ACCEPTANCE) -> int:
    """Return how many of `width` proposals in a chain are accepted on average, in thousandths.

    acceptance: the probability that a token is right if those before it are, in thousandths. The first wrong token ends
    the chain.
    """
    return sum(UNIT * acceptance**length // UNIT**length for length in range(1, width + 1))


def estimate_acceptance(width: int, gain: int) -> int:
    """Return the acceptance probability per token, in thousandths, with which a chain of `width` would gain `gain`."""
    chain_gain = lambda acceptance: estimate_chain_gain(width, acceptance)  # noqa: E731
    return bisect_right(range(UNIT + 1), gain, key=chain_gain) - 1


def update_draft_gains(control: SpeculationControl, done: Decoded) -> tuple[tuple[int, ...], int]:
    """Return `gains` and `seen` of a request's control after one more outcome."""
    if not done.proposed or done.copied:
        return control.gains, control.seen
    gains = update_gains(control, control.seen, (done.proposed, done.accepted), REQUEST_MEMORY)
    return gains, control.seen + 1


def update_gains(control: SpeculationControl, seen: int, counts: tuple[int, int], memory: int) -> tuple[int, ...]:
    """Return the expected gains after one more decode step with proposals. They rested on `seen` such steps before.

    They are moving averages, with weights that rest on at most `memory` steps. counts: the proposals of that step, and
    how many of them were right.
    """
    weight = min(seen + PRIOR_STEPS, memory)
    samples = sample_gains(control, *counts)
    return tuple((gain * (weight - 1) + sample) // weight for gain, sample in zip(control.gains, samples, strict=True))


def find_covering_width(control: SpeculationControl, proposed: int) -> int:
    """Return the index of the smallest width that holds this many proposals: they go through the same forward."""
    covering = (index for index, width in enumerate(control.widths) if width >= proposed)
    return next(covering, len(control.widths) - 1)


def sample_gains(control: SpeculationControl, proposed: int, accepted: int) -> Iterator[int]:
    """Yield what one decode step says about the gain of every width, in thousandths.

    Up to its own width that is exact. A wider chain would have gained the same if a proposal was wrong. If all were
    right, the tokens after them are estimated with the acceptance that this width usually has.
    """
    gained = UNIT * accepted
    all_right = accepted >= proposed
    own = find_covering_width(control, proposed)
    acceptance = estimate_acceptance(control.widths[own], control.gains[own]) if all_right else 0
    for index, width in enumerate(control.widths):
        if width <= proposed:
            yield min(gained, UNIT * width)
        elif all_right:
            yield gained + estimate_chain_gain(width - proposed, acceptance)
        elif control.branching:
            yield gained + control.gains[index] - control.gains[own]
        else:
            yield gained


def estimate_gain(control: SpeculationControl | None, propose: int) -> int:
    """Return how many of a request's proposals are expected to be right, in thousandths."""
    if control is None or not propose:
        return 0
    return min(control.gains[find_covering_width(control, propose)], UNIT * propose)


# --- which members of a launch propose, and how much ---


def plan_launch(candidates: Sequence[ProposalCandidate], prices: StepPrices, rates: Rates, row_limit: int) -> Plan:
    """Choose what each member of a step proposes.

    candidates: all members of the step. row_limit: rows of the step with proposals; 0: a plain step is due.
    """
    plain = Plan((0,) * len(candidates), plain_ns=prices.plain_ns)
    if prices.needs_plain_step or not row_limit or not any(candidate.limit for candidate in candidates):
        return plain
    options = list(list_options(candidates, prices, row_limit))
    balance, is_self_funded = find_balance([candidate.control for candidate in candidates], rates)
    affordable = [option for option in options if option.price - UNIT <= balance]
    cheapest = min((option.price for option in affordable), default=UNIT)
    bearable = [
        option
        for option in affordable
        if option.price == cheapest or FRUITLESS_STEPS * (option.price - UNIT) <= balance
    ]
    best = max(bearable, key=rate_option, default=None)
    pays = rate_option(best) > UNIT * len(candidates) if best else False
    if best is None or not (pays or rates.steps_until_trial == 0):
        reason = "loss_limit" if max(map(rate_option, options), default=0) > UNIT * len(candidates) else "does_not_pay"
        return evolve(plain, reason=reason, steps=count_plain_steps(options, rates.steps_until_trial, balance))
    proposals = [0] * len(candidates)
    # The draft first reads the prompt of each member that proposes, so only one does in a trial.
    for member in best.members if pays else best.members[:1]:
        proposals[member.index] = member.proposals
    # In a request's first step with proposals, the draft first catches up with rows of the prompt.
    proposing = [member.control for propose, member in zip(proposals, candidates, strict=True) if propose]
    catches_up = any(control and not control.seen for control in proposing)
    price_doubted = round_up_to_bucket(len(candidates) + sum(proposals)) in prices.doubted_buckets
    return Plan(
        tuple(proposals),
        prices.price_of(len(candidates) + sum(proposals)),
        prices.plain_ns,
        is_trial=not pays,
        charges_measured_time=catches_up or not pays,
        price_doubted=price_doubted,
        self_funded=is_self_funded,
        reason="does_not_pay",  # for the members that got no proposals
        steps=count_bearable_steps(best.price, balance) if pays and not (catches_up or price_doubted) else 1,
    )


def find_balance(controls: Sequence[SpeculationControl | None], rates: Rates) -> tuple[int, bool]:
    """Return what a step of these members may cost beyond a plain one, and whether the members alone pay for it.

    As a rule the server's account and that of each member must have as much. But what a member has gained beyond the
    account that it began with is its own: an answer that loses it again ends no later than without proposals. So if all
    members have gained more than the server's account has left, they may lose that, and the server's account is spared.
    """
    least_balance = min(control.account for control in controls if control)
    gained = least_balance - INITIAL_ACCOUNT
    return min(least_balance, max(rates.account, gained)), gained > rates.account


def rate_drafts(plan: Plan, controls: Sequence[SpeculationControl | None]) -> int:
    """Return the tokens that the draft's proposals give in the time of a plain step, in thousandths."""
    gains = (estimate_gain(control, propose) for control, propose in zip(controls, plan.proposals, strict=True))
    return UNIT * (UNIT * len(controls) + sum(gains)) // plan.price


def count_plain_steps(options: Sequence[ProposalOption], steps_until_trial: int, balance: int) -> int:
    """Count the plain steps until something may be proposed: a trial is due, or one more option can be afforded."""
    until_affordable = [
        -(-(option.price - UNIT - balance) // REFILL) for option in options if option.price - UNIT > balance
    ]
    return min([*until_affordable, steps_until_trial or LONGEST_TRIAL_GAP])


def count_bearable_steps(price: int, balance: int) -> int:
    """Count the steps of that price which the accounts can bear even if no proposal is right.

    They are at most as many as a request's estimate rests on.
    """
    loss = price - UNIT - REFILL
    return min(REQUEST_MEMORY, 1 + (balance - (price - UNIT)) // loss) if loss > 0 else REQUEST_MEMORY


@frozen
class ProposalCandidate:
    """A member of a step that may propose."""

    limit: int  # the most that it may propose; 0: nothing
    control: SpeculationControl | None  # None: it has neither a draft nor copies


@frozen
class ProposingMember:
    """A member of an option, with the number of its proposals."""

    index: int  # of the member in its step
    proposals: int
    gain: int  # how many of these are expected to be right, in thousandths


@frozen
class ProposalOption:
    """One way in which a step could propose."""

    tokens: int  # expected of all members together, in thousandths
    price: int
    members: Sequence[ProposingMember]


def list_options(
    candidates: Sequence[ProposalCandidate], prices: StepPrices, row_limit: int
) -> Iterator[ProposalOption]:
    """Yield, for each width and each size of forward, the option with as many proposing members as the forward holds.

    The members that gain most by proposing come first.
    """
    member_count = len(candidates)
    widths = next(member.control.widths for member in candidates if member.limit and member.control is not None)
    bucket_count = (round_up_to_bucket(row_limit) // SMALLEST_BUCKET).bit_length()
    forward_rows = [min(SMALLEST_BUCKET << step, row_limit) for step in range(bucket_count)]
    for width in widths:
        proposing = [
            ProposingMember(index, min(member.limit, width), estimate_gain(member.control, min(member.limit, width)))
            for index, member in enumerate(candidates)
            if member.limit
        ]
        members = sorted(proposing, key=lambda member: -member.gain)
        rows = list(accumulate((member.proposals for member in members), initial=member_count))
        tokens = list(accumulate((member.gain for member in members), initial=UNIT * member_count))
        for count in sorted({bisect_right(rows, size) - 1 for size in forward_rows}):
            if count > 0:
                yield ProposalOption(tokens[count], prices.price_of(rows[count]), members[:count])


def rate_option(option: ProposalOption) -> int:
    """Return the tokens that an option gives in the time of a plain step, in thousandths."""
    return UNIT * option.tokens // option.price


# --- what a step teaches all requests ---


def record_step(rates: Rates, plan: Plan) -> Rates:
    """Return the rates after one more step of a launch has begun.

    Trials move further apart, and nearer again when proposals pay.
    """
    if plan.is_trial:
        gap = rates.next_trial_gap
        return evolve(rates, steps_until_trial=gap, next_trial_gap=min(2 * gap, LONGEST_TRIAL_GAP))
    if any(plan.proposals):
        return evolve(rates, next_trial_gap=max(1, rates.next_trial_gap // 2)) if rates.next_trial_gap > 1 else rates
    balance = max(rates.account, min(rates.account + REFILL, INITIAL_ACCOUNT))
    # Only steps that were plain because proposals did not pay bring the next trial nearer.
    plain_steps_left = max(0, rates.steps_until_trial - bool(plan.reason))
    if (balance, plain_steps_left) == (rates.account, rates.steps_until_trial):
        return rates
    return evolve(rates, account=balance, steps_until_trial=plain_steps_left)


def record_speculation_outcome(settings: Settings, rates: Rates, plan: Plan, done: Decoded) -> Rates:
    """Return the rates after the outcome of one member. The members share what a step costs the server's account.

    What a plain step earns was paid in when it began.
    """
    if not (any(plan.proposals) or done.rows):
        return rates
    balance = min(update_balance(rates.account, plan, done, len(plan.proposals)), MAX_SERVER_ACCOUNT)
    balance = max(balance, rates.account) if plan.self_funded else balance
    if not done.proposed or done.copied:
        return evolve(rates, account=balance)
    counts = done.proposed, done.accepted
    gains = update_gains(make_control(settings, rates), rates.seen, counts, SERVER_MEMORY)
    return evolve(rates, gains=gains, seen=rates.seen + 1, account=balance)


def update_balance(balance: int, plan: Plan, done: Decoded, members: int = 1) -> int:
    """Return an account after an outcome: it earns what the tokens would have cost, and pays what the step cost."""
    earned = (UNIT + REFILL) * len(done.tokens) - done.steps * charge_step(plan, done)
    return balance + earned // members


def charge_step(plan: Plan, done: Decoded) -> int:
    """Return what a step of a launch is charged: its price, or its measured time where the price may be wrong.

    The price may be wrong where the draft had to catch up, or where it is doubted. No more than a plain step is
    charged beyond the price: what took longer was held up by other work.
    """
    price = plan.price
    is_uncertain = plan.charges_measured_time or plan.price_doubted
    if done.rows:
        prices = plan.copy_prices.branches if done.branched else plan.copy_prices.chains
        copied = prices.price_of(done.rows)
        # Where a draft proposes as well, other members may have asked it in the same step.
        price = max(price, copied) if any(plan.proposals) and len(plan.proposals) > 1 else copied
        is_uncertain = round_up_to_bucket(done.rows) in prices.doubted_buckets
    if not is_uncertain or not done.ns or not plan.plain_ns:
        return price
    return min(max(price, UNIT * done.ns // plan.plain_ns), price + UNIT)
