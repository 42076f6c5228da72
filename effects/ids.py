"""Names that effects and events use for things that others own: requests, slots, lanes, pages, leases."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NewType, TypeAlias

from attrs import frozen

RequestId = NewType("RequestId", int)
SlotId = NewType("SlotId", int)
CheckpointId = NewType("CheckpointId", int)  # a checkpoint of positional state that a device keeps
LaneId = NewType("LaneId", int)  # a queue of device work: MAIN, PROMPTS, or 1 for a prompt scorer's own device
PageId = NewType("PageId", int)  # a page of the pool that all slots share
LeaseId = NewType("LeaseId", int)  # a hit in the block store, which stays until its rows are restored or released
MAIN = LaneId(0)
PROMPTS = LaneId(2)  # a second lane of the target's device: wide forwards of prompts, while MAIN decodes
ENGINE = RequestId(0)  # of an effect that belongs to no request; requests are counted from 1
PAGE = 256  # rows of a page: whole tiles and whole sums of attention, so their position in memory changes no bits
Tokens: TypeAlias = tuple[int, ...]
Span: TypeAlias = tuple[int, int]  # half-open: [start, stop)
ModelName: TypeAlias = Literal["target", "draft", "scorer"]
# Where rows were found: `none`, `device` (a slot), or the name of one of the store's tiers (`host`, `disk`, `shared`).
Tier: TypeAlias = str
FailureKind: TypeAlias = Literal["abandoned", "out_of_memory", "io", "timed_out", "broken", "lost", "dead_end"]


class Side(Enum):
    """The executor that carries an effect out. A request has at most one awaited effect in flight on each side."""

    DEVICE = "device"  # one OS thread for each lane of a device; the core decides the order
    STORE = "store"  # host memory and disk; concurrent, bounded by the executor


@frozen
class DeviceFailed:
    """A device effect did not happen.

    If it was abandoned, ran out of memory or came to a dead end, what was acknowledged before still holds. After any
    other failure the slot's rows cannot be trusted. The kind `lost` means that the rows are gone, as `SlotsLost` has
    reported before. The kind `dead_end` means that the request's grammar lets no token follow.
    """

    kind: FailureKind
    detail: str


@frozen
class StoreFailed:
    """A store effect did not happen. The store has released the lease that the effect used.

    The kind `lost` means that the slot's positional state was overwritten in part, so the state is gone. The slot's
    rows are still there.
    """

    kind: FailureKind
    detail: str
