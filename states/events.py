"""What can happen: to a request, beside the outcomes of its effects, and to the engine as a whole."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from effects.all import Outcome
from effects.ids import ModelName, PlaceId, RequestId, SlotId
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
    """Derived by the world: a slot is free, and these rows of it, or of `source`, can be kept.

    state: where the positional state is, of a model that has any, and `place` which has it, if not `source` itself.
    """

    slot: SlotId
    source: SlotId
    keep: int
    state: int = 0
    place: PlaceId | None = None


@frozen
class Rejected:
    """Derived by the world: the queue is full."""

    waiting: int


@frozen
class SlotEmptied:
    """Derived by the world: the rows of the slot that it holds are gone."""


@frozen
class SlotsLost:
    """The rows of these slots are gone, all at once: what kept them died, or is not to be believed any more.

    An executor tells so before it answers what was in flight there. The slots can be opened again, with nothing in
    them.
    """

    slots: tuple[SlotId, ...]


@frozen
class ExpertsUsed:
    """Of every expert that host memory keeps, those of all layers counted through: the steps since the last report
    that needed it. Told after 32 steps at least, so it is 65,536 small numbers at most, about every second.
    """

    counts: tuple[int, ...]


@frozen
class ForModel:
    """The process that a model is in has gone, or there is one again, with nothing of what the last one knew."""

    name: ModelName
    there: bool


External: TypeAlias = Submitted | Cancelled
Derived: TypeAlias = Admitted | Rejected | SlotEmptied
Event: TypeAlias = External | Derived | Outcome
Common: TypeAlias = SlotsLost | ExpertsUsed  # to no request, but to the engine


@frozen
class ForRequest:
    request: RequestId
    event: Event


@frozen
class ForEngine:
    event: Common


Happened: TypeAlias = ForRequest | ForEngine | ForModel
