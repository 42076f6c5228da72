"""Decode steps whose next one begins before the host has read what they picked, so that a GPU always has work.

Theory of operation
-------------------

A plain step has a gap: the device waits while the host reads the picks, decides which requests go on, and launches the
next forward. But the next forward needs only the picked token ids, and these are on the device already. So the host
launches step N + 1 with the picks of step N as its input, and only then reads what step N picked. Rows are committed
and tokens are appended step by step, in order:

    device:   forward N                               | forward N+1
    host:     commit rows N, launch N+1 | read picks N, append tokens, report | commit rows N+1, launch N+2 | ...

When the host launches step N + 1, it does not know yet whether step N ended a request. If it did, step N + 1 has a row
too many: that row is not committed, and its pick is dropped. A request that joins has its first row in the step after
the one that runs.

Some picks depend on the pick before them: a grammar, and penalties on the answer. Then step N + 1's forward is launched
ahead, but its pick is launched only when step N is known (`InFlightStep.picking` is None until then).

Invariants:

* When step N + 1 is launched, all steps before N have been read.
* The host reads a step only after it has launched the next one, or when there is none.
* `BatchMember.steps_left` counts the step in flight. A request has no row in more steps than that, and none beyond the
  slot's capacity.
* Only plain steps come here: nothing is proposed, so each request has one row per step. Where a step that was read
  makes a match to copy from, no further step is launched, and the requests go on elsewhere (`run`).
* Rows of prompts may go along with a step (`prompt_along.py`). Their last ones are reported when they are launched.
  If the forward has the prompt's very last row, its first decode step joins the step in flight (`kept_rows.py`).
* If members have ended or joined by then, the rules for copies do not hold any more. Then the step in flight is the
  last one for all members, and the core decides how they go on.

Example: A and B decode, and step 5 picks A's stop token. Step 6 was launched for both. Reading step 5 ends A, which
gets its last outcome then. Step 6 commits B's row only, and step 7 has B alone. If step 7 makes a match to copy from,
B gets its last outcome with step 8, which was launched before, and the core plans the next launch for B alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.device.decode.in_flight_step import BatchMember, InFlightStep, append_picks, last_tokens
from adapters.device.decode.kept_rows import has_kept_row, keep_last_rows, pick_from_kept_rows
from adapters.device.decode.last_row import forward_unless_kept
from adapters.device.decode.next_steps import make_next_step
from adapters.device.decode.prompt_along import PlaceAlong, append_tokens, goes_along
from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.out_of_memory import is_out_of_memory, out_of_memory_failure
from adapters.device.lane.running_batch import RunningBatch
from adapters.device.sampling.sampler import Draw, LaunchedPicks, Sampler, start_picking
from adapters.device.slots.checkpoints import StateCheckpoints
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.step_copies import StepCopies
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.factory import build_step_pacer
from adapters.models.kernels.interfaces.step_pacer import StepPacer
from adapters.models.kernels.step import Forward, Segment, Step
from effects.all import EffectRequest
from effects.decode import RunDecode
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling

log = logging.getLogger("rekindle.device")


@define(eq=False)
class OverlappedDecode:
    """Runs overlapped decode steps. Every method but `set_pace` is called on the lane.

    follow: called with each step after its rows are committed, so that a draft keeps up. find_ready_slot: returns the
    state of a request's slot, or why it cannot decode. copies: asked what matches when a step's picks are appended.
    along: the place of the prompts that go along.
    """

    shard: Pipeline
    buckets: Sequence[int]
    checkpoints: StateCheckpoints
    find_ready_slot: Callable[[RequestId, RunDecode], SlotState | DeviceFailed]
    is_abandoned: Callable[[RequestId], bool]
    follow: Callable[[Step, Forward, Sequence[Kept], Sequence[SlotState]], object]
    copies: StepCopies
    along: PlaceAlong
    _pace_ns: int | None = field(init=False, default=None)  # as in `StepPacer.beat`; None: steps keep no pace
    _pacer: StepPacer = field(init=False)
    _default_sampler: Sampler | None = field(init=False, default=None)  # for picks that are dropped
    _in_flight: InFlightStep | None = field(init=False, default=None)  # None before the first read of a launch

    def __attrs_post_init__(self) -> None:
        """Make the pacer of the shard's device."""
        self._pacer = build_step_pacer(self.shard.spec.device)

    def set_pace(self, *, evenly: bool, interval_ns: int = 0) -> None:
        """Begin, change or end the even pace of steps. Called on the event loop; it holds from the next step on.

        interval_ns: as in `StepPacer.beat`.
        """
        self._pace_ns = interval_ns if evenly else None

    def can_run(self, effect_requests: Sequence[EffectRequest], batch: RunningBatch | None) -> bool:
        """Can these effects run overlapped? The device must run ahead, and no draft may propose.

        No member may copy text in its next step either, unless members have ended or joined: then nothing is copied.
        batch: the launch, if it has begun.
        """
        if not self.shard.spec.runs_ahead:
            return False
        effects = [one.effect for one in effect_requests if isinstance(one.effect, RunDecode)]
        return (
            not any(one.propose for one in effects)
            and any(one.steps > 1 for one in effects)
            and ((batch is not None and batch.has_changed) or not any(self.copies_next(one) for one in effect_requests))
        )

    def copies_next(self, effect_request: EffectRequest) -> bool:
        """Would its next step copy text, by the rule of its launch?"""
        effect = effect_request.effect
        if not isinstance(effect, RunDecode) or effect.copying is None:
            return False
        state = self.find_ready_slot(effect_request.request, effect)
        return isinstance(state, SlotState) and self.copies.find_class(effect, state) >= 0

    def finds_expired_match(self, following: Sequence[EffectRequest | None], batch: RunningBatch) -> bool:
        """Would a request copy text in its next step, though members have ended or joined since the launch began?

        following: the next step of each member; None for one that has ended.
        """
        has_changed = batch.has_changed or None in following
        if not (has_changed and self.copies.has_matching_text):
            return False
        return any(self.copies_next(one) for one in following if one is not None)

    def run(self, effect_requests: Sequence[EffectRequest], batch: RunningBatch) -> Sequence[EffectRequest]:
        """Take steps until every request has its last outcome, or one of them would copy earlier text.

        Return the effect requests that the launch goes on with in another way; none if all requests have ended.
        """
        try:
            members = self._begin_members(effect_requests, batch)
            staying = self._run(self._launch_first(members, batch), batch)
        finally:
            self._in_flight = None
            not_along = self.along.end()
        following = [
            make_next_step(EffectRequest(one.request, one.effect), one.state, one.steps_left) for one in staying
        ]
        return [*following, *not_along, *batch.take_joining()]

    def is_known_unused(self, slot: int) -> bool:
        """Is it known that no step which the device still runs has a row of the slot? Called between two steps.

        False also where nothing is known, because no step has been read yet. All steps before the one in flight have
        been read, so only that one counts. Copies that openings launched are not covered.
        """
        return self._in_flight is not None and all(segment.slot != slot for segment in self._in_flight.step.segments)

    def _run(self, running: InFlightStep | None, batch: RunningBatch) -> Sequence[BatchMember]:
        """Take steps from this one on. Return the members that go on elsewhere, because they would copy text now."""
        started_ns = time.perf_counter_ns()
        has_match = False  # a request's text has a match to copy from now, so no further step is launched
        begun = () if running is None else running.members  # members whose texts may not be indexed yet
        while running is not None:
            self._commit_rows(running)
            # The rules of what is copied hold for the members that the launch began with.
            ends = batch.serve_and_check_stop() or (has_match and batch.has_changed)
            joined = [] if has_match else self._begin_members(batch.take_joining(), batch)
            joining = pick_from_kept_rows(self.shard, self.buckets, running, joined)
            staying = [] if ends else [member for member in running.members if self._may_continue(member)]
            following = None
            if not has_match:
                following = self._launch_next(running, staying, joining, batch)
                self.copies.index_texts((*begun, *joined))  # while the device is at work
                begun = ()
            picked = running.read_picks()
            read_ns = time.perf_counter_ns()
            continuing = set() if following is None and not has_match else set(staying)
            took_ns = read_ns - started_ns if running.has_own_time else 0
            outcomes = append_picks(running, picked, continuing, took_ns, self.copies)
            for rows in running.rows:
                outcomes += rows.report(() if following is None else following.rows)
            started_ns = read_ns
            if following is not None and following.picking is None:
                following.picking = self._start_picking(following.logits, following.members)
            batch.report_outcomes(outcomes)
            if has_match:
                for member in staying:
                    member.steps_left -= 1
                return [member for member in staying if not member.has_ended]
            has_match = self.copies.has_match(running.members)
            self._in_flight = following
            running = following
        return ()

    def _begin_members(self, effect_requests: Sequence[EffectRequest], batch: RunningBatch) -> list[BatchMember]:
        """Return the requests that can begin; report to the others why they cannot."""
        members = list[BatchMember]()
        for effect_request in effect_requests:
            if goes_along(effect_request):
                batch.report_some(self.along.begin(effect_request))
                continue
            effect: RunDecode = effect_request.effect  # type: ignore[assignment] # all others are
            state = self.find_ready_slot(effect_request.request, effect)
            if isinstance(state, DeviceFailed):
                batch.report_outcomes([(effect_request.request, state)])
                continue
            self.checkpoints.keep_before_step(effect_request.request, effect)
            steps_left = min(effect.steps, self.shard.spec.capacity - effect.position)
            members.append(BatchMember(effect_request.request, effect.slot, state, effect, steps_left))
        return members

    def _may_continue(self, member: BatchMember) -> bool:
        """May it have a row in the next step, as far as that is known before the step in flight has been read?"""
        return not member.has_ended and member.steps_left > 1 and not self.is_abandoned(member.request)

    def _launch_first(self, members: Sequence[BatchMember], batch: RunningBatch) -> InFlightStep | None:
        """Launch the first step. Return None if no request is there, or no memory, which is reported."""
        try:
            return self._note_rows(self._launch(members, last_tokens(members)), batch) if members else None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._report_no_memory(members, error, batch)
            return None

    def _launch_next(
        self,
        running: InFlightStep,
        staying: Sequence[BatchMember],
        joining: Sequence[BatchMember],
        batch: RunningBatch,
    ) -> InFlightStep | None:
        """Launch the step after `running`.

        It is fed what the staying members pick, then the last tokens of those that join. Called on the lane.

        Return None if no request is left for it, or if there is no memory. Then the launch ends with `running`: the
        staying members get their last outcome with what `running` picks. Without memory, the joining members and a
        prompt that goes along get DeviceFailed.
        """
        tokens = running.tokens
        batch.report_some(self.along.drop_abandoned())
        try:
            if len(staying) < len(running.members):
                staying_members = set(staying)
                indices = [index for index, member in enumerate(running.members) if member in staying_members]
                tokens = tokens[torch.tensor(indices, dtype=torch.int64).to(tokens.device, non_blocking=True)]
            if joining:
                tokens = torch.cat((tokens, last_tokens(joining).to(tokens.device, non_blocking=True)))
            following = self._launch([*staying, *joining], tokens, len(staying)) if staying or joining else None
            if following is not None:
                self._note_rows(following, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("a decode step could not be prepared ahead: %s", error)
            self._report_no_memory(joining, error, batch)
            return None
        for member in staying:
            member.steps_left -= 1
        return following

    def _note_rows(self, step: InFlightStep, batch: RunningBatch) -> InFlightStep:
        """Report the last rows of prompts that go with a step which was just launched. Returns the step."""
        batch.report_some(self.along.note_launched(step.rows))
        return step

    def _report_no_memory(self, members: Sequence[BatchMember], error: Exception, batch: RunningBatch) -> None:
        """Report to these members, and to prompts that go along, that a step could not be launched for them."""
        failures = [(member.request, out_of_memory_failure(error)) for member in members]
        batch.report_some([*failures, *self.along.fail(error)])

    def _launch(self, members: Sequence[BatchMember], tokens: Tensor, unread_count: int = 0) -> InFlightStep:
        """Launch a step of one row per request. tokens: int64 `[R]`, on the device or the host.

        unread_count: the number of members, from the first on, whose token the host has not read yet. Such a token
        stands one position further than the slot state knows.

        If a pace is set (`set_pace`), the end of the step is held back to its beat. So a running prefill gets the GPU
        meanwhile.
        """
        offsets = [1] * unread_count + [0] * (len(members) - unread_count)
        segments = [
            Segment(member.slot, member.state.valid + offset, 1)
            for member, offset in zip(members, offsets, strict=True)
        ]
        step = whole = Step(tuple(segments), bucket_of(self.buckets, len(members)))
        state = members[0].state if len(members) == 1 and not unread_count else None
        # A row that is kept needs no forward, so its token comes before one that prompts go along with.
        is_kept = state is not None and has_kept_row(members[0])
        along = () if is_kept else self.along.find_rows(len(members))
        for rows in along:
            whole = rows.computed_piece.append_to(whole, self.buckets)
        if along:
            tokens = append_tokens(tokens, along)
        forward = forward_unless_kept(self.shard, whole, tokens, state)
        keep_last_rows(along, self.buckets, forward.hidden, len(members))
        hidden = forward.hidden if whole.bucket == step.bucket else forward.hidden[: step.bucket]
        logits = self.shard.logits(step, hidden)
        pace_ns = self._pace_ns
        if unread_count and pace_ns is not None:
            self._pacer.beat(pace_ns)
        else:
            self._pacer.stop()
        picking = None
        if all(member.state.sampler.picks_independently for member in members[:unread_count]):
            picking = self._start_picking(logits, members, offsets)
        return InFlightStep(members, whole, forward, logits, picking, along)

    def _start_picking(
        self, logits: Tensor, members: Sequence[BatchMember], offsets: Sequence[int] = ()
    ) -> LaunchedPicks:
        """Launch the picks of a step. offsets: per member, positions beyond what the slot state knows; default 0.

        A request that has ended is picked for without its own settings, which may refuse to go on behind the end.
        """
        draws = list[Draw]()
        for member, offset in zip(members, offsets or [0] * len(members), strict=True):
            state = member.state
            sampler = self._get_default_sampler(state.sampler) if member.has_ended else state.sampler
            draws.append(Draw(sampler, state.valid + offset + 1))
        return start_picking(logits, draws)

    def _get_default_sampler(self, sampler: Sampler) -> Sampler:
        """Return a sampler without settings on the device of `sampler`, made once."""
        if self._default_sampler is None:
            self._default_sampler = Sampler(Sampling(), (), self.shard.spec.vocab_size, sampler.device)
        return self._default_sampler

    def _commit_rows(self, running: InFlightStep) -> None:
        """Commit the rows of the requests that have not ended. Called before the next forward is launched."""
        kept: list[Kept] = [int(not member.has_ended) for member in running.members]
        states = [member.state for member in running.members]
        for rows in running.rows:
            kept.append(rows.piece.rows)
            states.append(rows.piece.state)
        self.shard.commit(running.step, kept)
        self.follow(running.step, running.forward, kept, states)
        for rows in running.rows:
            if rows.are_last:
                request = rows.prompt.effect_request.request
                self.checkpoints.keep_after_chunk(request, rows.prompt.effect, rows.prompt.state)
