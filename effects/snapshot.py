"""Snapshots: keep a slot's rows beyond the device, copied while the lane works and written in the background."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import Side, SlotId, StoreFailed, Tokens


@frozen
class SnapshotSaved:
    """Rows `[0, length)` are in host memory, and lower tiers write them in the background.

    If `length` is less than what was asked for, time or memory ended before the rest was copied.
    """

    length: int
    bytes: int


@frozen
class SaveSnapshot:
    """Keep these rows. The device does other work meanwhile.

    The request holds its slot until the outcome comes, so the rows do not change.
    """

    outcomes: ClassVar = (SnapshotSaved, StoreFailed)
    side: ClassVar = Side.STORE
    slot: SlotId
    tokens: Tokens  # that rows [0, len(tokens)) stand for
    checkpoint: bool = False  # keep the positional state behind the last row as well, which the slot still has
