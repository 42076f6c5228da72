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
from states.machine import Transition, first
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
    SlotLease,
    Speculating,
    Unparking,
    Waiting,
    begun,
    continuing,
)
from states.settings import DecisionContext, Settings

Verbatim: TypeAlias = (
    Transition[LookingUp, OpenSlot, FindPrefix]
    | Transition[Unparking, OpenSlot, LoadModel]
    | Transition[Prefilling, OpenSlot, RunPrefill]
)
Served: TypeAlias = Verbatim | Transition[Speculating, OpenSlot, RunDecode]
Opened: TypeAlias = Served | Transition[Fetching, OpenSlot, LoadModel]


def submit(_: New, event: Submitted, __: DecisionContext) -> Transition[Waiting, ReportProgress]:
    prompt = begun(event.job)
    return Transition(Waiting(prompt), ReportProgress(0, len(prompt.tokens), 0))


def refuse(_: New, event: Rejected, __: DecisionContext) -> Transition[Done, CloseStream]:
    return Transition(Done(), CloseStream("queue_full", Report(0), f"{event.waiting} requests are waiting already"))


def leave_queue(state: Waiting, event: Cancelled, _: DecisionContext) -> Transition[Done, CloseStream]:
    return Transition(Done(), CloseStream(FINISH[event.reason], report_early(state.prompt), event.reason))


def admit(state: Waiting, event: Admitted, known: DecisionContext) -> Opened:
    valid = event.state if known.settings.stateful else event.keep
    seat = SlotLease(event.slot, valid, valid, "device" if valid else "none", event.keep - valid)
    prompt = evolve(state.prompt, miss="" if valid else "nothing_shared_on_device")
    return first(opening(known.settings, seat, prompt, event.source, event.place), look(known, seat, prompt))


def look(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Transition[LookingUp, FindPrefix] | Onward:
    """For more of it elsewhere, where that is worth asking."""
    if policy.lookup(known.settings, seat, prompt).go:
        return find(known.settings, seat, prompt)
    return phases.onward(known, seat, prompt)


Found: TypeAlias = (
    Transition[Restoring, OpenSlot, RestoreBlocks]
    | Transition[Restoring, OpenSlot, RestoreBlocks, RunPrefill]
    | Transition[Fetching, ReleasePrefix, OpenSlot, LoadModel]
    | Transition[Unparking, ReleasePrefix, OpenSlot, LoadModel]
    | Transition[Prefilling, ReleasePrefix, OpenSlot, RunPrefill]
    | Transition[Speculating, ReleasePrefix, OpenSlot, RunDecode]
)


def found(state: LookingUp, event: PrefixFound, known: DecisionContext) -> Found:
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
        return Transition(Restoring(seat, prompt, front, stop, event.tier), opened, restore)
    restoring = Restoring(seat, prompt, front, stop, event.tier, computing=True)
    return Transition(restoring, opened, restore, chunk(settings, seat, prompt, front))


def missed(state: LookingUp, event: PrefixMissed, known: DecisionContext) -> Onward:
    prompt = without(known.settings, state.seat, state.prompt, event.reason)
    prompt = evolve(prompt, shared=prompt.shared or event.shared, stored=event.length)
    return phases.onward(known, state.seat, prompt)


def served(known: DecisionContext, seat: SlotLease, prompt: Prompt) -> Served:
    """What stays from here on, another prompt than before or this one after all: it is looked for once more. What was
    computed while a restore was under way may have ended anywhere.
    """
    seat = continuing(known.settings, seat, prompt.tokens[: seat.rows], prompt.tokens)
    opened = opening(known.settings, seat, prompt)
    if policy.lookup(known.settings, seat, prompt).go:
        return first(opened, find(known.settings, seat, prompt))
    return first(opened, settled(known, seat, prompt))


def unanswered(state: LookingUp, event: StoreFailed, known: DecisionContext) -> Onward:
    """A failed lookup is a miss."""
    prompt = without(known.settings, state.seat, state.prompt, f"lookup_{event.kind}")
    return phases.onward(known, state.seat, prompt)


def without(settings: Settings, seat: SlotLease, prompt: Prompt, reason: str) -> Prompt:
    """Nothing came of the lookup; nothing is missed where all was on the device."""
    return evolve(prompt, miss=reason) if policy.missing(settings, seat, prompt) else prompt
