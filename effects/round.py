"""A round: feed the last token, let a draft propose what follows, keep what the target agrees with."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from attrs import frozen

from effects.ids import DeviceFailed, Lane, SlotId, Tokens

# One token's natural-log probability and its alternatives, likeliest first: (logprob, ((token, logprob), ...))
Logprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]


@frozen
class RoundDone:
    """The target picked `tokens`: the accepted proposals, then one of its own."""

    tokens: Tokens  # at least one
    proposed: int = 0
    logprobs: tuple[Logprob, ...] = ()  # one per token, when the job asked for them
    ns: int = 0  # what the launch took on the lane, its draft included; 0: not measured


@frozen
class RunRound:
    """Feed `token` at row `position` and up to `propose` drafted tokens after it.

    The token comes along so that an executor can refuse to run on a slot that went out of step.
    """

    outcomes: ClassVar = (RoundDone, DeviceFailed)
    lane: ClassVar = Lane.DEVICE
    slot: SlotId
    position: int  # rows [0, position) are valid
    token: int
    propose: int = 0
