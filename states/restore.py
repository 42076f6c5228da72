"""Transitions of Restoring: the store loads the last rows of a prompt while the device computes the rows before them.

Rows `[front, stop)` are loaded and rows `[valid_rows, front)` are computed, both at once. Either side may end first,
and either may fail. When both have ended, `join_both_sides` counts the rows that are valid without a gap.
`states/policy.py` chooses `front` so that both sides are expected to end at the same time.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.ids import DeviceFailed, StoreFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored
from effects.stream import Abandon, CloseStream, ReportProgress
from states.machine import Transition
from states.phases import (
    ComputeMissing,
    ContinueRequest,
    FailWithoutLease,
    compute_missing_rows,
    continue_request,
    fail_without_lease,
    keep_rows_after_failed_load,
    keep_trusted_rows,
    make_failure_close,
    make_prefill_chunk,
)
from states.request_states import Draining, Prompt, Restoring, SlotLease, get_remainder
from states.sequences import round_down_to_block
from states.settings import DecisionContext

RestoreOrContinue: TypeAlias = Transition[Restoring] | ContinueRequest
ComputeFrontOrContinue: TypeAlias = (
    Transition[Restoring, ReportProgress, RunPrefill] | Transition[Restoring, ReportProgress] | ContinueRequest
)


def accept_restored_rows(state: Restoring, event: BlocksRestored, context: DecisionContext) -> RestoreOrContinue:
    """Trust the rows that the store says it has loaded, which may be fewer than were asked for.

    Where the model has positional state, fewer rows come without the state at their end, so none of them counts.
    Nothing is computed meanwhile in such a request, so no other effect is in flight.
    """
    if event.stop < state.stop:
        state = evolve(state, prompt=evolve(state.prompt, stored_rows=0))
        if context.settings.stateful:
            prompt = evolve(state.prompt, miss_reason="restore_incomplete")
            return compute_missing_rows(context, state.slot_lease, prompt)
    front = max(state.front, event.start)
    stop = round_down_to_block(context.settings, min(state.stop, event.stop))
    state = evolve(state, front=front, stop=stop, loading=False, loaded=True)
    return Transition(state) if state.computing else join_both_sides(context, state)


def continue_without_restored_rows(
    state: Restoring, event: StoreFailed, context: DecisionContext
) -> Transition[Restoring] | ComputeMissing:
    """Treat a failed load as a miss. Rows that were computed stay, and the others are computed, too."""
    slot_lease = keep_rows_after_failed_load(state.slot_lease, event)
    prompt = evolve(state.prompt, miss_reason=f"restore_{event.kind}", stored_rows=0)
    if state.computing:
        return Transition(evolve(state, slot_lease=slot_lease, prompt=prompt, loading=False))
    return compute_missing_rows(context, slot_lease, prompt)


def accept_computed_rows(state: Restoring, event: PrefillAdvanced, context: DecisionContext) -> ComputeFrontOrContinue:
    """Compute the next rows up to the front. After the last ones, wait for the load or go on."""
    slot_lease = state.slot_lease.with_computed_rows(event.stop)
    progress = make_progress_report(slot_lease, state.prompt)
    if event.more:
        return Transition(evolve(state, slot_lease=slot_lease), progress)
    if event.stop < state.front and (state.loading or state.loaded):
        chunk = make_prefill_chunk(context.settings, slot_lease, state.prompt, state.front)
        return Transition(evolve(state, slot_lease=slot_lease), progress, chunk)
    state = evolve(state, slot_lease=slot_lease, computing=False)
    return Transition(state, progress) if state.loading else join_both_sides(context, state)


def fail_front(
    state: Restoring, event: DeviceFailed, context: DecisionContext
) -> Transition[Draining, CloseStream, Abandon] | FailWithoutLease:
    """Fail the request because the front could not be computed. A load that still runs answers first."""
    if state.loading:
        left = keep_trusted_rows(get_remainder(state), event)
        return Transition(Draining(left, 1), make_failure_close(context, state, event), Abandon())
    return fail_without_lease(context, state, event)


def join_both_sides(context: DecisionContext, state: Restoring) -> ContinueRequest:
    """Go on after both sides have ended, with the rows that are valid without a gap."""
    slot_lease = state.slot_lease
    if state.loaded and state.front <= slot_lease.rows and slot_lease.valid_rows < state.stop:
        slot_lease = slot_lease.with_loaded_rows(state.front, state.stop, state.tier)
        return continue_request(context, slot_lease, evolve(state.prompt, miss_reason=""))
    prompt = evolve(state.prompt, miss_reason="restore_incomplete") if state.loaded else state.prompt
    return continue_request(context, slot_lease, prompt)


def make_progress_report(slot_lease: SlotLease, prompt: Prompt) -> ReportProgress:
    return ReportProgress(slot_lease.valid_rows, len(prompt.tokens), slot_lease.reused_rows)
