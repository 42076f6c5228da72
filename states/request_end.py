"""Transitions of Draining, Snapshotting and Parking: what happens after the client's stream is closed.

A request that is cancelled while effects are in flight drains first: the effects are abandoned, and their outcomes
still come. Then rows that are worth it are saved, and the leased model is given back.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import PrefillAdvanced
from effects.prompt_compression import PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded
from effects.restore import BlocksRestored
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream
from states.events import Cancelled
from states.machine import Transition
from states.phases import (
    EndRequest,
    EndWithoutLease,
    ReleaseModel,
    end_request,
    end_with_lease,
    end_without_lease,
    keep_rows_after_failed_load,
    keep_trusted_rows,
    release_model,
    unload_model,
)
from states.reports import make_report
from states.request_states import (
    FINISH,
    Compressing,
    Done,
    Draining,
    LoadingScorer,
    LookingUp,
    Parking,
    Prefilling,
    RequestRemainder,
    Restoring,
    Snapshotting,
    Speculating,
    UnparkingDraft,
    get_remainder,
)
from states.settings import DecisionContext

DrainOrEnd: TypeAlias = Transition[Draining] | EndRequest
DrainOrEndWithoutLease: TypeAlias = Transition[Draining] | EndWithoutLease


# --- cancelled ---


def cancel_and_drain(
    state: LookingUp | LoadingScorer | Compressing | UnparkingDraft | Prefilling | Speculating,
    event: Cancelled,
    context: DecisionContext,
) -> Transition[Draining, CloseStream, Abandon]:
    """Close the stream, and wait for the outcome of the one effect that is in flight."""
    closing = CloseStream(FINISH[event.reason], make_report(context, state), event.reason)
    return Transition(Draining(get_remainder(state), 1), closing, Abandon())


def cancel_and_drain_both(
    state: Restoring, event: Cancelled, context: DecisionContext
) -> Transition[Draining, CloseStream, Abandon]:
    """Close the stream, and wait for the outcomes of the load and of the chunk that is computed meanwhile."""
    closing = CloseStream(FINISH[event.reason], make_report(context, state), event.reason)
    return Transition(Draining(get_remainder(state), state.loading + state.computing), closing, Abandon())


# --- outcomes of what was in flight ---


def end_after_miss(state: Draining, _: PrefixMissed, context: DecisionContext) -> EndWithoutLease:
    """End the request. The lookup was all that was in flight."""
    return end_without_lease(context.settings, state.remainder)


def end_after_scoring(
    state: Draining, _: PromptScored | PromptCompressed, context: DecisionContext
) -> Transition[Snapshotting, SaveSnapshot] | ReleaseModel:
    """End the request, which has leased the prompt scorer."""
    return end_with_lease(context.settings, state.remainder)


def end_after_store_failure(state: Draining, event: StoreFailed, context: DecisionContext) -> DrainOrEndWithoutLease:
    """End the request, or wait for the other effect, after a load or a lookup has failed."""
    left = state.remainder
    slot_lease = keep_rows_after_failed_load(left.slot_lease, event)
    left = evolve(left, slot_lease=slot_lease, prompt=evolve(left.prompt, stored_rows=0))
    return keep_draining(state, left) if state.in_flight > 1 else end_without_lease(context.settings, left)


def end_after_device_failure(state: Draining, event: DeviceFailed, context: DecisionContext) -> DrainOrEnd:
    """End the request, or wait for the other effect, with the rows that are still trusted."""
    left = keep_trusted_rows(state.remainder, event)
    return keep_draining(state, left) if state.in_flight > 1 else end_request(context.settings, left)


def end_after_found_prefix(state: Draining, event: PrefixFound, _: DecisionContext) -> Transition[Done, ReleasePrefix]:
    """End the request. The lookup was all that was in flight, and the store has what it found."""
    return Transition(Done(state.remainder), ReleasePrefix(event.lease))


def end_after_model_load(state: Draining, event: ModelLoaded, context: DecisionContext) -> ReleaseModel:
    """Give the draft or the prompt scorer back, which was loaded after all."""
    left = evolve(state.remainder, leased_model=event.name)
    return Transition(Parking(left), unload_model(context.settings, event.name))


def end_after_prefill(state: Draining, event: PrefillAdvanced, context: DecisionContext) -> DrainOrEnd:
    """Count the computed rows. End the request once everything in flight has answered."""
    left = state.remainder
    if not state.rows_lost:
        left = evolve(left, slot_lease=left.slot_lease.with_computed_rows(event.stop))
    if event.more:
        return Transition(evolve(state, remainder=left))
    return keep_draining(state, left) if state.in_flight > 1 else end_request(context.settings, left)


def end_after_restore(
    state: Draining, event: BlocksRestored, _: DecisionContext
) -> Transition[Draining] | Transition[Done]:
    """Keep the loaded rows in the slot if no row before them is missing. They need not be saved: the store has them."""
    left = state.remainder
    lease = left.slot_lease
    if event.start <= lease.rows and lease.valid_rows < event.stop and not state.rows_lost:
        left = evolve(left, slot_lease=lease.with_loaded_rows(event.start, event.stop, lease.tier))
    return keep_draining(state, left) if state.in_flight > 1 else Transition(Done(left))


def end_after_decode(state: Draining, event: Decoded, context: DecisionContext) -> DrainOrEnd:
    """Count the row of the token that the step fed, which the client has seen. The tokens that it picked are dropped.

    A launch that continues alone has gone further, and positional state may have. Then the slot keeps all of it, and
    the picked tokens become part of the answer, so that rows and tokens agree.
    """
    left = state.remainder
    if not state.rows_lost:
        row_count = 1
        if event.more or event.steps > 1 or context.settings.stateful:
            row_count = len(event.tokens)
            left = evolve(left, answer=left.answer + event.tokens)
        valid_rows = left.slot_lease.valid_rows + row_count
        left = evolve(left, slot_lease=evolve(left.slot_lease, valid_rows=valid_rows))
    return Transition(evolve(state, remainder=left)) if event.more else end_request(context.settings, left)


def keep_draining(state: Draining, left: RequestRemainder) -> Transition[Draining]:
    """Wait for the other effect that is in flight."""
    return Transition(Draining(left, state.in_flight - 1, state.rows_lost))


# --- saving rows and giving models back ---


def end_after_snapshot(
    state: Snapshotting, _: SnapshotSaved, context: DecisionContext
) -> ReleaseModel | Transition[Done]:
    """End the request. Its rows are saved."""
    return release_model(context.settings, state.remainder)


def end_after_failed_snapshot(
    state: Snapshotting, event: StoreFailed, context: DecisionContext
) -> ReleaseModel | Transition[Done]:
    """End the request. Rows that could not be saved are computed again when they are needed."""
    return release_model(context.settings, keep_trusted_rows(state.remainder, event))


def finish_parking(state: Parking, _: ModelUnloaded | DeviceFailed, __: DecisionContext) -> Transition[Done]:
    """End the request. Whether the model could be unloaded does not matter to it."""
    return Transition(Done(state.remainder))
