"""When to speculate and how wide: no draft costs more than it may, a good one gives nearly all that it could."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from effects.decode import Decoded
from states import speculation_control as control
from states import step_prices, suffix_control
from states.rates import INITIAL_ACCOUNT, DecodeTimes, Rates, TimedStep
from states.settings import Settings
from states.speculation_control import LONGEST_TRIAL_GAP, REFILL
from states.speculation_plan import Plan, SpeculationControl
from states.step_prices import UNIT, Shape, StepPrices
from tests.pairs import cover_pairs, one_in, usual_where

CHAIN = Settings(max_proposals=15, batch_rows=64)
TREE = Settings(max_proposals=15, tree=22, batch_rows=64)
UNKNOWN = Rates()


def alone(plain: int, *wider: int) -> DecodeTimes:
    """Return the step times of one request: of a plain decode step, and of those with 4, 8, 16 ... rows."""
    return (TimedStep(0, 1, 0, plain, 0), *(TimedStep(0, 1, 4 << step, ns, plain) for step, ns in enumerate(wider)))


FLAT = Rates(decode=alone(1000, 1120, 1130, 1160))  # rows for next to nothing, as on a GPU
STEEP = Rates(decode=alone(1000, 1200, 1500, 2200))  # as on a CPU
HOPELESS = Rates(decode=alone(1000, 4000, 8000, 16000))
LENGTH = 512

Draft: TypeAlias = Callable[[int, int], int]  # (proposals, tokens so far) -> how many of them are right


@pytest.mark.parametrize(
    ("changes", "useful"),
    [
        ({"max_proposals": 0}, ()),
        ({"max_proposals": 1}, (1,)),
        ({"max_proposals": 3}, (3,)),
        ({"max_proposals": 4}, (3, 4)),
        ({"max_proposals": 7}, (3, 7)),
        ({"max_proposals": 15}, (3, 7, 15)),
        ({"max_proposals": 10}, (3, 7, 10)),
        ({"max_proposals": 15, "batch_rows": 8}, (3, 7)),
        ({"max_proposals": 15, "batch_rows": 1}, ()),
        ({"max_proposals": 15, "tree": 22}, (3, 7, 15, 22)),
        ({"max_proposals": 15, "tree": 63}, (3, 7, 15, 31, 63)),
        ({"max_proposals": 0, "tree": 22}, ()),
    ],
)
def test_widths_fill_a_forward_up_to_its_rung(changes: dict[str, int], useful: tuple[int, ...]) -> None:
    assert control.list_widths(Settings(**{"batch_rows": 64, **changes})) == useful  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "forward"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 64)])
def test_a_step_takes_as_long_as_the_smallest_forward_that_holds_it(rows: int, forward: int) -> None:
    assert step_prices.round_up_to_bucket(rows) == forward
    assert Shape(2, 3, rows).key == (2, 3, forward)
    assert Shape(2, 3).key == (2, 3, 0)


@pytest.mark.parametrize(
    ("decode", "prices"),
    [
        ((), (1200, 1360, 1680)),  # a guess that expects little of a device
        ((TimedStep(0, 1, 4, 1100, 0), TimedStep(0, 1, 8, 1200, 0)), (1200, 1360, 1680)),  # nothing to compare with
        (FLAT.decode, (1120, 1130, 1160)),
        (
            (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 1, 16, 1500, 0)),
            (1500, 1500, 1500),
        ),  # narrower ones are at most as dear
        (alone(1000, 1100), (1100, 1200, 1400)),  # wider ones cost more in proportion
        (alone(1000, 1500, 1300, 1400), (1300, 1300, 1400)),  # one was noise
        (alone(1000, 900, 950, 950), (1000, 1000, 1000)),  # never below a plain decode step
    ],
)
def test_prices_are_measured_or_kept_sane(decode: DecodeTimes, prices: tuple[int, ...]) -> None:
    assert step_prices.estimate_prices(decode, 0, 1, 16).prices == prices


def test_a_batch_is_priced_by_its_own_steps_or_by_what_the_draft_costs_a_single_request() -> None:
    """A plain step of four takes 1,500. The draft and its rows add to it what they add to the 1,000 of a single one."""
    together = (*STEEP.decode, TimedStep(0, 4, 0, 1500, 0))
    assert step_prices.estimate_prices(together, 0, 4, 64) == StepPrices(4, 1500, (1133, 1333, 1800, 2600, 4200))
    assert step_prices.estimate_prices((*together, TimedStep(0, 4, 16, 3000, 0)), 0, 4, 16).prices == (2000, 2000, 2000)
    assert step_prices.estimate_prices((*together, TimedStep(1, 4, 0, 3000, 0)), 1, 4, 16).prices == (1066, 1166, 1400)
    assert step_prices.estimate_prices(
        (*together, TimedStep(1, 1, 0, 2000, 0), TimedStep(1, 1, 16, 5000, 0)), 1, 1, 16
    ).prices == (
        2500,
        2500,
        2500,
    )


def test_rows_that_cost_a_single_request_next_to_nothing_are_not_taken_to_cost_a_batch_more() -> None:
    """A GPU: 2.3 ms for proposing anything, and 0.1 more from four rows to eight, and to sixteen."""
    gpu = alone(5800, 8100, 8200, 8300)
    prices = step_prices.estimate_prices((*gpu, TimedStep(0, 16, 0, 7000, 0)), 0, 16, 64).prices
    assert prices == (1328, 1342, 1357, 1385, 1442)


def test_a_slow_step_moves_a_price_a_little_and_a_quick_one_much() -> None:
    one, plain = Shape(0, 1, 4), Shape(0, 1)
    assert step_prices.record_step_time((), one, 900) == (TimedStep(0, 1, 4, 900, 0),)
    assert step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), plain, 500) == (
        TimedStep(0, 1, 0, 500, 0),
        TimedStep(0, 1, 4, 800, 0),
    )
    assert step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), one, 400) == (TimedStep(0, 1, 4, 600, 0),)
    halved = step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), one, 399)
    assert halved == (TimedStep(0, 1, 4, 399, 0),), "nothing but noise takes twice as long"
    assert step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), one, 1440) == (TimedStep(0, 1, 4, 820, 0),)
    assert step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), one, 10**9) == (TimedStep(0, 1, 4, 825, 0),)
    assert step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), Shape(0, 2, 4), 900) == (
        TimedStep(0, 1, 4, 800, 0),
        TimedStep(0, 2, 4, 900, 0),
    )
    assert step_prices.record_step_time((TimedStep(0, 1, 4, 800, 0),), Shape(1, 1, 4), 900) == (
        TimedStep(0, 1, 4, 800, 0),
        TimedStep(1, 1, 4, 900, 0),
    )


@given(seed=st.integers(0, 99), start=st.integers(500, 10_000))
def test_prices_are_found_out_on_a_machine_with_other_work(seed: int, start: int) -> None:
    """Every second decode step is held up, by up to three times its time; the first one of all was anything."""
    rng, true, decode = random.Random(seed), {0: 1000, 4: 1200, 8: 1500}, alone(start)
    for _ in range(300):
        rows = rng.choice(list(true))
        decode = step_prices.record_step_time(
            decode, Shape(0, 1, rows), round(true[rows] * rng.choice((1, 1, 1, 1.1, 1.3, 3)))
        )
    for rows, price in zip((4, 8), step_prices.estimate_prices(decode, 0, 1, 8).prices, strict=True):
        assert 0.8 * true[rows] <= price <= 1.25 * true[rows]


def test_a_machine_that_stays_slow_is_believed() -> None:
    decode = alone(1000, 1200)
    for _ in range(100):
        decode = step_prices.record_step_time(decode, Shape(0, 1, 4), 3600)
    assert decode[1][3] > 3200


def test_a_price_is_what_was_measured_at_one_pace_of_the_machine() -> None:
    """If plain steps have become slower since, the wide one has, too. If they have become quicker, it may have, or they
    alone were held up before. Then it is charged for what it takes, and believed at once.
    """
    one, then = Shape(0, 1, 4), TimedStep(0, 1, 4, 1200, 1000)
    for plain, doubted in ((1000, set()), (3000, set()), (900, set()), (800, {4})):
        decode = (TimedStep(0, 1, 0, plain, 0), then)
        offer = step_prices.estimate_prices(decode, 0, 1, 4)
        assert offer.prices == (1200,)
        assert offer.doubted_buckets == doubted
        assert step_prices.record_step_time(decode, one, 1400)[1][4] == plain
        plan = plan_for([(3, evolve(KNOWN, seen=1))], offer, STEEP, 64)
        assert (plan.proposals, plan.price_doubted, plan.steps == 1) == ((3,), bool(doubted), bool(doubted))
        assert control.charge_step(plan, evolve(done(3, 0), ns=2 * plain)) == (2 * UNIT if doubted else 1200)
    quick = (TimedStep(0, 1, 0, 500, 0), then)
    for took in (400, 700, 1900):
        after = step_prices.record_step_time(quick, one, took)
        assert after[1] == TimedStep(0, 1, 4, took, 500)
        assert not step_prices.estimate_prices(after, 0, 1, 4).doubted_buckets
    slow = (TimedStep(0, 1, 0, 3000, 0), then)
    assert step_prices.record_step_time(slow, one, 3600)[1] == TimedStep(0, 1, 4, 3600, 3000), "as dear as it was"
    assert step_prices.record_step_time(slow, one, 1200)[1] == TimedStep(0, 1, 4, 1200, 3000), (
        "nothing is quicker than it can be"
    )
    assert not step_prices.estimate_prices(slow, 0, 1, 4).plain_suspect


@usual_where(lambda places: places["noisy"] == places["pace"] % 2)
@pytest.mark.parametrize("pace", [2, 3, 10])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_draft_that_is_never_right_is_not_free_because_the_machine_became_slower(pace: int, noisy: bool) -> None:
    """The machine becomes slower in the middle of an answer, then quick again, and so on. The request loses no more
    than on a steady machine.
    """
    lost, _, _ = one_answer(never, [1, pace, 1, pace], 256, noisy)
    assert lost <= UNKNOWN.account + REFILL * 1024


@usual_where(lambda places: places["noisy"] == places["pace"] % 2)
@pytest.mark.parametrize("pace", [2, 3, 10])
@pytest.mark.parametrize("noisy", [False, True])
def test_nor_does_a_good_draft_seem_dear_for_that(pace: int, noisy: bool) -> None:
    lost, _, proposing = one_answer(lambda proposed, _: min(proposed, 2), [1, pace, 1, pace], 1024, noisy)
    assert lost < -0.5 * UNIT * 4096
    assert proposing > 1000, "of 1,366"


def one_answer(draft: Draft, paces: list[int], tokens: int, noisy: bool) -> tuple[int, Rates, int]:
    """Return what one answer loses, in thousandths of plain steps at the pace of each, the rates after it, and its
    number of steps with proposals. tokens: of the answer at each pace.
    """
    true, rng = {0: 1000, 4: 1200, 8: 1500, 16: 2200}, random.Random(1)
    rates, own, lost, proposing, proposing_steps = STEEP, control.make_control(CHAIN, STEEP), 0, 0, 0
    for pace in paces:
        said = 0
        while said < tokens:
            offer = step_prices.estimate_prices(rates.decode, 0, 1, 64)
            plan = plan_for(
                [(15, own)], offer, rates, 0 if proposing >= 64 or (proposing and offer.plain_suspect) else 64
            )
            proposed = plan.proposals[0]
            proposing, proposing_steps = proposing + 1 if proposed else 0, proposing_steps + (proposed > 0)
            shape = Shape(0, 1, proposed and 1 + proposed)
            took = pace * true[shape.key[2]] * (rng.choice((100, 100, 105, 130)) if noisy else 100) // 100
            rates = control.record_step(rates, plan)
            if not plan.charges_measured_time or UNIT * took < plan.price * plan.plain_ns:
                rates = evolve(rates, decode=step_prices.record_step_time(rates.decode, shape, took))
            step = done(proposed, draft(proposed, said), took)
            rates, own = (
                control.record_speculation_outcome(CHAIN, rates, plan, step),
                suffix_control.update_control(evolve(own, plan=plan), step),
            )
            said += len(step.tokens)
            lost += true[shape.key[2]] - UNIT * len(step.tokens)
    return lost, rates, proposing_steps


def sure(*gains: int, rates: Rates = STEEP, **changes: Any) -> SpeculationControl:
    return evolve(control.make_control(CHAIN, rates), gains=gains, **changes)


KNOWN = control.make_control(CHAIN, STEEP)
ALONE = step_prices.estimate_prices(STEEP.decode, 0, 1, 64)


def make_candidates(members: Sequence[tuple[int, SpeculationControl | None]]) -> list[control.ProposalCandidate]:
    return [control.ProposalCandidate(limit, known) for limit, known in members]


def plan_for(
    members: Sequence[tuple[int, SpeculationControl | None]], prices: StepPrices, rates: Rates, row_limit: int
) -> Plan:
    """Plan a step of members, each with the most that it may propose and its control."""
    return control.plan_launch(make_candidates(members), prices, rates, row_limit)


def done(proposed: int, right: int, ns: int = 0) -> Decoded:
    return Decoded((7,) * (1 + right), proposed, ns=ns, accepted=right)


# --- what is proposed ---


@pytest.mark.parametrize(
    ("gains", "wanted", "proposed"),
    [
        ((3000, 7000, 15000), 15, 15),
        ((2500, 4500, 5000), 15, 7),
        ((1000, 1200, 1200), 15, 3),
        ((3000, 7000, 15000), 5, 5),
        ((3000, 7000, 15000), 0, 0),
    ],
)
def test_one_that_is_alone_takes_the_width_with_the_most_tokens_for_its_time(
    gains: tuple[int, ...], wanted: int, proposed: int
) -> None:
    assert plan_for([(wanted, sure(*gains))], ALONE, STEEP, 64).proposals == (proposed,)


@pytest.mark.parametrize(
    ("server", "own", "proposed"),
    [
        *((5000, 5000, 15), (4799, 5000, 7), (5000, 4799, 7), (2000, 5000, 7), (1999, 5000, 3), (200, 5000, 3)),
        *((5000, 199, 0), (-1, 4999, 0)),
    ],
)
def test_nothing_begins_that_the_server_or_a_member_cannot_bear(server: int, own: int, proposed: int) -> None:
    """The accounts must bear a step four times unless it is the cheapest: one wide step without gain ends nothing."""
    rates, member = evolve(STEEP, account=server), sure(3000, 7000, 15000, account=own)
    plan = plan_for([(15, member)], ALONE, rates, 64)
    assert plan.proposals == (proposed,)
    earning = -(-(200 - min(server, own)) // control.REFILL)
    assert proposed or plan == Plan((0,), plain_ns=1000, reason="loss_limit", steps=earning), (
        "then the first can be borne"
    )


def test_an_answer_may_lose_again_what_it_has_gained_itself() -> None:
    """And no more: where it ends, it is no later than without a draft, so the server has not lost anything by it."""
    empty, good = evolve(STEEP, account=0), sure(2500, 4000, 5000, account=INITIAL_ACCOUNT + 2000)
    plan = plan_for([(15, good)], ALONE, empty, 64)
    assert (plan.proposals, plan.price, plan.self_funded) == ((7,), 1500, True)
    assert plan_for([(15, good), (15, evolve(good, account=INITIAL_ACCOUNT))], ALONE, empty, 64).proposals == (
        0,
        0,
    )
    assert not plan_for([(15, good)], ALONE, evolve(STEEP, account=INITIAL_ACCOUNT), 64).self_funded, (
        "the server can bear it"
    )
    lost, won = done(7, 0), done(7, 7)
    assert control.record_speculation_outcome(CHAIN, empty, plan, lost).account == 0
    assert (
        suffix_control.update_control(evolve(good, plan=plan), lost).account
        == INITIAL_ACCOUNT + 2000 + UNIT + REFILL - 1500
    )
    assert control.record_speculation_outcome(CHAIN, empty, plan, won).account > INITIAL_ACCOUNT


def test_what_does_not_pay_rests_and_is_then_tried_at_the_least_price() -> None:
    bad = sure(100, 100, 100, seen=9)
    plan = plan_for([(15, bad)], ALONE, evolve(STEEP, steps_until_trial=1), 64)
    assert plan == Plan((0,), plain_ns=1000, reason="does_not_pay")
    plan = plan_for([(15, bad)], ALONE, STEEP, 64)
    assert plan == Plan((3,), 1200, 1000, is_trial=True, charges_measured_time=True, reason="does_not_pay")


@pytest.mark.parametrize("held_up", [{0}, {4}, {4, 8, 16}, {0, 4, 8, 16}], ids=str)
def test_a_start_beside_other_work_is_found_out(held_up: set[int]) -> None:
    """The steps that were held up at the start seem to take twenty times as long. Steps with proposals pay here, and
    are taken.
    """
    true = {0: 1000, 4: 1200, 8: 1400, 16: 2000}
    rates = Rates(decode=alone(*(20 * ns if rows in held_up else ns for rows, ns in true.items())))
    own, proposing, paid = control.make_control(CHAIN, rates), 0, list[int]()
    for number in range(200):
        offer = step_prices.estimate_prices(rates.decode, 0, 1, 64)
        plan = plan_for([(15, own)], offer, rates, 0 if proposing and offer.plain_suspect else 64)
        proposed = plan.proposals[0]
        proposing = proposing + 1 if proposed else 0
        shape = Shape(0, 1, proposed and 1 + proposed)
        took = true[shape.key[2]] + 100 * plan.charges_measured_time
        rates = control.record_step(rates, plan)
        if not plan.charges_measured_time or UNIT * took < plan.price * plan.plain_ns:
            rates = evolve(rates, decode=step_prices.record_step_time(rates.decode, shape, took))
        step = done(proposed, min(proposed, 3), took)
        rates, own = (
            control.record_speculation_outcome(CHAIN, rates, plan, step),
            suffix_control.update_control(evolve(own, plan=plan), step),
        )
        paid += [number] * (proposed > 0 and not plan.is_trial)
    assert paid[0] <= 64
    assert len(paid) >= 120, "of those after that nearly all"
    prices = step_prices.estimate_prices(rates.decode, 0, 1, 16).prices
    assert prices[0] <= 1300, "it is known what it costs"


def test_what_a_start_says_of_a_draft_never_keeps_it_from_being_tried() -> None:
    assert step_prices.estimate_prices(alone(1000, 87_000, 90_000, 99_000), 0, 1, 16).prices == (3000, 5000, 9000)
    assert step_prices.estimate_prices((*alone(1000, 87_000), TimedStep(0, 4, 0, 1000, 0)), 0, 4, 16).prices == (
        3000,
        5000,
        9000,
    )
    assert not control.list_widths(evolve(CHAIN, batch_rows=1)), "there no step has room for a proposal"


def test_without_a_request_for_any_nothing_is_proposed() -> None:
    for members in ([(0, KNOWN)], [(0, KNOWN), (0, KNOWN)], [(0, None), (0, None)]):
        assert plan_for(members, ALONE, STEEP, 64) == Plan((0,) * len(members), plain_ns=1000)


def test_a_plain_step_is_measured_first() -> None:
    offer = step_prices.estimate_prices(STEEP.decode, 0, 4, 64)
    assert offer.needs_plain_step
    assert plan_for([(7, KNOWN)], offer, STEEP, 64) == Plan((0,), plain_ns=offer.plain_ns)
    assert not step_prices.estimate_prices((), 0, 4, 64).needs_plain_step, "nothing is measured here"
    assert not ALONE.needs_plain_step


@pytest.mark.parametrize(("wide", "held_up"), [(4000, True), (5000, True), (5001, False)])
def test_a_plain_step_that_seems_no_quicker_than_a_wide_one_was_held_up(wide: int, held_up: bool) -> None:
    assert step_prices.estimate_prices(alone(5000, wide), 0, 1, 64).plain_suspect == held_up


FOUR = step_prices.estimate_prices(
    (*FLAT.decode, TimedStep(0, 4, 0, 1000, 0), TimedStep(0, 4, 16, 1500, 0), TimedStep(0, 4, 32, 4000, 0)), 0, 4, 64
)
RICH = evolve(STEEP, account=INITIAL_ACCOUNT)
GOOD, BAD = sure(2500, 4000, 5000, account=INITIAL_ACCOUNT), sure(100, 100, 100, account=INITIAL_ACCOUNT)


def test_a_step_has_one_price_however_many_propose() -> None:
    assert plan_for([(15, GOOD)] * 4, FOUR, RICH, 16).proposals == (3, 3, 3, 3)
    assert plan_for([(15, GOOD), (0, GOOD), (0, GOOD), (0, None)], FOUR, RICH, 16).proposals == (
        7,
        0,
        0,
        0,
    )


def test_who_gains_most_goes_first() -> None:
    """Seven rows of one that is right, rather than three of each: as many rows in all, and more tokens."""
    plan = plan_for([(15, BAD), (15, GOOD), (15, BAD), (15, BAD)], FOUR, RICH, 16)
    assert plan.proposals == (0, 7, 0, 0)
    assert plan.price == 1500


def test_a_member_that_could_not_bear_it_is_not_made_slower_by_the_others() -> None:
    poor = evolve(BAD, account=499)
    assert plan_for([(15, GOOD)] * 3 + [(15, poor)], FOUR, RICH, 16).proposals == (0, 0, 0, 0)
    assert plan_for([(15, GOOD)] * 3 + [(0, None)], FOUR, RICH, 16).proposals == (3, 3, 3, 0), "it has no account"


@given(
    wanted=st.lists(st.tuples(st.integers(0, 15), st.booleans(), st.integers(0, 5000)), min_size=1, max_size=8),
    limit=st.integers(1, 64),
    rest=st.integers(0, 1),
    data=st.data(),
)
def test_what_is_shared_is_never_more_than_was_wanted_and_fits(
    wanted: list[tuple[int, bool, int]], limit: int, rest: int, data: st.DataObject
) -> None:
    rates = evolve(data.draw(some_rates()), steps_until_trial=rest)
    known = control.make_control(CHAIN, rates)
    members = [(most if drafts else 0, evolve(known, account=own) if drafts else None) for most, drafts, own in wanted]
    plan = plan_for(members, step_prices.estimate_prices(rates.decode, 0, len(members), limit), rates, limit)
    assert all(propose <= most for propose, (most, _) in zip(plan.proposals, members, strict=True))
    assert sum(plan.proposals) + len(members) <= limit or not any(plan.proposals)
    assert all(plan.price - UNIT <= max(own, 0) for _, drafts, own in wanted if drafts)


# --- what is learnt ---


def test_a_decode_step_says_exactly_what_narrower_ones_would_have_got() -> None:
    assert list(control.sample_gains(KNOWN, 7, 5)) == [3000, 5000, 5000]
    assert list(control.sample_gains(KNOWN, 7, 2)) == [2000, 2000, 2000]
    assert list(control.sample_gains(KNOWN, 15, 15)) == [3000, 7000, 15000]


def test_a_chain_that_was_right_to_its_end_promises_more_of_a_wider_one() -> None:
    assert list(control.sample_gains(sure(3000, 3500, 3500), 3, 3)) == [3000, 7000, 15000]
    assert list(control.sample_gains(sure(1500, 1500, 1500), 3, 3)) == [3000, 4724, 5202], "0.69 + 0.69 ** 2 + ..."


def test_a_smaller_tree_says_nothing_about_what_branches_would_have_got() -> None:
    tree = evolve(control.make_control(TREE, FLAT), gains=(1000, 1500, 2000, 3000))
    assert list(control.sample_gains(tree, 7, 2)) == [2000, 2000, 2500, 3500]


def test_a_request_learns_quickly_and_the_server_from_all_of_them() -> None:
    rates, member = STEEP, KNOWN
    for _ in range(40):
        rates = control.record_speculation_outcome(CHAIN, rates, Plan((3,), 1200), done(3, 3))
        member = suffix_control.update_control(member, done(3, 3))
    known, own = rates.gains, member.gains
    rates, member = (
        control.record_speculation_outcome(CHAIN, rates, Plan((3,), 1200), done(3, 0)),
        suffix_control.update_control(member, done(3, 0)),
    )
    assert rates.seen == member.seen == 41
    assert 0.97 * known[0] <= rates.gains[0] < known[0]
    assert member.gains[0] < 0.95 * own[0]
    assert rates.account > INITIAL_ACCOUNT
    assert control.make_control(CHAIN, rates) == evolve(KNOWN, gains=rates.gains, account=INITIAL_ACCOUNT), (
        "none begins with more"
    )
    assert control.make_control(CHAIN, evolve(rates, account=700)).account == 700


def test_what_another_draft_has_taught_is_not_believed() -> None:
    assert control.make_control(CHAIN, evolve(STEEP, gains=(1, 2))).gains == KNOWN.gains


def test_rests_grow_while_tries_fail_and_shrink_while_steps_pay() -> None:
    rates, rests, trying = STEEP, list[int](), Plan((3,), 1200, is_trial=True)
    for _ in range(10):
        rates = control.record_step(rates, trying)
        rests.append(rates.steps_until_trial)
    assert rests == [1, 2, 4, 8, 16, 32, 64, 128, 256, LONGEST_TRIAL_GAP]
    for _ in range(9):
        rates = control.record_step(rates, Plan((3,), 1200))
    assert rates.next_trial_gap == 1
    plain, resting = Plan((0,), reason="does_not_pay"), evolve(STEEP, steps_until_trial=2, account=INITIAL_ACCOUNT)
    assert control.record_step(resting, plain) == evolve(resting, steps_until_trial=1)
    assert control.record_step(resting, Plan((0,))) == resting, "no request wanted any"


def test_an_account_gains_what_tokens_would_have_cost_and_loses_what_the_step_did() -> None:
    assert control.update_balance(0, Plan((0,)), done(0, 0)) == REFILL
    assert control.update_balance(0, Plan((3,), 1200), done(3, 0)) == REFILL - 200
    assert control.update_balance(0, Plan((3,), 1200), done(3, 2)) == 3 * (UNIT + REFILL) - 1200
    waits = evolve(KNOWN, plan=Plan((3, 0), 1500))
    assert suffix_control.update_control(waits, done(0, 0)).account == KNOWN.account + REFILL - 500, (
        "who does not propose pays as well"
    )
    assert (
        suffix_control.update_control(evolve(KNOWN, account=INITIAL_ACCOUNT), done(0, 0)).account
        == INITIAL_ACCOUNT + REFILL
    ), "its own gain is its own"


def test_members_share_in_the_account_of_the_server_which_has_a_limit() -> None:
    four, rates = Plan((3,) * 4, 1500), evolve(STEEP, account=0)
    for right in (3, 1, 0, 0):
        rates = control.record_speculation_outcome(CHAIN, rates, four, done(3, right))
    assert rates.account == pytest.approx(2 * (UNIT + REFILL) - 1500, abs=4)
    gained = control.record_speculation_outcome(
        CHAIN, evolve(STEEP, account=INITIAL_ACCOUNT), Plan((15,), 1200), done(15, 15)
    )
    assert gained.account == INITIAL_ACCOUNT + 16 * (UNIT + REFILL) - 1200
    assert control.record_step(gained, Plan((0,))).account == gained.account, (
        "what is earned with tokens has a limit of its own"
    )
    assert control.record_step(evolve(STEEP, account=INITIAL_ACCOUNT), Plan((0,))).account == INITIAL_ACCOUNT
    rich = evolve(STEEP, account=control.MAX_SERVER_ACCOUNT)
    assert (
        control.record_speculation_outcome(CHAIN, rich, Plan((15,), 1200), done(15, 15)).account
        == control.MAX_SERVER_ACCOUNT
    )
    assert control.record_step(evolve(STEEP, account=0), Plan((0,) * 4)).account == REFILL
    assert control.record_speculation_outcome(CHAIN, STEEP, Plan((0,) * 4), done(0, 0)) == STEEP, "once is enough"


@pytest.mark.parametrize(
    ("late", "took", "price"),
    [(True, 2400, 1200), (True, 3000, 1500), (True, 10**9, 2200), (True, 0, 1200), (False, 3000, 1200)],
)
def test_what_catches_up_is_paid_for_as_it_was(late: bool, took: int, price: int) -> None:
    assert control.charge_step(Plan((3,), 1200, 2000, charges_measured_time=late), evolve(done(3, 0), ns=took)) == price


def test_a_first_step_with_proposals_is_late_and_the_next_is_not() -> None:
    assert plan_for([(15, KNOWN)], ALONE, STEEP, 64).charges_measured_time
    assert not plan_for([(15, evolve(KNOWN, seen=1))], ALONE, STEEP, 64).charges_measured_time


# --- what comes of it ---


def decode(house: Settings, rates: Rates, *answers: tuple[Draft, int], late: int = 0) -> tuple[int, list[int], Rates]:
    """Return what answers that decode together cost by the prices, in thousandths of plain steps: until all are done,
    and each of them. late: what a step takes longer in which the draft catches up.
    """
    cost, costs, members = 0, [0] * len(answers), [control.make_control(house, rates) for _ in answers]
    answered, lengths = [0] * len(answers), [length for _, length in answers]
    while busy := [at for at, length in enumerate(lengths) if answered[at] < length]:
        # However many members there are, the prices are those of a single request.
        offer = step_prices.estimate_prices(rates.decode, 0, 1, 64)
        wanted = [(min(members[at].widths[-1], lengths[at] - answered[at] - 1), members[at]) for at in busy]
        plan = plan_for(wanted, offer, rates, 64)
        rates, took = control.record_step(rates, plan), plan.price + late * plan.charges_measured_time
        cost += took
        assert min(rates.account, *(members[at].account for at in busy)) >= 0 or late or not any(plan.proposals)
        for at, proposed in zip(busy, plan.proposals, strict=True):
            right = answers[at][0](proposed, answered[at])
            assert 0 <= right <= proposed
            step = done(proposed, right, took * offer.plain_ns // UNIT)
            members[at] = suffix_control.update_control(evolve(members[at], plan=plan), step)
            rates = control.record_speculation_outcome(house, rates, plan, step)
            costs[at] += took
            answered[at] += right + 1
            for gains in (members[at].gains, rates.gains or members[at].gains):
                assert list(gains) == sorted(gains), "a wider block is right about no fewer"
                assert all(0 <= gain <= UNIT * width for width, gain in zip(members[at].widths, gains, strict=True))
    return cost, costs, rates


def never(_: int, __: int) -> int:
    return 0


def steady(chance: float, seed: int) -> Draft:
    rng = random.Random(seed)
    return lambda proposed, _: next((right for right in range(proposed) if rng.random() >= chance), proposed)


def some_rates() -> st.SearchStrategy[Rates]:
    """Anything from rows for nothing to decode steps that cost as much as their rows, measured in part."""
    dear = st.lists(st.integers(0, 4000), min_size=4, max_size=4)
    seen = st.lists(st.booleans(), min_size=4, max_size=4)

    def make_rates(more: list[int], known: list[bool]) -> Rates:
        prices = [1000 + sum(more[: at + 1]) for at in range(4)]
        wider = [
            TimedStep(0, 1, rows, price, 1000)
            for rows, price, there in zip((4, 8, 16, 32), prices, known, strict=True)
            if there
        ]
        return Rates(decode=(TimedStep(0, 1, 0, 1000, 0), *wider))

    return st.one_of(st.sampled_from([UNKNOWN, FLAT, STEEP, HOPELESS]), st.builds(make_rates, dear, seen))


@settings(max_examples=6, deadline=None)
@given(
    rates=some_rates(),
    house=st.sampled_from([CHAIN, TREE, evolve(CHAIN, max_proposals=3), evolve(CHAIN, max_proposals=10)]),
    length=st.integers(LENGTH, 1500),
    moods=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_an_answer_never_takes_more_than_two_per_cent_longer_whatever_the_draft_does(
    rates: Rates, house: Settings, length: int, moods: list[tuple[int, int]], seed: int
) -> None:
    """Moods: for so many decode steps every proposal is right with such a chance; then the next one, around again."""
    rng, steps = random.Random(seed), [chance for times, chance in moods for _ in range(times)]
    turn = iter(range(10**9))

    def moody(proposed: int, _: int) -> int:
        chance = steps[next(turn) % len(steps)]
        return next((right for right in range(proposed) if rng.random() * 100 >= chance), proposed)

    cost, _, after = decode(house, rates, (moody, length))
    assert cost <= UNIT * length + rates.account + REFILL * length <= 1.02 * UNIT * length
    cost, _, _ = decode(house, after, (never, length))
    assert cost <= UNIT * length + INITIAL_ACCOUNT + REFILL * length, "nor after one in which much was gained"


@usual_where(lambda places: places["length"] == 0)
@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
@pytest.mark.parametrize("length", [LENGTH, 1500])
@pytest.mark.parametrize(
    "patiences", [(1, 2, 3, 5, 8, 11), pytest.param((4, 6, 7, 9, 10), marks=pytest.mark.long)], ids=str
)
def test_nor_where_the_draft_knows_what_would_hurt_most(rates: Rates, length: int, patiences: tuple[int, ...]) -> None:
    """Right whenever it is trusted little, wrong whenever it is trusted much: it sees the estimates."""
    worst = 0
    for patience in patiences:
        streak = 0

        def malicious(proposed: int, _: int, patience: int = patience) -> int:
            nonlocal streak
            streak = (streak + 1) % (patience + 1) if proposed else streak
            return proposed if streak == 0 else 0

        worst = max(worst, decode(CHAIN, rates, (malicious, length))[0])
    assert worst <= 1.015 * UNIT * length


@one_in(2, "rates", 1)
@pytest.mark.parametrize("rates", [FLAT, STEEP])
def test_an_answer_is_not_later_for_what_the_one_before_it_has_lost(rates: Rates) -> None:
    """The draft is like real ones: right about most of one answer's code, and about nothing of the next answer."""
    rng = random.Random(0)

    def good(proposed: int, _: int) -> int:
        return next((right for right in range(proposed) if rng.random() >= 0.7), proposed)

    found: dict[Draft, list[int]] = {good: [], never: []}
    for turn in range(60):
        draft = good if turn % 3 else never
        cost, _, rates = decode(CHAIN, rates, (draft, 192))
        found[draft].append(cost)
    behind, later = sum(found[good][2::2]), sum(found[good][3::2])  # a bad one, and one further
    assert behind < 1.1 * later < UNIT * 192 * 20
    assert max(found[never]) <= UNIT * 192 + INITIAL_ACCOUNT + REFILL * 192


@usual_where(lambda places: places["members"] == places["rates"] % 2)
@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
@pytest.mark.parametrize("members", [1, 4])
def test_a_draft_that_is_never_right_costs_next_to_nothing_after_the_first_answers(rates: Rates, members: int) -> None:
    costs, late = list[int](), 300 if rates.decode else 0  # where nothing is measured, it is not known what is late
    for _ in range(30):
        cost, _, rates = decode(CHAIN, rates, *[(never, 64)] * members, late=late)
        costs.append(cost)
    assert costs[0] <= UNIT * 64 + UNKNOWN.account + REFILL * 64 + late
    assert sum(costs) <= (UNIT + REFILL) * 64 * 30 + UNKNOWN.account + late
    assert sum(costs[20:]) <= 1.006 * UNIT * 64 * 10


@one_in(2, "rates")
@pytest.mark.parametrize(
    ("rates", "chance", "others"), cover_pairs([UNKNOWN, FLAT, STEEP], [0.0, 0.3, 0.8], [0.0, 0.5, 0.9])
)
def test_no_answer_is_made_slower_by_the_batch_it_is_in(rates: Rates, chance: float, others: float) -> None:
    """It loses no more than the server had to spare when it came."""
    for seed in range(3):
        rates = evolve(rates, account=INITIAL_ACCOUNT)
        answers = [(steady(chance, seed), 200), *((steady(others, 99 - at), 400) for at in range(3))]
        _, costs, _ = decode(CHAIN, rates, *answers)
        assert costs[0] <= (UNIT + REFILL) * 200 + INITIAL_ACCOUNT


@usual_where(lambda places: (places["rates"] + places["chance"]) % 2 == 0)
@pytest.mark.parametrize("rates", [UNKNOWN, FLAT, STEEP])
@pytest.mark.parametrize("chance", [0.6, 0.75, 0.9, 0.97])
def test_a_steady_draft_gives_nearly_what_its_best_width_would(rates: Rates, chance: float) -> None:
    """0.75: four tokens a step. Against the one width that is best on average, known beforehand."""
    length, runs, offer = 1000, 3, step_prices.estimate_prices(rates.decode, 0, 1, 64)
    expected = {width: 1 + sum(chance**right for right in range(1, width + 1)) for width in KNOWN.widths}
    best = min(offer.price_of(1 + width) / tokens for width, tokens in expected.items()) * length
    cost = sum(decode(CHAIN, rates, (steady(chance, seed), length))[0] for seed in range(runs)) / runs
    assert cost <= 1.06 * best
    assert best < 0.8 * UNIT * length


def test_a_draft_that_turns_good_is_found_out() -> None:
    def turning(proposed: int, answered: int) -> int:
        return proposed if answered >= 300 else 0

    cost, _, _ = decode(CHAIN, STEEP, (turning, 1300))
    assert cost <= 0.6 * UNIT * 1300


def test_a_request_that_the_draft_suits_is_found_out_where_it_suited_no_other() -> None:
    rates = STEEP
    for _ in range(10):
        _, _, rates = decode(CHAIN, rates, (never, 64))
    cost, _, _ = decode(CHAIN, rates, (steady(0.9, 1), 1500))
    assert cost <= 0.6 * UNIT * 1500


@one_in(2, "members")
@pytest.mark.parametrize(("members", "dear", "chance"), cover_pairs([2, 4, 16], [1.0, 1.5, 3.0], [0.8, 0.3, 0.0]))
def test_a_batch_is_never_more_than_one_and_a_half_per_cent_slower(members: int, dear: float, chance: float) -> None:
    """Answers of 64 tokens come and go; steps really cost `dear` times what is presumed of them."""
    rng, rates, busy = random.Random(members), STEEP, list[tuple[SpeculationControl, int]]()
    true = {0: 1000} | {rows: round(dear * ns) for _, _, rows, ns, _ in STEEP.decode if rows} | {32: 4000, 64: 8000}
    time = tokens = 0
    while tokens < 10_000:
        busy += [(control.make_control(CHAIN, rates), 64)] * (members - len(busy))
        offer = step_prices.estimate_prices(rates.decode, 0, members, 64)
        plan = plan_for([(min(15, left - 1), each) for each, left in busy], offer, rates, 64)
        shape = Shape(0, members, sum(plan.proposals) and members + sum(plan.proposals))
        took = true[shape.key[2]]
        rates, time = control.record_step(rates, plan), time + took
        if not plan.charges_measured_time:
            rates = evolve(rates, decode=step_prices.record_step_time(rates.decode, shape, took))
        after = list[tuple[SpeculationControl, int]]()
        for (each, left), proposed in zip(busy, plan.proposals, strict=True):
            step = done(proposed, steady(chance, rng.randrange(10**6))(proposed, 0), took)
            rates = control.record_speculation_outcome(CHAIN, rates, plan, step)
            tokens += len(step.tokens)
            if left > len(step.tokens):
                after.append((suffix_control.update_control(evolve(each, plan=plan), step), left - len(step.tokens)))
        busy = after
    assert time / (UNIT * tokens / members) <= (1.015 if dear < 3 else 1.04), (
        "what is tried for the first time may be three times as dear as presumed"
    )
    assert chance < 0.8 or dear > 1 or members > 2 or time / (UNIT * tokens / members) < 0.8


# --- the example of docs/SPECULATION.md ---

MEASURED = Rates(decode=alone(10_000, 15_000, 17_000, 22_000))


@pytest.mark.parametrize(
    ("right", "proposed", "accounts"),
    [
        ((2, 0, 3, 1), [3, 3, 3, 7], [6230, 5740, 8280, 8600]),
        ((0,) * 11, [*(3,) * 9, 0, 0], [4210, 3720, 3230, 2740, 2250, 1760, 1270, 780, 290, 300, 310]),
    ],
)
def test_the_example_of_one_request(right: tuple[int, ...], proposed: list[int], accounts: list[int]) -> None:
    rates, member, found = MEASURED, control.make_control(CHAIN, MEASURED), list[tuple[int, int]]()
    for number, accepted in enumerate(right):
        plan = plan_for([(15, member)], step_prices.estimate_prices(rates.decode, 0, 1, 64), rates, 64)
        step = done(plan.proposals[0], accepted, plan.price * 10 + 3000 * (number == 0))
        member, rates = (
            suffix_control.update_control(evolve(member, plan=plan), step),
            control.record_step(rates, plan),
        )
        rates = control.record_speculation_outcome(CHAIN, rates, plan, step)
        found.append((plan.proposals[0], rates.account))
    assert found == list(zip(proposed, accounts, strict=True))
    assert member.account == accounts[-1], "its own account is the server's, as no other request is there"


@pytest.mark.parametrize(
    ("gains", "proposed", "worth"),
    [
        ([(1300, 1600, 1700)] * 4, (3, 3, 3, 3), [3854, 5257, 3200, 4160, 2280, 2979]),
        ([(2400, 4500, 5500)] + [(200, 200, 200)] * 3, (7, 0, 0, 0), [4654, 4000, 4857, 3640, 3800, 2786]),
    ],
)
def test_the_example_of_four(gains: list[tuple[int, ...]], proposed: tuple[int, ...], worth: list[int]) -> None:
    four = (
        TimedStep(0, 4, 0, 16_000, 0),
        TimedStep(0, 4, 8, 22_000, 0),
        TimedStep(0, 4, 16, 28_000, 0),
        TimedStep(0, 4, 32, 40_000, 0),
    )
    offer, rich = (
        step_prices.estimate_prices((*MEASURED.decode, *four), 0, 4, 64),
        evolve(MEASURED, account=INITIAL_ACCOUNT),
    )
    members = [(15, sure(*each, account=INITIAL_ACCOUNT)) for each in gains]
    assert [control.rate_option(way) for way in control.list_options(make_candidates(members), offer, 64)] == worth
    assert plan_for(members, offer, rich, 64).proposals == proposed
