"""Keep a slot's rows beyond the device: copied out on the lane, written behind the request's back."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, Side, SlotId, Tokens


@frozen
class SnapshotSaved:
    """Rows `[0, length)` are in host memory, to be written in the background."""

    length: int
    bytes: int


@frozen
class SaveSnapshot:
    """Keep these rows. checkpoint: and the positional state behind the last of them, which the slot still has."""

    outcomes: ClassVar = (SnapshotSaved, DeviceFailed)
    side: ClassVar = Side.DEVICE
    slot: SlotId
    tokens: Tokens  # what rows [0, len(tokens)) stand for
    checkpoint: bool = False
