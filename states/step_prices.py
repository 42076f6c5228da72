"""Prices of decode steps: times of each shape, learned from steps that ran, and prices made from them.

A plain step is one in which no request proposes anything. A price is the time of a step in thousandths of the time of
a plain step, of the same requests at the same length of context. Prices are what `states/speculation_control.py`
decides with. All times here are those of one step (`Decoded.ns`), however many steps its launch takes.

The shape of a step is all that its time is taken to depend on: where its requests are in their contexts, how many
there are, and how many rows go through the forward. Forwards come in buckets of 4, 8, 16 ... rows.

Times are noisy in one direction only: other work on the machine makes steps slower, never quicker. So a quicker time
counts much (half), and a slower one counts little (a 32nd) until it has stayed slow for long. `record_step_time` has
the rule, with two cases in which a time replaces what was known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping
from itertools import accumulate
from typing import TypeAlias

from attrs import frozen

from states.rates import DecodeTimes, TimedStep

UNIT = 1000
# Thousandths of a plain step, where nothing was measured: what a draft costs, and each row beyond the first bucket.
GUESSED_DRAFT_COST = 200
GUESSED_ROW_COST = 40
# What a step costs beyond a plain one at most, for each time that its rows fill the plain step's forward. So a price is
# at most UNIT + MAX_EXTRA_COST * rows / (rows of the plain step's forward). For 8 rows of one request, whose plain
# forward has 4 rows, these are 1,000 + 2,000 * 8 / 4 = 5,000.
MAX_EXTRA_COST = 2 * UNIT
SMALLEST_BUCKET = 4  # rows of the smallest forward with proposals: this many tokens are fed at one price

ShapeKey: TypeAlias = tuple[int, int, int]  # (span, members, rows of the forward), as in `TimedStep`


@frozen
class Shape:
    """The things that the time of a step depends on."""

    span: int  # of positions, as in `Rates.prefill`: where its requests are on average
    members: int
    rows: int = 0  # that it feeds in all; 0: no request proposes anything

    @property
    def key(self) -> ShapeKey:
        """The first three fields of its entry in `Rates.decode`."""
        return self.span, self.members, round_up_to_bucket(self.rows) if self.rows else 0


@frozen
class StepPrices:
    """The prices of steps of the same requests."""

    members: int = 1
    plain_ns: int = 0  # nanoseconds of a plain step; 0: not measured
    prices: tuple[int, ...] = ()  # of steps of up to 4, 8, 16 ... rows
    # Sizes of forwards, in rows, whose price may be wrong: plain steps were slower than now when they were timed.
    doubted_buckets: frozenset[int] = frozenset()
    needs_plain_step: bool = False  # times are learned here, and that of a plain step is missing
    # A plain step seems to take as long as one with proposals. That cannot be: its known time is probably too long.
    plain_suspect: bool = False

    def price_of(self, rows: int) -> int:
        """Return the price of a step of this many rows. Beyond the largest bucket it grows in proportion."""
        at = (round_up_to_bucket(rows) // SMALLEST_BUCKET).bit_length() - 1
        last = len(self.prices) - 1
        return self.prices[at] if at <= last else self.prices[last] << at - last


def round_up_to_bucket(rows: int) -> int:
    """Return the rows of the smallest forward that holds this many."""
    return SMALLEST_BUCKET << max(0, (rows - 1) // SMALLEST_BUCKET).bit_length()


def estimate_prices(
    decode: DecodeTimes, span: int, members: int, most_rows: int, *, only_rows_cost: bool = False
) -> StepPrices:
    """Return the prices of steps of this many requests, up to `most_rows` rows.

    only_rows_cost: a step differs from a plain one in its rows alone, because no draft is asked.
    """
    times = scale_times_to_now(decode, ((span, members), (span, 1), (0, 1)))
    plain = times.get((span, members, 0), 0)
    wider = [ns for key, ns in times.items() if key[:2] == (span, members) and key[2]]
    bucket_count = (round_up_to_bucket(most_rows) // SMALLEST_BUCKET).bit_length()
    sizes = [SMALLEST_BUCKET << index for index in range(bucket_count)]
    bounded = (bound_price(times, span, members, rows, only_rows_cost=only_rows_cost) for rows in sizes)
    prices = accumulate(bounded, max)
    old = (
        step_time.rows
        for step_time in decode
        if step_time[:2] == (span, members) and is_outdated(step_time.plain_then_ns, plain)
    )
    return StepPrices(
        members,
        plain,
        tuple(prices),
        frozenset(old),
        needs_plain_step=bool(decode) and not plain,
        plain_suspect=bool(wider) and plain >= min(wider),
    )


def find_plain_time(decode: DecodeTimes, span: int, members: int) -> int:
    """Return the nanoseconds of a plain step of this many requests; 0: such a step was not timed."""
    return next((step_time.ns for step_time in decode if step_time[:3] == (span, members, 0)), 0)


def scale_times_to_now(decode: DecodeTimes, near: Container[tuple[int, int]]) -> dict[ShapeKey, int]:
    """Return the times of steps near these (span, members), scaled to the machine's present speed.

    Plain steps are timed more often than wide ones. Where plain steps have become slower or quicker since a wide one
    was last timed, the wide one is taken to have changed in the same proportion.

    decode: sorted, as `Rates.decode` is. So the plain step of each (span, members), which has 0 rows, comes before the
    wide ones that are scaled by it.
    """
    times: dict[ShapeKey, int] = {}
    for step_time in decode:
        if (step_time.span, step_time.members) in near:
            span, members, rows, ns, plain_then_ns = step_time
            plain = times.get((span, members, 0), 0)
            times[span, members, rows] = ns * plain // plain_then_ns if plain_then_ns and plain else ns
    return times


def is_outdated(plain_then_ns: int, plain_ns: int) -> bool:
    """Return whether plain steps were more than an eighth slower when a wide step was timed than they are now.

    Then other work may have held up plain steps at that time and not the wide one, so its scaled time may be too short.
    """
    return 8 * plain_then_ns > 9 * plain_ns > 0


def bound_price(times: Mapping[ShapeKey, int], span: int, members: int, rows: int, *, only_rows_cost: bool) -> int:
    """Return the estimated price of a step, limited so that the shape is tried again sooner or later.

    Without the limit, a single step that other work slowed down could keep this shape from ever being timed again.
    """
    most = UNIT + MAX_EXTRA_COST * rows // round_up_to_bucket(members)
    return min(estimate_price(times, span, members, rows, only_rows_cost=only_rows_cost), most)


def estimate_price(times: Mapping[ShapeKey, int], span: int, members: int, rows: int, *, only_rows_cost: bool) -> int:
    """Return the price of a step, which is never less than that of a plain one.

    It is what was measured of this shape or of a wider one, since a wider step costs no less. If only rows cost, it is
    between the times of narrower and wider steps (`interpolate_time`). Or it is what this many rows cost a single
    request beyond its plain step. Or it is a guess.
    """
    plain = times.get((span, members, 0), 0)
    own = {key[2]: ns for key, ns in times.items() if key[:2] == (span, members) and key[2]}
    wider = [ns for row_count, ns in own.items() if row_count >= rows]
    if plain and wider:
        took = interpolate_time({members: plain} | own, rows) if only_rows_cost else min(wider)
        return max(UNIT, UNIT * took // plain)
    for near_span in (span, 0):
        base = times.get((near_span, 1, 0), 0)
        wide = {key[2]: ns for key, ns in times.items() if key[:2] == (near_span, 1) and key[2]}
        if base and wide:
            # If only rows cost, take a single request's step with as many rows beyond one for each member.
            own_rows = max(1, rows - members + 1) if only_rows_cost else rows
            is_between = only_rows_cost and own_rows <= max(wide)
            took = (
                interpolate_time({1: base} | wide, own_rows) if is_between else extrapolate_time(wide, own_rows, base)
            )
            return UNIT + UNIT * max(0, took - base) // (plain or base)
    return UNIT + GUESSED_DRAFT_COST + GUESSED_ROW_COST * (rows - SMALLEST_BUCKET)


def interpolate_time(known: Mapping[int, int], rows: int) -> int:
    """Return what a step of this many rows takes at most, from what narrower and wider ones take, by their rows.

    The first rows that are added to a step cost no more than later ones: on a GPU they cost next to nothing. So the
    time lies below the straight line between two times that are known.
    """
    narrower = max((row_count for row_count in known if row_count < rows), default=min(known))
    base = known[narrower]
    return min(
        base + (ns - base) * max(0, rows - narrower) // max(1, row_count - narrower)
        for row_count, ns in known.items()
        if row_count >= rows
    )


def extrapolate_time(wide: Mapping[int, int], rows: int, base: int) -> int:
    """Return what a step of this many rows takes, from what others took. base: the time of a plain one.

    Beyond the widest one that was timed, two estimates are made, and the smaller one holds. Either what a step takes
    beyond a plain one grows with its rows. Or time grows as it does between the last two that were timed: more rows
    cost a GPU next to nothing, whatever the first ones cost.
    """
    if times := [ns for row_count, ns in wide.items() if row_count >= rows]:
        return min(times)
    *others, widest = sorted(wide)
    most = base + (wide[widest] - base) * rows // widest
    if not others:
        return most
    growth = max(0, wide[widest] - wide[others[-1]])
    return min(most, wide[widest] + growth * (rows - widest) // (widest - others[-1]))


def record_step_time(decode: DecodeTimes, shape: Shape, took_ns: int) -> DecodeTimes:
    """Return `Rates.decode` after one more step.

    What is known of a wide step is scaled first (`scale_times_to_now`). A time that is less than half of what is known
    replaces it. So does any time, if what is known was recorded while plain steps were much slower (`is_outdated`).
    Else a quicker time counts half. A slower one counts a 32nd, and no more than twice what is known, so what stays
    slow is believed in time. Where 1,000 ns are known, 400 gives 400, 800 gives 900, and 1,320 gives 1,010.
    """
    key = shape.key
    at = bisect_left(decode, key)  # the entry of this shape, if there is one: `key` is shorter, so it sorts before it
    own = decode[bisect_left(decode, key[:2]) : bisect_left(decode, (key[0], key[1] + 1))]
    times = scale_times_to_now(own, (key[:2],))
    mean = times.get(key, took_ns)
    plain = times.get((*key[:2], 0), 0) if shape.rows else 0
    if 2 * took_ns < mean or (key in times and is_outdated(decode[at].plain_then_ns, plain)):
        ns = took_ns
    elif took_ns < mean:
        ns = (mean + took_ns) // 2
    else:
        ns = (31 * mean + min(took_ns, 2 * mean)) // 32
    return (*decode[:at], TimedStep(*key, ns, plain), *decode[at + (key in times) :])
