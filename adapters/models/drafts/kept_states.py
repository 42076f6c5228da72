"""The hidden states that a draft keeps for each slot, in the rows of one tensor: those of the slot's last rows.

The state of a row at some position lies at that position modulo KEPT_STATES, behind the first row of its slot. So a row
that takes the place of a rejected one overwrites the state of the rejected one. Some rows of a step are followed by
KEPT_STATES or more others of the same step. Their states are not kept; they go to one row that is never read.
"""

from __future__ import annotations

from torch import Tensor, unflatten

from adapters.models.kernels.step import Segment

KEPT_STATES = 64  # the hidden states that a slot keeps


def find_kept_row(first: int, slot: int, position: int) -> int:
    """Return the row with the state of this position. first: the first row of slot 0."""
    return first + slot * KEPT_STATES + position % KEPT_STATES


def list_target_rows(first: int, segment: Segment, unkept_row: int) -> list[int]:
    """Return for each row of a segment the row that its state goes to. unkept_row: takes states that are not kept."""
    last = range(segment.start, segment.start + segment.count)[-KEPT_STATES:]
    kept_rows = [find_kept_row(first, segment.slot, position) for position in last]
    return [unkept_row] * (segment.count - len(kept_rows)) + kept_rows


def copy_kept_states(hidden: Tensor, first: int, slots: int, source: int, target: int) -> None:
    """Copy all states of one slot to another one. hidden: the tensor, `[rows, D]`. slots: how many there are."""
    states = unflatten(hidden.narrow(0, first, slots * KEPT_STATES), 0, (-1, KEPT_STATES))
    states[target].copy_(states[source])
