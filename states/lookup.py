"""New, Waiting, LookingUp: from a submitted job to what is there of the prompt that will be served."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import RunDecode
from effects.ids import StoreFailed
from effects.job import Report
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel
from effects.restore import RestoreBlocks
from effects.stream import CloseStream, ReportProgress
from states import phases, policy
from states.events import Admitted, Cancelled, Rejected, Submitted
from states.machine import Then, first
from states.phases import Onward, chunk, find, opening, report_early, settled
from states.request_states import (
    FINISH,
    Done,
    Fetching,
    LookingUp,
    New,
    Prefilling,
    Prompt,
    Restoring,
    Seat,
    Speculating,
    Unparking,
    Waiting,
    begun,
    continuing,
)
from states.settings import Known, Settings

Verbatim: TypeAlias = (
    Then[LookingUp, OpenSlot, FindPrefix]
    | Then[Unparking, OpenSlot, LoadModel]
    | Then[Prefilling, OpenSlot, RunPrefill]
)
Served: TypeAlias = Verbatim | Then[Speculating, OpenSlot, RunDecode]
Opened: TypeAlias = Served | Then[Fetching, OpenSlot, LoadModel]


def submit(_: New, event: Submitted, __: Known) -> Then[Waiting, ReportProgress]:
    prompt = begun(event.job)
    return Then(Waiting(prompt), ReportProgress(0, len(prompt.tokens), 0))


def refuse(_: New, event: Rejected, __: Known) -> Then[Done, CloseStream]:
    return Then(Done(), CloseStream("queue_full", Report(0), f"{event.waiting} requests are waiting already"))


def leave_queue(state: Waiting, event: Cancelled, _: Known) -> Then[Done, CloseStream]:
    return Then(Done(), CloseStream(FINISH[event.reason], report_early(state.prompt), event.reason))


def admit(state: Waiting, event: Admitted, known: Known) -> Opened:
    valid = event.state if known.settings.stateful else event.keep
    seat = Seat(event.slot, valid, valid, "device" if valid else "none", event.keep - valid)
    prompt = evolve(state.prompt, miss="" if valid else "nothing_shared_on_device")
    return first(opening(known.settings, seat, prompt, event.source, event.place), look(known, seat, prompt))


def look(known: Known, seat: Seat, prompt: Prompt) -> Then[LookingUp, FindPrefix] | Onward:
    """For more of it elsewhere, where that is worth asking."""
    if policy.lookup(known.settings, seat, prompt).go:
        return find(known.settings, seat, prompt)
    return phases.onward(known, seat, prompt)


Found: TypeAlias = (
    Then[Restoring, OpenSlot, RestoreBlocks]
    | Then[Restoring, OpenSlot, RestoreBlocks, RunPrefill]
    | Then[Fetching, ReleasePrefix, OpenSlot, LoadModel]
    | Then[Unparking, ReleasePrefix, OpenSlot, LoadModel]
    | Then[Prefilling, ReleasePrefix, OpenSlot, RunPrefill]
    | Then[Speculating, ReleasePrefix, OpenSlot, RunDecode]
)


def found(state: LookingUp, event: PrefixFound, known: Known) -> Found:
    """Load what is there, computing its front meanwhile; or let go of it, where computing is better."""
    settings = known.settings
    seat, shared = state.seat, state.prompt.shared or event.shared
    prompt = evolve(state.prompt, shared=shared, stored=event.length)
    there = policy.there(settings, seat, prompt, event)
    best = max(there, default=seat.valid)
    load = policy.load(known, seat, prompt, there, event.tier)
    compress = policy.compress(known, prompt, prompt.target - best).go
    opened = opening(settings, seat, prompt)
    if compress or load is None:
        if seat.valid < best:
            prompt = evolve(prompt, miss="compression_is_quicker" if compress else "recompute_is_quicker")
        return first(ReleasePrefix(event.lease), first(opened, phases.onward(known, seat, prompt)))
    front, stop = load
    restore = RestoreBlocks(event.lease, seat.slot, front, stop)
    if front <= seat.rows:
        return Then(Restoring(seat, prompt, front, stop, event.tier), opened, restore)
    restoring = Restoring(seat, prompt, front, stop, event.tier, computing=True)
    return Then(restoring, opened, restore, chunk(settings, seat, prompt, front))


def missed(state: LookingUp, event: PrefixMissed, known: Known) -> Onward:
    prompt = without(known.settings, state.seat, state.prompt, event.reason)
    prompt = evolve(prompt, shared=prompt.shared or event.shared, stored=event.length)
    return phases.onward(known, state.seat, prompt)


def served(known: Known, seat: Seat, prompt: Prompt) -> Served:
    """What stays from here on, another prompt than before or this one after all: it is looked for once more. What was
    computed while a restore was under way may have ended anywhere.
    """
    seat = continuing(known.settings, seat, prompt.tokens[: seat.rows], prompt.tokens)
    opened = opening(known.settings, seat, prompt)
    if policy.lookup(known.settings, seat, prompt).go:
        return first(opened, find(known.settings, seat, prompt))
    return first(opened, settled(known, seat, prompt))


def unanswered(state: LookingUp, event: StoreFailed, known: Known) -> Onward:
    """A failed lookup is a miss."""
    prompt = without(known.settings, state.seat, state.prompt, f"lookup_{event.kind}")
    return phases.onward(known, state.seat, prompt)


def without(settings: Settings, seat: Seat, prompt: Prompt, reason: str) -> Prompt:
    """Nothing came of the lookup; nothing is missed where all was on the device."""
    return evolve(prompt, miss=reason) if policy.missing(settings, seat, prompt) else prompt
