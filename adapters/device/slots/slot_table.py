"""The table of what every slot serves, shared by the executor, its decode steps, and transfers to and from a store."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.models.decoder.shard import Shard
from effects.all import EffectRequest
from effects.decode import RunDecode
from effects.ids import DeviceFailed, RequestId


@define(eq=False)
class SlotTable:
    """The state of each slot that was opened, or the failure with which it refuses all work.

    Read and changed on the lanes of one executor only.
    """

    _entries: dict[int, SlotState | DeviceFailed] = field(init=False, factory=dict)

    def find(self, slot: int, request: RequestId) -> SlotState | DeviceFailed:
        """Return the slot's state if it was opened for this request, else why nothing can be done for it there."""
        entry = self._entries.get(slot)
        if isinstance(entry, SlotState):
            if entry.request == request:
                return entry.refusal or entry
            return DeviceFailed("broken", f"slot {slot} serves request {entry.request}, not {request}")
        return entry or DeviceFailed("broken", f"slot {slot} was never opened")

    def find_state(self, slot: int) -> SlotState | None:
        """Return the slot's state whatever request it serves; None if it was never opened or refuses all work."""
        state = self._entries.get(slot)
        return state if isinstance(state, SlotState) else None

    def put(self, slot: int, entry: SlotState | DeviceFailed) -> None:
        """Replace what the slot serves. A failure makes it refuse all work until it is opened again."""
        self._entries[slot] = entry

    def remove(self, slot: int) -> None:
        """Forget the slot, as if it had never been opened."""
        del self._entries[slot]

    def fail_all(self, slots: Iterable[int], failure: DeviceFailed) -> None:
        """Make these slots refuse all work with the same failure."""
        self._entries |= dict.fromkeys(slots, failure)

    def break_requests(self, requests: Container[RequestId], error: BaseException) -> None:
        """Make the slots of these requests refuse all work: `error` may have left anything in their rows."""
        for slot, state in self._entries.items():
            if isinstance(state, SlotState) and state.request in requests:
                self._entries[slot] = DeviceFailed("broken", f"slot {slot} is not to be believed: {error}")


def add_pages(shard: Shard, slots: SlotTable, effect_requests: Sequence[EffectRequest]) -> None:
    """Give slots the pages for the rows of these decode steps, before anything is launched."""
    for effect_request in effect_requests:
        effect = effect_request.effect
        if not isinstance(effect, RunDecode) or not effect.pages:
            continue
        if isinstance(slots.find(effect.slot, effect_request.request), SlotState):
            shard.rows.grow(effect.slot, effect.pages)
