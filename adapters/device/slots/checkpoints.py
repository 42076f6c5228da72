"""Where slots of a model with positional state go on from, and what is kept of it: in places of the device, and beyond.

Places are numbered and their contents are known by the core; what is remembered here refuses a place that does not have
what it is said to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import define, field

from adapters.device.slots.slots import SlotState
from adapters.models.decoder.shard import Shard
from effects.decode import RunDecode
from effects.ids import PlaceId, RequestId, SlotId
from effects.prefill import OpenSlot, RunPrefill

# Keeps what a slot has behind so many rows beyond the device; on the lane. Where it cannot, it says so in the log.
KeepState: TypeAlias = Callable[[RequestId, SlotId, int], object]


@define(eq=False)
class Checkpoints:
    """On the lane."""

    shard: Shard
    beyond: KeepState | None = None
    _places: dict[PlaceId, list[int]] = field(factory=dict[PlaceId, "list[int]"])  # the tokens that each stands for

    def standing(self, rows: int) -> int:
        """Where a slot has its state that has settled so many rows."""
        return rows - rows % self.shard.state_block

    def open(self, origin: SlotState | None, effect: OpenSlot) -> None:
        """Bring the state to where the slot shall go on from; the rows are there. Raises ValueError."""
        source, at, place = effect.source, effect.state, effect.place
        if not 0 <= at <= effect.keep:
            raise ValueError(f"a state behind {at} rows, of which {effect.keep} are kept")
        if place is not None:
            if not 0 <= place < self.shard.state_places or self._places.get(place) != list(effect.prompt[:at]):
                raise ValueError(f"place {place} does not have the state behind {at} tokens of the prompt")
            self.shard.load_state(place, effect.slot)
        elif at:
            rows = 0 if origin is None else origin.valid
            if not self.standing(rows) <= at <= rows:
                raise ValueError(f"slot {source}, with {rows} rows, has no state to go on from at {at}")
            if source != effect.slot:
                self.shard.copy_state(source, effect.slot)

    def computed(self, request: RequestId, effect: RunPrefill, state: SlotState) -> None:
        """A chunk that stops where the state is kept."""
        if effect.place is not None:
            self._places[effect.place] = state.tokens[: effect.stop]
            self.shard.keep_state(effect.slot, effect.place)
        if effect.checkpoint and self.beyond is not None:
            self.beyond(request, effect.slot, effect.stop)

    def held(self, request: RequestId, effect: RunPrefill) -> None:
        """Keep the state that a prefill goes on from, before its first row overwrites it."""
        if effect.held and self.beyond is not None:
            self.beyond(request, effect.slot, effect.start)

    def passed(self, request: RequestId, effect: RunDecode) -> None:
        """A decode step that goes on behind where the state is kept."""
        if effect.checkpoint and self.beyond is not None:
            self.beyond(request, effect.slot, self.standing(effect.position))
