"""Decode steps of a launch: one, or one after the other without asking, until somebody has to be asked.

A step feeds everybody's last token and, where somebody proposes, what may follow. What the target itself picks after
each of them decides how much stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import define, evolve, field

from adapters.device.decode.native_decode import NativeDecodeStep, rounds_of
from adapters.device.decode.overlapped_decode import OverlappedDecode
from adapters.device.decode.prefill import PromptPiece
from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.out_of_memory import out_of_memory, ran_out_of_memory
from adapters.device.lane.running_batch import OutcomeQueue, RunningBatch, going_on
from adapters.device.sampling.sampler import Draw, NotFinite, picker
from adapters.device.slots.checkpoints import Checkpoints
from adapters.device.slots.row_watch import RowWatch
from adapters.device.slots.slots import SlotState, abandoned, unfit
from adapters.device.speculation.acceptance import Agreed, Member, agree, decoded
from adapters.device.speculation.proposal_tree import kept
from adapters.device.speculation.proposer import Proposer, proposed
from adapters.models.decoder.shard import Kept, Shard
from adapters.models.kernels.step import Forward, Segment, Step
from effects.all import EffectRequest, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId
from effects.prefill import PrefillAdvanced

log = logging.getLogger("rekindle.device")

NOT_CARRIED_OUT = DeviceFailed("broken", "not carried out")


@define(eq=False)
class Decoding:
    """Every call runs on the lane.

    slots: what each serves, or why it refuses. serving: the slot's state, if it was opened for this request. abandoned:
    is a request given up? report: called before outcomes are told. watch: compares rows before each step.
    """

    shard: Shard
    buckets: Sequence[int]
    lane: DeviceLane
    slots: dict[int, SlotState | DeviceFailed]
    checkpoints: Checkpoints
    serving: Callable[[int, RequestId], SlotState | DeviceFailed]
    abandoned: Callable[[RequestId], bool]
    report: Callable[[], object]
    watch: RowWatch
    proposer: Proposer | None = None
    rounds: NativeDecodeStep | None = field(init=False)
    ahead: OverlappedDecode = field(init=False)
    _company: RunningBatch | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.rounds = rounds_of(self.shard, self.buckets)
        self.ahead = OverlappedDecode(
            self.shard, self.buckets, self.checkpoints, self.ready, self.abandoned, self.follow
        )

    def close(self) -> None:
        self.rounds = None  # it has what the shard's steps are made of
        self.shard.close()

    def run(self, asks: Sequence[EffectRequest], steps: OutcomeQueue) -> None:
        """One step, and then as many more as may be taken alone while nobody else wants the lane; until each member has
        its last outcome. Called between two of them, it makes these members of what it is at.
        """
        if self._company is not None:
            self._company.join(asks)
            return
        self._company = company = RunningBatch(steps, self.lane, self.report)
        try:
            while asks:
                asks = self.ahead.run(asks, company) if self.ahead.takes(asks) else self._run_on(asks, company)
        finally:
            self._company = None

    def _run_on(self, asks: Sequence[EffectRequest], company: RunningBatch) -> Sequence[EffectRequest]:
        """A step of everybody; who has a next one. With a draft all go on or nobody does: what it costs is theirs."""
        self.watch.before(self.slots, asks)
        outcomes = self.step(asks)
        self.watch.behind(self.slots, asks)
        onward = list(map(self._onward, asks, outcomes))
        if company.halted() or (self.proposer is not None and None in onward):
            onward = [None] * len(asks)
        company.tell(
            [
                (ask.request, going_on(outcome) if isinstance(outcome, Decoded) and then is not None else outcome)
                for ask, outcome, then in zip(asks, outcomes, onward, strict=True)
            ]
        )
        return [ask for ask in (*onward, *company.joined()) if ask is not None]

    def _onward(self, ask: EffectRequest, outcome: Outcome) -> EffectRequest | None:
        """A request's next step, if it may be taken without asking."""
        effect = ask.effect
        if not (isinstance(effect, RunDecode) and isinstance(outcome, Decoded)) or effect.steps <= 1:
            return None
        state, last = self.serving(effect.slot, ask.request), outcome.tokens[-1]
        if isinstance(state, DeviceFailed) or last in state.stops or self.abandoned(ask.request):
            return None
        return EffectRequest(
            ask.request,
            RunDecode(effect.slot, state.valid, last, effect.propose, checkpoint=False, steps=effect.steps - 1),
        )

    # --- one step ---

    def _at_once(self, ask: EffectRequest) -> Outcome | None:
        """A single request's step in one call, where there is one for it. None: nothing has happened."""
        effect: RunDecode = ask.effect  # type: ignore[assignment] # it is one
        started, state = time.perf_counter_ns(), self.ready(ask.request, effect)
        if self.rounds is None or effect.checkpoint or isinstance(state, DeviceFailed):
            return None
        taken = self.rounds.step(effect.slot, state, effect.propose, self.proposer)
        if taken is None:
            return None
        if not taken.tokens:
            return DeviceFailed("broken", f"slot {effect.slot}: {NotFinite.at(state.valid + 1).detail}")
        state.commit(taken.tokens)
        if not taken.followed and self.proposer is not None:
            step = Step((Segment(effect.slot, effect.position, 1),), bucket_of(self.buckets, 1))
            self.follow(step, self.rounds.left(step.bucket), (1,), (state,))
        return Decoded(taken.tokens, taken.proposed, (), time.perf_counter_ns() - started, taken.accepted)

    def step(self, asks: Sequence[EffectRequest], piece: PromptPiece | None = None) -> tuple[Outcome, ...]:
        """One of everybody. piece: goes behind it in one forward, and its outcome is one more; where nobody is left who
        decodes, neither is there.
        """
        if piece is None and len(asks) == 1 and (found := self._at_once(asks[0])) is not None:
            return (found,)
        outcomes: list[Outcome] = [NOT_CARRIED_OUT] * len(asks)
        taken: dict[int, tuple[int, SlotState, int]] = {}
        for index, ask in enumerate(asks):
            effect: RunDecode = ask.effect  # type: ignore[assignment] # all of them are
            state = self.ready(ask.request, effect)
            if isinstance(state, DeviceFailed):
                outcomes[index] = state
            else:
                taken[effect.slot] = (index, state, effect.propose)
                self.checkpoints.passed(ask.request, effect)
        if not taken:
            return tuple(outcomes)
        started = time.perf_counter_ns()
        settling = False
        try:
            members = proposed(self.proposer, taken, self.shard.capacity)
            step, forward, agreements = self._verify(members, piece)
            settling = True
            self._settle(step, forward, members, agreements, piece)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            if piece is not None:
                if not settling:
                    return (*self.step(asks), out_of_memory(error))
                outcomes.append(self.half_settled(piece.slot, error))
            for slot, (index, _, _) in taken.items():
                outcomes[index] = self.half_settled(slot, error) if settling else out_of_memory(error)
            return tuple(outcomes)
        took = time.perf_counter_ns() - started if piece is None else 0  # how much of it was whose, nobody knows
        for member, agreed in zip(members, agreements, strict=True):
            outcomes[member.index] = decoded(member, agreed, took)
        return tuple(outcomes) if piece is None else (*outcomes, PrefillAdvanced(piece.stop))

    def ready(self, request: RequestId, effect: RunDecode) -> SlotState | DeviceFailed:
        if self.abandoned(request):
            return abandoned(request)
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        return unfit(state, effect, self.shard.capacity) or state

    def half_settled(self, slot: int, error: Exception) -> DeviceFailed:
        """Some layers' states may have moved and others not, so nobody may go on from any of them."""
        self.slots[slot] = failed = DeviceFailed("broken", f"slot {slot} was being settled: {error}")
        return failed

    def _verify(
        self, members: Sequence[Member], piece: PromptPiece | None
    ) -> tuple[Step, Forward, list[Agreed | DeviceFailed]]:
        """One forward for all: how far the target picks what was proposed. Of a prompt's rows nobody asks what follows,
        so logits are those of a step without them.
        """
        segments: list[Segment] = []
        rows: list[Draw] = []
        tokens: list[int] = []
        firsts: list[int] = []
        for member in members:
            firsts.append(len(rows))
            segments += member.tree.pieces(member.slot, member.state.valid)
            rows += member.rows
            tokens += member.tree.tokens
        step = whole = Step(tuple(segments), bucket_of(self.buckets, len(rows)))
        if piece is not None:
            whole, tokens = piece.behind(step, self.buckets), tokens + piece.tokens
        forward = self.shard.forward(whole, torch.from_numpy(np.array(tokens, np.int64)))
        hidden = forward.hidden if whole.bucket == step.bucket else forward.hidden[: step.bucket]
        picked = picker(self.shard.logits(step, hidden), rows, every=len(rows) == len(members))
        return whole, forward, [agree(member, picked, first) for member, first in zip(members, firsts, strict=True)]

    def _settle(
        self,
        step: Step,
        forward: Forward,
        members: Sequence[Member],
        found: Sequence[Agreed | DeviceFailed],
        piece: PromptPiece | None,
    ) -> None:
        """What the target picked has happened, and the rest is rolled back."""
        stay = [kept(one.path) if isinstance(one, Agreed) else 0 for one in found]
        states = [member.state for member in members]
        if piece is not None:
            stay.append(piece.rows)
            states.append(piece.state)
        self.shard.commit(step, stay)
        for member, one in zip(members, found, strict=True):
            if isinstance(one, Agreed):
                member.state.commit(one.tokens)
        if piece is None:
            self.follow(step, forward, stay, states)
        else:
            self.follow(evolve(step, rows_only=True), forward, stay, states)  # all of them stay, as in a prefill
            piece.state.advance(piece.stop)

    def follow(self, step: Step, forward: Forward, kept: Sequence[Kept], states: Sequence[SlotState]) -> None:
        """What the target did has happened, and moved its state, whether or not a draft finds memory to follow."""
        if self.proposer is None:
            return
        try:
            self.proposer.follow(step, forward.aux_hidden_states, kept, states)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("the draft does not follow: %s", error)
