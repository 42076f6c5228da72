"""Keep a slot's rows beyond the device: copied out beside the lane, written behind the request's back."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import Side, SlotId, StoreFailed, Tokens


@frozen
class SnapshotSaved:
    """Rows `[0, length)` are in host memory, to be written in the background; there was no time or room for more."""

    length: int
    bytes: int


@frozen
class SaveSnapshot:
    """Keep these rows. checkpoint: and the positional state behind the last of them, which the slot still has.

    The device does other work meanwhile: the slot is the request's until the outcome, so nobody changes them.
    """

    outcomes: ClassVar = (SnapshotSaved, StoreFailed)
    side: ClassVar = Side.STORE
    slot: SlotId
    tokens: Tokens  # what rows [0, len(tokens)) stand for
    checkpoint: bool = False
