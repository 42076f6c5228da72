"""Snapshotting, Parking, Draining: what happens behind the client's back."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.pflash import PromptCompressed, PromptScored
from effects.prefill import PrefillAdvanced
from effects.residency import ModelLoaded, ModelUnloaded
from effects.restore import BlocksRestored
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream
from states.events import Cancelled
from states.machine import Transition
from states.phases import (
    GiveBack,
    Leave,
    LeaveEarly,
    leave,
    leave_early,
    leave_leased,
    let_go,
    park,
    report,
    trusted,
    unloaded,
)
from states.request_states import (
    FINISH,
    Compressing,
    Done,
    Draining,
    Fetching,
    LookingUp,
    Parking,
    Prefilling,
    RequestRemainder,
    Restoring,
    Snapshotting,
    Speculating,
    Unparking,
    remains,
)
from states.settings import DecisionContext

Settled: TypeAlias = Transition[Draining] | Leave
SettledEarly: TypeAlias = Transition[Draining] | LeaveEarly  # no draft yet


def drain(
    state: LookingUp | Fetching | Compressing | Unparking | Prefilling | Speculating,
    event: Cancelled,
    known: DecisionContext,
) -> Transition[Draining, CloseStream, Abandon]:
    closing = CloseStream(FINISH[event.reason], report(known, state), event.reason)
    return Transition(Draining(remains(state), 1), closing, Abandon())


def drain_both(
    state: Restoring, event: Cancelled, known: DecisionContext
) -> Transition[Draining, CloseStream, Abandon]:
    closing = CloseStream(FINISH[event.reason], report(known, state), event.reason)
    return Transition(Draining(remains(state), state.loading + state.computing), closing, Abandon())


def settle(state: Draining, _: PrefixMissed, known: DecisionContext) -> LeaveEarly:
    """It was all that was in flight, and nothing came of it that would be worth keeping."""
    return leave_early(known.settings, state.remains)


def settle_scored(
    state: Draining, _: PromptScored | PromptCompressed, known: DecisionContext
) -> Transition[Snapshotting, SaveSnapshot] | GiveBack:
    """The same; the drafter is leased."""
    return leave_leased(known.settings, state.remains)


def settle_loss(state: Draining, event: StoreFailed, known: DecisionContext) -> SettledEarly:
    left = state.remains
    left = evolve(left, seat=unloaded(left.seat, event), prompt=evolve(left.prompt, stored=0))
    return still(state, left) if state.flying > 1 else leave_early(known.settings, left)


def settle_failure(state: Draining, event: DeviceFailed, known: DecisionContext) -> Settled:
    left = trusted(state.remains, event)
    return still(state, left) if state.flying > 1 else leave(known.settings, left)


def settle_found(state: Draining, event: PrefixFound, _: DecisionContext) -> Transition[Done, ReleasePrefix]:
    """The lookup was all that was in flight."""
    return Transition(Done(state.remains), ReleasePrefix(event.lease))


def settle_model(state: Draining, event: ModelLoaded, known: DecisionContext) -> GiveBack:
    """The draft or the drafter came after all: give it back."""
    return Transition(Parking(evolve(state.remains, leased=event.name)), park(known.settings, event.name))


def settle_rows(state: Draining, event: PrefillAdvanced, known: DecisionContext) -> Settled:
    left = state.remains
    if not state.lost:
        left = evolve(left, seat=left.seat.computed(event.stop))
    if event.more:
        return Transition(evolve(state, remains=left))
    return still(state, left) if state.flying > 1 else leave(known.settings, left)


def settle_restored(
    state: Draining, event: BlocksRestored, _: DecisionContext
) -> Transition[Draining] | Transition[Done]:
    """Loaded rows stay in the slot if none is missing before them; the store has them all."""
    left = state.remains
    if event.start <= left.seat.rows and left.seat.valid < event.stop and not state.lost:
        left = evolve(left, seat=left.seat.loaded(event.start, event.stop, left.seat.tier))
    return still(state, left) if state.flying > 1 else Transition(Done(left))


def settle_decode(state: Draining, event: Decoded, known: DecisionContext) -> Settled:
    """The decode step fed one more token that the client has seen: its row is valid. What it picked, nobody saw.

    Positional state may have gone past that, and so may a launch that goes on: the slot keeps all of it.
    """
    left = state.remains
    if not state.lost:
        rows = 1
        if event.more or event.steps > 1 or known.settings.stateful:
            left, rows = evolve(left, answer=left.answer + event.tokens), len(event.tokens)
        left = evolve(left, seat=evolve(left.seat, valid=left.seat.valid + rows))
    return Transition(evolve(state, remains=left)) if event.more else leave(known.settings, left)


def still(state: Draining, left: RequestRemainder) -> Transition[Draining]:
    """Something else has not answered yet."""
    return Transition(Draining(left, state.flying - 1, state.lost))


def snapshotted(state: Snapshotting, _: SnapshotSaved, known: DecisionContext) -> GiveBack | Transition[Done]:
    return let_go(known.settings, state.remains)


def unsaved(state: Snapshotting, event: StoreFailed, known: DecisionContext) -> GiveBack | Transition[Done]:
    """A failed snapshot loses time, nothing else."""
    return let_go(known.settings, trusted(state.remains, event))


def parked(state: Parking, _: ModelUnloaded | DeviceFailed, __: DecisionContext) -> Transition[Done]:
    return Transition(Done(state.remains))
