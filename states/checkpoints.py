"""Checkpoints of positional state on the device: a few places, each with the state behind some row of a slot.

A checkpoint belongs to the sequence of a slot and goes with it. The number of places is fixed. When a new checkpoint
needs one, the block store's rule decides which has to go: the one that saves the fewest tokens, discounted by age.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from effects.ids import PlaceId, SlotId, Tokens

FIRST_SLOT = SlotId(0)


@frozen
class StateCheckpoint:
    """The positional state behind the first `at` tokens of a slot's sequence. at = 0: the place is empty."""

    slot: SlotId = FIRST_SLOT
    at: int = 0
    last_turn: int = 0  # the turn (`Slots.release_count`) in which it was filled, or last continued from


Places = tuple[StateCheckpoint, ...]
EMPTY = StateCheckpoint()


def replace_place(places: Places, number: PlaceId, checkpoint: StateCheckpoint) -> Places:
    return (*places[:number], checkpoint, *places[number + 1 :])


def mark_used(places: Places, number: PlaceId | None, turn: int) -> Places:
    """Note that a request continues from this checkpoint. None: it continues from none."""
    return places if number is None else replace_place(places, number, evolve(places[number], last_turn=turn))


def drop_beyond(places: Places, slot: int, rows: int) -> Places:
    """Empty the places of checkpoints that lie beyond the rows that are left of a slot's sequence."""
    if not any(place.slot == slot and place.at > rows for place in places):
        return places
    return tuple(EMPTY if place.slot == slot and place.at > rows else place for place in places)


def hand_over(places: Places, slot: int, rows: int, sequences: Sequence[Tokens]) -> Places:
    """Do as `drop_beyond` before a slot serves another prompt, but save checkpoints that other slots can use.

    A checkpoint is handed over to a slot that keeps the same tokens, unless such a slot has that state already.
    sequences: by slot, what it keeps.
    """

    def pass_on(place: StateCheckpoint) -> StateCheckpoint:
        if place.slot != slot or place.at <= rows:
            return place
        tokens = sequences[slot][: place.at]
        others = (SlotId(number) for number in range(len(sequences)) if number != slot)
        heirs = [number for number in others if len(tokens) == place.at and sequences[number][: place.at] == tokens]
        has_one = any(other.at == place.at and other.slot in heirs for other in places)
        return EMPTY if has_one or not heirs else evolve(place, slot=heirs[0])

    return tuple(map(pass_on, places))


def rate_checkpoint(places: Places, checkpoint: StateCheckpoint, turn: int) -> int:
    """Return what a checkpoint is worth, in thousandths of a token: tokens that it saves, divided by its age.

    Without it a request would go on from the checkpoint before it. The age is one more than the requests since its use.
    """
    earlier = (other.at for other in places if other.slot == checkpoint.slot and other.at < checkpoint.at)
    return 1000 * (checkpoint.at - max(earlier, default=0)) // (1 + turn - checkpoint.last_turn)


def choose_place(places: Places, slot: SlotId, at: int, turn: int) -> PlaceId | None:
    """Choose a place for one more checkpoint: an empty one, or that of the checkpoint that is worth least.

    None: the new checkpoint would be worth least itself.
    """
    candidates = (*places, StateCheckpoint(slot, at, turn))

    def rank(number: int) -> tuple[int, int]:
        checkpoint = candidates[number]
        return checkpoint.at and rate_checkpoint(candidates, checkpoint, turn), number

    least = min(range(len(candidates)), key=rank)
    return PlaceId(least) if least < len(places) else None
