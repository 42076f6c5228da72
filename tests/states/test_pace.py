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
from states.pace import LENGTH, LONGEST, LOSS, SHORTEST, UNIT, Choice, Pace
from states.rates import Rates
from states.settings import Settings

CHAIN = Settings(block=15, batch_rows=64)
TREE = Settings(block=15, tree=22, batch_rows=64)
UNKNOWN = Rates()
FLAT = Rates(rounds=((0, 1000), (3, 1120), (7, 1130), (15, 1160)))  # rows for next to nothing, as on a GPU
STEEP = Rates(rounds=((0, 1000), (3, 1200), (7, 1500), (15, 2200)))  # as on a CPU
HOPELESS = Rates(rounds=((0, 1000), (3, 4000), (7, 8000), (15, 16000)))

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


@pytest.mark.parametrize(
    ("rounds", "prices"),
    [
        ((), (1200, 1360, 1680)),  # a guess that expects little of a device
        (((3, 1100), (7, 1200)), (1200, 1360, 1680)),  # nothing to compare with
        (FLAT.rounds, (1120, 1130, 1160)),
        (((0, 1000), (15, 1500)), (1500, 1500, 1500)),  # narrower ones are at most as dear
        (((0, 1000), (3, 1100)), (1100, 1260, 1580)),  # wider ones are as much dearer as was guessed
        (((0, 1000), (3, 1500), (7, 1300), (15, 1400)), (1300, 1300, 1400)),  # one was noise
        (((0, 1000), (3, 1100), (15, 9000)), (1100, 2200, 4400)),  # and so was this: four rounds of four rows
        (((0, 1000), (3, 900), (15, 950)), (1000, 1000, 1000)),  # never below a plain round
    ],
)
def test_prices_are_measured_or_kept_sane(rounds: tuple[tuple[int, int], ...], prices: tuple[int, ...]) -> None:
    assert pace.priced((3, 7, 15), rounds) == prices


def test_a_slow_round_moves_a_price_a_little_and_a_quick_one_much() -> None:
    assert pace.timed((), (3, 7), 3, 900) == ((3, 900),)
    assert pace.timed(((3, 800),), (3, 7), 0, 500) == ((0, 500), (3, 800))
    assert pace.timed(((3, 800),), (3, 7), 3, 400) == ((3, 600),)
    assert pace.timed(((3, 800),), (3, 7), 3, 1440) == ((3, 820),)
    assert pace.timed(((3, 800),), (3, 7), 3, 10**9) == ((3, 825),)
    assert pace.timed(((3, 800),), (3, 7), 5, 900) == ((3, 800),)


@given(seed=st.integers(0, 99), start=st.integers(500, 10_000))
def test_prices_are_found_out_on_a_machine_with_other_work(seed: int, start: int) -> None:
    """Every second round is held up, by up to three times its time; the first one of all was anything."""
    rng, true, rounds = random.Random(seed), {0: 1000, 3: 1200, 7: 1500}, ((0, start),)
    for _ in range(300):
        width = rng.choice(list(true))
        rounds = pace.timed(rounds, (3, 7), width, round(true[width] * rng.choice((1, 1, 1, 1.1, 1.3, 3))))
    for width, price in zip((3, 7), pace.priced((3, 7), rounds), strict=True):
        assert 0.8 * true[width] <= price <= 1.25 * true[width]


def test_a_machine_that_stays_slow_is_believed() -> None:
    rounds = ((0, 1000), (3, 1200))
    for _ in range(100):
        rounds = pace.timed(rounds, (3,), 3, 3600)
    assert rounds[1][1] > 3200


KNOWN = pace.fresh(CHAIN, STEEP)


@pytest.mark.parametrize(
    ("changes", "answered", "room", "choice"),
    [
        ({"gains": (3000, 7000, 15000)}, 0, 99, Choice(15, "")),
        ({"gains": (2500, 4500, 5000)}, 0, 99, Choice(7, "")),
        ({"gains": (1000, 1200, 1200)}, 0, 99, Choice(3, "")),
        ({"gains": (3000, 7000, 15000)}, 0, 5, Choice(5, "")),
        ({"gains": (3000, 7000, 15000)}, 0, 2, Choice(2, "")),
        ({}, 0, 0, Choice(0, "last_token")),
        ({"rest": 1}, 0, 99, Choice(0, "does_not_pay")),
        ({"debt": LOSS * LENGTH}, 0, 99, Choice(0, "loss_limit")),
        ({"debt": LOSS * LENGTH - 200, "gains": (3000, 7000, 15000)}, 0, 99, Choice(3, "")),
        ({"debt": LOSS * LENGTH}, LENGTH + 99, 99, Choice(7, "")),
        ({"gains": (0, 0, 0)}, 0, 99, Choice(3, "")),  # a rest is over: try again, with what costs least
    ],
)
def test_choose(changes: dict[str, object], answered: int, room: int, choice: Choice) -> None:
    assert pace.choose(evolve(KNOWN, **changes), answered, room) == choice


def test_could_pay() -> None:
    assert pace.could_pay(pace.fresh(CHAIN, UNKNOWN))
    assert not pace.could_pay(pace.fresh(CHAIN, HOPELESS))
    assert not pace.could_pay(pace.fresh(evolve(CHAIN, batch_rows=1), UNKNOWN))


def test_a_round_says_exactly_what_narrower_ones_would_have_got() -> None:
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


def test_a_plain_round_only_shortens_the_rest() -> None:
    assert pace.after(evolve(KNOWN, rest=3), 0, 0, 1) == evolve(KNOWN, rest=2)
    assert pace.after(KNOWN, 0, 0, 1) == KNOWN


def decode(now: Pace, draft: Draft, length: int) -> tuple[int, Pace]:
    """What an answer costs by the prices, in thousandths of plain rounds."""
    cost = answered = 0
    while answered < length:
        proposed = pace.choose(now, answered, length - answered - 1).propose
        right = draft(proposed, answered)
        assert 0 <= right <= proposed
        cost += now.prices[pace.covering(now, proposed)] if proposed else UNIT
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

    def rounds(more: list[int], known: list[bool]) -> Rates:
        prices = [1000 + sum(more[: at + 1]) for at in range(4)]
        pairs = [(width, price) for width, price, there in zip((3, 7, 15, 22), prices, known, strict=True) if there]
        return Rates(rounds=((0, 1000), *pairs))

    return st.one_of(st.sampled_from([UNKNOWN, FLAT, STEEP, HOPELESS]), st.builds(rounds, dear, seen))


@settings(max_examples=150, deadline=None)
@given(
    rates=some_rates(),
    house=st.sampled_from([CHAIN, TREE, evolve(CHAIN, block=3), evolve(CHAIN, block=10)]),
    length=st.integers(LENGTH, 1500),
    moods=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_an_answer_never_takes_two_per_cent_longer_whatever_the_draft_does(
    rates: Rates, house: Settings, length: int, moods: list[tuple[int, int]], seed: int
) -> None:
    """Moods: for so many rounds every proposal is right with such a chance; then the next one, around and around."""
    rng, rounds = random.Random(seed), [chance for times, chance in moods for _ in range(times)]
    turn = iter(range(10**9))

    def moody(proposed: int, _: int) -> int:
        chance = rounds[next(turn) % len(rounds)]
        return next((right for right in range(proposed) if rng.random() * 100 >= chance), proposed)

    cost, _ = decode(pace.fresh(house, rates), moody, length)
    assert cost * 100 <= 102 * UNIT * length


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
    assert worst * 100 <= 102 * UNIT * length


@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP, HOPELESS])
def test_a_useless_draft_is_hardly_asked(rates: Rates) -> None:
    cost, _ = decode(pace.fresh(CHAIN, rates), lambda _, __: 0, 600)
    assert cost <= 1.0155 * UNIT * 600


def steady(chance: float, seed: int) -> Draft:
    rng = random.Random(seed)
    return lambda proposed, _: next((right for right in range(proposed) if rng.random() >= chance), proposed)


@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
@pytest.mark.parametrize("chance", [0.6, 0.75, 0.9, 0.97])
def test_a_steady_draft_gives_nearly_what_its_best_width_would(rates: Rates, chance: float) -> None:
    """0.75: four tokens a round. Against the one width that is best on average, known beforehand."""
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


def test_without_a_wish_or_company_nothing_is_shared() -> None:
    assert pace.share([(7, KNOWN)], 4) == [7]
    assert pace.share([(0, KNOWN), (0, KNOWN)], 64) == [0, 0]
    assert pace.share([(0, None), (0, None)], 64) == [0, 0]


@given(
    wanted=st.lists(st.tuples(st.integers(0, 15), st.booleans()), min_size=2, max_size=8),
    limit=st.integers(1, 64),
    rates=some_rates(),
)
def test_what_is_shared_is_never_more_than_was_wanted_and_fits(
    wanted: list[tuple[int, bool]], limit: int, rates: Rates
) -> None:
    known = pace.fresh(CHAIN, rates)
    members = [(most if drafts else 0, known if drafts else None) for most, drafts in wanted]
    each = pace.share(members, limit)
    assert all(propose <= most for propose, (most, _) in zip(each, members, strict=True))
    assert sum(each) + len(each) <= limit or not any(each)
