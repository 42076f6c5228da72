"""When to speculate and how wide: what a launch of decode steps costs against what it is likely to give.

Counted in thousandths: of a token, for what decode steps give, and of a plain launch, for what they cost: one of the
same requests, at the same length of context, in which nobody proposes anything. Three things are known, all folded from
what launches took and gave: prices (`Rates.decode`); how often proposals are right, of each request, which starts from
what all of them have taught; and how much may yet be lost, an account of the server's and one of each request.

A launch proposes what gives most tokens for its time, if those come sooner than plain ones. Where nothing does, it is
tried now and then, ever more rarely while tries fail. And no launch begins that costs more than is left on the account
of the server or of any of its members: what a launch gains is paid in, what it loses is taken out, and REFILL is earned
with every token. docs/SPECULATION.md derives this, with an example in numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

from attrs import evolve, frozen

from effects.decode import Decoded
from states.launch_prices import BUCKET, UNIT, Terms, filled
from states.rates import SPARE, Rates
from states.settings import Settings

REFILL = 10  # with a token: one percent
FIRST = 8  # decode steps that the estimate counts for that a request, or the server, starts from
MEMORY, SHARED = 16, 64  # decode steps that an estimate rests on at most, about: of a request, and of all of them
LONGEST = 512  # plain launches between tries
STAKE = 4  # an account has to bear so many launches that bring nothing, or only the cheapest is launched
SAVED = 64 * UNIT  # of what all answers have gained, at most so much may be lost again
HOPE = 600  # before anything is known: how likely a draft is right about the next token


@frozen
class Plan:
    """What the members of a launch propose, and what that costs it."""

    proposals: tuple[int, ...] = ()
    price: int = UNIT
    plain: int = 0  # nanoseconds of a plain launch; 0: not measured
    trying: bool = False  # it is not expected to pay
    late: bool = False  # the draft has rows to follow before it proposes, which no price tells of
    doubted: bool = False  # its price is not known well enough to be charged
    own: bool = False  # its members can pay for it with what they have gained themselves, so the server does not
    reason: str = ""  # machine-readable: why some propose nothing; empty: to measure a plain launch, or they want none
    steps: int = 1  # for so many it holds, whatever they bring


NOBODY = Plan()


@frozen
class SpeculationControl:
    """How often a draft is right: for a request, or for all of them."""

    widths: tuple[int, ...]  # proposals that are worth considering, ascending
    gains: tuple[int, ...]  # proposals that are expected to be right, in thousandths, one for each width
    branching: bool = False  # proposals are trees: a smaller one says little about what a larger one would have got
    seen: int = 0  # decode steps with proposals
    spare: int = 0  # thousandths of a plain launch that it may yet lose
    plan: Plan = NOBODY  # of the launch that it is in, or was in last


def widths(settings: Settings) -> tuple[int, ...]:
    """Proposals that fill a forward up to its bucket, and the most that are possible."""
    return buckets(min(settings.tree or settings.block, settings.batch_rows - 1) if settings.block else 0)


@cache
def buckets(most: int) -> tuple[int, ...]:
    full = [(BUCKET << step) - 1 for step in range(most.bit_length()) if (BUCKET << step) - 1 < most]
    return (*full, most) if most > 0 else ()


# --- how often a draft is right ---


def fresh(settings: Settings, rates: Rates) -> SpeculationControl:
    """Of a request that has proposed nothing: as all others did."""
    useful = widths(settings)
    known = len(rates.gains) == len(useful)
    gains = rates.gains if known else tuple(map(chain, useful))
    return SpeculationControl(useful, gains, branching=settings.tree > 0, spare=min(rates.spare, SPARE))


@cache
def chain(width: int, each: int = HOPE) -> int:
    """What so many get if each is right with that chance, in thousandths: up to the first wrong one."""
    return sum(UNIT * each**right // UNIT**right for right in range(1, width + 1))


def chance(width: int, gain: int) -> int:
    """Of each of so many that get that much."""
    return bisect_right(range(UNIT + 1), gain, key=lambda each: chain(width, each)) - 1


def after(control: SpeculationControl, done: Decoded) -> SpeculationControl:
    """One more decode step: what it gave, and what it cost. As `evolve`, which takes four times as long."""
    gains, seen, spare = control.gains, control.seen, balance(control.spare, control.plan, done)
    if done.proposed:
        gains, seen = learnt(control, seen, done, MEMORY), seen + 1
    return SpeculationControl(control.widths, gains, control.branching, seen, spare, control.plan)


def learnt(control: SpeculationControl, seen: int, done: Decoded, memory: int) -> tuple[int, ...]:
    """Its gains, which rest on so many decode steps, after one more with proposals."""
    weight, told = min(seen + FIRST, memory), sample(control, done.proposed, done.accepted)
    return tuple((gain * (weight - 1) + right) // weight for gain, right in zip(control.gains, told, strict=True))


def covering(control: SpeculationControl, proposed: int) -> int:
    """Which width's forward so many proposals go through."""
    return next((at for at, width in enumerate(control.widths) if width >= proposed), len(control.widths) - 1)


def sample(control: SpeculationControl, proposed: int, accepted: int) -> Iterator[int]:
    """What this decode step says about every width: exactly, up to its own; wider ones would have got the same, or
    behind a chain that was right to its end more, each with the chance that those before it usually have.
    """
    right = UNIT * accepted
    at = covering(control, proposed)
    each = chance(control.widths[at], control.gains[at]) if accepted >= proposed else 0
    for wider, width in enumerate(control.widths):
        if width <= proposed:
            yield min(right, UNIT * width)
        elif accepted >= proposed:
            yield right + chain(width - proposed, each)
        elif control.branching:
            yield right + control.gains[wider] - control.gains[at]
        else:
            yield right


def gain(control: SpeculationControl | None, propose: int) -> int:
    return min(control.gains[covering(control, propose)], UNIT * propose) if control is not None and propose else 0


# --- who proposes how much in a launch ---


def share(wanted: Sequence[tuple[int, SpeculationControl | None]], offer: Terms, rates: Rates, limit: int) -> Plan:
    """In at most `limit` rows; 0: it is time for a plain launch. Where nobody proposes there may be more."""
    plain = Plan((0,) * len(wanted), plain=offer.plain)
    if offer.measuring or not limit or not any(most for most, _ in wanted):
        return plain
    ways = list(possible(wanted, offer, limit))
    own = min(control.spare for _, control in wanted if control)
    gained = own - SPARE  # more than any answer begins with: whoever loses that again is no later than without a draft
    spare = min(own, max(rates.spare, gained))
    within = [way for way in ways if way.price - UNIT <= spare]
    least = min((way.price for way in within), default=UNIT)
    borne = [way for way in within if way.price == least or STAKE * (way.price - UNIT) <= spare]
    best = max(borne, key=worth, default=None)
    pays = worth(best) > UNIT * len(wanted) if best else False
    if best is None or not (pays or rates.rest == 0):
        hoped = max(map(worth, ways), default=0) > UNIT * len(wanted)
        return evolve(plain, reason="loss_limit" if hoped else "does_not_pay", steps=quiet(ways, rates.rest, spare))
    proposals = [0] * len(wanted)
    for _, propose, member in best.members:
        proposals[member] = propose
    late = any(control and not control.seen for propose, (_, control) in zip(proposals, wanted, strict=True) if propose)
    doubted = filled(len(wanted) + sum(proposals)) in offer.doubted
    steps = bearable(best.price, spare) if pays and not late and not doubted else 1
    what = {"trying": not pays, "late": late or not pays, "doubted": doubted, "own": gained > rates.spare}
    return Plan(tuple(proposals), best.price, offer.plain, **what, reason="does_not_pay", steps=steps)


def quiet(ways: Sequence[Way], rest: int, spare: int) -> int:
    """Plain steps until something may be proposed: it is time for a try, or one more way can be borne."""
    earned = [-(-(way.price - UNIT - spare) // REFILL) for way in ways if way.price - UNIT > spare]
    return min([*earned, rest or LONGEST])


def bearable(price: int, spare: int) -> int:
    """Steps of that price which the accounts can bear even if no proposal is right; not more than estimates rest on."""
    lost = price - UNIT - REFILL
    return min(MEMORY, 1 + (spare - (price - UNIT)) // lost) if lost > 0 else MEMORY


@frozen
class Way:
    """members: who proposes, as (gain, proposals, place in the launch). tokens: expected of all, in thousandths."""

    tokens: int
    price: int
    members: Sequence[tuple[int, int, int]]


def possible(wanted: Sequence[tuple[int, SpeculationControl | None]], offer: Terms, limit: int) -> Iterator[Way]:
    """For each width and each forward: as many members as it holds, those first that gain most by it."""
    company, bounds = len(wanted), next(control.widths for most, control in wanted if most and control is not None)
    sizes = [min(BUCKET << step, limit) for step in range((filled(limit) // BUCKET).bit_length())]
    for bound in bounds:
        asked = [(min(most, bound), control, at) for at, (most, control) in enumerate(wanted) if most]
        order = sorted(((gain(control, most), most, at) for most, control, at in asked), key=lambda one: -one[0])
        rows = list(accumulate((most for _, most, _ in order), initial=company))
        tokens = list(accumulate((more for more, _, _ in order), initial=UNIT * company))
        for count in sorted({bisect_right(rows, forward) - 1 for forward in sizes}):
            if count > 0:
                yield Way(tokens[count], offer.price(rows[count]), order[:count])


def worth(way: Way) -> int:
    """Tokens in the time of a plain launch."""
    return UNIT * way.tokens // way.price


# --- what a launch teaches all of them ---


def begun(rates: Rates, plan: Plan) -> Rates:
    """Tries that follow each other are ever further apart; what pays brings the next ones nearer."""
    if plan.trying:
        return evolve(rates, rest=rates.pause, pause=min(2 * rates.pause, LONGEST))
    if any(plan.proposals):
        return evolve(rates, pause=max(1, rates.pause // 2)) if rates.pause > 1 else rates
    spare, rest = max(rates.spare, min(rates.spare + REFILL, SPARE)), max(0, rates.rest - bool(plan.reason))
    return rates if (spare, rest) == (rates.spare, rates.rest) else evolve(rates, spare=spare, rest=rest)


def settled(settings: Settings, rates: Rates, plan: Plan, done: Decoded) -> Rates:
    """One of a launch's members is back. They share in the server's account; what a plain one earns it has already."""
    if not any(plan.proposals):
        return rates
    spare = min(balance(rates.spare, plan, done, len(plan.proposals)), SAVED)
    spare = max(spare, rates.spare) if plan.own else spare
    if not done.proposed:
        return evolve(rates, spare=spare)
    gains = learnt(fresh(settings, rates), rates.seen, done, SHARED)
    return evolve(rates, gains=gains, seen=rates.seen + 1, spare=spare)


def balance(spare: int, plan: Plan, done: Decoded, members: int = 1) -> int:
    """Of an account: what the tokens would have cost without a draft, less what the launch did."""
    earned = (UNIT + REFILL) * len(done.tokens) - done.steps * cost(plan, done.ns)
    return spare + earned // members


def cost(plan: Plan, took_ns: int) -> int:
    """What such launches usually cost; where the draft had to catch up, or nobody knows, what this one really took.

    That takes no longer than a plain launch: what did was held up by something else.
    """
    if not (plan.late or plan.doubted) or not took_ns or not plan.plain:
        return plan.price
    return min(max(plan.price, UNIT * took_ns // plan.plain), plan.price + UNIT)
