"""Restoring: rows come from two sides at once, loaded by the store and computed by the device."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.ids import DeviceFailed, StoreFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored
from effects.stream import Abandon, CloseStream, ReportProgress
from states.machine import Transition
from states.phases import FailEarly, Fill, Onward, chunk, fail_early, failed, fill, onward, trusted, unloaded
from states.request_states import Draining, Prompt, Restoring, SlotLease, remains
from states.sequences import whole_blocks
from states.settings import DecisionContext

Restored: TypeAlias = Transition[Restoring] | Onward
Computed: TypeAlias = Transition[Restoring, ReportProgress, RunPrefill] | Transition[Restoring, ReportProgress] | Onward


def loaded(state: Restoring, event: BlocksRestored, known: DecisionContext) -> Restored:
    """Trust the rows that were acknowledged, not the ones that were asked for.

    Rows without the positional state at their end are none.
    """
    if event.stop < state.stop:
        state = evolve(state, prompt=evolve(state.prompt, stored=0))
        if known.settings.stateful:
            return fill(known, state.seat, evolve(state.prompt, miss="restore_incomplete"))
    front, stop = max(state.front, event.start), whole_blocks(known.settings, min(state.stop, event.stop))
    state = evolve(state, front=front, stop=stop, loading=False, loaded=True)
    return Transition(state) if state.computing else joined(known, state)


def lost(state: Restoring, event: StoreFailed, known: DecisionContext) -> Transition[Restoring] | Fill:
    """A failed restore is a miss: what was computed stays, the rest is prefilled."""
    seat, prompt = unloaded(state.seat, event), evolve(state.prompt, miss=f"restore_{event.kind}", stored=0)
    if state.computing:
        return Transition(evolve(state, seat=seat, prompt=prompt, loading=False))
    return fill(known, seat, prompt)


def advanced(state: Restoring, event: PrefillAdvanced, known: DecisionContext) -> Computed:
    seat = state.seat.computed(event.stop)
    if event.more:
        return Transition(evolve(state, seat=seat), progress(seat, state.prompt))
    if event.stop < state.front and (state.loading or state.loaded):
        following = chunk(known.settings, seat, state.prompt, state.front)
        return Transition(evolve(state, seat=seat), progress(seat, state.prompt), following)
    state = evolve(state, seat=seat, computing=False)
    if state.loading:
        return Transition(state, progress(seat, state.prompt))
    return joined(known, state)


def broken(
    state: Restoring, event: DeviceFailed, known: DecisionContext
) -> Transition[Draining, CloseStream, Abandon] | FailEarly:
    """The front could not be computed. The load, if it still runs, answers first."""
    if state.loading:
        return Transition(Draining(trusted(remains(state), event), 1), failed(known, state, event), Abandon())
    return fail_early(known, state, event)


def joined(known: DecisionContext, state: Restoring) -> Onward:
    """Both sides are done: the rows that are valid without a gap."""
    seat, prompt = state.seat, state.prompt
    if state.loaded and state.front <= seat.rows and seat.valid < state.stop:
        return onward(known, seat.loaded(state.front, state.stop, state.tier), evolve(prompt, miss=""))
    return onward(known, seat, evolve(prompt, miss="restore_incomplete") if state.loaded else prompt)


def progress(seat: SlotLease, prompt: Prompt) -> ReportProgress:
    return ReportProgress(seat.valid, len(prompt.tokens), seat.restored)
