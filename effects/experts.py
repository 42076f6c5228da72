"""Which experts of a model are on the device, where host memory has all of them."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import Side


@frozen
class PlaceExperts:
    """Copy experts to places on the device; whoever had a place has none from then on. Nobody awaits it.

    Done on the device lane, in order with the launches. Whether it is done changes how long steps take and nothing
    else: an expert without a place is brought when a step needs it.
    """

    outcomes: ClassVar = ()
    side: ClassVar = Side.DEVICE
    moves: tuple[tuple[int, int], ...]  # (place, expert); experts of all layers are counted through
