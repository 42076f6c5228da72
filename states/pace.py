"""When to speculate and how wide: what a round costs against what it is likely to give.

Counted in thousandths: of a plain round, for what things cost, and of a token, for what they give. So a request that
speculates knows at every moment how much longer it took than plain decoding would have, by what was measured, and it
never starts a round that could leave it more than `LOSS` behind: whatever the draft proposes. Beside that hard limit
there is judgement: the width with the most expected tokens for its time, a rest where no width pays, and a new try
after it, each rest twice as long as the one before while tries keep failing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TypeAlias

from attrs import evolve, frozen

from states.rates import Rates
from states.settings import Settings

UNIT = 1000
LOSS = 15  # thousandths that an answer of LENGTH tokens or more may take longer than without a draft, at most
LENGTH = 512
MEMORY = 8  # rounds that an estimate rests on, about
SHORTEST, LONGEST = 8, 256  # plain rounds of a rest
HOPE = 800  # before anything is known: how likely a draft is right about the next token
DRAFT, ROW = 200, 40  # where nothing was measured: what a draft costs, and a row of the target beyond the first ones
RUNG = 4  # rows of the smallest forward: as many tokens are fed at the price of one


Rounds: TypeAlias = tuple[tuple[int, int], ...]  # as in Rates


@frozen
class Pace:
    """What a request has learnt about its draft. All tuples go with `widths`."""

    widths: tuple[int, ...]  # proposals that are worth considering, ascending
    prices: tuple[int, ...]  # of a round with so many, in thousandths of a plain one
    gains: tuple[int, ...]  # proposals that are expected to be right, in thousandths
    branching: bool = False  # proposals are trees: a smaller one says little about what a larger one would have got
    debt: int = 0  # thousandths of plain rounds that this took longer than plain decoding; below zero: saved
    tried: int = 0  # rounds since the last rest
    rest: int = 0  # plain rounds until the next try
    pause: int = SHORTEST  # of the next rest


@frozen
class Choice:
    propose: int
    reason: str  # machine-readable; empty where something is proposed


def widths(settings: Settings) -> tuple[int, ...]:
    """Proposals that fill a forward up to its rung, and the most that are possible."""
    return rungs(min(settings.tree or settings.block, settings.batch_rows - 1) if settings.block else 0)


@cache
def rungs(most: int) -> tuple[int, ...]:
    full = [(RUNG << step) - 1 for step in range(most.bit_length()) if (RUNG << step) - 1 < most]
    return (*full, most) if most > 0 else ()


def fresh(settings: Settings, rates: Rates) -> Pace:
    useful = widths(settings)
    return Pace(useful, priced(useful, rates.rounds), tuple(map(hoped, useful)), branching=settings.tree > 0)


@cache
def hoped(width: int) -> int:
    return sum(UNIT * HOPE**right // UNIT**right for right in range(1, width + 1))


@cache
def guessed(width: int) -> int:
    return UNIT + DRAFT + ROW * max(0, width + 1 - RUNG)


def priced(useful: tuple[int, ...], rounds: Rounds) -> tuple[int, ...]:
    """What rounds of such widths cost, never less than a plain one."""
    plain = dict(rounds).get(0, 0)
    known = {width: max(UNIT, UNIT * took // plain) for width, took in rounds if width and took} if plain else {}
    return tuple(presumed(width, known) for width in useful)


def presumed(width: int, known: Mapping[int, int]) -> int:
    """What was measured, or what that of other widths says, if it is less: noise only ever adds.

    A wider round costs no less, and no more than as many narrower ones as have its rows. Where only narrower ones are
    known, it costs as much more than the widest of them as would be guessed, up to that.
    """
    if not known:
        return guessed(width)
    ceilings = [price * -(-(width + 1) // (other + 1)) for other, price in known.items() if other < width]
    wider = [price for other, price in known.items() if other >= width]
    widest = max(known)
    return min([*ceilings, *wider] if wider else [*ceilings, guessed(width) + known[widest] - guessed(widest)])


def choose(pace: Pace, answered: int, room: int) -> Choice:
    """For the next round of a request with so many tokens of answer, which may propose no more than `room`."""
    if room <= 0:
        return Choice(0, "last_token")
    if pace.rest:
        return Choice(0, "does_not_pay")
    limit = LOSS * max(LENGTH, answered + 1)
    able = [at for at, price in enumerate(pace.prices) if pace.debt + price - UNIT <= limit]
    if not able:
        return Choice(0, "loss_limit")
    return Choice(min(pace.widths[max(able, key=lambda at: value(pace, at, room))], room), "")


def value(pace: Pace, at: int, room: int) -> int:
    """Thousandths of a token for the time of a plain round."""
    return UNIT * (UNIT + min(pace.gains[at], UNIT * room)) // pace.prices[at]


def share(wanted: Sequence[tuple[int, Pace | None]], limit: int) -> list[int]:
    """How much each of several requests may propose of what it wants, in a launch of at most `limit` rows.

    All get the same bound: the one with the most expected tokens for the time of the whole launch. Where nobody
    proposes, there may still be more rows than `limit`.
    """
    costs = next((pace for _, pace in wanted if pace is not None), None)
    most = [propose for propose, _ in wanted]
    if len(wanted) == 1 or costs is None or not any(most):
        return most
    best, proposals = 0, most
    for bound in (0, *costs.widths):
        each = [min(propose, bound) for propose in most]
        rows = len(each) + sum(each)
        if bound and rows > limit:
            break
        tokens = sum(UNIT + gain(pace, propose) for propose, (_, pace) in zip(each, wanted, strict=True))
        worth = UNIT * tokens // launch_price(costs, rows, sum(map(bool, each)))
        if worth > best:
            best, proposals = worth, each
    return proposals


def gain(pace: Pace | None, propose: int) -> int:
    return min(pace.gains[covering(pace, propose)], UNIT * propose) if pace is not None and propose else 0


def launch_price(pace: Pace, rows: int, drafting: int) -> int:
    """Of a forward of so many rows with so many drafts before it, by what a single request's rounds cost."""
    draft = pace.prices[0] - UNIT if pace.widths[0] < RUNG else DRAFT
    beyond = rows - 1 - pace.widths[-1]
    if rows <= RUNG:
        verify = UNIT
    elif beyond <= 0:
        verify = pace.prices[covering(pace, rows - 1)] - draft
    else:
        dearer, wider = pace.prices[-1] - pace.prices[0], pace.widths[-1] - pace.widths[0]
        verify = pace.prices[-1] - draft + beyond * (max(0, dearer) // wider if wider else ROW)
    return max(verify, UNIT) + drafting * draft


def timed(rounds: Rounds, useful: tuple[int, ...], proposed: int, took_ns: int) -> Rounds:
    """`Rates.rounds` after one more round of a request that was alone.

    Whatever else the machine does makes rounds slower, never quicker: so a quick one counts for much and a slow one for
    little, and widths stay comparable. What stays slow is believed in time.
    """
    if proposed and proposed not in useful:
        return rounds
    known = dict(rounds)
    mean = known.get(proposed, took_ns)
    known[proposed] = (mean + took_ns) // 2 if took_ns < mean else (31 * mean + min(took_ns, 2 * mean)) // 32
    return tuple(sorted(known.items()))


def pays(pace: Pace) -> bool:
    return any(UNIT + gain > price for gain, price in zip(pace.gains, pace.prices, strict=True))


def could_pay(pace: Pace) -> bool:
    """If every proposal were right."""
    return any(UNIT * (1 + width) > price for width, price in zip(pace.widths, pace.prices, strict=True))


def after(pace: Pace, proposed: int, accepted: int, tokens: int) -> Pace:
    """What a round has taught: of so many proposals so many were right, and it gave so many tokens."""
    if proposed == 0:
        return evolve(pace, rest=pace.rest - 1) if pace.rest else pace
    at = covering(pace, proposed)
    weight = min(pace.tried + 2, MEMORY)
    gains = tuple(
        (gain * (weight - 1) + seen) // weight
        for gain, seen in zip(pace.gains, sample(pace, proposed, accepted), strict=True)
    )
    debt = pace.debt + pace.prices[at] - UNIT * tokens
    learnt = evolve(pace, gains=gains, debt=debt, tried=pace.tried + 1)
    if pays(learnt):
        return evolve(learnt, pause=max(SHORTEST, pace.pause // 2)) if learnt.tried >= MEMORY else learnt
    return evolve(learnt, tried=0, rest=pace.pause, pause=min(2 * pace.pause, LONGEST))


def covering(pace: Pace, proposed: int) -> int:
    """Which width's forward so many proposals go through."""
    return next((at for at, width in enumerate(pace.widths) if width >= proposed), len(pace.widths) - 1)


def sample(pace: Pace, proposed: int, accepted: int) -> Iterator[int]:
    """What this round says about every width: exactly, up to its own; and about wider ones, what they would have got.

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
