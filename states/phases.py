"""What comes next: the phases of a request in order, each skipped where policy says that there is nothing to do."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.compression import Compressed
from effects.decode import RunDecode
from effects.ids import DeviceFailed, ModelName, PlaceId, SlotId, StoreFailed
from effects.job import Report
from effects.lookup import FindPrefix
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel, UnloadModel
from effects.snapshot import SaveSnapshot
from effects.stream import CloseStream, EmitTokens, Finish
from states import policy, scope
from states.machine import Transition, first
from states.request_states import (
    Done,
    Drafted,
    Fetching,
    Generated,
    LookingUp,
    Open,
    Parking,
    Prefilling,
    Prompt,
    RequestRemainder,
    SlotLease,
    Snapshotting,
    Speculating,
    Speculation,
    Undrafted,
    Unparking,
    live,
    remains,
)
from states.residency import unload
from states.settings import DecisionContext, Settings

Decoding: TypeAlias = Transition[Speculating, RunDecode]
Work: TypeAlias = Transition[Prefilling, RunPrefill] | Decoding
Compress: TypeAlias = Transition[Fetching, LoadModel]
Verbatim: TypeAlias = Transition[Unparking, LoadModel] | Transition[Prefilling, RunPrefill]  # rows are missing
Fill: TypeAlias = Compress | Verbatim
Settled: TypeAlias = Transition[Unparking, LoadModel] | Work
Onward: TypeAlias = Compress | Settled
LeaveEarly: TypeAlias = Transition[Snapshotting, SaveSnapshot] | Transition[Done]
GiveBack: TypeAlias = Transition[Parking, UnloadModel]
Leave: TypeAlias = LeaveEarly | GiveBack
Finished: TypeAlias = (
    Transition[Snapshotting, EmitTokens, CloseStream, SaveSnapshot]
    | Transition[Parking, EmitTokens, CloseStream, UnloadModel]
    | Transition[Done, EmitTokens, CloseStream]
)
FailEarly: TypeAlias = Transition[Snapshotting, CloseStream, SaveSnapshot] | Transition[Done, CloseStream]
Failing: TypeAlias = FailEarly | Transition[Parking, CloseStream, UnloadModel]

NOTHING = Generated()


def opening(
    settings: Settings, seat: SlotLease, prompt: Prompt, source: SlotId | None = None, place: PlaceId | None = None
) -> OpenSlot:
    """The slot serves this prompt from now on. source: None for itself."""
    whence, state = seat.slot if source is None else source, seat.valid if settings.stateful else 0
    job = prompt.job
    tokens = prompt.tokens[: settings.max_context]  # what is longer is served once it has been shortened
    return OpenSlot(seat.slot, whence, seat.rows, tokens, job.sampling, job.stop_tokens, state, place, job.salt)


def find(settings: Settings, seat: SlotLease, prompt: Prompt) -> Transition[LookingUp, FindPrefix]:
    rows = seat.rows if settings.stateful else 0
    asking = FindPrefix(prompt.tokens, seat.valid, policy.window(prompt), rows, prompt.job.salt)
    return Transition(LookingUp(seat, prompt), asking)


def onward(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Onward:
    """All that could be restored has been."""
    if policy.compress(known, prompt, prompt.target - seat.valid).go:
        return Transition(Fetching(seat, prompt), LoadModel("drafter"))
    return settled(known, seat, prompt)


def settled(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Settled:
    """What is served is certain."""
    wanted = policy.speculate(known, prompt.job)
    if wanted.go:
        return Transition(Unparking(seat, prompt), LoadModel("draft"))
    return work(known.settings, seat, prompt, Undrafted(wanted.reason))


def fill(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Fill:
    """Rows are missing: shorten the prompt, or compute them."""
    if policy.compress(known, prompt, prompt.target - seat.valid).go:
        return Transition(Fetching(seat, prompt), LoadModel("drafter"))
    return verbatim(known, seat, prompt)


def verbatim(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Verbatim:
    """Rows are missing, and what is served is certain."""
    wanted = policy.speculate(known, prompt.job)
    if wanted.go:
        return Transition(Unparking(seat, prompt), LoadModel("draft"))
    return prefill(known.settings, seat, prompt, Undrafted(wanted.reason))


def work(settings: Settings, seat: SlotLease, prompt: Prompt, speculation: Speculation) -> Work:
    if seat.valid < prompt.target:
        return prefill(settings, seat, prompt, speculation)
    held, seat = scope.held(settings, seat, prompt), seat.computed(seat.valid)
    one = next_decode(settings, seat, prompt, speculation, NOTHING, checkpoint=held)
    return Transition(Speculating(seat, prompt, speculation, NOTHING), one)


def prefill(
    settings: Settings, seat: SlotLease, prompt: Prompt, speculation: Speculation
) -> Transition[Prefilling, RunPrefill]:
    """From now on rows are overwritten, those that are there already included. The state that the slot goes on from is
    kept beyond the device first, where the scope wants it there.
    """
    seat = seat.computed(seat.valid)
    first_chunk = chunk(settings, seat, prompt, prompt.target)
    if scope.held(settings, seat, prompt):
        first_chunk = evolve(first_chunk, held=True)
    return Transition(Prefilling(seat, prompt, speculation), first_chunk)


def chunk(settings: Settings, seat: SlotLease, prompt: Prompt, target: int) -> RunPrefill:
    """The next rows of `[valid, target)`: a chunk, or several at once, or up to where the positional state is kept. Of
    several the last one is no narrower than what has a lane of its own.
    """
    logprobs = prompt.job.prompt_logprobs
    rows = settings.chunk * (settings.span if logprobs < 0 else 1)
    stop, mark = min(seat.valid + rows, target), scope.mark(settings, seat, prompt)
    narrow = (stop - seat.valid) % settings.chunk
    if stop - seat.valid > settings.chunk and narrow <= settings.beside_rows:
        stop -= narrow
    if mark is None or mark.at > stop:
        return RunPrefill(seat.slot, seat.valid, stop, logprobs=logprobs)
    return RunPrefill(seat.slot, seat.valid, mark.at, checkpoint=mark.beyond, logprobs=logprobs)


def next_decode(
    settings: Settings,
    seat: SlotLease,
    prompt: Prompt,
    speculation: Speculation,
    answer: Generated,
    *,
    checkpoint: bool = False,
) -> RunDecode:
    """It may propose as much as is of use, and go on alone for as many tokens as nothing is to be looked at: what is
    done is decided with those that it is launched with.
    """
    last = answer.tokens[-1] if answer.tokens else prompt.tokens[-1]
    propose = min(speculation.control.widths[-1], answer.room(prompt.job)) if isinstance(speculation, Drafted) else 0
    return RunDecode(seat.slot, seat.valid, last, propose, checkpoint, unwatched(settings, seat, prompt, answer))


def unwatched(settings: Settings, seat: SlotLease, prompt: Prompt, answer: Generated) -> int:
    """Tokens that may come before the core has to look: at an end, at what was heard before, at a state to be kept."""
    if prompt.heard and len(answer.tokens) < len(prompt.heard):
        return 1
    left = answer.room(prompt.job) + 1
    return min(left, settings.block_size - seat.valid % settings.block_size) if settings.stateful else left


def park(settings: Settings, name: ModelName) -> UnloadModel:
    return unload(settings.residency, name)


def leave(settings: Settings, left: RequestRemainder) -> Leave:
    """The stream is closed: keep what is worth keeping, then give back what is held."""
    return leave_leased(settings, left) if left.leased else leave_early(settings, left)


def leave_leased(settings: Settings, left: RequestRemainder) -> Transition[Snapshotting, SaveSnapshot] | GiveBack:
    """The same, where a model is leased."""
    assert left.leased is not None
    return saved(settings, left) or Transition(Parking(left), park(settings, left.leased))


def leave_early(settings: Settings, left: RequestRemainder) -> LeaveEarly:
    """The same, where none has been asked for yet, or comes later."""
    return saved(settings, left) or Transition(Done(left))


def saved(settings: Settings, left: RequestRemainder) -> Transition[Snapshotting, SaveSnapshot] | None:
    if not policy.snapshot(settings, left).go:
        return None
    rows = scope.select(settings, left).rows
    saving = SaveSnapshot(left.seat.slot, left.rows[:rows], checkpoint=rows == live(settings, left))
    return Transition(Snapshotting(left), saving)


def let_go(settings: Settings, left: RequestRemainder) -> GiveBack | Transition[Done]:
    return Transition(Parking(left), park(settings, left.leased)) if left.leased else Transition(Done(left))


def finish(known: DecisionContext, state: Speculating, emit: EmitTokens, why: Finish) -> Finished:
    return first(emit, first(CloseStream(why, report(known, state)), leave(known.settings, remains(state))))


def fail(known: DecisionContext, state: Open, event: DeviceFailed) -> Failing:
    return first(failed(known, state, event), leave(known.settings, trusted(remains(state), event)))


def fail_early(known: DecisionContext, state: Open, event: DeviceFailed) -> FailEarly:
    return first(failed(known, state, event), leave_early(known.settings, trusted(remains(state), event)))


def fail_emptied(
    known: DecisionContext, state: Speculating, why: str
) -> Transition[Parking, CloseStream, UnloadModel] | Transition[Done, CloseStream]:
    """Its rows are not to be believed."""
    return first(failed(known, state, DeviceFailed("broken", why)), let_go(known.settings, emptied(remains(state))))


def failed(known: DecisionContext, state: Open, event: DeviceFailed) -> CloseStream:
    """The report is of what was done, the cache's part of it of what is believed now."""
    believed = scope.select(known.settings, trusted(remains(state), event))
    why: Finish = event.kind if event.kind in {"dead_end", "lost"} else "failed"
    return CloseStream(why, evolve(report(known, state), cache=believed), event.detail)


def trusted(left: RequestRemainder, event: DeviceFailed | StoreFailed) -> RequestRemainder:
    """What was given up, had no room or nothing to say costs only its own work. After anything else the slot keeps no
    rows, so that nobody is sent to it again.
    """
    return left if event.kind in {"abandoned", "out_of_memory", "dead_end"} else emptied(left)


def unloaded(seat: SlotLease, event: StoreFailed) -> SlotLease:
    """What stays where loading failed: everything, unless a state was overwritten in part."""
    return SlotLease(seat.slot, ahead=seat.rows) if event.kind == "lost" else seat


def emptied(left: RequestRemainder) -> RequestRemainder:
    return evolve(left, seat=SlotLease(left.seat.slot))


def report(known: DecisionContext, state: Open) -> Report:
    """What the client is told at the end, if that is now."""
    seat, prompt = state.seat, state.prompt
    answer = state.answer if isinstance(state, Speculating) else NOTHING
    return Report(
        prompt_tokens=len(prompt.tokens),
        restored_tokens=seat.restored,
        tier=seat.tier,
        miss=prompt.miss,
        completion_tokens=max(len(answer.tokens), len(prompt.heard or ())),
        decode_steps=answer.decode_steps,
        proposed=answer.proposed,
        accepted=answer.accepted,
        speculation=undrafted(known, state),
        compression=compression(known, state),
        cache=scope.select(known.settings, remains(state)),
        prompt_logprobs=prompt.logprobs,
    )


def compression(known: DecisionContext, state: Open) -> Compressed | None:
    """What was left out of the prompt, or why nothing was; why not yet is no reason."""
    prompt, sent = state.prompt, len(state.prompt.job.prompt)
    if prompt.job.compression.mode == "off" or prompt.compression is not None:
        return prompt.compression
    if prompt.compressed:
        return Compressed(sent, "" if len(prompt.tokens) < sent else "not_shorter", keep=prompt.job.compression.keep)
    tried = policy.compress(known, prompt, prompt.target - state.seat.restored)
    return Compressed(sent, "not_reached" if tried.go else tried.reason)


def report_early(prompt: Prompt) -> Report:
    """The same, while it has no slot whose rows could be told of."""
    return Report(len(prompt.tokens), completion_tokens=len(prompt.heard or ()))


def undrafted(known: DecisionContext, state: Open) -> str:
    """Why nothing (more) is proposed, or no trees; empty while all is that was asked for, or is yet to be."""
    if isinstance(state, Prefilling | Speculating):
        return state.speculation.reason or ("no_trees" if known.settings.no_trees else "")
    wanted = policy.speculate(known, state.prompt.job)
    return "" if wanted.go else wanted.reason
