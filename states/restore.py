"""Restoring: rows come from two sides at once, loaded by the store and computed by the device."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.ids import DeviceFailed, StoreFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored
from effects.stream import Abandon, CloseStream, ReportProgress
from states.life import Draining, Hold, Restoring, whole_blocks
from states.machine import Then
from states.onward import FailEarly, Fill, Onward, chunk, fail_early, fill, onward, trusted
from states.scope import select

Restored: TypeAlias = Then[Restoring] | Onward
Computed: TypeAlias = Then[Restoring, ReportProgress, RunPrefill] | Then[Restoring, ReportProgress] | Onward


def loaded(state: Restoring, event: BlocksRestored) -> Restored:
    """Trust the rows that were acknowledged, not the ones that were asked for.

    Rows without the positional state at their end are none.
    """
    if event.stop < state.stop:
        state = evolve(state, hold=evolve(state.hold, stored=0))
        if state.hold.settings.stateful:
            return fill(evolve(state.hold, miss="restore_incomplete"))
    front, stop = max(state.front, event.start), whole_blocks(state.hold.settings, min(state.stop, event.stop))
    return settled(evolve(state, front=front, stop=stop, loading=False, loaded=True))


def lost(state: Restoring, event: StoreFailed) -> Then[Restoring] | Fill:
    """A failed restore is a miss: what was computed stays, the rest is prefilled."""
    hold = evolve(state.hold, miss=f"restore_{event.kind}", stored=0)
    return Then(evolve(state, hold=hold, loading=False)) if state.computing else fill(hold)


def advanced(state: Restoring, event: PrefillAdvanced) -> Computed:
    hold = evolve(state.hold, valid=event.stop)
    if event.stop < state.front and (state.loading or state.loaded):
        return Then(evolve(state, hold=hold), progress(hold), chunk(hold, state.front))
    state = evolve(state, hold=hold, computing=False)
    if state.loading:
        return Then(state, progress(hold))
    return onward(joined(state))


def failed(state: Restoring, event: DeviceFailed) -> Then[Draining, CloseStream, Abandon] | FailEarly:
    """The front could not be computed. The load, if it still runs, answers first."""
    if state.loading:
        hold = trusted(state.hold, event)
        closing = CloseStream("failed", evolve(state.hold.report, cache=select(hold)), event.detail)
        return Then(Draining(hold, 1), closing, Abandon())
    return fail_early(state.hold, event)


def settled(state: Restoring) -> Restored:
    return Then(state) if state.computing else onward(joined(state))


def joined(state: Restoring) -> Hold:
    """Both sides are done: the rows that are valid without a gap."""
    hold = state.hold
    if not state.loaded:
        return hold
    if not state.front <= hold.valid < state.stop:
        return evolve(hold, miss="restore_incomplete")
    loaded = state.stop - state.front
    tier = state.tier if loaded > hold.restored else hold.tier
    return evolve(hold, valid=state.stop, restored=hold.restored + loaded, tier=tier, miss="")


def progress(hold: Hold) -> ReportProgress:
    return ReportProgress(hold.valid, len(hold.prompt), hold.restored)
