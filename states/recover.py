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
from states.machine import Then
from states.phases import emptied, park, report, report_early
from states.request_states import (
    FINISH,
    Draining,
    Open,
    Parking,
    Recovering,
    Remains,
    Restoring,
    Snapshotting,
    Waiting,
    Yielding,
    remains,
)
from states.settings import Known

Lost: TypeAlias = Then[Recovering, Abandon] | Then[Draining, CloseStream, Abandon]
Answered: TypeAlias = Then[Recovering] | Then[Waiting]
Resumed: TypeAlias = Then[Waiting] | Then[Yielding, UnloadModel]

TWICE = "the rows of its slot were lost a second time"


def lost(state: Open, _: SlotEmptied, known: Known) -> Lost:
    """What is in flight is of no use any more, and answers all the same."""
    left = emptied(remains(state))
    flying = state.loading + state.computing if isinstance(state, Restoring) else 1
    if left.prompt.heard is None:
        left = evolve(left, prompt=evolve(left.prompt, heard=left.answer))
        return Then(Recovering(left, flying), Abandon())
    return Then(Draining(left, flying, lost=True), CloseStream("lost", report(known, state), TWICE), Abandon())


def lost_behind(state: Draining, _: SlotEmptied, __: Known) -> Then[Draining]:
    return Then(Draining(emptied(state.remains), state.flying, lost=True))


def lost_saving(state: Snapshotting, _: SlotEmptied, __: Known) -> Then[Snapshotting]:
    return Then(Snapshotting(emptied(state.remains)))


def lost_parking(state: Parking, _: SlotEmptied, __: Known) -> Then[Parking]:
    return Then(Parking(emptied(state.remains)))


def found(state: Recovering, event: PrefixFound, _: Known) -> Then[Waiting, ReleasePrefix]:
    """The lookup was all that was in flight. What was compared is known, and not compared again."""
    return Then(Waiting(compared(state.remains, event).prompt), ReleasePrefix(event.lease))


def missed(state: Recovering, event: PrefixMissed, _: Known) -> Then[Waiting]:
    return Then(Waiting(compared(state.remains, event).prompt))


def compared(left: Remains, event: PrefixFound | PrefixMissed) -> Remains:
    return evolve(left, prompt=evolve(left.prompt, shared=left.prompt.shared or event.shared))


def loaded(state: Recovering, _: BlocksRestored | StoreFailed, __: Known) -> Answered:
    if state.flying > 1:
        return Then(Recovering(state.remains, state.flying - 1))
    return Then(Waiting(state.remains.prompt))


def compressed(state: Recovering, _: PromptScored | PromptCompressed, known: Known) -> Then[Yielding, UnloadModel]:
    """It is scored again, in whatever slot."""
    return Then(Yielding(state.remains), park(known.settings, "drafter"))


def fetched(state: Recovering, event: ModelLoaded, known: Known) -> Then[Yielding, UnloadModel]:
    return Then(Yielding(evolve(state.remains, leased=event.name)), park(known.settings, event.name))


def computed(state: Recovering, event: PrefillAdvanced | DeviceFailed, known: Known) -> Then[Recovering] | Resumed:
    if isinstance(event, PrefillAdvanced) and event.more:
        return Then(state)
    if state.flying > 1:
        return Then(Recovering(state.remains, state.flying - 1))
    return resumed(state, known)


def decoded(state: Recovering, event: Decoded, known: Known) -> Then[Recovering] | Resumed:
    return Then(state) if event.more else resumed(state, known)


def resumed(state: Recovering, known: Known) -> Resumed:
    if state.remains.leased:
        return Then(Yielding(state.remains), park(known.settings, state.remains.leased))
    return Then(Waiting(state.remains.prompt))


def yielded(state: Yielding, _: ModelUnloaded | DeviceFailed, __: Known) -> Then[Waiting]:
    return Then(Waiting(state.remains.prompt))


def drain(state: Recovering, event: Cancelled, _: Known) -> Then[Draining, CloseStream, Abandon]:
    closing = CloseStream(FINISH[event.reason], report_early(state.remains.prompt), event.reason)
    return Then(Draining(state.remains, state.flying, lost=True), closing, Abandon())


def park_on(state: Yielding, event: Cancelled, _: Known) -> Then[Parking, CloseStream]:
    return Then(
        Parking(state.remains), CloseStream(FINISH[event.reason], report_early(state.remains.prompt), event.reason)
    )
