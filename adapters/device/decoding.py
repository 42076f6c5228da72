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
from torch import Tensor

from adapters.device.agreement import Agreed, Member, agree, decoded
from adapters.device.buckets import bucket_of
from adapters.device.checkpoints import Checkpoints
from adapters.device.lane import DeviceLane
from adapters.device.memory import out_of_memory, ran_out_of_memory
from adapters.device.prefilling import PromptPiece
from adapters.device.proposer import Proposer, proposed
from adapters.device.rounds import RoundsAtOnce, rounds_of
from adapters.device.sampling import Draw, NotFinite, Picking, Sampler, picker, picking
from adapters.device.slots import SlotState, abandoned, unfit
from adapters.device.tree import chain, kept
from adapters.device.underway import StepsTaken, behind, going_on
from adapters.models.shard import Forward, Kept, Segment, Shard, Step
from effects.all import Ask, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling
from effects.prefill import PrefillAdvanced

log = logging.getLogger("rekindle.device")

NOT_CARRIED_OUT = DeviceFailed("broken", "not carried out")


@define(eq=False)
class Flying:
    """A step that the device is at, or is about to be. picking: None until what is picked in the one before is known,
    where somebody's grammar or penalties ask for it.
    """

    step: Step
    forward: Forward
    logits: Tensor
    picking: Picking | None


@define(eq=False)
class Decoding:
    """Every call runs on the lane.

    slots: what each serves, or why it refuses. serving: the slot's state, if it was opened for this request. abandoned:
    is a request given up?
    """

    shard: Shard
    buckets: Sequence[int]
    lane: DeviceLane
    slots: dict[int, SlotState | DeviceFailed]
    checkpoints: Checkpoints
    serving: Callable[[int, RequestId], SlotState | DeviceFailed]
    abandoned: Callable[[RequestId], bool]
    proposer: Proposer | None = None
    rounds: RoundsAtOnce | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rounds = rounds_of(self.shard, self.buckets)

    def close(self) -> None:
        self.rounds = None  # it has what the shard's steps are made of
        self.shard.close()

    def run(self, asks: tuple[Ask, ...], steps: StepsTaken, piece: PromptPiece | None = None) -> tuple[Outcome, ...]:
        """One step, and then as many more as may be taken alone while nobody else wants the lane. What the last one
        brings is returned. piece: goes behind a single step, and its outcome is one more; where nobody is left who
        decodes, neither is there.
        """
        if piece is not None:
            return self._step(asks, piece)
        if members := self._independent(asks):
            return self._run_ahead(asks, members, steps)
        while True:
            outcomes = self._step(asks)
            onward = tuple(map(self._onward, asks, outcomes))
            asks = tuple(ask for ask in onward if ask is not None)
            if len(asks) < len(onward) or self.lane.wanted:
                return outcomes
            steps.put(tuple(going_on(one) for one in outcomes if isinstance(one, Decoded)))

    def _onward(self, ask: Ask, outcome: Outcome) -> Ask | None:
        """A request's next step, if it may be taken without asking."""
        effect = ask.effect
        if not (isinstance(effect, RunDecode) and isinstance(outcome, Decoded)) or effect.steps <= 1:
            return None
        state, last = self.serving(effect.slot, ask.request), outcome.tokens[-1]
        if isinstance(state, DeviceFailed) or last in state.stops or self.abandoned(ask.request):
            return None
        return Ask(
            ask.request,
            RunDecode(effect.slot, state.valid, last, effect.propose, checkpoint=False, steps=effect.steps - 1),
        )

    # --- without waiting for what was picked ---

    def _independent(self, asks: Sequence[Ask]) -> list[Member]:
        """The members of a launch of which every step may begin before the host knows what the one before it picked:
        where the device can, and nobody proposes. Otherwise none.
        """
        if not self.shard.runs_ahead:
            return []
        members, slots = list[Member](), set[int]()
        for index, ask in enumerate(asks):
            effect: RunDecode = ask.effect  # type: ignore[assignment] # all of them are
            state = self._ready(ask.request, effect)
            if isinstance(state, DeviceFailed) or effect.slot in slots or effect.steps <= 1 or effect.propose:
                return []
            if effect.position + effect.steps > self.shard.capacity:
                return []
            members.append(Member(index, effect.slot, state, chain((effect.token,))))
            slots.add(effect.slot)
        return members

    def _run_ahead(self, asks: Sequence[Ask], members: Sequence[Member], steps: StepsTaken) -> tuple[Outcome, ...]:
        """The device is never without work: a step is launched, and then what the one before it picked is looked at. If
        that ended somebody's answer, the step is of the others only; the rest of it is rolled back. A pick that depends
        on the one before it follows its step when that is known: the device is at the step meanwhile.
        """
        for ask in asks:
            self.checkpoints.passed(ask.request, ask.effect)  # type: ignore[arg-type] # a decode step
        effects = [ask.effect for ask in asks if isinstance(ask.effect, RunDecode)]
        left, clock = min(effect.steps for effect in effects), time.perf_counter_ns
        try:
            flying = self._launched(members, torch.tensor([effect.token for effect in effects]), 0)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return (out_of_memory(error),) * len(asks)
        started, everybody = clock(), [1] * len(members)
        while True:
            self._settle_rows(flying, members, everybody)
            left -= 1
            halted = not left or self.lane.wanted or any(self.abandoned(ask.request) for ask in asks)
            assert flying.picking is not None
            following = None if halted else self._following(members, flying.picking.tokens)
            outcomes = self._landed(flying, members, clock() - started)
            started = clock()
            if following is None:
                return outcomes
            staying = [int(goes_on(member, outcome)) for member, outcome in zip(members, outcomes, strict=True)]
            if following.picking is None:
                following.picking = self._picking(following.logits, members, staying)
            if not all(staying):
                self._settle_rows(following, members, staying)
                last = self._landed(following, members, clock() - started, staying)
                later = iter(last)
                return tuple(
                    behind(one, next(later)) if stays else one for one, stays in zip(outcomes, staying, strict=True)
                )
            steps.put(tuple(going_on(one) for one in outcomes if isinstance(one, Decoded)))
            flying = following

    def _following(self, members: Sequence[Member], tokens: Tensor) -> Flying | None:
        """None: there is no memory for it now."""
        try:
            return self._launched(members, tokens, 1)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("no step ahead: %s", error)
            return None

    def _launched(self, members: Sequence[Member], tokens: Tensor, ahead: int) -> Flying:
        """A step of everybody's next token, `ahead` of what the host knows."""
        segments = tuple(Segment(member.slot, member.state.valid + ahead, 1) for member in members)
        step = Step(segments, bucket_of(self.buckets, len(members)))
        forward = self.shard.forward(step, tokens)
        logits, picked = self.shard.logits(step, forward.hidden), None
        if not ahead or all(member.state.sampler.forgetful for member in members):
            picked = self._picking(logits, members, [1] * len(members), ahead)
        return Flying(step, forward, logits, picked)

    def _picking(self, logits: Tensor, members: Sequence[Member], staying: Sequence[int], ahead: int = 0) -> Picking:
        """Of who does not stay nothing is asked that its answer's end could refuse."""
        samplers = [
            member.state.sampler if stays else Sampler(Sampling(), (), self.shard.vocab_size, self.lane.device)
            for member, stays in zip(members, staying, strict=True)
        ]
        return picking(
            logits,
            [Draw(sampler, member.state.valid + ahead + 1) for sampler, member in zip(samplers, members, strict=True)],
        )

    def _settle_rows(self, flying: Flying, members: Sequence[Member], kept: Sequence[int]) -> None:
        """Whose answer goes on, their row has happened; before the next forward."""
        self.shard.commit(flying.step, kept)
        self.follow(flying.step, flying.forward, kept, [member.state for member in members])

    def _landed(
        self, flying: Flying, members: Sequence[Member], took: int, staying: Sequence[int] = ()
    ) -> tuple[Decoded | DeviceFailed, ...]:
        """What was picked; of those only who stay, where they are told apart."""
        assert flying.picking is not None
        picked, outcomes = flying.picking.read(), list[Decoded | DeviceFailed]()
        for index, member in enumerate(members):
            if staying and not staying[index]:
                continue
            agreed = agree(member, picked.__getitem__, index)
            if isinstance(agreed, Agreed):
                member.state.commit(agreed.tokens)
            outcomes.append(decoded(member, agreed, took))
        return tuple(outcomes)

    # --- one step ---

    def _at_once(self, ask: Ask) -> Outcome | None:
        """A single request's step in one call, where there is one for it. None: nothing has happened."""
        effect: RunDecode = ask.effect  # type: ignore[assignment] # it is one
        started, state = time.perf_counter_ns(), self._ready(ask.request, effect)
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

    def _step(self, asks: Sequence[Ask], piece: PromptPiece | None = None) -> tuple[Outcome, ...]:
        if piece is None and len(asks) == 1 and (found := self._at_once(asks[0])) is not None:
            return (found,)
        outcomes: list[Outcome] = [NOT_CARRIED_OUT] * len(asks)
        taken: dict[int, tuple[int, SlotState, int]] = {}
        for index, ask in enumerate(asks):
            effect: RunDecode = ask.effect  # type: ignore[assignment] # all of them are
            state = self._ready(ask.request, effect)
            if isinstance(state, DeviceFailed):
                outcomes[index] = state
            elif effect.slot in taken:
                outcomes[index] = DeviceFailed("broken", f"slot {effect.slot} is in the batch already")
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
                    return (*self._step(asks), out_of_memory(error))
                outcomes.append(self.half_settled(piece.slot, error))
            for slot, (index, _, _) in taken.items():
                outcomes[index] = self.half_settled(slot, error) if settling else out_of_memory(error)
            return tuple(outcomes)
        took = time.perf_counter_ns() - started if piece is None else 0  # how much of it was whose, nobody knows
        for member, agreed in zip(members, agreements, strict=True):
            outcomes[member.index] = decoded(member, agreed, took)
        return tuple(outcomes) if piece is None else (*outcomes, PrefillAdvanced(piece.stop))

    def _ready(self, request: RequestId, effect: RunDecode) -> SlotState | DeviceFailed:
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


def goes_on(member: Member, outcome: Outcome) -> bool:
    return isinstance(outcome, Decoded) and outcome.tokens[-1] not in member.state.stops
