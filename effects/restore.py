"""Restore: load KV rows into a slot from host memory or disk."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import LeaseId, Side, SlotId, StoreFailed


@frozen
class BlocksRestored:
    """Rows `[start, stop)` of the slot are on the device, and the lease is released.

    Where the model has positional state, the slot has the state behind row `stop` now. If the slot had all rows before,
    only that state was loaded, and the span is empty.
    """

    start: int
    stop: int
    bytes: int
    ns: int = 0  # nanoseconds that the load took; 0: not measured


@frozen
class RestoreBlocks:
    """Load rows `[start, stop)` into the slot, and the positional state at `stop` where the model has any.

    The span may be empty where only the state is missing. The lease is released with the outcome, whatever it is. Rows
    are written on the device's lane, in order with earlier effects: the slot may not be open yet, and another slot may
    still have to be copied from it.
    """

    outcomes: ClassVar = (BlocksRestored, StoreFailed)
    side: ClassVar = Side.STORE
    lease: LeaseId
    slot: SlotId
    start: int
    stop: int
