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

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TypeAlias

from attrs import evolve, frozen

from effects.decode import Decoded
from states.rates import SPARE, Rates
from states.settings import Settings

UNIT = 1000
REFILL = 10  # with a token: one percent
FIRST = 4  # decode steps that the estimate counts for that a request, or the server, starts from
MEMORY, SHARED = 16, 64  # decode steps that an estimate rests on at most, about: of a request, and of all of them
LONGEST = 512  # plain launches between tries
HOPE = 600  # before anything is known: how likely a draft is right about the next token
DRAFT, ROW = 200, 40  # where nothing was measured: what a draft costs, and a row of the target beyond the first ones
DEAREST = 2 * UNIT  # that a launch costs beyond a plain one at most, each time that it fills that one's forward
BUCKET = 4  # rows of the smallest forward: as many tokens are fed at the price of one

Key: TypeAlias = tuple[int, int, int]
DecodeTimes: TypeAlias = tuple[tuple[int, int, int, int, int], ...]  # as in Rates


@frozen
class Shape:
    """Of a launch, as far as its time depends on it. rows: that it feeds in all; 0: nobody proposes anything."""

    span: int  # of positions, as in `Rates.prefill`: where its requests are on average
    members: int
    rows: int = 0

    @property
    def key(self) -> Key:
        return self.span, self.members, filled(self.rows) if self.rows else 0


@frozen
class Terms:
    """What launches of the same requests cost."""

    members: int = 1
    plain: int = 0  # nanoseconds of one in which nobody proposes; 0: not measured
    prices: tuple[int, ...] = ()  # of up to BUCKET, 2 BUCKET, 4 BUCKET ... rows
    measuring: bool = False  # times are measured here, and this one is missing: a plain launch comes first
    held_up: bool = False  # a plain launch seems to take as long as one with proposals

    def price(self, rows: int) -> int:
        """Beyond what a launch may have, in proportion: nobody will ask for that many."""
        at, last = (filled(rows) // BUCKET).bit_length() - 1, len(self.prices) - 1
        return self.prices[at] if at <= last else self.prices[last] << at - last


@frozen
class Plan:
    """What the members of a launch propose, and what that costs it."""

    proposals: tuple[int, ...] = ()
    price: int = UNIT
    plain: int = 0  # nanoseconds of a plain launch; 0: not measured
    trying: bool = False  # it is not expected to pay
    late: bool = False  # the draft has rows to follow before it proposes, which no price tells of
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


def filled(rows: int) -> int:
    """The smallest forward that holds so many rows."""
    return BUCKET << max(0, (rows - 1) // BUCKET).bit_length()


# --- what launches cost ---


def terms(decode: DecodeTimes, span: int, members: int, most: int) -> Terms:
    """Of so many requests around there, for launches of up to `most` rows."""
    known = paced(decode, ((span, members), (span, 1), (0, 1)))
    plain = known.get((span, members, 0), 0)
    wider = [ns for (at, company, rows), ns in known.items() if (at, company) == (span, members) and rows]
    sizes = [BUCKET << step for step in range((filled(most) // BUCKET).bit_length())]
    prices = accumulate((presumed(known, span, members, rows) for rows in sizes), max)
    held_up = bool(wider) and plain >= min(wider)
    return Terms(members, plain, tuple(prices), bool(decode) and not plain, held_up)


def paced(decode: DecodeTimes, near: Container[tuple[int, int]]) -> dict[Key, int]:
    """Times at the machine's pace of now. Plain launches are timed more often than wide ones: where they have become
    slower since a wide one was last timed, so has that. Where they have become quicker, they had been held up.
    """
    known: dict[Key, int] = {}
    for span, members, rows, ns, beside in decode:
        if (span, members) in near:
            plain = known.get((span, members, 0), 0)
            known[span, members, rows] = ns * plain // beside if 0 < beside < plain else ns
    return known


def presumed(known: Mapping[Key, int], span: int, members: int, rows: int) -> int:
    """What was measured; or what it costs a request that is alone, on top; or a guess. Never less than a plain one, and
    never so much that nothing could be tried again: a start beside other work would else decide for good.

    A wider launch costs no less, so what was measured of one is a limit: noise only ever adds.
    """
    return min(measured(known, span, members, rows), UNIT + DEAREST * rows // filled(members))


def measured(known: Mapping[Key, int], span: int, members: int, rows: int) -> int:
    plain = known.get((span, members, 0), 0)
    own = [ns for key, ns in known.items() if key[:2] == (span, members) and key[2] >= rows]
    if plain and own:
        return max(UNIT, UNIT * min(own) // plain)
    for at in (span, 0):
        base, wide = (
            known.get((at, 1, 0), 0),
            {key[2]: ns for key, ns in known.items() if key[:2] == (at, 1) and key[2]},
        )
        if base and wide:
            widest = max(wide)
            more = min((ns for row, ns in wide.items() if row >= rows), default=wide[widest]) - base
            return UNIT + UNIT * max(0, more) * max(rows, widest) // widest // (plain or base)
    return UNIT + DRAFT + ROW * (rows - BUCKET)


def timed(decode: DecodeTimes, shape: Shape, took_ns: int) -> DecodeTimes:
    """`Rates.decode` after one more launch.

    Whatever else the machine does makes launches slower, never quicker: so a quick one counts for much, or all, and a
    slow one for little, and shapes stay comparable. What stays slow is believed in time.
    """
    key = shape.key
    at = bisect_left(decode, key)  # right before it, as the shorter of two tuples that begin alike
    known = paced(decode, (key[:2],))
    mean, plain = known.get(key, took_ns), known.get((*key[:2], 0), 0) if shape.rows else 0
    if 2 * took_ns < mean:
        ns = took_ns
    else:
        ns = (mean + took_ns) // 2 if took_ns < mean else (31 * mean + min(took_ns, 2 * mean)) // 32
    return (*decode[:at], (*key, ns, plain), *decode[at + (key in known) :])


# --- how often a draft is right ---


def fresh(settings: Settings, rates: Rates) -> SpeculationControl:
    """Of a request that has proposed nothing: as all others did."""
    useful = widths(settings)
    known = len(rates.gains) == len(useful)
    gains = rates.gains if known else tuple(map(chain, useful))
    return SpeculationControl(useful, gains, branching=settings.tree > 0, spare=rates.spare)


@cache
def chain(width: int, each: int = HOPE) -> int:
    """What so many get if each is right with that chance, in thousandths: up to the first wrong one."""
    return sum(UNIT * each**right // UNIT**right for right in range(1, width + 1))


def chance(width: int, gain: int) -> int:
    """Of each of so many that get that much."""
    return bisect_right(range(UNIT + 1), gain, key=lambda each: chain(width, each)) - 1


def after(control: SpeculationControl, done: Decoded, memory: int = MEMORY) -> SpeculationControl:
    """One more decode step: what it gave, and what it cost."""
    spare = balance(control.spare, control.plan, done)
    if not done.proposed:
        return evolve(control, spare=spare)
    weight = min(control.seen + FIRST, memory)
    seen = sample(control, done.proposed, done.accepted)
    gains = tuple((gain * (weight - 1) + right) // weight for gain, right in zip(control.gains, seen, strict=True))
    return evolve(control, gains=gains, seen=control.seen + 1, spare=spare)


def covering(control: SpeculationControl, proposed: int) -> int:
    """Which width's forward so many proposals go through."""
    return next((at for at, width in enumerate(control.widths) if width >= proposed), len(control.widths) - 1)


def sample(control: SpeculationControl, proposed: int, accepted: int) -> Iterator[int]:
    """What this decode step says about every width: exactly, up to its own; wider ones would have got the same, or
    behind a chain that was right to its end more, each with the chance that those before it usually have.
    """
    right = UNIT * accepted
    at = covering(control, proposed)
    for wider, width in enumerate(control.widths):
        if width <= proposed:
            yield min(right, UNIT * width)
        elif accepted >= proposed:
            yield right + chain(width - proposed, chance(control.widths[at], control.gains[at]))
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
    best = max(within, key=worth, default=None)
    pays = worth(best) > UNIT * len(wanted) if best else False
    if best is None or not (pays or rates.rest == 0):
        hoped = max(map(worth, ways), default=0) > UNIT * len(wanted)
        return evolve(plain, reason="loss_limit" if hoped else "does_not_pay", steps=quiet(ways, rates.rest, spare))
    proposals = [0] * len(wanted)
    for _, propose, member in best.members:
        proposals[member] = propose
    late = any(control and not control.seen for propose, (_, control) in zip(proposals, wanted, strict=True) if propose)
    steps = bearable(best.price, spare) if pays and not late else 1
    mine = gained > rates.spare
    return Plan(tuple(proposals), best.price, offer.plain, not pays, late or not pays, mine, "does_not_pay", steps)


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
    spare, rest = min(rates.spare + REFILL, SPARE), max(0, rates.rest - bool(plan.reason))
    return rates if (spare, rest) == (rates.spare, rates.rest) else evolve(rates, spare=spare, rest=rest)


def settled(settings: Settings, rates: Rates, plan: Plan, done: Decoded) -> Rates:
    """One of a launch's members is back. They share in the server's account; what a plain one earns it has already."""
    if not any(plan.proposals):
        return rates
    spare = min(balance(rates.spare, plan, done, len(plan.proposals)), SPARE)
    spare = max(spare, rates.spare) if plan.own else spare
    if not done.proposed:
        return evolve(rates, spare=spare)
    learnt = after(evolve(fresh(settings, rates), seen=rates.seen), done, SHARED)
    return evolve(rates, gains=learnt.gains, seen=learnt.seen, spare=spare)


def balance(spare: int, plan: Plan, done: Decoded, members: int = 1) -> int:
    """Of an account: what the tokens would have cost without a draft, less what the launch did."""
    earned = (UNIT + REFILL) * len(done.tokens) - done.steps * cost(plan, done.ns)
    return spare + earned // members


def cost(plan: Plan, took_ns: int) -> int:
    """What such launches usually cost; where the draft had to catch up, what this one really took.

    That takes no longer than a plain launch: what did was held up by something else.
    """
    if not plan.late or not took_ns or not plan.plain:
        return plan.price
    return min(max(plan.price, UNIT * took_ns // plan.plain), plan.price + UNIT)
