"""A decode step: feed the last token, let a draft propose what follows, keep what the target agrees with."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from attrs import Factory, field, frozen

from effects.ids import DeviceFailed, PageId, Side, SlotId, Tokens

# One token's natural-log probability and its alternatives, likeliest first: (logprob, ((token, logprob), ...))
Logprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]


def all_but_one(done: Decoded) -> int:
    """What was accepted, unless a proposal ended the answer: then it is every one."""
    return len(done.tokens) - 1 if done.proposed else 0


@frozen
class Decoded:
    """The target picked `tokens`: the accepted proposals, then one of its own.

    A stop token is the last of them, whichever it was: nothing is kept past it. An executor that goes on alone may tell
    of several plain steps at once.
    """

    tokens: Tokens  # at least one
    proposed: int = 0
    logprobs: tuple[Logprob, ...] = ()  # one per token, when the job asked for them
    ns: int = 0  # what a step of the launch took on the lane, its draft included; 0: not measured
    accepted: int = field(default=Factory(all_but_one, takes_self=True))  # how many of `tokens` were proposed
    steps: int = 1
    more: bool = False  # the launch goes on: this is not its last outcome for the request


@frozen
class RunDecode:
    """Feed `token` at row `position` and up to `propose` drafted tokens after it.

    checkpoint: the model's positional state at the last block's end up to `position` is copied out first, to be kept. A
    failure to keep it is none here.

    Proposals are a chain; where an executor proposes trees, as many more than a chain can hold branch off from it. The
    token comes along so that an executor can refuse to run on a slot that went out of step.

    steps: after this one the executor may go on alone, from what it picked and with as many proposals, up to so many in
    all. It answers what they bring on the way. A stop token, a failure or being given up ends that, for all of a launch
    where there is a draft; whoever waits for the lane ends it for all, but who joins them.

    pages: that the slot has from now on, behind those that it had.
    """

    outcomes: ClassVar = (Decoded, DeviceFailed)
    side: ClassVar = Side.DEVICE
    slot: SlotId
    position: int  # rows [0, position) are valid
    token: int
    propose: int = 0
    checkpoint: bool = False
    steps: int = 1
    pages: tuple[PageId, ...] = ()
