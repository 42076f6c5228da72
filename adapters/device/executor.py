"""Carries out device effects on a shard: opens slots, prefills prompts in chunks, and runs decode steps as one batch.

Theory of operation
-------------------

The engine calls the executor on the event loop. The executor does no work there: it hands work to a device lane, which
is one thread per device (`lane/lane.py`), and outcomes come back to the event loop by a callback.

* `open` prepares a slot for a request. It keeps the first rows of the slot or copies them from another one, restores
  the positional state of a recurrent model, and makes the request's sampler. An opening has no outcome. If it fails,
  every later effect on the slot fails and says why, and `SlotRowsLost` is reported before that.
* `submit` carries out a launch. A launch is a batch of decode steps, one prefill, or decode steps with one piece of a
  prompt. It may also be one effect that another part handles (`ExecutorParts.handlers`), for instance loading a draft.
* A decode step feeds the last token of each request, and the proposals of the draft behind it. What the target picks
  after each of these tokens decides how many stay. So proposals change how many tokens a step gives, never which.
* A launch may take many decode steps without asking the core. `lane/running_batch.py` says how requests join such a
  launch, and `decode/decode_step.py` how its steps follow each other.

Invariants:

* Work runs in the order of the calls. The exception is a launch of lane PROMPTS, if these have a lane of their own
  (`lane/prompt_lane.py`).
* Each request of a launch gets outcomes until one that is the last, or the launch as a whole fails.
* A failure that concerns one request is that request's outcome. An exception is a bug, or a lost process of a shard:
  the slots of the launch then refuse all work until they are opened again.
* An event is reported before the outcomes of the step that caused it.

Example: `open(7, OpenSlot(slot=0, ...))`, then `submit(Launch((RunPrefill(0, 0, 40),)))`, then
`submit(Launch((RunDecode(0, position=40, token=9, steps=16),)))` gives up to 16 tokens of request 7.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from adapters.device.decode.decode_step import DecodeRunner
from adapters.device.decode.prefill import PromptPiece, find_prompt_piece
from adapters.device.decode.prefill_runner import PrefillRunner
from adapters.device.decode.prompt_along import goes_along, limit_to_forward
from adapters.device.device_events import DeviceEventPort, ExpertUseCounted, SlotRowsLost
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.buckets import row_counts
from adapters.device.lane.lane import make_loop_caller
from adapters.device.lane.out_of_memory import is_out_of_memory, out_of_memory_failure
from adapters.device.lane.prompt_lane import ExecutorLanes
from adapters.device.lane.running_batch import InFlightRequests, OutcomeQueue, perform_launch
from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.checkpoints import StateCheckpoints
from adapters.device.slots.row_watch import RowWatch
from adapters.device.slots.slot_table import add_pages
from adapters.device.slots.slots import (
    SlotState,
    abandoned_failure,
    begin_slot,
    check_opening,
    clip_spans,
    find_lost_slots,
    opening_failure,
)
from adapters.watched_thread import WatchedThread
from effects.all import EffectRequest, Launch, Outcome
from effects.decode import RunDecode
from effects.experts import MoveExperts
from effects.ids import DeviceFailed, RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.pacing import PaceSteps
from effects.ports import DeliverOutcomes
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.stream import StopLaunch

log = logging.getLogger("rekindle.device")


class DeviceExecutor:
    """Opens slots and carries out launches on the shard of its parts, all of which belong to it until it is closed.

    An executor of the same parts, or of evolved ones, may replace this one while no request is in flight.
    """

    def __init__(self, parts: ExecutorParts) -> None:
        self.parts = parts
        self._shard = parts.shard
        self._lane = parts.lane
        self._slots = parts.slots
        self._lanes = ExecutorLanes(parts.lane, parts.prompt_lane)
        self._buckets = row_counts(parts.buckets, fast=parts.fast)
        self._chunk = max(parts.buckets)
        self._checkpoints = StateCheckpoints(parts.shard, parts.keep_state)
        self.row_watch = RowWatch(parts.shard)
        self.decoding = DecodeRunner(
            shard=parts.shard,
            buckets=self._buckets,
            lane=parts.lane,
            slots=parts.slots,
            checkpoints=self._checkpoints,
            is_abandoned=self.is_abandoned,
            row_watch=self.row_watch,
            before_report=self._report_used_experts,
            proposer=parts.proposer,
            text_proposer=parts.text_proposer,
        )
        self._prefills = PrefillRunner(
            shard=parts.shard,
            buckets=self._buckets,
            chunk=self._chunk,
            slots=parts.slots,
            checkpoints=self._checkpoints,
            is_abandoned=self.is_abandoned,
            is_lane_wanted=lambda: self._lanes.is_prefill_lane_wanted(parts.shard.launches_ahead),
            is_alone=lambda: self._in_flight.count == 1,
            has_own_lane=parts.prompt_lane is not None,
            decoding=self.decoding,
        )
        self._in_flight = InFlightRequests()

    # --- called on the event loop ---

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """The threads of its lanes."""
        return self._lanes.threads

    @property
    def events(self) -> DeviceEventPort:
        """The port by which its events reach the engine."""
        return self.parts.events

    def move_experts(self, _: RequestId, effect: MoveExperts) -> None:
        """Move experts between host and device memory, in turn. If that fails, they are copied when they are needed."""
        if self.parts.experts is not None and not self._lane.is_closed:
            moving = partial(self.parts.experts.move_experts, effect.moves)
            self._lane.post(
                moving, lambda error: log.error("experts could not be moved and stay where they are", exc_info=error)
            )

    def pace_steps(self, _: RequestId, effect: PaceSteps) -> None:
        """Begin, change or end the even pace of decode steps. It holds from the next step that is launched."""
        self.decoding.overlapped.set_pace(evenly=effect.evenly, interval_ns=effect.interval_ns)

    def open(self, request: RequestId, effect: OpenSlot) -> None:
        """Open the slot in its turn. If that fails, every later effect on the slot for this request fails and says why.

        If the rows of the slot are not there, `SlotRowsLost` is delivered before any of these failures.
        """

        def on_done(_: object, error: BaseException | None) -> None:
            if lost := find_lost_slots(error, effect.slot):
                self.events.deliver(SlotRowsLost(lost))

        self._lanes.open(effect.slot, partial(self._open, request, effect), on_done)

    def submit(self, launch: Launch, done: DeliverOutcomes) -> None:
        """Carry out a launch in its turn.

        `done` is called on the event loop with the outcomes of its requests, until each has had its last one; or with
        the exception that is a bug: an effect without a handler, or a batch that cannot be.
        """
        queue, failed = self._in_flight.begin(launch, self._lanes.lane_of(launch), done, make_loop_caller())
        self._lanes.launch(launch, partial(self._carry_out, launch.effect_requests, queue), failed)

    async def perform(self, launch: Launch) -> tuple[Outcome, ...]:
        """Submit a launch and return the combined outcome of each request. A cancelled caller waits for it as well."""
        return await perform_launch(self.submit, launch)

    def abandon(self, request: RequestId) -> None:
        """Give the request up: work for it that has not started will not start, and what has started finishes."""
        self._in_flight.abandon(request)

    def stop_launch(self, request: RequestId, _: StopLaunch) -> None:
        """End the launch that this request is in after its current step, because other requests wait for the lane.

        Work that may not run between two steps ends a running launch (`DeviceLane.post`), so an empty piece is enough.
        """
        lane = self._in_flight.lane_of(request)
        if lane is not None and not lane.is_closed:
            lane.post(
                lambda: None, lambda error: log.debug("there is no launch to stop: %s", error), between_steps=False
            )

    def close(self, timeout_s: float = 10) -> bool:
        """Give the memory back and end the lanes. Return False if one was still busy after `timeout_s`."""
        return self._lanes.close(self.decoding.close, timeout_s)

    # --- called on a lane ---

    def is_abandoned(self, request: RequestId) -> bool:
        """Should work for this request stop? Handlers that take long ask between two parts of their work."""
        return request in self._in_flight.abandoned

    def lose_all_slots(self, why: str) -> None:
        """Make all slots refuse work, idle ones included: a process of the shard is gone, and rows and states with it.

        The engine hears of the lost slots before any outcome of a launch that meets them.
        """
        lost = tuple(map(SlotId, range(self._shard.spec.slots)))
        self._slots.fail_all(lost, DeviceFailed("lost", why))
        self.events.report(SlotRowsLost(lost))

    def rehearse(
        self, opening: OpenSlot, next_request: Callable[[Sequence[Outcome]], EffectRequest | None]
    ) -> list[Outcome]:
        """Open a slot and carry out the effects that `next_request` chooses, one by one, until it returns None.

        Used for measurements while no request is served. `next_request` gets all outcomes so far.
        """
        outcomes = list[Outcome]()
        self._open(RequestId(0), opening)
        while (effect_request := next_request(outcomes)) is not None:
            queue = OutcomeQueue(lambda _: None, {effect_request.request: None})
            self._carry_out((effect_request,), queue)
            outcomes += [outcome for _, outcome in queue.take()]
        self._slots.remove(opening.slot)
        return outcomes

    # --- opening a slot ---

    def _open(self, request: RequestId, effect: OpenSlot) -> bool:
        """Open the slot, and return whether the device may still be at work on rows of it."""
        try:
            self._slots.put(effect.slot, self._build_slot(request, effect))
        except BaseException as error:
            # Whatever the reason is, the rows of this slot are not those that it was opened with.
            self._slots.put(effect.slot, opening_failure(effect, error))
            raise
        copied = bool(effect.pages) or (effect.keep > 0 and effect.source != effect.slot)
        return copied or not self.decoding.overlapped.is_known_unused(effect.slot)

    def _build_slot(self, request: RequestId, effect: OpenSlot) -> SlotState:
        slot = effect.slot
        source = effect.source
        keep = effect.keep
        check_opening(effect, self._shard)
        state = begin_slot(request, effect, self._build_sampler)
        origin = self._slots.find_state(source)
        proposer = self.parts.proposer
        if keep:
            if origin is None or not origin.holds(effect.prompt[:keep]):
                raise ValueError(f"slot {source} does not hold the first {keep} tokens of the prompt")
            if proposer is not None:
                proposer.catch_up(source)
            state.draft_spans = clip_spans(origin.draft_spans, keep)
        self.row_watch.check_source_rows(effect, origin)
        if effect.pages:
            self._shard.rows.seat(slot, source, keep, effect.pages)
        elif keep and source != slot:
            self._shard.rows.copy(source, slot, keep)
        self.row_watch.check_opened_rows(effect)
        if self._shard.states.specs:
            self._checkpoints.restore_state(origin, effect)
            state.valid = effect.state
            state.rows_ahead = keep - effect.state
        if proposer is not None:
            proposer.inherit_rows(source, slot, state)
        return state

    def _build_sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        matching = None if sampling.grammar is None else self.parts.match_grammar(sampling.grammar)
        return Sampler(sampling, prompt, self._shard.spec.vocab_size, self._lane.device, matching)

    # --- carrying out a launch ---

    def _carry_out(self, effect_requests: tuple[EffectRequest, ...], queue: OutcomeQueue) -> None:
        """Carry out a launch. An exception makes the slots of its requests refuse all work until they are opened."""
        try:
            self._dispatch(effect_requests, queue)
            self.row_watch.learn_new_rows(self._slots, effect_requests)
        except BaseException as error:
            self._slots.break_requests(queue.members, error)
            raise

    def _dispatch(self, effect_requests: tuple[EffectRequest, ...], queue: OutcomeQueue) -> None:
        """Carry out decode steps and behind them one other effect, or the next rows of several prompts.

        A piece of a prompt goes into one forward with the decode steps where that is possible, else behind them. Where
        steps can be overlapped, rows of prompts may go along with several of them. Otherwise the first of these prompts
        shares a forward, and the others have forwards of their own.
        """
        decode_steps = tuple(takewhile(lambda one: isinstance(one.effect, RunDecode), effect_requests))
        rest = effect_requests[len(decode_steps) :]
        outcomes = tuple[Outcome, ...]()
        only_prefills = all(isinstance(one.effect, RunPrefill) for one in rest)
        go_along = all(map(goes_along, rest))
        if (not only_prefills and (decode_steps or len(rest) > 1)) or (decode_steps and len(rest) > 1 and not go_along):
            raise ValueError("only decode steps are batched, and a piece of a prompt with them, or several prompts")
        for request, count in Counter(one.request for one in effect_requests).items():
            if count > 1:
                raise ValueError(f"request {request} is in a launch twice")
        add_pages(self._shard, self._slots, decode_steps)
        # Behind that: pages that one slot is given may be what another one has lost.
        self.row_watch.check_launch(self._slots, effect_requests)
        if (decode_steps and not rest) or self.decoding.can_take_along(effect_requests):
            for one in self.decoding.run(effect_requests, queue):
                queue.put([(one.request, self._carry_out_one(one, queue))])
            return
        if decode_steps:
            first = limit_to_forward(rest[0], len(decode_steps))
            effect_requests = (*decode_steps, first, *rest[1:])
            request = first.request
            effect = first.effect
            piece = self._find_piece(first)
            outcomes = self.decoding.step(decode_steps, piece)
            if piece is not None and isinstance(effect, RunPrefill) and isinstance(outcomes[-1], PrefillAdvanced):
                self._checkpoints.keep_after_chunk(request, effect, piece.state)
        elif len(rest) > 1 and not go_along:
            self._prefills.run_together(rest, queue)
            self._report_used_experts()
            return
        # If the piece went with the decode steps, its outcome is there already.
        outcomes = (*outcomes, *(self._carry_out_one(one, queue) for one in effect_requests[len(outcomes) :]))
        self._report_used_experts()
        queue.put([(one.request, outcome) for one, outcome in zip(effect_requests, outcomes, strict=True)])

    def _find_piece(self, effect_request: EffectRequest) -> PromptPiece | None:
        effect: RunPrefill = effect_request.effect  # type: ignore[assignment] # `_dispatch` has checked it
        if self.is_abandoned(effect_request.request):
            return None
        state = self._slots.find(effect.slot, effect_request.request)
        return find_prompt_piece(self._shard, self._chunk, state, effect)

    def _carry_out_one(self, effect_request: EffectRequest, queue: OutcomeQueue) -> Outcome:
        handler = self.parts.handlers.get(type(effect_request.effect))
        if isinstance(effect_request.effect, RunPrefill):
            handler = partial(self._prefills.run, queue=queue)
        if handler is None:
            raise LookupError(f"{type(effect_request.effect).__name__} has no handler on the device")
        if self.is_abandoned(effect_request.request):
            return abandoned_failure(effect_request.request)
        try:
            return handler(effect_request.request, effect_request.effect)
        except Exception as error:
            if is_out_of_memory(error):
                return out_of_memory_failure(error)
            raise

    def _report_used_experts(self) -> None:
        """Report which experts the last steps needed. Called before the outcomes of these steps are reported."""
        if self.parts.experts is not None and (counts := self.parts.experts.report()):
            self.events.report(ExpertUseCounted(counts))
