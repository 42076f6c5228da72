"""New, Waiting, LookingUp, Compressing: from a submitted job to the prompt that will be served."""

from __future__ import annotations

from typing import TypeAlias, cast

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
from states.machine import Then
from states.onward import Onward, Opened, Served, Verbatim, chunk, onward, open_slot


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
    return open_slot(hold if wanted.go else evolve(hold, speculation=wanted.reason), event.source)


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
    opening = OpenSlot(hold.slot, hold.slot, hold.valid, hold.prompt, hold.job.sampling, hold.job.stop_tokens)
    hold = evolve(hold, shared=hold.shared or event.shared, stored=event.length)
    stop = max(usable(hold, event.length), hold.valid)
    front = policy.front(hold.settings, hold.rates, hold.valid, stop, event.tier)
    compress = policy.compress(hold, hold.target - stop).go
    if compress or front == stop:
        if hold.valid < stop:
            hold = evolve(hold, miss="compression_is_quicker" if compress else "recompute_is_quicker")
        then = onward(hold)
        return cast("Found", Then(then.state, ReleasePrefix(event.lease), opening, *then.effects))
    restore = RestoreBlocks(event.lease, hold.slot, front, stop)
    if front > hold.valid:
        return Then(Restoring(hold, front, stop, event.tier, computing=True), opening, restore, chunk(hold, front))
    return Then(Restoring(hold, front, stop, event.tier), opening, restore)


def missed(state: LookingUp, event: PrefixMissed) -> Onward | Served:
    hold = remembered(without(state.hold, event.reason), event.served)
    hold = evolve(hold, shared=hold.shared or event.shared, stored=event.length)
    if hold.prompt == state.hold.prompt:
        return onward(hold)
    return cast("Served", open_slot(hold, hold.slot))


def unanswered(state: LookingUp, event: StoreFailed) -> Onward:
    """A failed lookup is a miss."""
    return onward(without(state.hold, f"lookup_{event.kind}"))


def without(hold: Hold, reason: str) -> Hold:
    """Nothing came of the lookup; nothing is missed where all was on the device."""
    return evolve(hold, miss=reason) if policy.missing(hold) else hold


def compressed(state: Compressing, event: PromptCompressed) -> Served:
    """Serve the shorter prompt: look for it once more, from the rows that both share."""
    hold = serve(state.hold, event.prompt)
    return cast("Served", open_slot(hold, hold.slot))


def verbatim(state: Compressing, _: DeviceFailed) -> Verbatim:
    """A failed compression serves the prompt as it is; what is kept of it is looked for again."""
    hold = evolve(state.hold, compressed=True)
    return cast("Verbatim", open_slot(hold, hold.slot))


def remembered(hold: Hold, served: Tokens | None) -> Hold:
    """What an earlier compression made of this prompt is served again."""
    if served is None:
        return hold
    assert policy.shorten(hold).go, "a memo was used that nobody asked for"
    return serve(hold, served)
