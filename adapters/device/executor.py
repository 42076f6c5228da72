"""Carries device effects out on a shard: slots are opened, prompts prefilled chunk by chunk, decode steps run as one
batch.

A decode step feeds the last token and, where somebody proposes, what may follow. What the target itself picks after
each of them decides how much stays, so proposals change how many tokens a decode step gives, never which.

Everything happens on the lane, in the order of the calls. What cannot be done for one request is that request's
failure; a launch that makes no sense is a bug and raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import anyio
import torch

from adapters.device.agreement import Agreed, Member, agree, decoded
from adapters.device.buckets import bucket_of, row_counts
from adapters.device.checkpoints import Checkpoints, KeepState
from adapters.device.constraint import Match, no_grammars
from adapters.device.lane import DeviceLane, waker
from adapters.device.memory import out_of_memory, ran_out_of_memory
from adapters.device.prefilling import misfit, prefilled
from adapters.device.prompt_logprobs import told
from adapters.device.proposer import Proposer, proposed
from adapters.device.sampling import Sampler, picker
from adapters.device.slots import SlotState, abandoned, begun, check, clipped, lost_with, unfit, unopened
from adapters.models.shard import Forward, Kept, Shard, Step
from effects.all import Ask, Launch, Outcome
from effects.decode import RunDecode
from effects.ids import DeviceFailed, RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.ports import Settle
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill

log = logging.getLogger("rekindle.device")

# Carries out one effect on the lane; raises torch.OutOfMemoryError where that is what happened.
Handler: TypeAlias = Callable[[RequestId, Any], Outcome]


class DeviceExecutor:
    """Opens slots and performs launches on `shard`; it and the lane belong to the executor, which closes them.

    buckets: the proven row counts, the largest being a prefill's chunk. fast: small batches run at their real row
    count instead, which may change bits; the shard must accept `row_counts(buckets, fast=fast)`. handlers: what carries
    out the effects beyond opening, prefill and decode steps, by type. proposer: a draft, where there is one.
    """

    def __init__(
        self,
        shard: Shard,
        buckets: Sequence[int],
        *,
        lane: DeviceLane,
        fast: bool = False,
        handlers: Mapping[type, Handler] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._shard, self._lane = shard, lane
        self._buckets = row_counts(buckets, fast=fast)
        self._chunk = max(buckets)
        self._proposer = proposer
        self._checkpoints = Checkpoints(shard)
        self._match: Match = no_grammars
        self._lost: Callable[[tuple[SlotId, ...]], object] = lambda _: None
        self._wake: Callable[..., object] = lambda *_: None
        self._handlers: dict[type, Handler] = {RunPrefill: self._prefill, **(handlers or {})}
        self._slots: dict[int, SlotState | DeviceFailed] = {}
        self._flying: set[RequestId] = set()
        self._abandoned: set[RequestId] = set()

    # --- called on the event loop ---
    def handle(self, effect: type, handler: Handler) -> None:
        """From now on, this carries out effects of that type; before the first launch."""
        self._handlers[effect] = handler

    def proposed_to(self, proposer: Proposer) -> None:
        """From now on, this proposes; before the first launch."""
        self._proposer = proposer

    def checkpointed_by(self, keep: KeepState) -> None:
        """From now on, this keeps positional state beyond the device; before the first launch."""
        self._checkpoints.beyond = keep

    def matched_by(self, match: Match) -> None:
        """From now on, this says what grammars let follow; before the first launch."""
        self._match = match

    def lost_to(self, lost: Callable[[tuple[SlotId, ...]], object]) -> None:
        """From now on, this hears of slots that do not have the rows they were opened with; before the first launch."""
        self._lost, self._wake = lost, waker()

    def open(self, request: RequestId, effect: OpenSlot) -> None:
        """Done in its turn. If it cannot be, whatever is asked of the slot for this request fails and says why; and
        where its rows are not there, those who count on them hear that first.
        """

        def opened(_: None, error: BaseException | None) -> None:
            if gone := lost_with(error, effect.slot):
                self._lost(gone)

        self._lane.submit(partial(self._open, request, effect), opened)

    def submit(self, launch: Launch, done: Settle) -> None:
        """`done` hears one outcome per ask, in order; or the exception that is a bug: an effect without a handler, a
        batch of anything but decode steps.
        """
        requests = {ask.request for ask in launch.asks}

        def landed(outcomes: tuple[Outcome, ...] | None, error: BaseException | None) -> None:
            self._flying -= requests
            self._abandoned -= requests
            done(outcomes if error is None and outcomes is not None else error or LookupError("no outcomes"))

        self._lane.submit(partial(self._carry_out, launch.asks), landed)
        self._flying |= requests

    async def perform(self, launch: Launch) -> tuple[Outcome, ...]:
        """`submit`, awaited; a cancelled caller waits for it all the same."""
        finished, outcomes = anyio.Event(), list[tuple[Outcome, ...] | BaseException]()

        def done(result: tuple[Outcome, ...] | BaseException) -> None:
            outcomes.append(result)
            finished.set()

        self.submit(launch, done)
        with anyio.CancelScope(shield=True):
            await finished.wait()
        if isinstance(outcomes[0], BaseException):
            raise outcomes[0]
        return outcomes[0]

    def abandon(self, request: RequestId) -> None:
        """What is in flight for it and has not started will not start; what has started finishes."""
        if request in self._flying:
            self._abandoned.add(request)

    def close(self, timeout_s: float = 10) -> bool:
        """Give the memory back and end the lane. False if it was still busy after `timeout_s`."""
        if not self._lane.closed:
            self._lane.post(self._shard.close, lambda error: log.error("closing the shard failed", exc_info=error))
        return self._lane.close(timeout_s)

    # --- called on the lane ---

    def abandoned(self, request: RequestId) -> bool:
        """For handlers that take long: should this one stop?"""
        return request in self._abandoned

    def lose(self, why: str) -> None:
        """All rows and states are gone, those of idle slots, too. What is carried out from now on finds them so, and
        those whose they were hear it before any outcome of that.
        """
        lost = tuple(map(SlotId, range(self._shard.slots)))
        self._slots |= {slot: DeviceFailed("lost", why) for slot in lost}
        with suppress(RuntimeError):  # the event loop has closed, so nobody waits any more
            self._wake(self._lost, lost)

    def rehearse(self, opening: OpenSlot, following: Callable[[Sequence[Outcome]], Ask | None]) -> list[Outcome]:
        """While nobody is served: open a slot, and carry out what follows from what came of it, one by one."""
        outcomes = list[Outcome]()
        self._open(RequestId(0), opening)
        while (ask := following(outcomes)) is not None:
            outcomes += self._carry_out((ask,))
        del self._slots[opening.slot]
        return outcomes

    def serving(self, slot: int, request: RequestId) -> SlotState | DeviceFailed:
        """The slot's state, if it was opened for this request."""
        state = self._slots.get(slot)
        if state is None:
            return DeviceFailed("broken", f"slot {slot} was never opened")
        if isinstance(state, SlotState) and state.request != request:
            return DeviceFailed("broken", f"slot {slot} serves request {state.request}, not {request}")
        return state if isinstance(state, DeviceFailed) else state.refusal or state

    def _open(self, request: RequestId, effect: OpenSlot) -> None:
        """Broken whatever the reason: nobody may believe in this slot's rows."""
        try:
            self._slots[effect.slot] = self._opened(request, effect)
        except BaseException as error:
            self._slots[effect.slot] = unopened(effect, error)
            raise

    def _opened(self, request: RequestId, effect: OpenSlot) -> SlotState:
        slot, source, keep, prompt = effect.slot, effect.source, effect.keep, effect.prompt
        check(effect, self._shard)
        state = begun(request, effect, self._sampler)
        origin = self._slots.get(source)
        if keep:
            if not isinstance(origin, SlotState) or not origin.holds(prompt[:keep]):
                raise ValueError(f"slot {source} does not hold the first {keep} tokens of the prompt")
            if self._proposer is not None:
                self._proposer.catch_up(source)
            state.context = clipped(origin.context, keep)
            if source != slot:
                self._shard.copy_rows(source, slot, keep)
        if self._shard.state_specs:
            self._checkpoints.open(origin if isinstance(origin, SlotState) else None, effect)
            state.valid, state.ahead = effect.state, keep - effect.state
        if self._proposer is not None:
            self._proposer.opened(source, slot, state)
        return state

    def _sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        matching = None if sampling.grammar is None else self._match(sampling.grammar)
        return Sampler(sampling, prompt, self._shard.vocab_size, self._lane.device, matching)

    def _carry_out(self, asks: tuple[Ask, ...]) -> tuple[Outcome, ...]:
        """What raises may have left anything in the slots it was about: they refuse all work until they are opened."""
        try:
            return self._carried_out(asks)
        except BaseException as error:
            for ask in asks:
                if isinstance(ask.effect, RunPrefill | RunDecode):
                    slot = ask.effect.slot
                    self._slots[slot] = DeviceFailed("broken", f"slot {slot} is not to be believed: {error}")
            raise

    def _carried_out(self, asks: tuple[Ask, ...]) -> tuple[Outcome, ...]:
        if all(isinstance(ask.effect, RunDecode) for ask in asks):
            return self._decode_steps(asks)
        if len(asks) != 1:
            raise ValueError("only decode steps are batched")
        return (self._one(*asks),)

    def _one(self, ask: Ask) -> Outcome:
        handler = self._handlers.get(type(ask.effect))
        if handler is None:
            raise LookupError(f"{type(ask.effect).__name__} has no handler on the device")
        if self.abandoned(ask.request):
            return abandoned(ask.request)
        try:
            return handler(ask.request, ask.effect)
        except Exception as error:
            if ran_out_of_memory(error):
                return out_of_memory(error)
            raise

    def _prefill(self, request: RequestId, effect: RunPrefill) -> Outcome:
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        if (odd := misfit(self._shard, self._chunk, state, effect)) is not None:
            return odd
        state.ahead, started, stop = 0, time.perf_counter_ns(), effect.start
        if effect.logprobs >= 0:
            return told(self._shard, self._buckets, state, effect)
        try:
            for step, forward in prefilled(self._shard, self._buckets, state, effect, partial(self.abandoned, request)):
                self._follow(step, forward, [step.rows], [state])
                state.advance(stop := step.segments[0].start + step.rows)
        except Exception as error:
            if effect.stop - effect.start > self._chunk and self._shard.state_specs and ran_out_of_memory(error):
                return self._half_settled(effect.slot, error)
            raise
        self._shard.synchronize()  # or the host would run ahead of what it acknowledges
        took = time.perf_counter_ns() - started
        if stop == effect.stop:
            self._checkpoints.computed(request, effect, state)
        return PrefillAdvanced(stop, took)

    def _decode_steps(self, asks: Sequence[Ask]) -> tuple[Outcome, ...]:
        outcomes: list[Outcome] = [DeviceFailed("broken", "not carried out")] * len(asks)
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
                self._checkpoints.passed(ask.request, effect)
        if not taken:
            return tuple(outcomes)
        started = time.perf_counter_ns()
        settling = False
        try:
            members = proposed(self._proposer, taken, self._shard.capacity)
            step, forward, agreements = self._verify(members)
            settling = True
            self._settle(step, forward, members, agreements)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            for slot, (index, _, _) in taken.items():
                outcomes[index] = self._half_settled(slot, error) if settling else out_of_memory(error)
            return tuple(outcomes)
        for member, agreed in zip(members, agreements, strict=True):
            outcomes[member.index] = decoded(member, agreed, time.perf_counter_ns() - started)
        return tuple(outcomes)

    def _ready(self, request: RequestId, effect: RunDecode) -> SlotState | DeviceFailed:
        if self.abandoned(request):
            return abandoned(request)
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        return unfit(state, effect, self._shard.capacity) or state

    def _half_settled(self, slot: int, error: Exception) -> DeviceFailed:
        """Some layers' states may have moved and others not, so nobody may go on from any of them."""
        self._slots[slot] = failed = DeviceFailed("broken", f"slot {slot} was being settled: {error}")
        return failed

    def _verify(self, members: Sequence[Member]) -> tuple[Step, Forward, list[Agreed | DeviceFailed]]:
        """One forward for all: how far the target picks what was proposed."""
        segments = [piece for member in members for piece in member.tree.pieces(member.slot, member.state.valid)]
        rows = [row for member in members for row in member.rows]
        step = Step(tuple(segments), bucket_of(self._buckets, len(rows)))
        forward = self._shard.forward(step, torch.tensor([token for member in members for token in member.tree.tokens]))
        picked = picker(self._shard.logits(step, forward.hidden), rows)
        firsts = accumulate((len(member.tree.tokens) for member in members), initial=0)
        return step, forward, [agree(member, picked, first) for member, first in zip(members, firsts, strict=False)]

    def _settle(
        self, step: Step, forward: Forward, members: Sequence[Member], found: Sequence[Agreed | DeviceFailed]
    ) -> None:
        """What the target picked has happened, and the rest is rolled back."""
        kept: list[Kept] = [
            member.tree.kept(one.path if isinstance(one, Agreed) else ())
            for member, one in zip(members, found, strict=True)
        ]
        self._shard.commit(step, kept)
        for member, one in zip(members, found, strict=True):
            if isinstance(one, Agreed):
                member.state.commit(one.tokens)
        self._follow(step, forward, kept, [member.state for member in members])

    def _follow(self, step: Step, forward: Forward, kept: Sequence[Kept], states: Sequence[SlotState]) -> None:
        """What the target did has happened, and moved its state, whether or not a draft finds memory to follow."""
        if self._proposer is None:
            return
        try:
            self._proposer.follow(step, forward.aux_hidden_states, kept, states)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("the draft does not follow: %s", error)
