"""Carries out the prefills of a launch: the chunks of one prompt, or the next rows of several prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from attrs import define

from adapters.device.decode.decode_step import DecodeRunner
from adapters.device.decode.prefill import PromptPiece, find_prefill_misfit, run_pieces, run_prefill
from adapters.device.decode.prompt_logprobs import prefill_with_logprobs
from adapters.device.lane.out_of_memory import is_out_of_memory, out_of_memory_failure
from adapters.device.lane.running_batch import OutcomeQueue
from adapters.device.slots.checkpoints import StateCheckpoints
from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState, abandoned_failure
from adapters.models.decoder.pipeline.pipeline import Pipeline
from effects.all import EffectRequest, Outcome
from effects.ids import DeviceFailed, RequestId
from effects.prefill import PrefillAdvanced, RunPrefill, group_prefills


@define(eq=False)
class PrefillRunner:
    """Runs prefills on the slots of an executor. Every method is called on a lane.

    buckets: row counts that forwards run with, ascending. chunk: the most rows of a forward. is_abandoned: is a request
    given up? is_lane_wanted: should a prefill of several chunks end, because other work waits? is_alone: is no other
    request in a launch? has_own_lane: prompts have a lane, so decode steps are launched on another stream. decoding:
    its draft follows the rows.
    """

    shard: Pipeline
    buckets: Sequence[int]
    chunk: int
    slots: SlotTable
    checkpoints: StateCheckpoints
    is_abandoned: Callable[[RequestId], bool]
    is_lane_wanted: Callable[[], bool]
    is_alone: Callable[[], bool]
    has_own_lane: bool
    decoding: DecodeRunner

    def run(self, request: RequestId, effect: RunPrefill, queue: OutcomeQueue) -> Outcome:
        """Compute the rows of one prefill. queue: gets the outcomes of all chunks but the last one, which is returned.

        The caller has checked that the request is not abandoned. Each time that is reported is that of all chunks so
        far. It is not known where shards work side by side, until all are done, nor where the last chunk is reported
        before the device has computed it (`run_prefill`).
        """
        state = self._begin(request, effect)
        if isinstance(state, DeviceFailed):
            return state
        if effect.logprobs >= 0:
            return prefill_with_logprobs(self.shard, self.buckets, state, effect)

        def is_given_up() -> bool:
            return self.is_abandoned(request) or self.is_lane_wanted()

        stop = effect.start
        follow = None if self.decoding.proposer is None else self.decoding.follow
        chunks = run_prefill(
            *(self.shard, self.buckets, state, effect, is_given_up),
            follow=follow,
            is_alone=self.is_alone(),
            waits_for_last=self.has_own_lane,
        )
        started_ns = time.perf_counter_ns()
        try:
            for stop in chunks:
                if stop < effect.stop:
                    took_ns = time.perf_counter_ns() - started_ns if self.shard.launches_ahead else 0
                    queue.put(((request, PrefillAdvanced(stop, took_ns, more=True)),))
        except Exception as error:
            is_lost = effect.stop - effect.start > self.chunk or not self.shard.states.survives_failure
            if is_lost and self.shard.states.specs and is_out_of_memory(error):
                return self.decoding.fail_half_settled(effect.slot, error)
            raise
        took_ns = 0
        if self.has_own_lane or state.last_row is None:
            # Without waiting, the host would acknowledge rows that the device has yet to compute.
            self.shard.synchronize()
            took_ns = time.perf_counter_ns() - started_ns
        if stop == effect.stop:
            self.checkpoints.keep_after_chunk(request, effect, state)
        return PrefillAdvanced(stop, took_ns)

    def run_together(self, effect_requests: Sequence[EffectRequest], queue: OutcomeQueue) -> None:
        """Compute the next rows of several prompts, and report those of each forward when they are in place.

        No times are reported, because a forward may wait for the one before it. If memory is missing, every prefill
        that has no outcome yet gets that failure. With positional state their slots are broken then, because a forward
        of several prompts puts no state back.
        """
        waiting: dict[int, tuple[RequestId, RunPrefill]] = {}  # by slot, those without an outcome
        for one in effect_requests:
            if not isinstance(one.effect, RunPrefill) or one.effect.logprobs >= 0:
                raise ValueError("only prefills without logprobs share a launch")
            if one.effect.slot in waiting:
                raise ValueError(f"slot {one.effect.slot} is in a launch twice")
            waiting[one.effect.slot] = (one.request, one.effect)
        try:
            for pieces in run_pieces(
                self.shard, self.buckets, self._make_forwards(waiting, queue), self.decoding.follow
            ):
                for piece in pieces:
                    self.checkpoints.keep_after_chunk(*waiting[piece.slot], piece.state)
                queue.put([(waiting.pop(piece.slot)[0], PrefillAdvanced(piece.stop)) for piece in pieces])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            queue.put([(request, self._fail(slot, error)) for slot, (request, _) in waiting.items()])

    def _fail(self, slot: int, error: Exception) -> DeviceFailed:
        """Return the failure of a prefill that shared a launch for which memory was missing."""
        return self.decoding.fail_half_settled(slot, error) if self.shard.states.specs else out_of_memory_failure(error)

    def _make_forwards(
        self, waiting: dict[int, tuple[RequestId, RunPrefill]], queue: OutcomeQueue
    ) -> Iterator[list[PromptPiece]]:
        """Yield the pieces of each forward. What cannot be computed is reported and taken from `waiting`."""
        for group in group_prefills([effect for _, effect in waiting.values()], self.chunk):
            pieces = list[PromptPiece]()
            for effect in group:
                request, _ = waiting[effect.slot]
                state = self._begin(request, effect)
                if isinstance(state, DeviceFailed):
                    del waiting[effect.slot]
                    queue.put(((request, state),))
                else:
                    pieces.append(PromptPiece(effect.slot, effect.start, effect.stop, state))
            if pieces:
                yield pieces

    def _begin(self, request: RequestId, effect: RunPrefill) -> SlotState | DeviceFailed:
        """Return the state of the prefill's slot, whose rows behind the valid ones are overwritten from now on."""
        if self.is_abandoned(request):
            return abandoned_failure(request)
        state = self.slots.find(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        misfit = find_prefill_misfit(self.shard, self.chunk, state, effect)
        if misfit is not None:
            return misfit
        self.checkpoints.keep_before_prefill(request, effect)
        state.rows_ahead = 0
        return state
