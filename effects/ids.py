"""The names that effects and events use for things they do not own."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NewType, TypeAlias

from attrs import frozen

RequestId = NewType("RequestId", int)
SlotId = NewType("SlotId", int)
PlaceId = NewType("PlaceId", int)  # where a device keeps a checkpoint of a model's positional state
LaneId = NewType("LaneId", int)  # whom device work is queued for; the target's device is MAIN
PageId = NewType("PageId", int)  # of the memory that all slots share
LeaseId = NewType("LeaseId", int)  # a hit in the block store: held until its rows are restored or released
MAIN = LaneId(0)
PROMPTS = LaneId(2)  # the target's device once more: wide forwards of prompts, beside decode steps
ENGINE = RequestId(0)  # whom an ask is for that is no request's; those are counted from 1
PAGE = 256  # rows of a page: whole tiles and whole sums of attention, so where they lie changes no bits
Tokens: TypeAlias = tuple[int, ...]
Span: TypeAlias = tuple[int, int]  # half-open: [start, stop)
ModelName: TypeAlias = Literal["target", "draft", "drafter"]
Tier: TypeAlias = Literal["none", "device", "host", "disk"]
FailureKind: TypeAlias = Literal["abandoned", "out_of_memory", "io", "timed_out", "broken", "lost", "dead_end"]


class Side(Enum):
    """Who carries an effect out. A request has at most one awaited effect in flight on each."""

    DEVICE = "device"  # one OS thread for each lane of a device; the pure core decides the order
    STORE = "store"  # host memory and disk; concurrent, bounded by the executor


@frozen
class DeviceFailed:
    """A device effect did not happen.

    What had been acknowledged before it still holds where it was abandoned, ran out of memory or came to a dead end.
    After anything else nobody knows what the slot's rows are worth. lost: they are gone, as `SlotsLost` has told.
    dead_end: the request's grammar lets no token follow.
    """

    kind: FailureKind
    detail: str


@frozen
class StoreFailed:
    """A store effect did not happen; the store has let go of the lease it used.

    lost: the positional state that the slot had is gone with it, overwritten in part. Its rows are still there.
    """

    kind: FailureKind
    detail: str
