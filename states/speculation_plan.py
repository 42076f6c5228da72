"""The plan of a launch with proposals, and the knowledge of how well a request's proposals do.

`states/speculation_control.py` and `states/suffix_control.py` make and update these values.
"""

from __future__ import annotations

from functools import cached_property

from attrs import frozen

from effects.decode import Copying
from states.rates import ClassGains
from states.step_prices import UNIT, StepPrices

NO_PRICES = StepPrices()


@frozen
class CopyPrices:
    """The prices of steps in which something is copied. branches: of those in which a member's copies have a branch."""

    chains: StepPrices = NO_PRICES
    branches: StepPrices = NO_PRICES


NO_COPY_PRICES = CopyPrices()


@frozen
class Plan:
    """The proposals of the members of a step, and what they cost the step."""

    proposals: tuple[int, ...] = ()
    price: int = UNIT
    plain_ns: int = 0  # nanoseconds of a plain step; 0: not measured
    is_trial: bool = False  # it is not expected to pay
    charges_measured_time: bool = False  # a trial, or the draft first catches up with rows: its price says little
    price_doubted: bool = False  # the price may be too low: a step is charged its measured time if that is more
    self_funded: bool = False  # its members can pay for it with their own gains, so the server's account does not
    # Machine-readable: why some members propose nothing. `does_not_pay`: no way to propose is expected to give more
    # than a plain step. `loss_limit`: some way is, but the accounts cannot bear it. `draft_lost`: the draft's process
    # has gone. Empty: a plain step is due, or no member wants proposals.
    reason: str = ""
    # How many steps the launch may take by this plan, plain ones included, however many proposals are right. Steps with
    # copies have a limit of their own (`Copying.steps`).
    steps: int = 1
    # What the members copy, as `states/suffix_control.py` has chosen; empty: nothing.
    copying: tuple[Copying | None, ...] = ()
    copy_prices: CopyPrices = NO_COPY_PRICES
    copy_trials: frozenset[int] = frozenset()  # classes of matches after which copies are not expected to pay

    @cached_property
    def charges_plain_steps(self) -> bool:
        """May a step of the launch cost more than a plain one although a member proposed and copied nothing in it?"""
        return self.price != UNIT or self.charges_measured_time or self.price_doubted

    @cached_property
    def copies_alone(self) -> bool:
        """May the launch copy text while no draft proposes anything?"""
        return bool(self.copying) and not any(self.proposals)

    @property
    def considers_copies(self) -> bool:
        """May the launch copy text, or is there a reason for proposing nothing?

        The steps of such a launch are counted although members have ended. They bring the next trial nearer, or say how
        long ago the last plain step was.
        """
        return bool(self.copying or self.reason)

    @cached_property
    def is_plain(self) -> bool:
        """Are all steps plain ones, as nothing is proposed or copied?"""
        return not (self.copying or any(self.proposals) or self.charges_plain_steps)


NO_PLAN = Plan()


@frozen
class SpeculationControl:
    """The knowledge about one request: how often its proposals are right, and the time that they may still lose."""

    widths: tuple[int, ...]  # numbers of proposals that are worth considering, ascending
    gains: tuple[int, ...]  # proposals that are expected to be right, in thousandths, one for each width
    branching: bool = False  # proposals are trees: a smaller one says little about what a larger one would have got
    seen: int = 0  # decode steps with proposals
    account: int = 0  # thousandths of a plain step that may still be lost, as of `settled`
    plan: Plan = NO_PLAN  # of the step that the request takes part in, or took part in last
    copy_widths: tuple[int, ...] = ()  # this and what follows is of `states/suffix_control.py`
    copied: tuple[ClassGains, ...] = ()  # as in `Rates.copied`, of this request
    matched: int = 0  # as in `Decoded`, of the last outcome
    max_branch: int = 0  # as in `Settings`
    # Tokens of the answer that `account` has counted. All later ones came in plain steps (`suffix_control.settle`).
    settled: int = 0

    def with_plan(self, plan: Plan) -> SpeculationControl:
        """Return the control in a launch with this plan. `evolve` would take four times as long."""
        return SpeculationControl(
            *(self.widths, self.gains, self.branching, self.seen, self.account, plan),
            *(self.copy_widths, self.copied, self.matched, self.max_branch, self.settled),
        )

    def with_account(self, account: int, settled: int) -> SpeculationControl:
        """Return the control with an account that has counted so many tokens of the answer."""
        return SpeculationControl(
            *(self.widths, self.gains, self.branching, self.seen, account, self.plan),
            *(self.copy_widths, self.copied, self.matched, self.max_branch, settled),
        )
