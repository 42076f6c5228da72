"""What launches cost on a machine with other work: prices that were measured in different minutes compare."""

from __future__ import annotations

import random

import pytest
from attrs import evolve

from effects.decode import BACKLOG, Decoded
from states import speculation_control as control
from states.prices import DEAREST, LATE, UNIT, Shape, launched, terms
from states.rates import Rates
from states.settings import Settings

CHAIN = Settings(block=15, batch_rows=64)
PLAIN, WIDE = Shape(0, 1), Shape(0, 1, 4)
KNOWN = Rates(decode=((0, 1, 0, 10_000), (0, 1, 4, 15_000)))


def test_a_machine_that_is_slower_now_is_so_for_all_launches() -> None:
    rates = KNOWN
    for _ in range(60):
        rates = launched(rates, PLAIN, 30_000)
    assert rates.decode == KNOWN.decode
    assert 2900 <= rates.pace <= 3000
    now = terms(rates, 0, 1, 4)
    assert now.plain == 10 * rates.pace, "that is what a launch is paid against"
    assert now.prices == (1500,), "a price that was known before is still one"
    for _ in range(20):
        rates = launched(rates, WIDE, 45_000, 1500)
    assert 1490 <= terms(rates, 0, 1, 4).prices[0] <= 1560
    for _ in range(120):
        rates = launched(rates, PLAIN, 10_000)
    assert (rates.pace, rates.decode[0][3]) == (UNIT, 10_000)


def test_one_launch_that_was_held_up_is_no_slow_machine() -> None:
    assert launched(KNOWN, PLAIN, 10**12).pace <= 3 * UNIT // 2
    assert launched(KNOWN, WIDE, 10**12).decode[1][3] <= 16_000


def test_what_was_held_up_when_it_was_measured_is_found_out_at_once() -> None:
    assert launched(KNOWN, PLAIN, 4_000).decode[0][3] == 4_000
    assert launched(KNOWN, WIDE, 7_000).decode[1][3] == 7_000
    assert launched(KNOWN, PLAIN, 8_000).decode[0][3] == 9_000, "half the way"
    assert launched(Rates(), PLAIN, 8_000).decode == ((0, 1, 0, 8_000),)
    assert launched(evolve(KNOWN, pace=2000), Shape(1, 1), 8_000).decode[-1] == (1, 1, 0, 4_000)


def test_what_follows_first_is_learnt_apart_from_what_the_launch_takes() -> None:
    rates = launched(KNOWN, WIDE, 15_000 + 100 * 7, 1500, late=100)
    assert (rates.follow, rates.decode) == (7, KNOWN.decode)
    assert launched(rates, WIDE, 15_000 + 100 * 3, 1500, late=100).follow == 3
    assert launched(evolve(rates, follow=100), WIDE, 10**9, 1500, late=100).follow == 106
    quick = launched(rates, WIDE, 12_000, 1500, late=100)
    assert quick.decode[1][3] < 15_000, "it takes no longer than that"
    assert launched(rates, WIDE, 15_500, 1500, late=1).follow == rates.follow, "a row more or less says nothing"


@pytest.mark.parametrize(
    ("rates", "late"),
    [
        (Rates(), LATE * 100),
        (KNOWN, LATE * 100),
        (evolve(KNOWN, follow=20), 200),
        (evolve(KNOWN, follow=20, pace=4000), 200),
        (evolve(KNOWN, follow=10**6), DEAREST),
    ],
    ids=["nothing known", "no rate", "a rate", "on a slow machine", "held up when it was measured"],
)
def test_what_a_row_costs_that_is_followed_late(rates: Rates, late: int) -> None:
    offer = terms(rates, 0, 1, 4)
    assert offer.late(100) == late
    assert offer.late(0) == 0


def test_rows_that_the_draft_has_not_followed_are_counted() -> None:
    member = control.fresh(CHAIN, KNOWN, 64, 40)
    assert member.behind == 40
    assert control.fresh(CHAIN, KNOWN, 64, 10_000).behind == BACKLOG
    plain = control.after(member, Decoded((1, 2, 3), steps=3))
    assert plain.behind == 43
    assert control.after(evolve(plain, behind=BACKLOG), Decoded((1,))).behind == BACKLOG
    assert control.after(plain, Decoded((1,), 3)).behind == 0


def test_what_has_to_be_followed_is_weighed_against_what_may_come_of_it() -> None:
    rates = evolve(KNOWN, spare=5000, follow=60)
    member = evolve(control.fresh(CHAIN, rates), gains=(1000, 1000, 1000))
    offer = terms(rates, 0, 1, 64)
    for behind, room, proposes, late in ((0, 15, 3, 0), (200, 15, 3, 1200), (200, 2, 0, 0), (0, 2, 2, 0)):
        plan = control.share([(room, evolve(member, behind=behind))], offer, evolve(rates, rest=1), 64)
        assert (plan.proposals, plan.behind, plan.late) == ((proposes,), behind * (proposes > 0), late)
    poor = evolve(rates, spare=1500)
    plan = control.share([(15, evolve(member, behind=200))], offer, poor, 64)
    assert (plan.proposals, plan.reason) == ((0,), "loss_limit"), "0.5 can be borne, and 1.2 on top cannot"
    assert control.share([(15, member)], offer, poor, 64).proposals == (3,)


def test_an_answer_may_lose_what_it_earns_unless_the_draft_is_known_to_be_worth_it() -> None:
    assert control.fresh(CHAIN, KNOWN, 128).spare == 1280
    assert control.fresh(CHAIN, KNOWN, 64).spare == UNIT, "so much is one try"
    assert control.fresh(CHAIN, KNOWN, 512).spare == KNOWN.spare
    assert control.fresh(CHAIN, evolve(KNOWN, seen=8), 64).spare == KNOWN.spare
    assert control.fresh(CHAIN, evolve(KNOWN, seen=8, pause=2), 64).spare == UNIT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("dear", [1.0, 1.6])
def test_a_draft_that_is_never_right_loses_two_per_cent_of_no_answer(seed: int, length: int, dear: float) -> None:
    """Of launches as they are: the machine is two or three times as slow for a while, each launch is held up a little,
    and proposals really cost `dear` times what was measured. Counted is what the same launches take of a quiet one.
    """
    rng, rates = random.Random(seed), evolve(KNOWN, follow=40)
    true = {0: 10_000, 4: round(15_000 * dear), 8: round(20_000 * dear), 16: round(30_000 * dear)}
    for number in range(10):
        slow = rng.choice((1.0, 1.0, 2.0, 3.0))
        own, proposing, took = control.fresh(CHAIN, rates, length, 200), 0, 0
        for at in range(length):
            if rng.random() < 0.01:
                slow = rng.choice((1.0, 1.0, 2.0, 3.0))
            now = terms(rates, 0, 1, 64)
            limit = 0 if proposing and now.held_up else 64
            plan = control.share([(min(15, length - at - 1), own)], now, rates, limit)
            proposed = plan.proposals[0]
            proposing = proposing + 1 if proposed else 0
            shape = Shape(0, 1, proposed and 1 + proposed)
            work = true[shape.key[2]] + 40 * plan.behind
            ns = round(work * slow * rng.uniform(1, 1.3))
            rates = launched(control.begun(rates, plan), shape, ns, plan.price, plan.behind)
            step = Decoded((7,), proposed, ns=ns, accepted=0)
            rates, own = control.settled(CHAIN, rates, plan, step), control.after(evolve(own, plan=plan), step)
            took += work
        assert took <= (1.02 if length > 64 else 1.03) * true[0] * length, (number, took / true[0] / length)
