"""A decode step that the device runs or will run next, and its members. Used by `overlapped_decode.py`."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from attrs import define
from torch import Tensor

from adapters.device.decode.last_row import has_own_time
from adapters.device.decode.prompt_along import PromptRows
from adapters.device.sampling.sampler import LaunchedPicks, PickResult, TokenPick
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import describe_failed_pick
from adapters.device.speculation.step_copies import StepCopies
from adapters.models.kernels.step import Forward, Step
from effects.all import Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId


@define(eq=False)
class BatchMember:
    """One request of a launch.

    effect: as it was launched. steps_left: steps that it may still take, the one in flight included. has_ended: its
    last outcome is reported; if it has a row in the step in flight, that row lies after its end and is dropped.
    """

    request: RequestId
    slot: int
    state: SlotState
    effect: RunDecode
    steps_left: int
    has_ended: bool = False

    @property
    def is_last_step(self) -> bool:
        """Does the launch end for the request with the step in flight, as far as its picks are known?"""
        return self.has_ended or self.effect.steps <= 1


@define(eq=False)
class InFlightStep:
    """A step that the device runs now or will run next.

    picking: the tokens that are picked from `logits`. It is None while the pick of the step before has to be known
    first, because a grammar or penalties of a request ask for it. rows: of the prompts that go along. first_picks:
    tokens of the last members, which joined after the forward was launched. Their last rows are kept (`kept_rows.py`).
    """

    members: Sequence[BatchMember]
    step: Step
    forward: Forward
    logits: Tensor
    picking: LaunchedPicks | None
    rows: Sequence[PromptRows] = ()
    first_picks: LaunchedPicks | None = None

    @property
    def tokens(self) -> Tensor:
        """The tokens that are picked for all members: int64 `[R]`, on the device."""
        assert self.picking is not None
        return (
            self.picking.tokens
            if self.first_picks is None
            else torch.cat((self.picking.tokens, self.first_picks.tokens))
        )

    def read_picks(self) -> list[PickResult]:
        """Return what was picked for each member. Waits for the device."""
        assert self.picking is not None
        picked = self.picking.read()
        return picked if self.first_picks is None else picked + self.first_picks.read()

    @property
    def has_own_time(self) -> bool:
        """Does the step take what a step of its members takes? Asked before its tokens are appended.

        With rows of prompts it is not known how much of the time was the decode rows' share.
        """
        return not self.rows and has_own_time([member.state for member in self.members])


def last_tokens(members: Sequence[BatchMember]) -> Tensor:
    """Return the last token of each slot, which the host knows and the next step feeds: int64 `[R]` on the host."""
    return torch.tensor([member.state.tokens[-1] for member in members], dtype=torch.int64)


def append_picks(
    running: InFlightStep,
    picked: Sequence[PickResult],
    continuing: Set[BatchMember],
    took_ns: int,
    copies: StepCopies,
) -> list[tuple[RequestId, Outcome]]:
    """Append what was picked to the answers that had not ended, note which ones end now, and return the outcomes.

    continuing: those that have a row in the next step. took_ns: since the step before was read, so it includes
    the wait for the device; 0: not measured. copies: asked what matches then.
    """
    answering = list[tuple[BatchMember, PickResult]]()
    for member, one in zip(running.members, picked, strict=True):
        if member.has_ended:
            continue
        answering.append((member, one))
        if isinstance(one, TokenPick):
            member.state.commit((one.token,))
            member.has_ended = member not in continuing or one.token in member.state.stops
        else:
            member.has_ended = True
    matches = copies.find_matches([member for member, _ in answering])
    outcomes = list[tuple[RequestId, Outcome]]()
    for (member, one), matched in zip(answering, matches, strict=True):
        if not isinstance(one, TokenPick):
            outcomes.append((member.request, describe_failed_pick(member.slot, one)))
            continue
        logprobs = () if one.logprob is None else (one.logprob,)
        more = not member.has_ended
        done = Decoded((one.token,), 0, logprobs, took_ns, accepted=0, more=more, matched=matched)
        outcomes.append((member.request, done))
    return outcomes
