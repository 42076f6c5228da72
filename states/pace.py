"""When to speculate and how wide: what a launch of decode steps costs against what it is likely to give.

Counted in thousandths: of a token, for what decode steps give, and of a plain launch, for what they cost: one of the
same requests, at the same length of context, in which nobody proposes anything. So a request knows at every moment how
much longer it took than without a draft. It starts with SPARE plain rounds of such time, earns REFILL of one with each
token, and begins no launch that could cost more than it has: an answer of N tokens takes at most SPARE + N REFILL
longer, whatever the draft proposes, which is 1.5 % for 512 tokens. What it has left, up to SPARE, is all that the next
answer starts with, so a thousand short answers lose no more than a long one.

Requests that decode together decide together. A launch has one price, which each of them pays whether it proposes or
not; it begins if they have that much between them. Beside this hard limit there is judgement: the width with the most
expected tokens for its time, a rest where no width pays, and a new try after it, each rest twice as long as the one
before while tries keep failing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TypeAlias

from attrs import evolve, field, frozen

from states.rates import Rates
from states.settings import Settings

UNIT = 1000
SPARE = 5 * UNIT  # 1 % of 512 tokens
REFILL = 5  # half a percent
MEMORY = 8  # rounds that an estimate rests on, about
SHORTEST, LONGEST = 8, 256  # plain rounds of a rest
HOPE = 800  # before anything is known: how likely a draft is right about the next token
DRAFT, ROW = 200, 40  # where nothing was measured: what a draft costs, and a row of the target beyond the first ones
BUCKET = 4  # rows of the smallest forward: as many tokens are fed at the price of one
MOST = 2  # times what was presumed: a launch that took longer was held up by something else than the draft

Key: TypeAlias = tuple[int, int, int]
DecodeTimes: TypeAlias = tuple[tuple[int, int, int, int], ...]  # as in Rates


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

    def price(self, rows: int) -> int:
        """Beyond what a launch may have, in proportion: nobody will ask for that many."""
        at, last = (filled(rows) // BUCKET).bit_length() - 1, len(self.prices) - 1
        return self.prices[at] if at <= last else self.prices[last] << at - last


@frozen
class Pace:
    """What a request has learnt about its draft."""

    widths: tuple[int, ...]  # proposals that are worth considering, ascending
    gains: tuple[int, ...]  # proposals that are expected to be right, in thousandths, one for each width
    terms: Terms  # of the company it was last in
    price: int = 0  # of the launch that it is in, or was in last; 0: a plain one
    branching: bool = False  # proposals are trees: a smaller one says little about what a larger one would have got
    spare: int = SPARE  # thousandths of plain rounds that it may yet take longer
    tried: int = 0  # decode steps since the last rest
    rest: int = 0  # plain rounds until the next try
    pause: int = SHORTEST  # of the next rest
    prices: tuple[int, ...] = field(init=False)  # where everybody proposes so many, one for each width

    def __attrs_post_init__(self) -> None:
        prices = tuple(self.terms.price(self.terms.members * (1 + width)) for width in self.widths)
        object.__setattr__(self, "prices", prices)  # frozen: once made, nothing changes


@frozen
class Choice:
    propose: int
    reason: str  # machine-readable; empty where something is proposed


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
    near = ((span, members), (span, 1), (0, 1))
    known = {each[:3]: each[3] for each in decode if each[:2] in near}
    plain = known.get((span, members, 0), 0)
    sizes = [BUCKET << step for step in range((filled(most) // BUCKET).bit_length())]
    prices = accumulate((presumed(known, span, members, rows) for rows in sizes), max)
    return Terms(members, plain, tuple(prices), measuring=bool(decode) and not plain)


def presumed(known: Mapping[Key, int], span: int, members: int, rows: int) -> int:
    """What was measured; or what it costs a request that is alone, on top; or a guess. Never less than a plain one.

    A wider launch costs no less, so what was measured of one is a limit: noise only ever adds.
    """
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

    Whatever else the machine does makes launches slower, never quicker: so a quick one counts for much and a slow one
    for little, and shapes stay comparable. What stays slow is believed in time.
    """
    known = {(span, members, rows): ns for span, members, rows, ns in decode}
    mean = known.get(shape.key, took_ns)
    known[shape.key] = (mean + took_ns) // 2 if took_ns < mean else (31 * mean + min(took_ns, 2 * mean)) // 32
    return tuple((*key, ns) for key, ns in sorted(known.items()))


# --- what a request wants, and what a launch gives ---


def fresh(settings: Settings, rates: Rates) -> Pace:
    """With what the answers before it have taught."""
    useful = widths(settings)
    gains = rates.gains if len(rates.gains) == len(useful) else tuple(map(hoped, useful))
    alone = terms(rates.decode, 0, 1, settings.batch_rows)
    return Pace(useful, gains, alone, branching=settings.tree > 0, spare=max(0, SPARE - rates.spent))


@cache
def hoped(width: int) -> int:
    return sum(UNIT * HOPE**right // UNIT**right for right in range(1, width + 1))


def remembered(rates: Rates, pace: Pace | None) -> Rates:
    """For the answers after it. Time that this one saved is its own."""
    if pace is None:
        return rates
    return evolve(rates, gains=pace.gains, spent=min(max(0, SPARE - pace.spare), SPARE))


def choose(pace: Pace, room: int) -> Choice:
    """What a request wants of its next decode step at most; `share` decides, and knows what others have to spare."""
    if room <= 0:
        return Choice(0, "last_token")
    if pace.rest:
        return Choice(0, "does_not_pay")
    if pace.terms.members == 1 and pace.spare < pace.prices[0] - UNIT:
        return Choice(0, "loss_limit")
    return Choice(min(pace.widths[-1], room), "")


def share(wanted: Sequence[tuple[int, Pace | None]], offer: Terms, limit: int) -> list[int]:
    """How much each of a launch's requests proposes of what it wants, in at most `limit` rows.

    All get the same bound: the one with the most expected tokens for the time of the whole launch, among those that
    they can spare together. What is not expected to pay is tried if all of them want to, and so learn from it. Where
    nobody proposes, there may still be more rows than `limit`.
    """
    most, paces = [propose for propose, _ in wanted], [pace for _, pace in wanted if pace is not None]
    best, proposals = len(wanted) * UNIT, [0] * len(wanted)
    if not paces or not any(most):
        return most
    if offer.measuring:
        return proposals
    if all(propose or pace is None for propose, pace in wanted):
        best = 0
    spare = sum(pace.spare for pace in paces)
    for bound in paces[0].widths:
        each = [min(propose, bound) for propose in most]
        rows = len(each) + sum(each)
        if rows > limit:
            break
        price = offer.price(rows)
        tokens = sum(UNIT + gain(pace, propose) for propose, (_, pace) in zip(each, wanted, strict=True))
        if UNIT * tokens // price > best and len(paces) * (price - UNIT) <= spare:
            best, proposals = UNIT * tokens // price, each
    return proposals


def gain(pace: Pace | None, propose: int) -> int:
    return min(pace.gains[covering(pace, propose)], UNIT * propose) if pace is not None and propose else 0


def launched(pace: Pace, offer: Terms, rows: int) -> Pace:
    """It is part of a launch of so many rows; 0: a plain one."""
    return evolve(pace, terms=offer, price=offer.price(rows) if rows else 0)


# --- what a decode step has taught ---


def pays(pace: Pace) -> bool:
    return any(UNIT + gain > price for gain, price in zip(pace.gains, pace.prices, strict=True))


def could_pay(pace: Pace) -> bool:
    """If every proposal were right."""
    return any(UNIT * (1 + width) > price for width, price in zip(pace.widths, pace.prices, strict=True))


def after(pace: Pace, proposed: int, accepted: int, tokens: int, took_ns: int = 0) -> Pace:
    """Of so many proposals so many were right, and the decode step gave so many tokens."""
    pace = evolve(pace, spare=pace.spare + (UNIT + REFILL) * tokens - cost(pace, took_ns))
    if proposed == 0:
        return evolve(pace, rest=pace.rest - 1) if pace.rest else pace
    weight = min(pace.tried + 2, MEMORY)
    gains = tuple(
        (gain * (weight - 1) + seen) // weight
        for gain, seen in zip(pace.gains, sample(pace, proposed, accepted), strict=True)
    )
    learnt = evolve(pace, gains=gains, tried=pace.tried + 1)
    if pays(learnt):
        return evolve(learnt, pause=max(SHORTEST, pace.pause // 2)) if learnt.tried >= MEMORY else learnt
    return evolve(learnt, tried=0, rest=pace.pause, pause=min(2 * pace.pause, LONGEST))


def cost(pace: Pace, took_ns: int) -> int:
    """Of the launch that it was in: what such ones usually cost; of a first try, in which the draft has catching up to
    do, what that one really took.
    """
    if not pace.price or pace.tried or not took_ns or not pace.terms.plain:
        return pace.price or UNIT
    return min(max(pace.price, UNIT * took_ns // pace.terms.plain), MOST * pace.price)


def covering(pace: Pace, proposed: int) -> int:
    """Which width's forward so many proposals go through."""
    return next((at for at, width in enumerate(pace.widths) if width >= proposed), len(pace.widths) - 1)


def sample(pace: Pace, proposed: int, accepted: int) -> Iterator[int]:
    """What this decode step says about every width: exactly, up to its own; and about wider ones, what they would have
    got.

    Of a chain that ended early that is the same; beyond one that was right to its end, as much of the rest as usual.
    """
    right = UNIT * accepted
    at = covering(pace, proposed)
    for wider, width in enumerate(pace.widths):
        if width <= proposed:
            yield min(right, UNIT * width)
        elif accepted >= proposed:
            yield right + (width - proposed) * pace.gains[at] // pace.widths[at]
        elif pace.branching:
            yield right + pace.gains[wider] - pace.gains[at]
        else:
            yield right
