"""The rows of a slot are gone: its request is looked up again, once, and fails clearly when that happens again.

What the client has heard of the answer is not said twice: the same prompt gets the same answer, so it is computed again
from the start and compared with what was heard.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.pflash import PromptCompressed, PromptScored
from effects.prefill import PrefillAdvanced
from effects.residency import ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored
from effects.stream import Abandon, CloseStream
from states.events import Cancelled, SlotEmptied
from states.machine import Transition
from states.phases import emptied, park, report, report_early
from states.request_states import (
    FINISH,
    Draining,
    Open,
    Parking,
    Recovering,
    RequestRemainder,
    Restoring,
    Snapshotting,
    Waiting,
    Yielding,
    remains,
)
from states.settings import DecisionContext

Lost: TypeAlias = Transition[Recovering, Abandon] | Transition[Draining, CloseStream, Abandon]
Answered: TypeAlias = Transition[Recovering] | Transition[Waiting]
Resumed: TypeAlias = Transition[Waiting] | Transition[Yielding, UnloadModel]

TWICE = "the rows of its slot were lost a second time"


def lost(state: Open, _: SlotEmptied, known: DecisionContext) -> Lost:
    """What is in flight is of no use any more, and answers all the same."""
    left = emptied(remains(state))
    flying = state.loading + state.computing if isinstance(state, Restoring) else 1
    if left.prompt.heard is None:
        left = evolve(left, prompt=evolve(left.prompt, heard=left.answer))
        return Transition(Recovering(left, flying), Abandon())
    return Transition(Draining(left, flying, lost=True), CloseStream("lost", report(known, state), TWICE), Abandon())


def lost_behind(state: Draining, _: SlotEmptied, __: DecisionContext) -> Transition[Draining]:
    return Transition(Draining(emptied(state.remains), state.flying, lost=True))


def lost_saving(state: Snapshotting, _: SlotEmptied, __: DecisionContext) -> Transition[Snapshotting]:
    return Transition(Snapshotting(emptied(state.remains)))


def lost_parking(state: Parking, _: SlotEmptied, __: DecisionContext) -> Transition[Parking]:
    return Transition(Parking(emptied(state.remains)))


def found(state: Recovering, event: PrefixFound, _: DecisionContext) -> Transition[Waiting, ReleasePrefix]:
    """The lookup was all that was in flight. What was compared is known, and not compared again."""
    return Transition(Waiting(compared(state.remains, event).prompt), ReleasePrefix(event.lease))


def missed(state: Recovering, event: PrefixMissed, _: DecisionContext) -> Transition[Waiting]:
    return Transition(Waiting(compared(state.remains, event).prompt))


def compared(left: RequestRemainder, event: PrefixFound | PrefixMissed) -> RequestRemainder:
    return evolve(left, prompt=evolve(left.prompt, shared=left.prompt.shared or event.shared))


def loaded(state: Recovering, _: BlocksRestored | StoreFailed, __: DecisionContext) -> Answered:
    if state.flying > 1:
        return Transition(Recovering(state.remains, state.flying - 1))
    return Transition(Waiting(state.remains.prompt))


def compressed(
    state: Recovering, _: PromptScored | PromptCompressed, known: DecisionContext
) -> Transition[Yielding, UnloadModel]:
    """It is scored again, in whatever slot."""
    return Transition(Yielding(state.remains), park(known.settings, "drafter"))


def fetched(state: Recovering, event: ModelLoaded, known: DecisionContext) -> Transition[Yielding, UnloadModel]:
    return Transition(Yielding(evolve(state.remains, leased=event.name)), park(known.settings, event.name))


def computed(
    state: Recovering, event: PrefillAdvanced | DeviceFailed, known: DecisionContext
) -> Transition[Recovering] | Resumed:
    if isinstance(event, PrefillAdvanced) and event.more:
        return Transition(state)
    if state.flying > 1:
        return Transition(Recovering(state.remains, state.flying - 1))
    return resumed(state, known)


def decoded(state: Recovering, event: Decoded, known: DecisionContext) -> Transition[Recovering] | Resumed:
    return Transition(state) if event.more else resumed(state, known)


def resumed(state: Recovering, known: DecisionContext) -> Resumed:
    if state.remains.leased:
        return Transition(Yielding(state.remains), park(known.settings, state.remains.leased))
    return Transition(Waiting(state.remains.prompt))


def yielded(state: Yielding, _: ModelUnloaded | DeviceFailed, __: DecisionContext) -> Transition[Waiting]:
    return Transition(Waiting(state.remains.prompt))


def drain(state: Recovering, event: Cancelled, _: DecisionContext) -> Transition[Draining, CloseStream, Abandon]:
    closing = CloseStream(FINISH[event.reason], report_early(state.remains.prompt), event.reason)
    return Transition(Draining(state.remains, state.flying, lost=True), closing, Abandon())


def park_on(state: Yielding, event: Cancelled, _: DecisionContext) -> Transition[Parking, CloseStream]:
    return Transition(
        Parking(state.remains), CloseStream(FINISH[event.reason], report_early(state.remains.prompt), event.reason)
    )
