"""What launches of decode steps cost: times of each shape, folded from what launches took, and prices made of them.

A price is in thousandths of a plain launch: one of the same requests, at the same length of context, in which nobody
proposes anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping
from itertools import accumulate
from typing import TypeAlias

from attrs import frozen

UNIT = 1000
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
    doubted: frozenset[int] = frozenset()  # forwards whose price is of a time when plain launches were slower
    measuring: bool = False  # times are measured here, and this one is missing: a plain launch comes first
    held_up: bool = False  # a plain launch seems to take as long as one with proposals

    def price(self, rows: int) -> int:
        """Beyond what a launch may have, in proportion: nobody will ask for that many."""
        at, last = (filled(rows) // BUCKET).bit_length() - 1, len(self.prices) - 1
        return self.prices[at] if at <= last else self.prices[last] << at - last


def filled(rows: int) -> int:
    """The smallest forward that holds so many rows."""
    return BUCKET << max(0, (rows - 1) // BUCKET).bit_length()


def terms(decode: DecodeTimes, span: int, members: int, most: int) -> Terms:
    """Of so many requests around there, for launches of up to `most` rows."""
    known = paced(decode, ((span, members), (span, 1), (0, 1)))
    plain = known.get((span, members, 0), 0)
    wider = [ns for (at, company, rows), ns in known.items() if (at, company) == (span, members) and rows]
    sizes = [BUCKET << step for step in range((filled(most) // BUCKET).bit_length())]
    prices = accumulate((presumed(known, span, members, rows) for rows in sizes), max)
    held_up = bool(wider) and plain >= min(wider)
    old = (rows for *key, rows, _, beside in decode if key == [span, members] and outdated(beside, plain))
    return Terms(members, plain, tuple(prices), frozenset(old), bool(decode) and not plain, held_up)


def paced(decode: DecodeTimes, near: Container[tuple[int, int]]) -> dict[Key, int]:
    """Times at the machine's pace of now. Plain launches are timed more often than wide ones: where they have become
    slower or quicker since a wide one was last timed, so has that, as far as anybody knows.
    """
    known: dict[Key, int] = {}
    for span, members, rows, ns, beside in decode:
        if (span, members) in near:
            plain = known.get((span, members, 0), 0)
            known[span, members, rows] = ns * plain // beside if beside and plain else ns
    return known


def outdated(beside: int, plain: int) -> bool:
    """Were plain launches so much slower when a wide one was timed that they may have been held up, and it not?"""
    return 8 * beside > 9 * plain > 0


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
            return UNIT + UNIT * max(0, of_rows(wide, rows, base) - base) // (plain or base)
    return UNIT + DRAFT + ROW * (rows - BUCKET)


def of_rows(wide: Mapping[int, int], rows: int, base: int) -> int:
    """What a launch of so many rows takes by what others took. Beyond the widest of them, what it takes more than a
    plain one grows with its rows; or time does as between the last two, if that is less: more rows cost a GPU next to
    nothing, whatever the first ones cost. base: of a plain one.
    """
    if known := [ns for row, ns in wide.items() if row >= rows]:
        return min(known)
    *others, widest = sorted(wide)
    most = base + (wide[widest] - base) * rows // widest
    if not others:
        return most
    grows = max(0, wide[widest] - wide[others[-1]])
    return min(most, wide[widest] + grows * (rows - widest) // (widest - others[-1]))


def timed(decode: DecodeTimes, shape: Shape, took_ns: int) -> DecodeTimes:
    """`Rates.decode` after one more launch.

    Whatever else the machine does makes launches slower, never quicker: so a quick one counts for much, or all, and a
    slow one for little, and shapes stay comparable. What stays slow is believed in time.
    """
    key = shape.key
    at = bisect_left(decode, key)  # right before it, as the shorter of two tuples that begin alike
    known = paced(decode, (key[:2],))
    mean, plain = known.get(key, took_ns), known.get((*key[:2], 0), 0) if shape.rows else 0
    if 2 * took_ns < mean or (key in known and outdated(decode[at][4], plain)):
        ns = took_ns
    else:
        ns = (mean + took_ns) // 2 if took_ns < mean else (31 * mean + min(took_ns, 2 * mean)) // 32
    return (*decode[:at], (*key, ns, plain), *decode[at + (key in known) :])
