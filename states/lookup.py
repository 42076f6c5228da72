"""New, Waiting, LookingUp, Compressing: from a submitted job to the prompt that will be served."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import RunDecode
from effects.draft import UnparkDraft
from effects.ids import DeviceFailed, StoreFailed, Tokens
from effects.job import Report
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.pflash import CompressPrompt, PromptCompressed
from effects.prefill import OpenSlot, RunPrefill
from effects.restore import RestoreBlocks
from effects.stream import CloseStream, ReportProgress
from states import policy
from states.life import (
    FINISH,
    Admitted,
    Cancelled,
    Compressing,
    Done,
    Hold,
    LookingUp,
    New,
    Prefilling,
    Refused,
    Restoring,
    Speculating,
    Submitted,
    Unparking,
    Waiting,
    serve,
    usable,
)
from states.machine import Then, first
from states.onward import Look, Onward, Opened, chunk, find, onward, opening, settled
from states.onward import verbatim as missing_rows


def submit(_: New, event: Submitted) -> Then[Waiting, ReportProgress]:
    return Then(Waiting(event.job), ReportProgress(0, len(event.job.prompt), 0))


def refuse(_: New, event: Refused) -> Then[Done, CloseStream]:
    return Then(Done(), CloseStream("queue_full", Report(0), f"{event.waiting} requests are waiting already"))


def leave_queue(state: Waiting, event: Cancelled) -> Then[Done, CloseStream]:
    return Then(Done(), CloseStream(FINISH[event.reason], Report(len(state.job.prompt)), event.reason))


def admit(state: Waiting, event: Admitted) -> Opened:
    hold = Hold(
        job=state.job,
        settings=event.settings,
        slot=event.slot,
        prompt=state.job.prompt,
        valid=event.keep,
        restored=event.keep,
        tier="device" if event.keep else "none",
        miss="" if event.keep else "nothing_shared_on_device",
        rates=event.rates,
    )
    wanted = policy.speculate(hold)
    hold = hold if wanted.go else evolve(hold, speculation=wanted.reason)
    return first(opening(hold, event.source), find(hold) if policy.lookup(hold).go else onward(hold))


Found: TypeAlias = (
    Then[Restoring, OpenSlot, RestoreBlocks]
    | Then[Restoring, OpenSlot, RestoreBlocks, RunPrefill]
    | Then[Compressing, ReleasePrefix, OpenSlot, CompressPrompt]
    | Then[Unparking, ReleasePrefix, OpenSlot, UnparkDraft]
    | Then[Prefilling, ReleasePrefix, OpenSlot, RunPrefill]
    | Then[Speculating, ReleasePrefix, OpenSlot, RunDecode]
)


def found(state: LookingUp, event: PrefixFound) -> Found:
    """Load what is there, computing its front meanwhile; or let go of it, where computing is better."""
    hold = remembered(state.hold, event.served)
    hold = evolve(hold, shared=hold.shared or event.shared, stored=event.length)
    stop = max(usable(hold, event.length), hold.valid)
    front = policy.front(hold.settings, hold.rates, hold.valid, stop, event.tier)
    compress = policy.compress(hold, hold.target - stop).go
    if compress or front == stop:
        if hold.valid < stop:
            hold = evolve(hold, miss="compression_is_quicker" if compress else "recompute_is_quicker")
        return first(ReleasePrefix(event.lease), first(opening(hold, hold.slot), onward(hold)))
    restore = RestoreBlocks(event.lease, hold.slot, front, stop)
    if front == hold.valid:
        return Then(Restoring(hold, front, stop, event.tier), opening(hold, hold.slot), restore)
    restoring = Restoring(hold, front, stop, event.tier, computing=True)
    return Then(restoring, opening(hold, hold.slot), restore, chunk(hold, front))


Served: TypeAlias = (
    Look
    | Then[Unparking, OpenSlot, UnparkDraft]
    | Then[Prefilling, OpenSlot, RunPrefill]
    | Then[Speculating, OpenSlot, RunDecode]
)


def missed(state: LookingUp, event: PrefixMissed) -> Onward | Served:
    hold = remembered(without(state.hold, event.reason), event.served)
    hold = evolve(hold, shared=hold.shared or event.shared, stored=event.length)
    if hold.prompt == state.hold.prompt:
        return onward(hold)
    return served(hold)


def served(hold: Hold) -> Served:
    """Another prompt than before, which stays: look for it once more, from the rows that both share."""
    return first(opening(hold, hold.slot), find(hold) if policy.lookup(hold).go else settled(hold))


def unanswered(state: LookingUp, event: StoreFailed) -> Onward:
    """A failed lookup is a miss."""
    return onward(without(state.hold, f"lookup_{event.kind}"))


def without(hold: Hold, reason: str) -> Hold:
    """Nothing came of the lookup; nothing is missed where all was on the device."""
    return evolve(hold, miss=reason) if policy.missing(hold) else hold


def compressed(state: Compressing, event: PromptCompressed) -> Served:
    return served(serve(state.hold, event.prompt))


Verbatim: TypeAlias = Look | Then[Unparking, OpenSlot, UnparkDraft] | Then[Prefilling, OpenSlot, RunPrefill]


def verbatim(state: Compressing, _: DeviceFailed) -> Verbatim:
    """A failed compression serves the prompt as it is; what is kept of it is looked for again."""
    hold = evolve(state.hold, compressed=True)
    return first(opening(hold, hold.slot), find(hold) if policy.lookup(hold).go else missing_rows(hold))


def remembered(hold: Hold, served: Tokens | None) -> Hold:
    """What an earlier compression made of this prompt is served again."""
    if served is None:
        return hold
    assert policy.shorten(hold).go, "a memo was used that nobody asked for"
    return serve(hold, served)
