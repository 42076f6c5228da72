"""Decode steps of a launch: one step, or step after step until a request needs a decision of the core.

Theory of operation
-------------------

A decode step is one forward of the target for all requests of a launch. For each request it feeds the last token and,
if the draft proposed, the proposed tokens behind it. The target picks a token after each of these rows. Proposals that
the target picks as well are kept, and so is its first pick that differs or goes beyond them. The rows of all other
proposals are rolled back. So a step has four parts:

1. *Propose*: the draft says what may follow (`speculation/proposer.py`), or it is copied from earlier text
   (`speculation/suffix_proposer.py`).
2. *Verify*: one forward and one pick per row; `accept_proposals` finds how many proposals stay.
3. *Settle*: the shard commits the rows that stay, and the slot states get the kept tokens.
4. *Feed the draft*: it gets what the target left of these rows, so that its own context keeps up.

A launch may allow `RunDecode.steps` steps. `DecodeRunner.run` takes them in one of three ways:

* *Overlapped* (`overlapped_decode.py`): on a GPU without proposals, the next step begins before the last pick is read.
* *Native* (`native_decode.py`): a single request on the CPU, with all four parts in one call of the compiled library.
* *Plain*: `step`, again and again. This path serves everything, and the two others give the same bits.

Invariants:

* Out of memory before settling has changed nothing: every request of the step gets that failure, and may try again.
* Out of memory while settling leaves some layers committed and others not: these slots are broken.
* A draft that finds no memory never makes a step fail. It has a gap in its context, and proposes nothing there.
* With a draft, all requests of a launch take another step or none does: they share its cost.
* Text is copied only while a launch has the members that it began with, and takes no prompts along. Otherwise a match
  to copy from ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from attrs import define, evolve, field

from adapters.device.decode.last_row import forward_unless_kept, has_own_time
from adapters.device.decode.native_decode import NativeDecodeStep, make_native_decode
from adapters.device.decode.next_steps import count_proposing_step, find_next_steps
from adapters.device.decode.overlapped_decode import OverlappedDecode
from adapters.device.decode.prefill import PromptPiece
from adapters.device.decode.prompt_along import PlaceAlong, goes_along
from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.out_of_memory import is_out_of_memory, out_of_memory_failure
from adapters.device.lane.running_batch import OutcomeQueue, RunningBatch, as_last_outcome
from adapters.device.sampling.sampler import Draw, NotFinite, make_picker
from adapters.device.slots.checkpoints import StateCheckpoints
from adapters.device.slots.row_watch import RowWatch
from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState, abandoned_failure, check_decode_step
from adapters.device.speculation.acceptance import (
    Acceptance,
    StepMember,
    VerifiedStep,
    accept_proposals,
    decode_outcome,
)
from adapters.device.speculation.launched_proposals import feed_tokens
from adapters.device.speculation.proposal_tree import rows_to_keep
from adapters.device.speculation.proposer import (
    NO_COPIES,
    DecodingSlot,
    Proposer,
    TextProposer,
    follow_rows,
    make_members,
)
from adapters.device.speculation.step_copies import StepCopies
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import UNSETTLED, Forward, Segment, Step
from effects.all import EffectRequest, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId
from effects.prefill import PrefillAdvanced


@define(eq=False)
class DecodeRunner:
    """Carries out decode steps. Every method is called on the lane.

    buckets: row counts of forwards, ascending. is_abandoned: is a request given up? before_report: called before
    outcomes are reported. row_watch: with `--paranoid`, checks that rows have not changed. proposer: the draft, if any.
    text_proposer: what copies earlier text, if anything does.
    """

    shard: Pipeline
    buckets: Sequence[int]
    lane: DeviceLane
    slots: SlotTable
    checkpoints: StateCheckpoints
    is_abandoned: Callable[[RequestId], bool]
    before_report: Callable[[], object]
    row_watch: RowWatch
    proposer: Proposer | None = None
    text_proposer: TextProposer | None = None
    native: NativeDecodeStep | None = field(init=False)
    copies: StepCopies = field(init=False)
    overlapped: OverlappedDecode = field(init=False)
    _batch: RunningBatch | None = field(init=False, default=None)  # the launch that goes on step after step

    def __attrs_post_init__(self) -> None:
        self.native = make_native_decode(self.shard, self.buckets)
        self.copies = StepCopies(self.text_proposer, self.shard.spec.capacity)
        self.overlapped = OverlappedDecode(
            self.shard,
            self.buckets,
            self.checkpoints,
            self.find_ready_slot,
            self.is_abandoned,
            self.follow,
            self.copies,
            PlaceAlong(
                *(self.shard, max(self.buckets), self.slots, self.is_abandoned),
                keeps_last_rows=self.proposer is None and not self.shard.states.specs,
            ),
        )

    def close(self) -> None:
        """Close the shard. The native steps go first, since they refer to its buffers. Answers are kept until then."""
        self.native = None
        self.copies.archive_all()
        self.shard.close()

    def can_take_along(self, effect_requests: Sequence[EffectRequest]) -> bool:
        """Can the rows of a prompt among these go along with steps of their launch, or of the one that they join?"""
        goes_on = self._batch is not None or self.overlapped.can_run(effect_requests, None)
        return goes_on and any(map(goes_along, effect_requests))

    def run(self, effect_requests: Sequence[EffectRequest], queue: OutcomeQueue) -> list[EffectRequest]:
        """Take step after step, until each member has its last outcome or other work needs the lane.

        Between two steps of a running launch the requests join that one. Returns prompts that could not go along.
        """
        if self._batch is not None:
            self._batch.join(effect_requests)
            return []
        takes_prompts = any(map(goes_along, effect_requests))
        batch = RunningBatch(queue, self.lane, self.before_report, has_changed=takes_prompts)
        self._batch = batch
        not_along = list[EffectRequest]()
        try:
            while effect_requests:
                is_overlapped = self.overlapped.can_run(effect_requests, batch)
                if not is_overlapped:
                    not_along += filter(goes_along, effect_requests)
                    effect_requests = [one for one in effect_requests if not goes_along(one)]
                take_steps = self.overlapped.run if is_overlapped else self._run_step
                effect_requests = take_steps(effect_requests, batch) if effect_requests else []
        finally:
            self._batch = None
        return not_along

    def _run_step(self, effect_requests: Sequence[EffectRequest], batch: RunningBatch) -> Sequence[EffectRequest]:
        """Take one step, report its outcomes, and return the effect requests of the next one, with those that join."""
        self.row_watch.check_launch(self.slots, effect_requests)
        outcomes = self.step(effect_requests, may_copy=not batch.has_changed, more=True)
        self.row_watch.learn_new_rows(self.slots, effect_requests)
        next_steps = find_next_steps(effect_requests, outcomes, self.slots, self.is_abandoned)
        following = count_proposing_step(next_steps, outcomes)
        ends_together = None in following and self.proposer is not None
        if batch.serve_and_check_stop() or ends_together or self.overlapped.finds_expired_match(following, batch):
            following = [None] * len(effect_requests)
        reported = list[tuple[RequestId, Outcome]]()
        for effect_request, outcome, next_request in zip(effect_requests, outcomes, following, strict=True):
            reported.append((effect_request.request, as_last_outcome(outcome) if next_request is None else outcome))
        batch.report_outcomes(reported)
        return [one for one in (*following, *batch.take_joining()) if one is not None]

    # --- one step ---

    def _step_natively(
        self, native: NativeDecodeStep, asked: EffectRequest, *, may_copy: bool, more: bool
    ) -> Outcome | None:
        """Take a single request's step in one call of the library. None: it is not served there, nothing happened."""
        effect: RunDecode = asked.effect  # type: ignore[assignment] # it is one
        started_ns = time.perf_counter_ns()
        state = self.find_ready_slot(asked.request, effect)
        if effect.checkpoint or isinstance(state, DeviceFailed):
            return None
        decoding = (DecodingSlot(effect, state),)
        copies = self.copies.choose(decoding) if may_copy else NO_COPIES
        taken = native.step(effect.slot, state, effect.propose, self.proposer, copies)
        if taken is None:
            return None
        if not taken.tokens:
            return DeviceFailed("broken", f"slot {effect.slot}: {NotFinite.at(state.valid + 1).detail}")
        state.commit(taken.tokens)
        if not taken.followed and self.proposer is not None:
            # One row: the draft proposed nothing, and where there is a draft no copies are taken natively.
            step = Step((Segment(effect.slot, effect.position, 1),), bucket_of(self.buckets, 1))
            self.follow(step, native.forward_of(step.bucket), (1,), (state,), 0 if effect.propose else effect.steps - 1)
        (matched,) = self.copies.find_matches(decoding)
        took_ns = time.perf_counter_ns() - started_ns
        copied = taken.proposed if copies.chains else 0
        on_branch = self.copies.count_on_branch(effect.slot) if copied else 0
        counts = taken.tokens, taken.proposed, (), took_ns, taken.accepted
        rows = copied and 1 + copied
        return Decoded(*counts, more=more, matched=matched, copied=copied, rows=rows, on_branch=on_branch)

    def step(
        self,
        effect_requests: Sequence[EffectRequest],
        piece: PromptPiece | None = None,
        *,
        may_copy: bool = True,
        more: bool = False,
    ) -> tuple[Outcome, ...]:
        """Take one decode step of all requests. more: of the outcomes, as in `Decoded`.

        piece: rows of a prompt that go behind the decode rows in one forward. Their outcome is the last one. It is
        missing where the piece was not computed: no request was left to decode. may_copy: their rules still hold.
        """
        if self.native is not None and piece is None and len(effect_requests) == 1:
            outcome = self._step_natively(self.native, effect_requests[0], may_copy=may_copy, more=more)
            if outcome is not None:
                return (outcome,)
        outcomes: list[Outcome] = [DeviceFailed("broken", "not carried out")] * len(effect_requests)
        taken: dict[int, tuple[int, DecodingSlot]] = {}  # by slot: index in `effect_requests`, effect and state
        for index, effect_request in enumerate(effect_requests):
            effect: RunDecode = effect_request.effect  # type: ignore[assignment] # all of them are
            state = self.find_ready_slot(effect_request.request, effect)
            if isinstance(state, DeviceFailed):
                outcomes[index] = state
            else:
                taken[effect.slot] = (index, DecodingSlot(effect, state))
                self.checkpoints.keep_before_step(effect_request.request, effect)
        if not taken:
            return tuple(outcomes)
        started_ns = time.perf_counter_ns()
        decoding = [one for _, one in taken.values()]
        is_settling = False
        if piece is not None:
            piece.state.rows_ahead = 0  # they are overwritten
        try:
            copies = self.copies.choose(decoding) if may_copy and piece is None else NO_COPIES
            members = make_members(self.proposer, copies, taken, self.shard.spec)
            is_timed = piece is None and has_own_time([member.state for member in members])
            verified = self._verify(members, piece)
            is_settling = True
            self._settle(verified, members, piece)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failures = self._fail_step(taken, error, piece, is_settling=is_settling)
            if failures is None:
                # The decode steps alone may find the memory that they did not find together with the piece.
                return (*self.step(effect_requests), out_of_memory_failure(error))
            for index, failure in failures.items():
                outcomes[index] = failure
            return tuple(outcomes) if piece is None else (*outcomes, self.fail_half_settled(piece.slot, error))
        matches = self.copies.find_matches(decoding)
        # With a piece it is not known how much of the time was the decode rows' share, so none is reported.
        took_ns = time.perf_counter_ns() - started_ns if is_timed else 0
        counts = self.copies.count_copies(members, copies)
        for member, one, matched, count in zip(members, verified.found, matches, counts, strict=True):
            outcomes[member.index] = decode_outcome(member, one, took_ns, matched, count, more=more)
        return tuple(outcomes) if piece is None else (*outcomes, PrefillAdvanced(piece.stop))

    def _fail_step(
        self,
        taken: Mapping[int, tuple[int, DecodingSlot]],
        error: Exception,
        piece: PromptPiece | None,
        *,
        is_settling: bool,
    ) -> dict[int, DeviceFailed] | None:
        """Return the failure of each decode step for which memory was missing, by its index.

        Return None if nothing was changed yet and the steps can be taken again without the piece.
        """
        if piece is not None and not is_settling and not (self.shard.states.specs and piece.rows > UNSETTLED):
            return None
        return {
            index: self.fail_half_settled(slot, error) if is_settling else out_of_memory_failure(error)
            for slot, (index, _) in taken.items()
        }

    def find_ready_slot(self, request: RequestId, effect: RunDecode) -> SlotState | DeviceFailed:
        """Return the slot's state if this decode step can be taken there now, else the failure that says why not."""
        if self.is_abandoned(request):
            return abandoned_failure(request)
        state = self.slots.find(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        return check_decode_step(state, effect, self.shard.spec.capacity) or state

    def fail_half_settled(self, slot: int, error: Exception) -> DeviceFailed:
        """Break the slot: some layers' states may have moved and others not, so nothing can go on from them."""
        failure = DeviceFailed("broken", f"slot {slot} was being settled: {error}")
        self.slots.put(slot, failure)
        return failure

    def _verify(self, members: Sequence[StepMember], piece: PromptPiece | None) -> VerifiedStep:
        """Run one forward for all, and find how far the target picks what was proposed.

        The rows of a prompt piece come last and need no logits. So the logits are those of a step without them, and
        its bits do not depend on the piece.
        """
        segments: list[Segment] = []
        rows: list[Draw] = []
        tokens: list[int] = []
        first_rows: list[int] = []  # of each member, the row of its last token
        for member in members:
            first_rows.append(len(rows))
            segments += member.tree.chain_segments(member.slot, member.state.valid)
            rows += member.rows
            tokens += member.tree.tokens
        step = Step(tuple(segments), bucket_of(self.buckets, len(rows)))
        whole = step
        if piece is not None:
            whole = piece.append_to(step, self.buckets)
            tokens = tokens + piece.tokens
        state = members[0].state if len(members) == 1 and piece is None else None
        chains = {first: one.launched for one, first in zip(members, first_rows, strict=True) if one.launched}
        forward = forward_unless_kept(self.shard, whole, feed_tokens(tokens, chains), state)
        hidden = forward.hidden if whole.bucket == step.bucket else forward.hidden[: step.bucket]
        picked = make_picker(self.shard.logits(step, hidden), rows, every=len(rows) == len(members))
        found = [accept_proposals(member, picked, first) for member, first in zip(members, first_rows, strict=True)]
        return VerifiedStep(whole, forward, found)

    def _settle(self, verified: VerifiedStep, members: Sequence[StepMember], piece: PromptPiece | None) -> None:
        """Commit what the target picked, and roll the rows of all other proposals back."""
        step = verified.step
        kept: list[Kept] = [rows_to_keep(one.path) if isinstance(one, Acceptance) else 0 for one in verified.found]
        states = [member.state for member in members]
        if piece is not None:
            kept.append(piece.rows)
            states.append(piece.state)
        self.shard.commit(step, kept)
        for member, one in zip(members, verified.found, strict=True):
            if isinstance(one, Acceptance):
                member.state.commit(one.tokens)
        if piece is None:
            self.follow(step, verified.forward, kept, states)
        else:
            # The core asks for no proposals together with a piece, so all rows stay, as in a prefill.
            self.follow(evolve(step, rows_only=True), verified.forward, kept, states)
            piece.state.mark_computed(piece.stop)

    def follow(
        self, step: Step, forward: Forward, kept: Sequence[Kept], states: Sequence[SlotState], plain_steps: int = 0
    ) -> None:
        """Give the draft, if there is one, what the target left of the rows that stay, as `follow_rows` does."""
        if self.proposer is not None:
            follow_rows(self.proposer, step, forward, kept, states, plain_steps=plain_steps)
