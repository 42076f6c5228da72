"""Places: a few checkpoints of positional state on the device, each behind some row of what a slot keeps.

A place belongs to a slot's sequence and goes with it. Which one has to make room is decided as in the block store: the
one that saves least, less for age.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from effects.ids import PlaceId, SlotId, Tokens

FIRST = SlotId(0)


@frozen
class StateCheckpoint:
    """The state behind the first `at` tokens of what the slot keeps. at: 0 if the place is empty."""

    slot: SlotId = FIRST
    at: int = 0
    used: int = 0  # the turn in which it was filled, or gone on from


Places = tuple[StateCheckpoint, ...]
EMPTY = StateCheckpoint()


def changed(places: Places, number: PlaceId, place: StateCheckpoint) -> Places:
    return (*places[:number], place, *places[number + 1 :])


def used(places: Places, number: PlaceId | None, turn: int) -> Places:
    """Somebody goes on from it."""
    return places if number is None else changed(places, number, evolve(places[number], used=turn))


def cut(places: Places, slot: int, rows: int) -> Places:
    """Of what the slot kept, so many rows are left."""
    if not any(place.slot == slot and place.at > rows for place in places):
        return places
    return tuple(EMPTY if place.slot == slot and place.at > rows else place for place in places)


def handed_on(places: Places, slot: int, rows: int, sequences: Sequence[Tokens]) -> Places:
    """The same, before the slot is used for something else: who keeps the same tokens in another slot, takes over."""

    def heir(place: StateCheckpoint) -> StateCheckpoint:
        if place.slot != slot or place.at <= rows:
            return place
        tokens = sequences[slot][: place.at]
        others = (SlotId(number) for number in range(len(sequences)) if number != slot)
        heirs = [number for number in others if len(tokens) == place.at and sequences[number][: place.at] == tokens]
        has_one = any(other.at == place.at and other.slot in heirs for other in places)
        return EMPTY if has_one or not heirs else evolve(place, slot=heirs[0])

    return tuple(map(heir, places))


def worth(places: Places, place: StateCheckpoint, turn: int) -> int:
    """Tokens that would have to be computed without it, less for age, which is counted in requests; in thousandths."""
    before = (other.at for other in places if other.slot == place.slot and other.at < place.at)
    return 1000 * (place.at - max(before, default=0)) // (1 + turn - place.used)


def room(places: Places, slot: SlotId, at: int, turn: int) -> PlaceId | None:
    """For one more: an empty place, or that of the one that is worth least; None if it would be that itself."""
    coming = StateCheckpoint(slot, at, turn)
    every = (*places, coming)
    least = min(range(len(every)), key=lambda number: (every[number].at and worth(every, every[number], turn), number))
    return PlaceId(least) if least < len(places) else None
