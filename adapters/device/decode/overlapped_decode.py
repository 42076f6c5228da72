"""Decode steps whose next one begins before the host knows what they picked, so that a GPU is never without work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.out_of_memory import out_of_memory, ran_out_of_memory
from adapters.device.lane.running_batch import RunningBatch, going_on
from adapters.device.sampling.sampler import Draw, Picked, Picking, Sampler, picking
from adapters.device.slots.checkpoints import Checkpoints
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.acceptance import Agreed, Member, agree, decoded
from adapters.device.speculation.proposal_tree import chain
from adapters.models.decoder.shard import Kept, Shard
from adapters.models.kernels.factory import build_step_pacer
from adapters.models.kernels.step import Forward, Segment, Step
from adapters.models.kernels.step_pacer import StepPacer
from effects.all import EffectRequest
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling

log = logging.getLogger("rekindle.device")


@define(eq=False)
class BatchMember:
    """A member of a launch.

    left: steps that it may take, the one under way included. ended: its last outcome is told; if it has a row in the
    step under way, that is behind its end.
    """

    request: RequestId
    member: Member
    left: int
    ended: bool = False


@define(eq=False)
class InFlightStep:
    """A step that the device is at, or is about to be. picking: None until what is picked in the one before is known,
    where somebody's grammar or penalties ask for it.
    """

    rows: Sequence[BatchMember]
    step: Step
    forward: Forward
    logits: Tensor
    picking: Picking | None


@define(eq=False)
class OverlappedDecode:
    """Every call runs on the lane. The fields are those of `Decoding`. crowded: do prompts wait for another one to be
    read?
    """

    shard: Shard
    buckets: Sequence[int]
    checkpoints: Checkpoints
    ready: Callable[[RequestId, RunDecode], SlotState | DeviceFailed]
    abandoned: Callable[[RequestId], bool]
    follow: Callable[[Step, Forward, Sequence[Kept], Sequence[SlotState]], object]
    crowded: Callable[[], bool] = field(init=False, default=lambda: False)
    _metronome: StepPacer = field(init=False)
    _nobody: Sampler | None = field(init=False, default=None)  # how what nobody wants is picked
    _under_way: InFlightStep | None = field(init=False, default=None)  # where one before it was looked at

    def __attrs_post_init__(self) -> None:
        self._metronome = build_step_pacer(self.shard.device)

    def takes(self, asks: Sequence[EffectRequest]) -> bool:
        """Where the device can, steps follow each other, and nobody proposes."""
        effects = [ask.effect for ask in asks if isinstance(ask.effect, RunDecode)]
        return (
            self.shard.runs_ahead and not any(one.propose for one in effects) and any(one.steps > 1 for one in effects)
        )

    def run(self, asks: Sequence[EffectRequest], company: RunningBatch) -> Sequence[EffectRequest]:
        """A step is launched, and then what the one before it picked is looked at. If that ended somebody's answer, the
        row that the step has of it is rolled back, and the next one has none. A pick that depends on the one before it
        follows its step when that is known: the device is at the step meanwhile. Nobody is left in the end.
        """
        try:
            self._run(self._first(self._going(asks, company), company), company)
        finally:
            self._under_way = None
        return ()

    def passed(self, slot: int) -> bool:
        """Between two steps: is the device done with every step that had a row of the slot? With those before the one
        under way it is, since they have been looked at. What openings told it is another matter.
        """
        return self._under_way is not None and all(row.member.slot != slot for row in self._under_way.rows)

    def _run(self, flying: InFlightStep | None, company: RunningBatch) -> None:
        clock = time.perf_counter_ns
        started = clock()
        while flying is not None:
            self._settle(flying)
            halted = company.halted()
            staying = [] if halted else [row for row in flying.rows if self._stays(row)]
            following = self._following(flying, staying, self._going(company.joined(), company), company)
            assert flying.picking is not None
            picked, before, started = flying.picking.read(), started, clock()
            outcomes = self._landed(flying, picked, started - before)
            onward = set() if following is None else set(staying)
            for row, outcome in outcomes:
                row.ended = row not in onward or not goes_on(row.member, outcome)
            if following is not None and following.picking is None:
                following.picking = self._picking(following.logits, following.rows)
            company.tell(
                [
                    (row.request, outcome if row.ended or not isinstance(outcome, Decoded) else going_on(outcome))
                    for row, outcome in outcomes
                ]
            )
            self._under_way = flying = following

    def _going(self, asks: Sequence[EffectRequest], company: RunningBatch) -> list[BatchMember]:
        """Those who can begin; of the rest it is told why not."""
        found = list[BatchMember]()
        for ask in asks:
            effect: RunDecode = ask.effect  # type: ignore[assignment] # all of them are
            state = self.ready(ask.request, effect)
            if isinstance(state, DeviceFailed):
                company.tell([(ask.request, state)])
                continue
            self.checkpoints.passed(ask.request, effect)
            left = min(effect.steps, self.shard.capacity - effect.position)
            found.append(BatchMember(ask.request, Member(0, effect.slot, state, chain((effect.token,))), left))
        return found

    def _stays(self, row: BatchMember) -> bool:
        """As far as that is known before the step under way has been looked at."""
        return not row.ended and row.left > 1 and not self.abandoned(row.request)

    def _first(self, rows: Sequence[BatchMember], company: RunningBatch) -> InFlightStep | None:
        """None: nobody is there, or no memory."""
        try:
            return self._launched(rows, fed(rows)) if rows else None
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            company.tell([(row.request, out_of_memory(error)) for row in rows])
            return None

    def _following(
        self,
        flying: InFlightStep,
        staying: Sequence[BatchMember],
        joining: Sequence[BatchMember],
        company: RunningBatch,
    ) -> InFlightStep | None:
        """What those pick now is fed next, and what these have last. None: nobody is there, or no memory now."""
        assert flying.picking is not None
        tokens = flying.picking.tokens
        try:
            if len(staying) < len(flying.rows):
                places = [place for place, row in enumerate(flying.rows) if row in staying]
                tokens = tokens[torch.tensor(places, dtype=torch.int64).to(tokens.device, non_blocking=True)]
            if joining:
                tokens = torch.cat((tokens, fed(joining).to(tokens.device, non_blocking=True)))
            following = self._launched([*staying, *joining], tokens, len(staying)) if staying or joining else None
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("no step ahead: %s", error)
            company.tell([(row.request, out_of_memory(error)) for row in joining])
            return None
        for row in staying:
            row.left -= 1
        return following

    def _launched(self, rows: Sequence[BatchMember], tokens: Tensor, ahead: int = 0) -> InFlightStep:
        """A step of everybody's next token; of the first `ahead` rows, the one after what the host knows.

        Where prompts wait for each other, what is read next decides when all of them are answered, and steps that come
        sooner would only keep it longer: so they come evenly, and leave it the device between them.
        """
        further = [int(place < ahead) for place in range(len(rows))]
        segments = tuple(
            Segment(row.member.slot, row.member.state.valid + more, 1) for row, more in zip(rows, further, strict=True)
        )
        step = Step(segments, bucket_of(self.buckets, len(rows)))
        forward = self.shard.forward(step, tokens)
        logits, picked = self.shard.logits(step, forward.hidden), None
        if ahead and self.crowded():
            self._metronome.beat()
        else:
            self._metronome.stop()
        if all(row.member.state.sampler.forgetful for row in rows[:ahead]):
            picked = self._picking(logits, rows, further)
        return InFlightStep(rows, step, forward, logits, picked)

    def _picking(self, logits: Tensor, rows: Sequence[BatchMember], further: Sequence[int] = ()) -> Picking:
        """further: rows beyond what the host knows. Of whose answer has ended nothing is asked that its end refuses."""
        draws = list[Draw]()
        for row, more in zip(rows, further or [0] * len(rows), strict=True):
            state = row.member.state
            sampler = self._unwanted(state.sampler) if row.ended else state.sampler
            draws.append(Draw(sampler, state.valid + more + 1))
        return picking(logits, draws)

    def _unwanted(self, sampler: Sampler) -> Sampler:
        if self._nobody is None:
            self._nobody = Sampler(Sampling(), (), self.shard.vocab_size, sampler.device)
        return self._nobody

    def _settle(self, flying: InFlightStep) -> None:
        """Whose answer goes on, their row has happened; before the next forward."""
        kept = [int(not row.ended) for row in flying.rows]
        self.shard.commit(flying.step, kept)
        self.follow(flying.step, flying.forward, kept, [row.member.state for row in flying.rows])

    def _landed(
        self, flying: InFlightStep, picked: Sequence[Picked], took: int
    ) -> list[tuple[BatchMember, Decoded | DeviceFailed]]:
        """What was picked, of those whose answer went on. took: since the step before was known, so with the wait for
        the device.
        """
        outcomes = list[tuple[BatchMember, Decoded | DeviceFailed]]()
        for place, row in enumerate(flying.rows):
            if row.ended:
                continue
            agreed = agree(row.member, picked.__getitem__, place)
            if isinstance(agreed, Agreed):
                row.member.state.commit(agreed.tokens)
            outcomes.append((row, decoded(row.member, agreed, took)))
        return outcomes


def fed(rows: Sequence[BatchMember]) -> Tensor:
    """What the host knows to come next: int64 `[R]`."""
    return torch.tensor([row.member.state.tokens[-1] for row in rows], dtype=torch.int64)


def goes_on(member: Member, outcome: Decoded | DeviceFailed) -> bool:
    return isinstance(outcome, Decoded) and outcome.tokens[-1] not in member.state.stops
