"""Carries device effects out on a shard: slots are opened, prompts prefilled chunk by chunk, decode steps run as one
batch.

A decode step feeds the last token and, where somebody proposes, what may follow. What the target itself picks after
each of them decides how much stays, so proposals change how many tokens a decode step gives, never which.

Everything happens on the lane, in the order of the calls, but for wide forwards of prompts where these have a lane of
their own. What cannot be done for one request is its own failure; a launch that makes no sense is a bug and raises.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

from adapters.device.decode.decode_step import Decoding
from adapters.device.decode.prefill import PromptPiece, misfit, piece_of, prefilled
from adapters.device.decode.prompt_logprobs import told
from adapters.device.lane.buckets import row_counts
from adapters.device.lane.lane import DeviceLane, waker
from adapters.device.lane.out_of_memory import out_of_memory, ran_out_of_memory
from adapters.device.lane.prompt_lane import Lanes
from adapters.device.lane.running_batch import InFlightRequests, OutcomeQueue, performed
from adapters.device.sampling.grammar_mask import Match, no_grammars
from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.checkpoints import Checkpoints, KeepState
from adapters.device.slots.row_watch import RowWatch
from adapters.device.slots.slots import SlotState, abandoned, begun, check, clipped, lost_with, unopened
from adapters.device.speculation.proposer import Proposer
from adapters.models.decoder.host_experts import HostExperts
from adapters.models.decoder.shard import Shard
from adapters.watched_thread import WatchedThread
from effects.all import EffectRequest, Launch, Outcome
from effects.decode import RunDecode
from effects.experts import PlaceExperts
from effects.ids import DeviceFailed, RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.ports import DeliverOutcomes
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.stream import StopLaunch

log = logging.getLogger("rekindle.device")

# Carries out one effect on the lane; raises torch.OutOfMemoryError where that is what happened.
Handler: TypeAlias = Callable[[RequestId, Any], Outcome]


class DeviceExecutor:
    """Opens slots and performs launches on `shard`; it and the lane belong to the executor, which closes them.

    buckets: the proven row counts, the largest being a prefill's chunk. fast: small batches run at their real row
    count instead, which may change bits; the shard must accept `row_counts(buckets, fast=fast)`. handlers: what carries
    out the effects beyond opening, prefill and decode steps, by type. proposer: a draft, where there is one. experts:
    those that host memory keeps.
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
        experts: HostExperts | None = None,
    ) -> None:
        self._shard, self._lane, self._lanes = shard, lane, Lanes(lane)
        self._buckets = row_counts(buckets, fast=fast)
        self._chunk = max(buckets)
        self._slots: dict[int, SlotState | DeviceFailed] = {}
        self._checkpoints, self.row_watch = Checkpoints(shard), RowWatch(shard)
        self.decoding = Decoding(
            *(shard, self._buckets, lane, self._slots, self._checkpoints, self.serving, self.abandoned),
            self._report,
            self.row_watch,
            proposer,
        )
        self._match: Match = no_grammars
        self._lost: Callable[[tuple[SlotId, ...]], object] = lambda _: None
        self._used: Callable[[tuple[int, ...]], object] = lambda _: None
        self._experts = experts
        self._reached: Callable[[bool], object] = lambda _: None
        self._wake: Callable[..., object] = lambda *_: None
        self._handlers: dict[type, Handler] = dict(handlers or {})
        self._flights = InFlightRequests()

    # --- called on the event loop ---
    def handle(self, effect: type, handler: Handler) -> None:
        """From now on, this carries out effects of that type; before the first launch."""
        self._handlers[effect] = handler

    def proposed_to(self, proposer: Proposer) -> None:
        """From now on, this proposes; before the first launch."""
        self.decoding.proposer = proposer

    def read_beside(self, lane: DeviceLane) -> None:
        """From now on, this carries out launches of lane PROMPTS, and is the executor's; before the first one."""
        self._lanes.prompts = lane

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return self._lanes.threads

    def checkpointed_by(self, keep: KeepState) -> None:
        """From now on, this keeps positional state beyond the device; before the first launch."""
        self._checkpoints.beyond = keep

    def matched_by(self, match: Match) -> None:
        """From now on, this says what grammars let follow; before the first launch."""
        self._match = match

    def lost_to(
        self, lost: Callable[[tuple[SlotId, ...]], object], reached: Callable[[bool], object] = lambda _: None
    ) -> None:
        """From now on, this hears of slots that do not have the rows they were opened with; and `reached` of a draft's
        process that is gone, or there again. Before the first launch.
        """
        self._lost, self._reached, self._wake = lost, reached, waker()

    def used_to(self, used: Callable[[tuple[int, ...]], object]) -> None:
        """From now on, this hears which experts steps have needed; before the first launch."""
        self._used, self._wake = used, waker()

    def place(self, _: RequestId, effect: PlaceExperts) -> None:
        """In its turn. Where it fails, experts are brought as they are needed."""
        if self._experts is not None and not self._lane.closed:
            moving = partial(self._experts.place, effect.moves)
            self._lane.post(moving, lambda error: log.error("experts have kept their places", exc_info=error))

    def open(self, request: RequestId, effect: OpenSlot) -> None:
        """Done in its turn. If it cannot be, whatever is asked of the slot for this request fails and says why; and
        where its rows are not there, those who count on them hear that first.
        """

        def opened(_: object, error: BaseException | None) -> None:
            if gone := lost_with(error, effect.slot):
                self._lost(gone)

        self._lanes.open(effect.slot, partial(self._open, request, effect), opened)

    def submit(self, launch: Launch, done: DeliverOutcomes) -> None:
        """`done` hears of each ask what comes of it, until that was the last; or the exception that is a bug: an effect
        without a handler, a batch that there is not.
        """
        steps, failed = self._flights.begin(launch, self._lanes.of(launch), done, waker())
        self._lanes.launch(launch, partial(self._carry_out, launch.asks, steps), failed)

    async def perform(self, launch: Launch) -> tuple[Outcome, ...]:
        """`submit`, awaited: what came of all its steps. A cancelled caller waits for it all the same."""
        return await performed(self.submit, launch)

    def abandon(self, request: RequestId) -> None:
        """What is in flight for it and has not started will not start; what has started finishes."""
        self._flights.abandon(request)

    def halt(self, request: RequestId, _: StopLaunch) -> None:
        """Others wait for the lane: what is on it for this request goes on no further."""
        lane = self._flights.lane_of(request)
        if lane is not None and not lane.closed:
            lane.post(lambda: None, lambda error: log.debug("nobody is to be halted: %s", error), between=False)

    def close(self, timeout_s: float = 10) -> bool:
        """Give the memory back and end the lanes. False if one was still busy after `timeout_s`."""
        return self._lanes.close(self.decoding.close, timeout_s)

    # --- called on the lane ---

    def abandoned(self, request: RequestId) -> bool:
        """For handlers that take long: should this one stop?"""
        return request in self._flights.abandoned

    def lose(self, why: str) -> None:
        """All rows and states are gone, those of idle slots, too. What is carried out from now on finds them so, and
        those whose they were hear it before any outcome of that.
        """
        lost = tuple(map(SlotId, range(self._shard.slots)))
        self._slots |= {slot: DeviceFailed("lost", why) for slot in lost}
        with suppress(RuntimeError):  # the event loop has closed, so nobody waits any more
            self._wake(self._lost, lost)

    def reach(self, there: bool) -> None:
        """By any thread: the draft's process is gone, or there again."""
        with suppress(RuntimeError):  # the event loop has closed, so nobody waits any more
            self._wake(self._reached, there)

    def rehearse(
        self, opening: OpenSlot, following: Callable[[Sequence[Outcome]], EffectRequest | None]
    ) -> list[Outcome]:
        """While nobody is served: open a slot, and carry out what follows from what came of it, one by one."""
        outcomes = list[Outcome]()
        self._open(RequestId(0), opening)
        while (ask := following(outcomes)) is not None:
            self._carry_out((ask,), steps := OutcomeQueue(lambda _: None, {ask.request: None}))
            outcomes += [outcome for _, outcome in steps.take()]
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

    def _open(self, request: RequestId, effect: OpenSlot) -> bool:
        """Is the device at anything of the slot? Broken whatever the reason: nobody may believe in this slot's rows."""
        try:
            self._slots[effect.slot] = self._opened(request, effect)
        except BaseException as error:
            self._slots[effect.slot] = unopened(effect, error)
            raise
        copied = bool(effect.pages) or (effect.keep > 0 and effect.source != effect.slot)
        return copied or not self.decoding.ahead.passed(effect.slot)

    def _opened(self, request: RequestId, effect: OpenSlot) -> SlotState:
        slot, source, keep, prompt = effect.slot, effect.source, effect.keep, effect.prompt
        check(effect, self._shard)
        state = begun(request, effect, self._sampler)
        origin = self._slots.get(source)
        if keep:
            if not isinstance(origin, SlotState) or not origin.holds(prompt[:keep]):
                raise ValueError(f"slot {source} does not hold the first {keep} tokens of the prompt")
            if self.decoding.proposer is not None:
                self.decoding.proposer.catch_up(source)
            state.context = clipped(origin.context, keep)
        self.row_watch.opening(effect, origin)
        if effect.pages:
            self._shard.seat(slot, source, keep, effect.pages)
        elif keep and source != slot:
            self._shard.copy_rows(source, slot, keep)
        self.row_watch.opened(effect)
        if self._shard.state_specs:
            self._checkpoints.open(origin if isinstance(origin, SlotState) else None, effect)
            state.valid, state.ahead = effect.state, keep - effect.state
        if self.decoding.proposer is not None:
            self.decoding.proposer.opened(source, slot, state)
        return state

    def _sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        matching = None if sampling.grammar is None else self._match(sampling.grammar)
        return Sampler(sampling, prompt, self._shard.vocab_size, self._lane.device, matching)

    def _carry_out(self, asks: tuple[EffectRequest, ...], steps: OutcomeQueue) -> None:
        """What raises may have left anything in the slots it was about: they refuse all work until they are opened."""
        try:
            self._carried_out(asks, steps)
            self.row_watch.behind(self._slots, asks)
        except BaseException as error:
            for slot, state in self._slots.items():
                if isinstance(state, SlotState) and state.request in steps.members:
                    self._slots[slot] = DeviceFailed("broken", f"slot {slot} is not to be believed: {error}")
            raise

    def _report(self) -> None:
        """What steps needed, before the outcomes of the last of them."""
        if self._experts is not None and (uses := self._experts.report()):
            with suppress(RuntimeError):  # the event loop has closed, so nobody waits any more
                self._wake(self._used, uses)

    def _carried_out(self, asks: tuple[EffectRequest, ...], steps: OutcomeQueue) -> None:
        """A piece of a prompt comes with decode steps: in one forward, or behind them where that cannot be."""
        decode_steps = tuple(takewhile(lambda ask: isinstance(ask.effect, RunDecode), asks))
        rest, outcomes = asks[len(decode_steps) :], tuple[Outcome, ...]()
        if len(rest) > 1 or (decode_steps and not all(isinstance(ask.effect, RunPrefill) for ask in rest)):
            raise ValueError("only decode steps are batched, and a piece of a prompt with them")
        for request, count in Counter(ask.request for ask in asks).items():
            if count > 1:
                raise ValueError(f"request {request} is in a launch twice")
        self._grow(decode_steps)
        # Behind that: pages that one slot is given may be what another one has lost.
        self.row_watch.before(self._slots, asks)
        if decode_steps:
            if not rest:
                self.decoding.run(decode_steps, steps)
                return
            outcomes = self.decoding.step(decode_steps, next(map(self._piece, rest), None))
        outcomes = (*outcomes, *(self._one(ask, steps) for ask in asks[len(outcomes) :]))
        self._report()
        steps.put([(ask.request, outcome) for ask, outcome in zip(asks, outcomes, strict=True)])

    def _piece(self, ask: EffectRequest) -> PromptPiece | None:
        effect: RunPrefill = ask.effect  # type: ignore[assignment] # it is one
        state = abandoned(ask.request) if self.abandoned(ask.request) else self.serving(effect.slot, ask.request)
        return piece_of(self._shard, self._chunk, state, effect)

    def _grow(self, asks: tuple[EffectRequest, ...]) -> None:
        """Rows that come have their pages before anything is launched."""
        for ask in asks:
            effect = ask.effect
            if not isinstance(effect, RunDecode) or not effect.pages:
                continue
            if isinstance(self.serving(effect.slot, ask.request), SlotState):
                self._shard.grow(effect.slot, effect.pages)

    def _one(self, ask: EffectRequest, steps: OutcomeQueue) -> Outcome:
        handler = self._handlers.get(type(ask.effect))
        if isinstance(ask.effect, RunPrefill):
            handler = partial(self._prefill, steps=steps)
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

    def _prefill(self, request: RequestId, effect: RunPrefill, *, steps: OutcomeQueue) -> Outcome:
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        if (odd := misfit(self._shard, self._chunk, state, effect)) is not None:
            return odd
        self._checkpoints.held(request, effect)
        state.ahead, started, stop = 0, time.perf_counter_ns(), effect.start
        if effect.logprobs >= 0:
            return told(self._shard, self._buckets, state, effect)
        how = self._shard, self._buckets, state, effect, lambda: self.abandoned(request) or self._lanes.given_up
        try:
            for stop in prefilled(*how, follow=self.decoding.follow):
                if stop < effect.stop:
                    steps.put(((request, PrefillAdvanced(stop, more=True)),))
        except Exception as error:
            if effect.stop - effect.start > self._chunk and self._shard.state_specs and ran_out_of_memory(error):
                return self.decoding.half_settled(effect.slot, error)
            raise
        self._shard.synchronize()  # or the host would run ahead of what it acknowledges
        took = time.perf_counter_ns() - started
        if stop == effect.stop:
            self._checkpoints.computed(request, effect, state)
        return PrefillAdvanced(stop, took)
