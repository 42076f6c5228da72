"""Bring KV rows back into a slot from host memory or disk."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import LeaseId, Side, SlotId, StoreFailed


@frozen
class BlocksRestored:
    """Rows `[start, stop)` of the slot are on the device; the lease is released.

    The model's positional state, where it has any, is the one at `stop`, which then is all that was asked for: no rows,
    if the slot had all of them.
    """

    start: int
    stop: int
    bytes: int
    ns: int = 0  # what that took; 0: not measured


@frozen
class RestoreBlocks:
    """Load rows `[start, stop)` into the slot, and the positional state at `stop` where the model has any: then there
    may be no rows to load. Whatever comes of it, the lease is released with the outcome.

    They are written on the device's lane, behind what was asked of it before: another slot may still be copied from
    this one, and this one not be open yet.
    """

    outcomes: ClassVar = (BlocksRestored, StoreFailed)
    side: ClassVar = Side.STORE
    lease: LeaseId
    slot: SlotId
    start: int
    stop: int
