"""Slots for experts on the device, of a model whose experts are all in host memory."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import Side


@frozen
class MoveExperts:
    """Copy experts to expert slots on the device. The experts that had these slots have none from then on.

    The copies are made on the device lane, in order with the launches, and no outcome comes back. They change how long
    steps take and nothing else: an expert without a slot is copied when a step needs it.
    """

    outcomes: ClassVar = ()
    side: ClassVar = Side.DEVICE
    moves: tuple[tuple[int, int], ...]  # (expert slot, expert); experts of all layers are counted through
