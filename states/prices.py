"""What launches of decode steps cost against plain ones of the same requests, by what they took.

Counted in thousandths of a plain launch: one of the same requests, at the same length of context, in which nobody
proposes anything. Times are kept as they would be were the machine as quick as it ever was: what plain launches take
longer now (`Rates.pace`) is taken off all of them, so that times that were measured in different minutes compare.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import TypeAlias

from attrs import evolve, frozen

from states.rates import Rates

UNIT = 1000
DRAFT, ROW = 200, 40  # where nothing was measured: what a draft costs, and a row of the target beyond the first ones
LATE = 2  # where nothing was measured: what a row costs that the draft follows late
DEAREST = 3 * UNIT // 2  # that a launch costs beyond a plain one at most, each time that it fills that one's forward
BUCKET = 4  # rows of the smallest forward: as many tokens are fed at the price of one
STEPS, PACES = 16, 8  # launches that a mean rests on, about: of a kind of them, and of what all take longer now

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
    plain: int = 0  # nanoseconds of one in which nobody proposes, as the machine is now; 0: not measured
    prices: tuple[int, ...] = ()  # of up to BUCKET, 2 BUCKET, 4 BUCKET ... rows
    measuring: bool = False  # times are measured here, and this one is missing: a plain launch comes first
    held_up: bool = False  # a plain launch seems to take as long as one with proposals
    follow: int = 0  # nanoseconds of a row that the draft follows late, as the machine is now; 0: not measured

    def price(self, rows: int) -> int:
        """Beyond what a launch may have, in proportion: nobody will ask for that many."""
        at, last = (filled(rows) // BUCKET).bit_length() - 1, len(self.prices) - 1
        return self.prices[at] if at <= last else self.prices[last] << at - last

    def late(self, rows: int) -> int:
        """What it costs that the draft follows so many rows first; no more than could ever be tried again."""
        known = self.plain and self.follow
        return min(UNIT * self.follow * rows // self.plain if known else LATE * rows, DEAREST)


def filled(rows: int) -> int:
    """The smallest forward that holds so many rows."""
    return BUCKET << max(0, (rows - 1) // BUCKET).bit_length()


def terms(rates: Rates, span: int, members: int, most: int) -> Terms:
    """Of so many requests around there, for launches of up to `most` rows."""
    near = ((span, members), (span, 1), (0, 1))
    known = {each[:3]: each[3] for each in rates.decode if each[:2] in near}
    plain = known.get((span, members, 0), 0)
    wider = [ns for (at, company, rows), ns in known.items() if (at, company) == (span, members) and rows]
    sizes = [BUCKET << step for step in range((filled(most) // BUCKET).bit_length())]
    prices = accumulate((presumed(known, span, members, rows) for rows in sizes), max)
    held_up, now = bool(wider) and plain >= min(wider), rates.pace
    measuring = bool(rates.decode) and not plain
    return Terms(members, plain * now // UNIT, tuple(prices), measuring, held_up, rates.follow * now // UNIT)


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


# --- what a launch teaches ---


def launched(rates: Rates, shape: Shape, took_ns: int, price: int = UNIT, late: int = 0) -> Rates:
    """After one more. price: what it costs by what was known. late: rows that the draft had to follow first: then most
    of what it took beyond its price is theirs, and of the launch itself no more is known than that it takes no longer.

    Whatever else the machine does makes launches slower, never quicker. So of plain ones the quickest is kept, and how
    much longer they take now; and of all others what they take beside that, which is never less than a plain one.
    """
    plain = known_time(rates.decode, Shape(shape.span, shape.members).key)
    if plain:
        now = UNIT * took_ns // plain
        rates = evolve(rates, pace=max(UNIT, min(rates.pace, now) if shape.rows else settled(rates.pace, now, PACES)))
    ns = max(1, took_ns * UNIT // rates.pace)
    if not shape.rows and plain:
        if took_ns >= plain:
            return rates
        ns = (plain + took_ns) // 2 if 2 * took_ns >= plain else took_ns
    elif plain and late > BUCKET:
        usual = plain * price // UNIT
        rates = evolve(rates, follow=settled(rates.follow, max(1, (ns - usual) // late)))
        if ns >= usual:
            return rates
    return evolve(rates, decode=with_time(rates.decode, shape.key, ns))


def with_time(decode: DecodeTimes, key: Key, ns: int) -> DecodeTimes:
    """key: 0 rows, and that is the time; else one more of them."""
    at, mean = bisect_left(decode, key), known_time(decode, key)
    return (*decode[:at], (*key, settled(mean, ns) if key[2] else ns), *decode[at + bool(mean) :])


def known_time(decode: DecodeTimes, key: Key) -> int:
    at = bisect_left(decode, key)  # right before it, as the shorter of two tuples that begin alike
    return decode[at][3] if at < len(decode) and decode[at][:3] == key else 0


def settled(mean: int, value: int, steps: int = STEPS) -> int:
    """A mean after one more: nothing but noise takes twice as long as usual, and what takes half as long never is."""
    return (mean * (steps - 1) + min(value, 2 * mean)) // steps if mean and 2 * value >= mean else value


def cost(plain_ns: int, price: int, took_ns: int) -> int:
    """What a launch with proposals cost: what it really took, against plain ones as they are now.

    Prices are believed for a while after the machine has changed, and no more may be lost for that. But a launch takes
    no longer than a plain one beyond its price: what did was held up by something else.
    """
    if not took_ns or not plain_ns:
        return price
    return min(max(price, UNIT * took_ns // plain_ns), price + UNIT)
