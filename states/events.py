"""Events: what can happen to a request, besides the outcomes of its effects, and to the engine as a whole.

External events come from clients. Derived events are made by the world itself while it lets another event play out.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from effects.all import Outcome
from effects.ids import CheckpointId, ModelName, RequestId, SlotId
from effects.job import Job
from effects.ports import CancelReason
from effects.timer import TimerName
from states.request_states import Followed


@frozen
class Submitted:
    """A client has submitted a job."""

    job: Job


@frozen
class Cancelled:
    """The client has left, the deadline has passed, a stop string was seen, or the server stops."""

    reason: CancelReason


@frozen
class Admitted:
    """A waiting request is given a free slot. Derived by the world."""

    slot: SlotId
    source: SlotId  # the slot whose first rows are kept; it may be the same slot
    keep: int  # rows that are kept
    state: int = 0  # rows behind which there is positional state to go on from, where the model has any
    device_checkpoint: CheckpointId | None = None  # that has this state; None: the source itself
    followed: Followed | None = None  # kept rows that another request computed while this one waited for them


@frozen
class Rejected:
    """A submitted job is turned away, because the queue is full. Derived by the world."""

    waiting: int  # requests in the queue


@frozen
class SlotEmptied:
    """The rows of the slot that the request holds are lost. Derived by the world."""


@frozen
class SlotsLost:
    """The rows of these slots are lost, because the process that had them died, or cannot be trusted any more.

    An executor reports this before it answers the effects that were in flight there. The slots can be opened again,
    with no rows in them.
    """

    slots: tuple[SlotId, ...]


@frozen
class ExpertsUsed:
    """A report of how often each expert was needed.

    It comes after 32 steps at least, so that is at most 65,536 small numbers about every second.
    """

    counts: tuple[int, ...]  # by expert, numbered through all layers: steps since the last report that needed it


@frozen
class TimerElapsed:
    """A timer that the core has started (`StartTimer`) has elapsed."""

    name: TimerName
    number: int


@frozen
class ForModel:
    """The process that a model runs in has gone, or is there again with nothing of what the last one knew."""

    name: ModelName
    there: bool  # False: it has gone


External: TypeAlias = Submitted | Cancelled
Derived: TypeAlias = Admitted | Rejected | SlotEmptied
Event: TypeAlias = External | Derived | Outcome
Common: TypeAlias = SlotsLost | ExpertsUsed | TimerElapsed  # they happen to the engine, and to no request


@frozen
class ForRequest:
    """An event of one request."""

    request: RequestId
    event: Event


@frozen
class EffectOutcome:
    """The outcome of an effect, and the request that awaits it."""

    request: RequestId
    outcome: Outcome


@frozen
class ForLaunch:
    """The outcomes that a launch reported at once, each of another request, in the order of its members."""

    outcomes: tuple[EffectOutcome, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse two outcomes of one request: the second one could not be awaited before the first one is folded."""
        if len({outcome.request for outcome in self.outcomes}) < len(self.outcomes):
            raise ValueError("two outcomes of one request are two events")


@frozen
class ForEngine:
    """An event that belongs to no single request."""

    event: Common


Happened: TypeAlias = ForRequest | ForLaunch | ForEngine | ForModel


def list_request_events(happened: Happened) -> tuple[tuple[RequestId, Event], ...]:
    """Return what happened to requests, in order. What happens to the engine or to a model happens to none."""
    match happened:
        case ForRequest(request, event):
            return ((request, event),)
        case ForLaunch(outcomes):
            return tuple((outcome.request, outcome.outcome) for outcome in outcomes)
        case _:
            return ()
