"""Branches of copied chains: how many rows they get, what steps with them cost, and what they give.

Problem. A chain of copies ends at its first wrong token, which is often where earlier text went on in two ways. A step
can verify the second way as well, as a branch of a tree (`IndexedText.find_branch`). But a tree costs more than a chain
of as many rows, because a branch attends apart. On a CPU it also leaves the quickest path of a step.

Idea. A branch takes rows from the chain: a quarter of the copied tokens. So chain and tree of one width are verified in
one forward of the same size, and differ in price and in gain only.

* The price is learned from steps that had a branch (`Rates.branch_times`). Before there is one, it is taken to be that
  of a chain. Then only a request that decodes alone may try a branch. Its launch may take plain steps first, but its
  first step with copies is the last one (`Copying.steps` is 1). That step is charged what it took.
* The gain is known before anything is paid for. Every outcome of a chain says whether the branch would have begun with
  the token that the target picked instead of the chain's next one (`Decoded.on_branch`).

Example. After matches of 9 to 16 tokens, 6.2 of 15 copied tokens are right and 4.6 of 7, so 5.6 of 12 are. In one of
four steps the target goes on as the second place does, for three tokens: a branch of 3 gives 0.75 more. A tree of 12
and 3 gives 7.35 tokens with the target's own, and the chain of 15 gives 7.2. So a tree is proposed only if it costs at
most 1.02 times as much as the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge

from attrs import evolve

from effects.decode import Decoded
from states.rates import ClassGains, DecodeTimes, Rates
from states.speculation_control import PRIOR_STEPS, estimate_acceptance, estimate_chain_gain
from states.speculation_plan import CopyPrices
from states.step_prices import SMALLEST_BUCKET, UNIT, Shape, StepPrices, estimate_prices

CHAIN_SHARE = 4  # of so many copied tokens, one is on the branch


def count_branch_tokens(width: int, most: int) -> int:
    """Return how many of `width` copied tokens are on the branch, at most `most`."""
    return min(width // CHAIN_SHARE, most)


# --- what steps with branches cost ---


def estimate_copy_prices(rates: Rates, shape: Shape, most_rows: int) -> CopyPrices:
    """Return the prices of steps in which these requests copy, up to `most_rows` rows. shape: of their plain step.

    A price is doubted if it was guessed: no step of so many requests with as many rows, or more, was timed.
    """
    times = merge_plain_times(rates, rates.copy_times)
    chains = estimate_prices(times, shape.span, shape.members, most_rows, only_rows_cost=True)
    widest = max(
        (step_time.rows for step_time in rates.copy_times if step_time[:2] == (shape.span, shape.members)), default=0
    )
    sizes = [SMALLEST_BUCKET << index for index in range(len(chains.prices))]
    guessed = frozenset(rows for rows in sizes if rows > max(widest, shape.members))
    chains = evolve(chains, doubted_buckets=chains.doubted_buckets | guessed)
    return CopyPrices(chains, estimate_branch_prices(rates, shape, most_rows, chains))


def merge_plain_times(rates: Rates, times: DecodeTimes) -> DecodeTimes:
    """Return the times of plain steps and these of steps with copies, in the format of `Rates.decode`."""
    return tuple(merge((step_time for step_time in rates.decode if not step_time.rows), times))


def estimate_branch_prices(rates: Rates, shape: Shape, most_rows: int, chains: StepPrices) -> StepPrices:
    """Return the prices of steps with branches. They are never below those of chains.

    Where nothing is known of them, they are taken to be those of chains, and are doubted.
    """
    near = {(shape.span, shape.members), (shape.span, 1), (0, 1)}
    if not any((step_time.span, step_time.members) in near for step_time in rates.branch_times):
        sizes = frozenset(SMALLEST_BUCKET << index for index in range(len(chains.prices)))
        return evolve(chains, doubted_buckets=sizes)
    found = estimate_prices(merge_plain_times(rates, rates.branch_times), shape.span, shape.members, most_rows)
    return evolve(found, prices=tuple(map(max, found.prices, chains.prices)))


# --- what branches give ---


def count_chain_accepted(done: Decoded) -> int:
    """Return how many tokens of the copied chain were right."""
    return done.accepted - (done.on_branch if done.proposed > done.copied else 0)


def update_branch_gain(known: ClassGains, widths: Sequence[int], done: Decoded, memory: int) -> int:
    """Return `ClassGains.branch_gain` after one more step with copies. It is a moving average, as the gains are.

    If no branch was proposed although its first token would have been right, those after it are estimated with the
    acceptance that copies of this class usually have.
    """
    weight = min(known.seen + PRIOR_STEPS, memory)
    sample = UNIT * done.on_branch
    if done.on_branch and done.proposed == done.copied:
        at = next((index for index, width in enumerate(widths) if width >= done.copied), len(widths) - 1)
        acceptance = estimate_acceptance(widths[at], known.gains[at])
        sample += estimate_chain_gain(max(0, widths[at] // CHAIN_SHARE - 1), acceptance)
    return (known.branch_gain * (weight - 1) + sample) // weight


def estimate_tree_gain(known: ClassGains, widths: Sequence[int], at: int, branch: int) -> int:
    """Return how many of `widths[at]` copied tokens are expected to be right if `branch` of them are on a branch.

    The gain of the chain lies between those of the next narrower width and of this one.
    """
    below = widths[at - 1] if at else 0
    gain_below = known.gains[at - 1] if at else 0
    share = widths[at] - branch - below
    return gain_below + (known.gains[at] - gain_below) * share // (widths[at] - below) + known.branch_gain
