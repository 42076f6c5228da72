"""What comes next: the phases of a request in order, each skipped where policy says that there is nothing to do."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import RunDecode
from effects.draft import ParkDraft, UnparkDraft
from effects.ids import DeviceFailed, SlotId
from effects.lookup import FindPrefix
from effects.pflash import CompressPrompt
from effects.prefill import OpenSlot, RunPrefill
from effects.snapshot import SaveSnapshot
from effects.stream import CloseStream, EmitTokens, Finish
from states import pace, policy, scope
from states.life import (
    Compressing,
    Done,
    Hold,
    LookingUp,
    Parking,
    Prefilling,
    Snapshotting,
    Speculating,
    Unparking,
)
from states.machine import Then, first

Decoding: TypeAlias = Then[Speculating, RunDecode]
Work: TypeAlias = Then[Prefilling, RunPrefill] | Decoding
Compress: TypeAlias = Then[Compressing, CompressPrompt]
Verbatim: TypeAlias = Then[Unparking, UnparkDraft] | Then[Prefilling, RunPrefill]  # rows are missing
Fill: TypeAlias = Compress | Verbatim
Settled: TypeAlias = Verbatim | Decoding
Onward: TypeAlias = Compress | Settled
Look: TypeAlias = Then[LookingUp, OpenSlot, FindPrefix]
Opened: TypeAlias = (
    Look
    | Then[Unparking, OpenSlot, UnparkDraft]
    | Then[Prefilling, OpenSlot, RunPrefill]
    | Then[Speculating, OpenSlot, RunDecode]
    | Then[Compressing, OpenSlot, CompressPrompt]
)
LeaveEarly: TypeAlias = Then[Snapshotting, SaveSnapshot] | Then[Done]
Leave: TypeAlias = LeaveEarly | Then[Parking, ParkDraft]
Finished: TypeAlias = (
    Then[Snapshotting, EmitTokens, CloseStream, SaveSnapshot]
    | Then[Parking, EmitTokens, CloseStream, ParkDraft]
    | Then[Done, EmitTokens, CloseStream]
)
FailEarly: TypeAlias = Then[Snapshotting, CloseStream, SaveSnapshot] | Then[Done, CloseStream]
Failing: TypeAlias = FailEarly | Then[Parking, CloseStream, ParkDraft]


def opening(hold: Hold, source: SlotId) -> OpenSlot:
    """The slot serves this prompt from now on."""
    return OpenSlot(hold.slot, source, hold.valid, hold.prompt, hold.job.sampling, hold.job.stop_tokens)


def find(hold: Hold) -> Then[LookingUp, FindPrefix]:
    return Then(LookingUp(hold), FindPrefix(hold.prompt, hold.valid, policy.shorten(hold).go, policy.window(hold)))


def onward(hold: Hold) -> Onward:
    """All that could be restored has been."""
    if policy.compress(hold, hold.target - hold.valid).go:
        return compress(hold)
    return settled(hold)


def settled(hold: Hold) -> Settled:
    """What is served is certain."""
    return verbatim(hold) if hold.valid < hold.target or policy.speculate(hold).go else decode(hold)


def fill(hold: Hold) -> Fill:
    """Rows are missing: shorten the prompt, or compute them."""
    if policy.compress(hold, hold.target - hold.valid).go:
        return compress(hold)
    return verbatim(hold)


def compress(hold: Hold) -> Compress:
    return Then(Compressing(hold), CompressPrompt(hold.prompt, hold.settings.keep_permille))


def verbatim(hold: Hold) -> Verbatim:
    """There is something to do before the first decode step: bring a draft in, or compute rows."""
    if policy.speculate(hold).go:
        return Then(Unparking(hold), UnparkDraft())
    return Then(Prefilling(hold), chunk(hold, hold.target))


def work(hold: Hold) -> Work:
    if hold.valid < hold.target:
        return Then(Prefilling(hold), chunk(hold, hold.target))
    return decode(hold)


def decode(hold: Hold) -> Decoding:
    hold, one = next_decode(hold)
    return Then(Speculating(hold), one)


def chunk(hold: Hold, target: int) -> RunPrefill:
    """The next rows of `[valid, target)`: C of them, or up to where the positional state is kept."""
    stop, mark = min(hold.valid + hold.settings.chunk, target), scope.checkpoint(hold)
    if mark is None or mark > stop:
        return RunPrefill(hold.slot, hold.valid, stop)
    return RunPrefill(hold.slot, hold.valid, mark, checkpoint=True)


def next_decode(hold: Hold) -> tuple[Hold, RunDecode]:
    """And why it proposes nothing, if so; the last token there is room for says nothing about that."""
    last = hold.answer[-1] if hold.answer else hold.prompt[-1]
    room = hold.job.max_tokens - len(hold.answer) - 1
    if hold.pace is None or room == 0:
        return hold, RunDecode(hold.slot, hold.valid, last)
    choice = pace.choose(hold.pace, room)
    if choice.reason != hold.speculation:
        hold = evolve(hold, speculation=choice.reason)
    return hold, RunDecode(hold.slot, hold.valid, last, choice.propose)


def park(hold: Hold) -> ParkDraft:
    return ParkDraft(release=hold.settings.residency.draft == "release")


def leave(hold: Hold) -> Leave:
    """The stream is closed: keep what is worth keeping, then give back what is held."""
    if hold.draft and not policy.snapshot(hold).go:
        return Then(Parking(hold), park(hold))
    return leave_early(hold)


def leave_early(hold: Hold) -> LeaveEarly:
    """The same, where the draft has not been asked for yet, or comes later."""
    if policy.snapshot(hold).go:
        return Then(Snapshotting(hold), SaveSnapshot(hold.slot, hold.rows[: scope.select(hold).rows]))
    return Then(Done(hold))


def let_go(hold: Hold) -> Then[Parking, ParkDraft] | Then[Done]:
    if hold.draft:
        return Then(Parking(hold), park(hold))
    return Then(Done(hold))


def finish(hold: Hold, emit: EmitTokens, why: Finish) -> Finished:
    return first(emit, first(CloseStream(why, scope.report(hold)), leave(hold)))


def fail(hold: Hold, event: DeviceFailed) -> Failing:
    return first(failed(hold, event), leave(trusted(hold, event)))


def fail_early(hold: Hold, event: DeviceFailed) -> FailEarly:
    return first(failed(hold, event), leave_early(trusted(hold, event)))


def failed(hold: Hold, event: DeviceFailed) -> CloseStream:
    """The report is of what was done, the cache's part of it of what is believed now."""
    return CloseStream("failed", evolve(hold.report, cache=scope.select(trusted(hold, event))), event.detail)


def trusted(hold: Hold, event: DeviceFailed) -> Hold:
    """A slot that broke keeps no rows, so nobody is sent to it again; any other failure costs only its own work."""
    return evolve(hold, valid=0, restored=0) if event.kind == "broken" else hold
