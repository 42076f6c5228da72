"""Transitions of New, Waiting and LookingUp: from a submitted job to what is found of its prompt."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import RunDecode
from effects.ids import StoreFailed, Tier
from effects.job import Report
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel
from effects.restore import RestoreBlocks
from effects.stream import CloseStream, ReportProgress
from states import policy
from states.events import Admitted, Cancelled, Rejected, Submitted
from states.kept_rows import continue_lease, make_prompt
from states.machine import Transition, prepend_effect
from states.phases import (
    ContinueRequest,
    continue_request,
    look_up_prefix,
    make_open_slot,
    make_prefill_chunk,
    serve_prompt,
)
from states.reports import make_report_without_slot
from states.request_states import (
    FINISH,
    Done,
    LoadingScorer,
    LookingUp,
    New,
    Prefilling,
    Prompt,
    Restoring,
    SlotLease,
    Speculating,
    UnparkingDraft,
    Waiting,
)
from states.settings import DecisionContext, Settings

ReopenVerbatim: TypeAlias = (
    Transition[LookingUp, OpenSlot, FindPrefix]
    | Transition[UnparkingDraft, OpenSlot, LoadModel]
    | Transition[Prefilling, OpenSlot, RunPrefill]
)
ReopenAndServe: TypeAlias = ReopenVerbatim | Transition[Speculating, OpenSlot, RunDecode]
OpenAndContinue: TypeAlias = ReopenAndServe | Transition[LoadingScorer, OpenSlot, LoadModel]


def submit_request(_: New, event: Submitted, __: DecisionContext) -> Transition[Waiting, ReportProgress]:
    """Let a new request wait for a slot. The first progress report says that it is accepted."""
    prompt = make_prompt(event.job)
    return Transition(Waiting(prompt), ReportProgress(0, len(prompt.tokens), 0))


def refuse_request(_: New, event: Rejected, __: DecisionContext) -> Transition[Done, CloseStream]:
    """Close the stream of a new request at once, because the queue is full."""
    return Transition(Done(), CloseStream("queue_full", Report(0), f"{event.waiting} requests are waiting already"))


def cancel_waiting(state: Waiting, event: Cancelled, _: DecisionContext) -> Transition[Done, CloseStream]:
    """Close the stream of a request that has no slot. It is done at once, because nothing of it is in flight."""
    report = make_report_without_slot(state.prompt)
    return Transition(Done(), CloseStream(FINISH[event.reason], report, event.reason))


def admit_request(state: Waiting, event: Admitted, context: DecisionContext) -> OpenAndContinue:
    """Open the slot for the request's prompt, and go on with the rows that the slot keeps of it."""
    valid_rows = event.state if context.settings.stateful else event.keep
    tier: Tier = "device" if valid_rows else "none"
    slot_lease = SlotLease(event.slot, valid_rows, valid_rows, tier, event.keep - valid_rows)
    miss_reason = "" if valid_rows else "nothing_shared_on_device"
    prompt = evolve(state.prompt, miss_reason=miss_reason, followed=event.followed)
    opening = make_open_slot(context.settings, slot_lease, prompt, event.source, event.device_checkpoint)
    return prepend_effect(opening, look_up_or_continue(context, slot_lease, prompt))


def look_up_or_continue(
    context: DecisionContext, slot_lease: SlotLease, prompt: Prompt
) -> Transition[LookingUp, FindPrefix] | ContinueRequest:
    """Ask the stores for more of the prompt, where that is worth it."""
    if policy.decide_lookup(context.settings, slot_lease, prompt).go:
        return look_up_prefix(context.settings, slot_lease, prompt)
    return continue_request(context, slot_lease, prompt)


UseFoundPrefix: TypeAlias = (
    Transition[Restoring, OpenSlot, RestoreBlocks]
    | Transition[Restoring, OpenSlot, RestoreBlocks, RunPrefill]
    | Transition[LoadingScorer, ReleasePrefix, OpenSlot, LoadModel]
    | Transition[UnparkingDraft, ReleasePrefix, OpenSlot, LoadModel]
    | Transition[Prefilling, ReleasePrefix, OpenSlot, RunPrefill]
    | Transition[Speculating, ReleasePrefix, OpenSlot, RunDecode]
)


def use_found_prefix(state: LookingUp, event: PrefixFound, context: DecisionContext) -> UseFoundPrefix:
    """Load what was found, and compute the rows before it meanwhile; or release it, where computing is better."""
    settings = context.settings
    slot_lease = state.slot_lease
    shared_tokens = state.prompt.shared_tokens or event.shared
    prompt = evolve(state.prompt, shared_tokens=shared_tokens, stored_rows=event.length)
    restore_ends = policy.list_restore_ends(settings, slot_lease, prompt, event)
    best = max(restore_ends, default=slot_lease.valid_rows)
    loaded_rows = policy.choose_rows_to_load(context, slot_lease, prompt, restore_ends, event.tier)
    compresses = policy.decide_compression(context, prompt, prompt.prefill_rows - best).go
    opening = make_open_slot(settings, slot_lease, prompt)
    if compresses or loaded_rows is None:
        if slot_lease.valid_rows < best:
            miss_reason = "compression_is_quicker" if compresses else "recompute_is_quicker"
            prompt = evolve(prompt, miss_reason=miss_reason)
        onward = prepend_effect(opening, continue_request(context, slot_lease, prompt))
        return prepend_effect(ReleasePrefix(event.lease), onward)
    load_start, stop = loaded_rows
    restore = RestoreBlocks(event.lease, slot_lease.slot, load_start, stop)
    if load_start <= slot_lease.rows:
        return Transition(Restoring(slot_lease, prompt, load_start, stop, event.tier), opening, restore)
    restoring = Restoring(slot_lease, prompt, load_start, stop, event.tier, computing=True)
    return Transition(restoring, opening, restore, make_prefill_chunk(settings, slot_lease, prompt, load_start))


def continue_after_miss(state: LookingUp, event: PrefixMissed, context: DecisionContext) -> ContinueRequest:
    """Continue with the rows that the slot has, because the stores have no more of the prompt."""
    prompt = note_miss(context.settings, state.slot_lease, state.prompt, event.reason)
    shared_tokens = prompt.shared_tokens or event.shared
    prompt = evolve(prompt, shared_tokens=shared_tokens, stored_rows=event.length)
    return continue_request(context, state.slot_lease, prompt)


def continue_without_store(state: LookingUp, event: StoreFailed, context: DecisionContext) -> ContinueRequest:
    """Treat a failed lookup as a miss."""
    prompt = note_miss(context.settings, state.slot_lease, state.prompt, f"lookup_{event.kind}")
    return continue_request(context, state.slot_lease, prompt)


def reopen_and_serve(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> ReopenAndServe:
    """Open the slot again after compression was decided, and look the prompt up once more.

    The tokens that are served may be others than before. And rows that were computed during a restore may end anywhere,
    so the lease is cut to whole blocks again.
    """
    slot_lease = continue_lease(context.settings, slot_lease, prompt.tokens[: slot_lease.rows], prompt.tokens)
    opening = make_open_slot(context.settings, slot_lease, prompt)
    if policy.decide_lookup(context.settings, slot_lease, prompt).go:
        return prepend_effect(opening, look_up_prefix(context.settings, slot_lease, prompt))
    return prepend_effect(opening, serve_prompt(context, slot_lease, prompt))


def note_miss(settings: Settings, slot_lease: SlotLease, prompt: Prompt, reason: str) -> Prompt:
    """Return the prompt with the reason why nothing was found; unchanged where nothing was missing on the device."""
    return evolve(prompt, miss_reason=reason) if policy.has_missing_blocks(settings, slot_lease, prompt) else prompt
