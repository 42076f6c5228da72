"""What can happen to a request beside the outcomes of its effects."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from effects.all import Outcome
from effects.ids import SlotId
from effects.job import Job
from effects.ports import CancelReason


@frozen
class Submitted:
    job: Job


@frozen
class Cancelled:
    """The client left, the deadline passed, a stop string was seen, the server stops: all the same here."""

    reason: CancelReason


@frozen
class Admitted:
    """Derived by the world: a slot is free, and these rows of it, or of `source`, can be kept."""

    slot: SlotId
    source: SlotId
    keep: int


@frozen
class Rejected:
    """Derived by the world: the queue is full."""

    waiting: int


External: TypeAlias = Submitted | Cancelled
Derived: TypeAlias = Admitted | Rejected
Event: TypeAlias = External | Derived | Outcome
