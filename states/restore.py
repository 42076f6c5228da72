"""Transitions of Restoring: the store loads the last rows of a prompt while the device computes the rows before them.

A restore has two sides that work at the same time. The store loads rows `[load_start, stop)`. The device computes rows
`[valid_rows, load_start)`, which are called the *front*. `states/policy.py` chooses `load_start` so that both sides are
expected to end at the same time. If there is no front, only the store works.

Either side may end first, and either may fail. `Restoring.loading` and `Restoring.computing` say which sides are still
at work. When both have ended, `join_both_sides` counts the rows that are valid without a gap, and the request goes on
from there: what is missing is computed like any other part of a prompt.

Invariant: `valid_rows <= load_start <= stop`. Without positional state, the rows between `valid_rows` and `load_start`
are the front. With positional state they are in the slot already, but the state behind them is not (`rows_ahead`).
Loading starts behind them, or at `stop` if they reach that far, and nothing is computed meanwhile. The state at `stop`
is loaded too, and makes all rows up to `stop` valid at once.

Example. A slot has rows [0, 256) of a prompt, and the store has rows [0, 960). Rows [512, 960) are loaded while rows
[256, 512) are computed. When both have ended, the request goes on from row 960. If the load fails, it goes on from row
512, and the rows behind that are computed, too.
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
    """Take over the rows that the store has loaded, which may be fewer than were asked for.

    If they are fewer and the model has positional state, none of them counts, because the state was kept for the last
    row only. The device computes nothing during a restore of positional state, so the request can go on at once.
    """
    if event.stop < state.stop:
        state = evolve(state, prompt=evolve(state.prompt, stored_rows=0))
        if context.settings.stateful:
            prompt = evolve(state.prompt, miss_reason="restore_incomplete")
            return compute_missing_rows(context, state.slot_lease, prompt)
    load_start = max(state.load_start, event.start)
    stop = round_down_to_block(context.settings, min(state.stop, event.stop))
    state = evolve(state, load_start=load_start, stop=stop, loading=False, loaded=True)
    return Transition(state) if state.computing else join_both_sides(context, state)


def continue_without_restored_rows(
    state: Restoring, event: StoreFailed, context: DecisionContext
) -> Transition[Restoring] | ComputeMissing:
    """Treat a failed load as a miss: the rows that should have been loaded are computed instead."""
    slot_lease = keep_rows_after_failed_load(state.slot_lease, event)
    prompt = evolve(state.prompt, miss_reason=f"restore_{event.kind}", stored_rows=0)
    if state.computing:
        return Transition(evolve(state, slot_lease=slot_lease, prompt=prompt, loading=False))
    return compute_missing_rows(context, slot_lease, prompt)


def accept_computed_rows(state: Restoring, event: PrefillAdvanced, context: DecisionContext) -> ComputeFrontOrContinue:
    """Compute the next rows of the front. After the last of them, wait for the load, or go on if it has ended.

    If the load has failed meanwhile, there is no need to compute all of the front: the request goes on at once.
    """
    slot_lease = state.slot_lease.with_computed_rows(event.stop)
    progress = make_progress_report(slot_lease, state.prompt)
    if event.more:
        return Transition(evolve(state, slot_lease=slot_lease), progress)
    if event.stop < state.load_start and (state.loading or state.loaded):
        chunk = make_prefill_chunk(context.settings, slot_lease, state.prompt, state.load_start)
        return Transition(evolve(state, slot_lease=slot_lease), progress, chunk)
    state = evolve(state, slot_lease=slot_lease, computing=False)
    return Transition(state, progress) if state.loading else join_both_sides(context, state)


def fail_front(
    state: Restoring, event: DeviceFailed, context: DecisionContext
) -> Transition[Draining, CloseStream, Abandon] | FailWithoutLease:
    """Fail the request because rows of the front could not be computed. A load that still runs is awaited first."""
    if state.loading:
        left = keep_trusted_rows(get_remainder(state), event)
        return Transition(Draining(left, 1), make_failure_close(context, state, event), Abandon())
    return fail_without_lease(context, state, event)


def join_both_sides(context: DecisionContext, state: Restoring) -> ContinueRequest:
    """Go on after both sides have ended, with the rows that are valid without a gap."""
    slot_lease = state.slot_lease
    if state.loaded and state.load_start <= slot_lease.rows and slot_lease.valid_rows < state.stop:
        slot_lease = slot_lease.with_loaded_rows(state.load_start, state.stop, state.tier)
        return continue_request(context, slot_lease, evolve(state.prompt, miss_reason=""))
    prompt = evolve(state.prompt, miss_reason="restore_incomplete") if state.loaded else state.prompt
    return continue_request(context, slot_lease, prompt)


def make_progress_report(slot_lease: SlotLease, prompt: Prompt) -> ReportProgress:
    """Return the report of how many prompt tokens are in place."""
    return ReportProgress(slot_lease.valid_rows, len(prompt.tokens), slot_lease.reused_rows)
