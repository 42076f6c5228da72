"""Checkpoints of positional state on the device: a few, each with the state after some row of a slot.

A checkpoint belongs to the sequence of a slot and goes with it. The device has memory for a fixed number of them. When
a new one needs memory, the block store's rule decides which has to go: the one that saves the fewest tokens, discounted
by age.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from attrs import evolve, frozen

from effects.ids import CheckpointId, SlotId, Tokens

FIRST_SLOT = SlotId(0)


@frozen
class StateCheckpoint:
    """The positional state after the first `at` tokens of a slot's sequence. at = 0: the checkpoint is empty."""

    slot: SlotId = FIRST_SLOT
    at: int = 0
    last_turn: int = 0  # the turn (`Slots.release_count`) in which it was filled, or last continued from


Checkpoints = tuple[StateCheckpoint, ...]
EMPTY = StateCheckpoint()


def replace_checkpoint(checkpoints: Checkpoints, number: CheckpointId, checkpoint: StateCheckpoint) -> Checkpoints:
    """Return the checkpoints with another one at this number."""
    return (*checkpoints[:number], checkpoint, *checkpoints[number + 1 :])


def mark_used(checkpoints: Checkpoints, number: CheckpointId | None, turn: int) -> Checkpoints:
    """Note that a request continues from this checkpoint. None: it continues from none."""
    return (
        checkpoints
        if number is None
        else replace_checkpoint(checkpoints, number, evolve(checkpoints[number], last_turn=turn))
    )


def drop_beyond(checkpoints: Checkpoints, slot: int, rows: int) -> Checkpoints:
    """Empty the checkpoints that lie beyond the rows that are left of a slot's sequence."""
    if not any(checkpoint.slot == slot and checkpoint.at > rows for checkpoint in checkpoints):
        return checkpoints
    return tuple(
        EMPTY if checkpoint.slot == slot and checkpoint.at > rows else checkpoint for checkpoint in checkpoints
    )


def hand_over(checkpoints: Checkpoints, slot: int, rows: int, sequences: Sequence[Tokens]) -> Checkpoints:
    """Return the checkpoints after a slot keeps only its first `rows` rows, because it will serve another prompt.

    Checkpoints of the slot beyond these rows are emptied, as `drop_beyond` does, with one exception. If another slot
    keeps a sequence that begins with the same tokens, the checkpoint belongs to that slot from now on. It is emptied
    all the same if such a slot has a checkpoint at that row already.

    sequences: by slot, the tokens that the slot keeps.
    """

    def pass_on(checkpoint: StateCheckpoint) -> StateCheckpoint:
        if checkpoint.slot != slot or checkpoint.at <= rows:
            return checkpoint
        tokens = sequences[slot][: checkpoint.at]
        others = (SlotId(number) for number in range(len(sequences)) if number != slot)
        heirs = [
            number for number in others if len(tokens) == checkpoint.at and sequences[number][: checkpoint.at] == tokens
        ]
        has_one = any(other.at == checkpoint.at and other.slot in heirs for other in checkpoints)
        return EMPTY if has_one or not heirs else evolve(checkpoint, slot=heirs[0])

    return tuple(map(pass_on, checkpoints))


def rate_checkpoint(checkpoints: Checkpoints, checkpoint: StateCheckpoint, turn: int) -> int:
    """Return what a checkpoint is worth, in thousandths of a token: the tokens that it saves, divided by its age.

    Without it, a request would continue from the checkpoint before it in the same slot, and compute the tokens between
    the two. The age is 1 plus the number of requests that have ended since the checkpoint was last used.
    """
    earlier = (other.at for other in checkpoints if other.slot == checkpoint.slot and other.at < checkpoint.at)
    return 1000 * (checkpoint.at - max(earlier, default=0)) // (1 + turn - checkpoint.last_turn)


def choose_checkpoint(
    checkpoints: Checkpoints, slot: SlotId, at: int, turn: int, taken: Container[CheckpointId] = ()
) -> CheckpointId | None:
    """Choose the checkpoint that a new one replaces: an empty one, or the one that is worth least.

    None: the new checkpoint would be worth least itself. taken: checkpoints that are not to be replaced.
    """
    candidates = (*checkpoints, StateCheckpoint(slot, at, turn))

    def rank(number: int) -> tuple[int, int]:
        checkpoint = candidates[number]
        return checkpoint.at and rate_checkpoint(candidates, checkpoint, turn), number

    least = min((number for number in range(len(candidates)) if number not in taken), key=rank)
    return CheckpointId(least) if least < len(checkpoints) else None
