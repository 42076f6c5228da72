"""Branches of copied chains: what they are expected to give, and when a launch proposes trees."""

from __future__ import annotations

import pytest
from attrs import evolve

from effects.decode import MATCH_CLASSES, Copying, Decoded, find_match_class
from states import copy_branches, copy_records, launch_choice, speculation_control
from states import suffix_control as control
from states.rates import ClassGains, Rates, TimedStep
from states.speculation_plan import CopyPrices, Plan, SpeculationControl
from states.step_prices import UNIT, Shape, StepPrices
from tests.states.builders import PLAIN

WIDTHS = (3, 7, 15)
TREES = evolve(PLAIN, max_copied=15, max_branch=7, batch_rows=64)
PLAIN_TIMES = tuple(TimedStep(0, members, 0, 1000, 0) for members in (1, 2, 4))
CHAINS = tuple(TimedStep(0, 1, rows, ns, 1000) for rows, ns in ((4, 1100), (8, 1200), (16, 1300)))
LEARNED = tuple(ClassGains(16, (2000, 4000, 7000), 2000) for _ in MATCH_CLASSES)
KNOWN = Rates(decode=PLAIN_TIMES, copy_times=CHAINS, copied=LEARNED)
MATCHED = 40
LONG = find_match_class(MATCHED)


def with_tree_times(*times: int) -> Rates:
    """Trees of 8 and 16 rows take so long."""
    return evolve(
        KNOWN, branch_times=tuple(TimedStep(0, 1, 8 << at, ns, 1000) for at, ns in enumerate(times)), account=5 * UNIT
    )


def copier(rates: Rates = KNOWN, **changes) -> SpeculationControl:
    return evolve(control.make_control(TREES, rates), widths=(), gains=(), matched=MATCHED, **changes)


def plan_for(rates: Rates, *controls: SpeculationControl) -> Plan:
    prices = copy_branches.estimate_copy_prices(rates, Shape(0, len(controls)), 64)
    plain = Plan((0,) * len(controls), steps=launch_choice.UNLIMITED_STEPS)
    return control.plan_copies(plain, controls, prices, rates, 64)


def rule_of(plan: Plan) -> Copying:
    (rule, *_) = plan.copying
    assert rule is not None
    return rule


@pytest.mark.parametrize(
    ("width", "most", "count"),
    [(3, 7, 0), (7, 7, 1), (15, 7, 3), (31, 7, 7), (31, 2, 2), (15, 0, 0)],
)
def test_a_quarter_of_the_copied_tokens_may_be_a_branch(width: int, most: int, count: int) -> None:
    assert copy_branches.count_branch_tokens(width, most) == count


def test_a_tree_gives_what_its_shorter_chain_and_its_branch_give() -> None:
    known = ClassGains(9, (2000, 4600, 6200), 750)
    assert copy_branches.estimate_tree_gain(known, WIDTHS, 2, 3) == 4600 + 1600 * 5 // 8 + 750
    assert copy_branches.estimate_tree_gain(known, WIDTHS, 0, 1) == 2000 * 2 // 3 + 750


# --- what is proposed ---


def test_a_tree_is_proposed_where_its_price_is_that_of_a_chain() -> None:
    rule = rule_of(plan_for(with_tree_times(1200, 1300), copier()))
    assert (rule.counts[LONG], rule.branches[LONG]) == (12, 3)
    assert rule.rows == 16


def test_a_chain_is_proposed_where_a_tree_costs_much_more() -> None:
    rule = rule_of(plan_for(with_tree_times(2400, 2600), copier()))
    assert (rule.counts[LONG], rule.branches[LONG]) == (15, 0)
    assert rule == rule_of(plan_for(evolve(KNOWN, account=5 * UNIT), copier(max_branch=0)))


def test_a_tree_is_proposed_up_to_the_price_that_its_branch_is_worth() -> None:
    known = LEARNED[LONG]
    tree = UNIT + copy_branches.estimate_tree_gain(known, WIDTHS, 2, 3)
    chain = UNIT + known.gains[2]
    worth = 1300 * tree // chain
    branches = {
        ns: rule_of(plan_for(with_tree_times(9000, ns), copier())).branches[LONG] for ns in (worth - 5, worth + 5)
    }
    assert branches == {worth - 5: 3, worth + 5: 0}


def test_no_branch_is_proposed_where_the_model_verifies_chains_only_or_nothing_is_known_of_branches() -> None:
    rates = with_tree_times(1200, 1300)
    assert not any(rule_of(plan_for(rates, copier(max_branch=0))).branches)
    unknown = evolve(rates, copied=tuple(evolve(one, branch_gain=0) for one in LEARNED))
    assert not any(rule_of(plan_for(unknown, copier(unknown))).branches)


def test_a_request_that_decodes_alone_finds_out_what_trees_cost() -> None:
    rates = evolve(KNOWN, account=5 * UNIT)
    plan = plan_for(rates, copier())
    rule = rule_of(plan)
    assert rule.branches[LONG] == 3
    assert rule.steps == 1, "the core decides again when the first time is known"
    slow = Decoded((1,), 15, ns=1900, accepted=0, copied=12, rows=16, branched=True)
    assert speculation_control.charge_step(plan, slow) == 1900, "its price was a guess"
    assert speculation_control.charge_step(plan, evolve(slow, ns=9000)) == 1300 + UNIT
    chain = evolve(slow, copied=15, branched=False)
    assert speculation_control.charge_step(plan, chain) == 1300
    learned = copy_records.record_copy_time(rates, Shape(0, 1, 16), 4000, branched=True)
    assert learned.copy_times == rates.copy_times
    assert learned.branch_times == (TimedStep(0, 1, 16, 4000, 1000),)
    after = rule_of(plan_for(learned, copier()))
    assert (after.branches[LONG], after.counts[LONG]) == (0, 15)
    assert after.steps > 1


def test_several_requests_propose_trees_only_once_their_price_is_known() -> None:
    rates = evolve(KNOWN, account=5 * UNIT)
    assert not any(rule_of(plan_for(rates, copier(), copier())).branches)
    assert rule_of(plan_for(with_tree_times(1200, 1300), copier(), copier())).branches[LONG] > 0


def test_prices_of_trees_are_never_below_those_of_chains() -> None:
    prices = copy_branches.estimate_copy_prices(with_tree_times(1010, 1020), Shape(0, 1), 64)
    assert prices.branches.price_of(16) == prices.chains.price_of(16) == 1300
    assert not prices.branches.doubted_buckets


def test_the_accounts_can_pay_for_several_trees_that_give_nothing() -> None:
    rates = with_tree_times(1250, 1350)
    for account, branch in ((4 * 350, 3), (4 * 350 - 1, 0)):
        assert rule_of(plan_for(rates, copier(account=account))).branches[LONG] == branch, account


def test_rows_are_limited_by_the_price_of_trees_where_trees_are_copied() -> None:
    rates = evolve(with_tree_times(1200, 1300), decode=PLAIN_TIMES)
    dear = evolve(rates, branch_times=(*rates.branch_times, TimedStep(0, 4, 64, 9000, 1000)))
    four = [copier(account=3000) for _ in range(4)]
    assert rule_of(plan_for(rates, *four)).rows >= rule_of(plan_for(dear, *four)).rows >= 19


# --- what is learned ---


def after_steps(*steps: Decoded) -> ClassGains:
    rates = evolve(KNOWN, copied=tuple(evolve(one, branch_gain=0) for one in LEARNED))
    plan = Plan((0,), copy_prices=copy_branches.estimate_copy_prices(rates, Shape(0, 1), 64))
    state = copier(rates, plan=plan)
    for step in steps:
        state = control.update_control(state, evolve(step, matched=MATCHED))
    return state.copied[LONG]


def test_chains_tell_what_a_branch_would_have_given() -> None:
    missed = Decoded((1, 2, 3), 15, accepted=2, copied=15, rows=16)
    assert after_steps(missed).branch_gain == 0
    hit = after_steps(evolve(missed, on_branch=1))
    usual = speculation_control.estimate_acceptance(15, 7000)
    assert hit.branch_gain == (UNIT + speculation_control.estimate_chain_gain(2, usual)) // 8
    assert hit.gains == after_steps(missed).gains, "the chain has gained the same"
    forgotten = after_steps(evolve(missed, on_branch=1), *[missed] * 200)
    assert forgotten.branch_gain == 0


def test_a_tree_tells_apart_what_its_chain_and_its_branch_have_given() -> None:
    tree = Decoded((1, 2, 3, 4, 5), 15, accepted=4, copied=12, rows=16, branched=True, on_branch=2)
    chain = Decoded((1, 2, 3), 12, accepted=2, copied=12, rows=16)
    found = after_steps(tree)
    assert found.branch_gain == 2 * UNIT // 8
    assert found.gains == after_steps(chain).gains
    assert copy_branches.count_chain_accepted(tree) == 2


def test_a_new_request_expects_of_branches_what_all_requests_have_learned() -> None:
    tree = Decoded((1, 2, 3, 4, 5), 15, accepted=4, copied=12, rows=16, branched=True, on_branch=2)
    state = copier(evolve(KNOWN, copied=()), plan=Plan((0,), copy_prices=CopyPrices(StepPrices(1, 1000, (1100,)))))
    rates = copy_records.record_copies(TREES, evolve(KNOWN, copied=()), state, tree, 1)
    assert rates.copied[LONG].branch_gain == 250
    assert control.make_control(TREES, rates).copied[LONG] == ClassGains(
        0, rates.copied[LONG].gains, rates.copied[LONG].branch_gain
    )


@pytest.mark.parametrize("tree_ns", [1300, 4000])
def test_trees_settle_on_what_pays(tree_ns: int) -> None:
    """Each chain ends at its third token, where the branch would have gone on for all its tokens."""
    rates = evolve(KNOWN, copied=(), account=5 * UNIT)
    state, trees, lost = copier(rates), [], 0
    for _ in range(300):
        plan = plan_for(rates, state)
        state = evolve(state, plan=plan)
        rates = copy_records.record_launch_begin(rates, plan)
        rule = plan.copying[0] if plan.copying else None
        for _ in range(min(rule.steps, 4) if rule else 1):
            chain, branch = (rule.counts[LONG], rule.branches[LONG]) if rule else (0, 0)
            rows = 1 + chain + branch if chain else 0
            right = min(chain, 2)
            on_branch = (branch or 1) if chain > 2 else 0
            accepted = right + (on_branch if branch and chain > 2 else 0)
            ns = (tree_ns if branch else 1300) if chain else 1000
            done = Decoded(
                tuple(range(1, 2 + accepted)), chain + branch, ns=ns, accepted=accepted, matched=MATCHED, copied=chain
            )
            done = evolve(done, rows=rows, branched=branch > 0, on_branch=on_branch)
            if chain:
                rates = copy_records.record_copy_time(rates, Shape(0, 1, rows), ns, branched=branch > 0)
                rates = copy_records.record_copies(TREES, rates, state, done, 1)
                trees.append(branch > 0)
            rates = copy_records.record_further_steps(rates, plan, done, 1)
            rates = speculation_control.record_speculation_outcome(TREES, rates, plan, done)
            state = control.update_control(state, done)
            lost += ns - 1000 * len(done.tokens)
    assert len(trees) > 100
    if tree_ns == 1300:
        assert sum(trees[-50:]) > 40
    else:
        assert 1 <= sum(trees) <= 3, "its price is known after the first one"
    assert lost < 0
