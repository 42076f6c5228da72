"""Snapshotting, Parking, Draining: what happens behind the client's back."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded
from effects.draft import DraftParked, DraftUnparked, ParkDraft
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.pflash import PromptCompressed
from effects.prefill import PrefillAdvanced
from effects.restore import BlocksRestored
from effects.snapshot import SnapshotSaved
from effects.stream import Abandon, CloseStream
from states.life import (
    FINISH,
    Cancelled,
    Compressing,
    Done,
    Draining,
    Hold,
    LookingUp,
    Parking,
    Prefilling,
    Restoring,
    Snapshotting,
    Speculating,
    Unparking,
)
from states.machine import Then
from states.onward import Leave, LeaveEarly, leave, leave_early, let_go, park, trusted
from states.scope import report

Settled: TypeAlias = Then[Draining] | Leave
SettledEarly: TypeAlias = Then[Draining] | LeaveEarly  # no draft yet


def drain(
    state: LookingUp | Compressing | Unparking | Prefilling | Speculating, event: Cancelled
) -> Then[Draining, CloseStream, Abandon]:
    return Then(Draining(state.hold, 1), CloseStream(FINISH[event.reason], report(state.hold), event.reason), Abandon())


def drain_both(state: Restoring, event: Cancelled) -> Then[Draining, CloseStream, Abandon]:
    closing = CloseStream(FINISH[event.reason], report(state.hold), event.reason)
    return Then(Draining(state.hold, state.loading + state.computing), closing, Abandon())


def settle(state: Draining, _: PrefixMissed | PromptCompressed) -> LeaveEarly:
    """It was all that was in flight, and nothing came of it that would be worth keeping."""
    return leave_early(state.hold)


def settle_loss(state: Draining, _: StoreFailed) -> SettledEarly:
    hold = evolve(state.hold, stored=0)
    return still(state, hold) if state.flying > 1 else leave_early(hold)


def settle_failure(state: Draining, event: DeviceFailed) -> Settled:
    hold = trusted(state.hold, event)
    return still(state, hold) if state.flying > 1 else leave(hold)


def settle_found(state: Draining, event: PrefixFound) -> Then[Done, ReleasePrefix]:
    """The lookup was all that was in flight."""
    return Then(Done(state.hold), ReleasePrefix(event.lease))


def settle_draft(state: Draining, _: DraftUnparked) -> Then[Parking, ParkDraft]:
    """The draft came after all: give it back."""
    return Then(Parking(evolve(state.hold, draft=True)), park(state.hold))


def settle_rows(state: Draining, event: PrefillAdvanced) -> Settled:
    hold = evolve(state.hold, valid=event.stop)
    return still(state, hold) if state.flying > 1 else leave(hold)


def settle_restored(state: Draining, event: BlocksRestored) -> Then[Draining] | Then[Done]:
    """Loaded rows stay in the slot if none is missing before them; the store has them all."""
    hold = state.hold
    if event.start <= hold.valid < event.stop:
        hold = evolve(hold, valid=event.stop, restored=hold.restored + event.stop - hold.valid)
    return still(state, hold) if state.flying > 1 else Then(Done(hold))


def settle_decode(state: Draining, event: Decoded) -> Leave:
    """The decode step fed one more token that the client has seen: its row is valid. What it picked, nobody saw.

    Positional state has gone past that, and takes the slot's sequence with it.
    """
    hold = state.hold
    if hold.settings.stateful:
        return leave(evolve(hold, valid=hold.valid + len(event.tokens), answer=hold.answer + event.tokens))
    return leave(evolve(hold, valid=hold.valid + 1))


def still(state: Draining, hold: Hold) -> Then[Draining]:
    """Something else has not answered yet."""
    return Then(Draining(hold, state.flying - 1))


def snapshotted(state: Snapshotting, _: SnapshotSaved) -> Then[Parking, ParkDraft] | Then[Done]:
    return let_go(state.hold)


def unsaved(state: Snapshotting, event: DeviceFailed) -> Then[Parking, ParkDraft] | Then[Done]:
    """A failed snapshot loses time, nothing else."""
    return let_go(trusted(state.hold, event))


def parked(state: Parking, _: DraftParked | DeviceFailed) -> Then[Done]:
    return Then(Done(state.hold))
