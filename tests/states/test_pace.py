"""When to speculate and how wide: no draft costs more than it may, a good one gives nearly all that it could."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from states import pace
from states.pace import LONGEST, REFILL, SHORTEST, SPARE, UNIT, Choice, DecodeTimes, Pace, Shape, Terms
from states.rates import Rates
from states.settings import Settings

CHAIN = Settings(block=15, batch_rows=64)
TREE = Settings(block=15, tree=22, batch_rows=64)
UNKNOWN = Rates()


def alone(plain: int, *wider: int) -> DecodeTimes:
    """Of one request: a plain decode step, and those of 4, 8, 16 ... rows."""
    return ((0, 1, 0, plain), *((0, 1, 4 << step, ns) for step, ns in enumerate(wider)))


FLAT = Rates(decode=alone(1000, 1120, 1130, 1160))  # rows for next to nothing, as on a GPU
STEEP = Rates(decode=alone(1000, 1200, 1500, 2200))  # as on a CPU
HOPELESS = Rates(decode=alone(1000, 4000, 8000, 16000))
LENGTH = 512

Draft: TypeAlias = Callable[[int, int], int]  # (proposals, tokens so far) -> how many of them are right


@pytest.mark.parametrize(
    ("changes", "useful"),
    [
        ({"block": 0}, ()),
        ({"block": 1}, (1,)),
        ({"block": 3}, (3,)),
        ({"block": 4}, (3, 4)),
        ({"block": 7}, (3, 7)),
        ({"block": 15}, (3, 7, 15)),
        ({"block": 10}, (3, 7, 10)),
        ({"block": 15, "batch_rows": 8}, (3, 7)),
        ({"block": 15, "batch_rows": 1}, ()),
        ({"block": 15, "tree": 22}, (3, 7, 15, 22)),
        ({"block": 15, "tree": 63}, (3, 7, 15, 31, 63)),
        ({"block": 0, "tree": 22}, ()),
    ],
)
def test_widths_fill_a_forward_up_to_its_rung(changes: dict[str, int], useful: tuple[int, ...]) -> None:
    assert pace.widths(Settings(**{"batch_rows": 64, **changes})) == useful  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "forward"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 64)])
def test_a_launch_takes_as_long_as_the_smallest_forward_that_holds_it(rows: int, forward: int) -> None:
    assert pace.filled(rows) == forward
    assert Shape(2, 3, rows).key == (2, 3, forward)
    assert Shape(2, 3).key == (2, 3, 0)


@pytest.mark.parametrize(
    ("decode", "prices"),
    [
        ((), (1200, 1360, 1680)),  # a guess that expects little of a device
        (((0, 1, 4, 1100), (0, 1, 8, 1200)), (1200, 1360, 1680)),  # nothing to compare with
        (FLAT.decode, (1120, 1130, 1160)),
        (((0, 1, 0, 1000), (0, 1, 16, 1500)), (1500, 1500, 1500)),  # narrower ones are at most as dear
        (alone(1000, 1100), (1100, 1200, 1400)),  # wider ones cost more in proportion
        (alone(1000, 1500, 1300, 1400), (1300, 1300, 1400)),  # one was noise
        (alone(1000, 900, 950, 950), (1000, 1000, 1000)),  # never below a plain decode step
    ],
)
def test_prices_are_measured_or_kept_sane(decode: DecodeTimes, prices: tuple[int, ...]) -> None:
    assert pace.terms(decode, 0, 1, 16).prices == prices


def test_a_company_is_priced_by_its_own_launches_or_by_what_the_draft_costs_one_alone() -> None:
    """Four plain rounds together take 1,500: what the draft and its rows add to one of 1,000, they add to those."""
    together = (*STEEP.decode, (0, 4, 0, 1500))
    assert pace.terms(together, 0, 4, 64) == Terms(4, 1500, (1133, 1333, 1800, 2600, 4200))
    assert pace.terms((*together, (0, 4, 16, 3000)), 0, 4, 16).prices == (2000, 2000, 2000)
    assert pace.terms((*together, (1, 4, 0, 3000)), 1, 4, 16).prices == (1066, 1166, 1400)
    assert pace.terms((*together, (1, 1, 0, 2000), (1, 1, 16, 5000)), 1, 1, 16).prices == (2500, 2500, 2500)


def test_what_a_launch_is_compared_with_is_measured_first() -> None:
    assert not pace.terms((), 0, 4, 64).measuring, "nothing is measured here"
    assert not pace.terms(STEEP.decode, 0, 1, 64).measuring
    for span, members in ((0, 4), (1, 1)):
        offer = pace.terms(STEEP.decode, span, members, 64)
        assert offer.measuring
        assert pace.share([(7, KNOWN)] * members, offer, 64) == [0] * members


def test_a_slow_launch_moves_a_price_a_little_and_a_quick_one_much() -> None:
    one, plain = Shape(0, 1, 4), Shape(0, 1)
    assert pace.timed((), one, 900) == ((0, 1, 4, 900),)
    assert pace.timed(((0, 1, 4, 800),), plain, 500) == ((0, 1, 0, 500), (0, 1, 4, 800))
    assert pace.timed(((0, 1, 4, 800),), one, 400) == ((0, 1, 4, 600),)
    assert pace.timed(((0, 1, 4, 800),), one, 1440) == ((0, 1, 4, 820),)
    assert pace.timed(((0, 1, 4, 800),), one, 10**9) == ((0, 1, 4, 825),)
    assert pace.timed(((0, 1, 4, 800),), Shape(0, 2, 4), 900) == ((0, 1, 4, 800), (0, 2, 4, 900))
    assert pace.timed(((0, 1, 4, 800),), Shape(1, 1, 4), 900) == ((0, 1, 4, 800), (1, 1, 4, 900))


@given(seed=st.integers(0, 99), start=st.integers(500, 10_000))
def test_prices_are_found_out_on_a_machine_with_other_work(seed: int, start: int) -> None:
    """Every second decode step is held up, by up to three times its time; the first one of all was anything."""
    rng, true, decode = random.Random(seed), {0: 1000, 4: 1200, 8: 1500}, alone(start)
    for _ in range(300):
        rows = rng.choice(list(true))
        decode = pace.timed(decode, Shape(0, 1, rows), round(true[rows] * rng.choice((1, 1, 1, 1.1, 1.3, 3))))
    for rows, price in zip((4, 8), pace.terms(decode, 0, 1, 8).prices, strict=True):
        assert 0.8 * true[rows] <= price <= 1.25 * true[rows]


def test_a_machine_that_stays_slow_is_believed() -> None:
    decode = alone(1000, 1200)
    for _ in range(100):
        decode = pace.timed(decode, Shape(0, 1, 4), 3600)
    assert decode[1][3] > 3200


KNOWN = pace.fresh(CHAIN, STEEP)


@pytest.mark.parametrize(
    ("changes", "room", "choice"),
    [
        ({}, 99, Choice(15, "")),
        ({}, 2, Choice(2, "")),
        ({}, 0, Choice(0, "last_token")),
        ({"rest": 1}, 99, Choice(0, "does_not_pay")),
        ({"spare": 199}, 99, Choice(0, "loss_limit")),
        ({"spare": 200}, 99, Choice(15, "")),
        ({"gains": (0, 0, 0)}, 99, Choice(15, "")),  # a rest is over: try again
    ],
)
def test_choose(changes: dict[str, object], room: int, choice: Choice) -> None:
    assert pace.choose(evolve(KNOWN, **changes), room) == choice


@pytest.mark.parametrize(
    ("changes", "wanted", "proposed"),
    [
        ({"gains": (3000, 7000, 15000)}, 15, 15),
        ({"gains": (2500, 4500, 5000)}, 15, 7),
        ({"gains": (1000, 1200, 1200)}, 15, 3),
        ({"gains": (3000, 7000, 15000)}, 5, 5),
        ({"gains": (3000, 7000, 15000)}, 0, 0),
        ({"gains": (3000, 7000, 15000), "spare": 1199}, 15, 7),
        ({"gains": (3000, 7000, 15000), "spare": 200}, 15, 3),
        ({"gains": (0, 0, 0)}, 15, 3),  # a try, with what costs least
    ],
)
def test_one_that_is_alone_takes_the_width_with_the_most_tokens_for_its_time(
    changes: dict[str, object], wanted: int, proposed: int
) -> None:
    assert pace.share([(wanted, evolve(KNOWN, **changes))], KNOWN.terms, 64) == [proposed]


def test_could_pay() -> None:
    assert pace.could_pay(pace.fresh(CHAIN, UNKNOWN))
    assert not pace.could_pay(pace.fresh(CHAIN, HOPELESS))
    assert not pace.could_pay(pace.fresh(evolve(CHAIN, batch_rows=1), UNKNOWN))


def test_a_decode_step_says_exactly_what_narrower_ones_would_have_got() -> None:
    assert list(pace.sample(KNOWN, 7, 5)) == [3000, 5000, 5000]
    assert list(pace.sample(KNOWN, 7, 2)) == [2000, 2000, 2000]
    assert list(pace.sample(KNOWN, 15, 15)) == [3000, 7000, 15000]


def test_a_chain_that_was_right_to_its_end_promises_more_of_a_wider_one() -> None:
    sure = evolve(KNOWN, gains=(3000, 3500, 3500))
    assert list(pace.sample(sure, 3, 3)) == [3000, 7000, 15000]
    doubtful = evolve(KNOWN, gains=(1500, 1500, 1500))
    assert list(pace.sample(doubtful, 3, 3)) == [3000, 5000, 9000]


def test_a_smaller_tree_says_nothing_about_what_branches_would_have_got() -> None:
    tree = evolve(pace.fresh(TREE, FLAT), gains=(1000, 1500, 2000, 3000))
    assert list(pace.sample(tree, 7, 2)) == [2000, 2000, 2500, 3500]


def test_rests_grow_while_tries_fail_and_shrink_while_they_pay() -> None:
    now, rests = KNOWN, list[int]()
    while len(rests) < 8:
        if now.rest:
            rests.append(now.rest)
            now = evolve(now, rest=0)
        now = pace.after(now, 3, 0, 1)
    assert rests == [SHORTEST, 16, 32, 64, 128, 256, LONGEST, LONGEST]
    now = evolve(now, rest=0)
    for _ in range(20):
        now = pace.after(now, 15, 15, 16)
    assert now.pause == SHORTEST


def test_a_plain_decode_step_shortens_the_rest_and_earns_a_little() -> None:
    assert pace.after(evolve(KNOWN, rest=3), 0, 0, 1) == evolve(KNOWN, rest=2, spare=SPARE + REFILL)
    assert pace.after(KNOWN, 0, 0, 1) == evolve(KNOWN, spare=SPARE + REFILL)


def test_who_does_not_propose_pays_for_those_who_do() -> None:
    waits = pace.launched(KNOWN, Terms(2, 2000, (1500,)), 4)
    assert pace.after(waits, 0, 0, 1).spare == SPARE + REFILL - 500


@pytest.mark.parametrize(
    ("tried", "took", "price"), [(0, 2400, 1200), (0, 3000, 1500), (0, 10**9, 2400), (0, 0, 1200), (3, 3000, 1200)]
)
def test_a_first_try_is_paid_for_as_it_was_since_the_draft_catches_up_in_it(tried: int, took: int, price: int) -> None:
    tries = pace.launched(evolve(KNOWN, tried=tried), Terms(1, 2000, (1200, 1300, 1400)), 4)
    assert pace.after(tries, 3, 1, 2, took).spare == SPARE + 2 * (UNIT + REFILL) - price


def test_the_next_answer_starts_with_what_the_last_one_has_taught_and_left() -> None:
    assert pace.fresh(CHAIN, pace.remembered(STEEP, evolve(KNOWN, gains=(500, 600, 700), spare=1200))) == evolve(
        KNOWN, gains=(500, 600, 700), spare=1200
    )
    assert pace.fresh(CHAIN, pace.remembered(STEEP, evolve(KNOWN, spare=10**6))).spare == SPARE
    assert pace.fresh(CHAIN, pace.remembered(STEEP, evolve(KNOWN, spare=-(10**6)))).spare == 0
    assert pace.fresh(CHAIN, Rates(decode=STEEP.decode, gains=(1, 2))).gains == KNOWN.gains, "of another draft"


def decode(now: Pace, draft: Draft, length: int) -> tuple[int, Pace]:
    """What an answer costs by the prices, in thousandths of plain rounds."""
    cost = answered = 0
    while answered < length:
        choice = pace.choose(now, length - answered - 1)
        (proposed,) = pace.share([(choice.propose, now)], now.terms, 64)
        right = draft(proposed, answered)
        assert 0 <= right <= proposed
        now = pace.launched(now, now.terms, proposed and 1 + proposed)
        cost += now.price or UNIT
        now = pace.after(now, proposed, right, right + 1)
        answered += right + 1
        assert list(now.gains) == sorted(now.gains), "a wider block is right about no fewer"
        steps = zip(now.widths, now.gains, now.widths[1:], now.gains[1:], strict=False)
        assert all(more - gain <= UNIT * (wider - width) for width, gain, wider, more in steps)
        assert all(0 <= gain <= UNIT * width for width, gain in zip(now.widths, now.gains, strict=True))
    return cost, now


def some_rates() -> st.SearchStrategy[Rates]:
    """Anything from rows for nothing to rounds that cost as much as their rows, measured in part."""
    dear = st.lists(st.integers(0, 4000), min_size=4, max_size=4)
    seen = st.lists(st.booleans(), min_size=4, max_size=4)

    def decode(more: list[int], known: list[bool]) -> Rates:
        prices = [1000 + sum(more[: at + 1]) for at in range(4)]
        wider = [(0, 1, rows, price) for rows, price, there in zip((4, 8, 16, 32), prices, known, strict=True) if there]
        return Rates(decode=((0, 1, 0, 1000), *wider))

    return st.one_of(st.sampled_from([UNKNOWN, FLAT, STEEP, HOPELESS]), st.builds(decode, dear, seen))


@settings(max_examples=150, deadline=None)
@given(
    rates=some_rates(),
    house=st.sampled_from([CHAIN, TREE, evolve(CHAIN, block=3), evolve(CHAIN, block=10)]),
    length=st.integers(LENGTH, 1500),
    moods=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_an_answer_never_takes_more_than_one_and_a_half_per_cent_longer_whatever_the_draft_does(
    rates: Rates, house: Settings, length: int, moods: list[tuple[int, int]], seed: int
) -> None:
    """Moods: for so many decode steps every proposal is right with such a chance; then the next one, around and
    around."""
    rng, chances = random.Random(seed), [chance for times, chance in moods for _ in range(times)]
    turn = iter(range(10**9))

    def moody(proposed: int, _: int) -> int:
        chance = chances[next(turn) % len(chances)]
        return next((right for right in range(proposed) if rng.random() * 100 >= chance), proposed)

    cost, _ = decode(pace.fresh(house, rates), moody, length)
    assert cost <= UNIT * length + SPARE + REFILL * length <= 1.015 * UNIT * length


@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
@pytest.mark.parametrize("length", [LENGTH, 700, 4000])
def test_nor_where_the_draft_knows_what_would_hurt_most(rates: Rates, length: int) -> None:
    """Right whenever it is trusted little, wrong whenever it is trusted much: it sees the estimates."""
    worst, now = 0, pace.fresh(CHAIN, rates)
    for patience in range(1, 12):
        streak = 0

        def malicious(proposed: int, _: int, patience: int = patience) -> int:
            nonlocal streak
            streak = (streak + 1) % (patience + 1) if proposed else streak
            return proposed if streak == 0 else 0

        worst = max(worst, decode(now, malicious, length)[0])
    assert worst <= 1.015 * UNIT * length


@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP, HOPELESS])
def test_a_useless_draft_is_hardly_asked(rates: Rates) -> None:
    cost, _ = decode(pace.fresh(CHAIN, rates), lambda _, __: 0, 600)
    assert cost <= 1.014 * UNIT * 600


@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
def test_nor_do_many_short_answers_one_after_the_other(rates: Rates) -> None:
    """Each of them alone would have the spare time of one of 512 tokens."""
    total = 0
    for _ in range(100):
        cost, now = decode(pace.fresh(CHAIN, rates), lambda _, __: 0, 40)
        rates, total = pace.remembered(rates, now), total + cost
    assert total <= UNIT * 4000 + SPARE + REFILL * 4000


def steady(chance: float, seed: int) -> Draft:
    rng = random.Random(seed)
    return lambda proposed, _: next((right for right in range(proposed) if rng.random() >= chance), proposed)


@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
@pytest.mark.parametrize("chance", [0.6, 0.75, 0.9, 0.97])
def test_a_steady_draft_gives_nearly_what_its_best_width_would(rates: Rates, chance: float) -> None:
    """0.75: four tokens a decode step. Against the one width that is best on average, known beforehand."""
    now, length, runs = pace.fresh(CHAIN, rates), 1000, 20
    tokens = [1 + sum(chance**right for right in range(1, width + 1)) for width in now.widths]
    best = min(price / expected for price, expected in zip(now.prices, tokens, strict=True)) * length
    cost = sum(decode(now, steady(chance, seed), length)[0] for seed in range(runs)) / runs
    assert cost <= 1.06 * best
    assert best < 0.8 * UNIT * length


def test_a_draft_that_turns_good_is_found_out() -> None:
    def late(proposed: int, answered: int) -> int:
        return proposed if answered >= 300 else 0

    cost, _ = decode(pace.fresh(CHAIN, STEEP), late, 1300)
    assert cost <= 0.6 * UNIT * 1300


def test_without_a_wish_nothing_is_proposed() -> None:
    assert pace.share([(0, KNOWN)], KNOWN.terms, 64) == [0]
    assert pace.share([(0, KNOWN), (0, KNOWN)], KNOWN.terms, 64) == [0, 0]
    assert pace.share([(0, None), (0, None)], KNOWN.terms, 64) == [0, 0]


FOUR = pace.terms((*FLAT.decode, (0, 4, 0, 1000), (0, 4, 16, 1500)), 0, 4, 64)
GOOD, BAD = evolve(KNOWN, gains=(2500, 4000, 5000)), evolve(KNOWN, gains=(100, 100, 100))


def test_a_launch_has_one_price_however_many_propose() -> None:
    assert pace.share([(15, GOOD)] * 4, FOUR, 16) == [3] * 4
    assert pace.share([(15, GOOD), (0, BAD), (0, BAD), (0, BAD)], FOUR, 16) == [7, 0, 0, 0], "five tokens for 1.5"


def test_what_is_not_expected_to_pay_is_tried_by_all_together_or_not_at_all() -> None:
    assert pace.share([(15, BAD)] * 4, FOUR, 16) == [3] * 4
    assert pace.share([(15, BAD)] * 3 + [(0, BAD)], FOUR, 16) == [0] * 4
    assert pace.share([(15, BAD)] * 3 + [(0, None)], FOUR, 16) == [3, 3, 3, 0], "it has no draft to learn about"


def test_a_launch_begins_if_its_requests_can_spare_its_price_between_them() -> None:
    poor, rich = evolve(GOOD, spare=0), evolve(GOOD, spare=2000)
    assert pace.share([(3, poor)] * 3 + [(3, rich)], FOUR, 16) == [3] * 4
    assert pace.share([(3, poor)] * 3 + [(3, evolve(rich, spare=1999))], FOUR, 16) == [0] * 4


@pytest.mark.parametrize("members", [2, 4, 16])
@pytest.mark.parametrize("dear", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8])
def test_a_batch_is_never_more_than_one_and_a_half_per_cent_slower(members: int, dear: float, chance: float) -> None:
    """Answers of 64 tokens come and go; launches really cost `dear` times what is presumed of them."""
    rng, rates, busy = random.Random(members), STEEP, list[tuple[Pace, int]]()
    true = {0: 1000} | {rows: round(dear * ns) for _, _, rows, ns in STEEP.decode if rows} | {32: 4000, 64: 8000}
    time = tokens = 0
    while tokens < 20_000:
        busy += [(pace.fresh(CHAIN, rates), 64)] * (members - len(busy))
        offer = pace.terms(rates.decode, 0, members, 64)
        requests = [(pace.choose(each, left - 1).propose, each) for each, left in busy]
        proposals = pace.share(requests, offer, 64)
        shape = Shape(0, members, sum(proposals) and members + sum(proposals))
        took = true[shape.key[2]]
        rates, time = evolve(rates, decode=pace.timed(rates.decode, shape, took)), time + took
        after = list[tuple[Pace, int]]()
        for (each, left), proposed in zip(busy, proposals, strict=True):
            right = steady(chance, rng.randrange(10**6))(proposed, 0)
            learnt = pace.after(pace.launched(each, offer, shape.rows), proposed, right, 1 + right, took)
            tokens += 1 + right
            if left > 1 + right:
                after.append((learnt, left - 1 - right))
            else:
                rates = pace.remembered(rates, learnt)
        busy = after
    assert time / (UNIT * tokens / members) <= 1.015
    assert chance < 0.8 or dear > 1 or members > 2 or time / (UNIT * tokens / members) < 0.8


@given(
    wanted=st.lists(st.tuples(st.integers(0, 15), st.booleans()), min_size=1, max_size=8),
    limit=st.integers(1, 64),
    rates=some_rates(),
)
def test_what_is_shared_is_never_more_than_was_wanted_and_fits(
    wanted: list[tuple[int, bool]], limit: int, rates: Rates
) -> None:
    known = pace.fresh(CHAIN, rates)
    members = [(most if drafts else 0, known if drafts else None) for most, drafts in wanted]
    each = pace.share(members, pace.terms(rates.decode, 0, len(members), limit), limit)
    assert all(propose <= most for propose, (most, _) in zip(each, members, strict=True))
    assert sum(each) + len(each) <= limit or not any(each)
