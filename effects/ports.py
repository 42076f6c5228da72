"""What the edges are given: a door to put jobs in at, and a stream of what becomes of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from attrs import frozen

from effects.all import Launch, Outcome
from effects.ids import RequestId, SlotId, Tier, Tokens
from effects.job import Job, Report
from effects.stream import EmitTokens, Finish, ReportProgress

CancelReason: TypeAlias = Literal["client_gone", "deadline", "stop_string", "shutdown"]
Stage: TypeAlias = Literal[
    "Waiting",
    "LookingUp",
    "Restoring",
    "Fetching",
    "Compressing",
    "Releasing",
    "Unparking",
    "Prefilling",
    "Speculating",
    "Snapshotting",
    "Parking",
    "Draining",
    "Recovering",
    "Yielding",
]
"""What a request does, as clients are told: in answers, /slots, /props and metrics. Names that others build upon."""
QUEUE_STAGES: tuple[Stage, ...] = ("Waiting",)
PROMPT_STAGES: tuple[Stage, ...] = (
    *("LookingUp", "Restoring", "Fetching", "Compressing", "Releasing", "Unparking", "Prefilling"),
    *("Recovering", "Yielding"),
)
ANSWER_STAGES: tuple[Stage, ...] = ("Speculating",)

# Executors are tables, symmetrical to the transition table: effect type -> what carries it out.
Perform: TypeAlias = Callable[[RequestId, Any], "Awaitable[Outcome] | Outcome"]


Told: TypeAlias = tuple[RequestId, Outcome]


@frozen(eq=False)
class LaunchFailed:
    """A launch raised this. requests: those in it to whom no last outcome had been told."""

    requests: tuple[RequestId, ...]
    error: BaseException


Settle: TypeAlias = Callable[["Sequence[Told] | LaunchFailed"], None]
# Taken at once; settled on the event loop: as often as there is something to tell, in the order in which it came. Every
# ask has one last outcome, and before that any number that say that more of them follow.
Submit: TypeAlias = Callable[[Launch, Settle], None]
Notify: TypeAlias = Callable[[RequestId, Any], None]


class RowsLost(Exception):
    """Raised by an executor: the rows of these slots are gone, not only what it was asked to do.

    slots: none, where those whose they were have been told already.
    """

    def __init__(self, slots: Iterable[SlotId], why: str) -> None:
        super().__init__(why)
        self.slots = tuple(slots)


DIVERGED = 64  # tokens of what was kept that are told: of a character each and more, all that anybody is shown


@frozen
class Divergence:
    """Where a prompt leaves the likest sequence that is kept under the same salt."""

    at: int  # tokens that both begin with
    tokens: Tokens  # what goes on there in the kept one
    tier: Tier  # where that is; `none`: only the prompt is remembered, among the recent ones


@frozen
class Closed:
    """The end of a stream: `CloseStream` with the times that the engine measured.

    stages_ms: milliseconds spent in each stage until the stream closed.  diverged: why the rest of the prompt was not
    there, where something else was.
    """

    finish: Finish
    report: Report
    detail: str
    stages_ms: Mapping[Stage, float]
    diverged: Divergence | None = None

    def spent_ms(self, stages: Collection[Stage]) -> float:
        return sum(spent for stage, spent in self.stages_ms.items() if stage in stages)


Message: TypeAlias = ReportProgress | EmitTokens | Closed


class Ticket(Protocol):
    """One submitted job. Its messages come in order; the last one is `Closed`, exactly once."""

    @property
    def request(self) -> RequestId: ...

    def take(self) -> Message | None:
        """The next message, if it is there."""
        ...

    def hear(self, told: Callable[[], object]) -> None:
        """From now on this is called, on the event loop, whenever a message has come."""
        ...

    def __aiter__(self) -> AsyncIterator[Message]:
        """All of them, for who waits for nothing else."""
        ...

    def cancel(self, reason: CancelReason) -> None:
        """Never blocks; may be called at any time, any number of times. The stream still ends with `Closed`."""
        ...


@frozen
class SlotStatus:
    """One device slot, as /slots shows it."""

    id: int
    is_processing: bool
    request: RequestId | None  # who holds it
    state: Stage | None  # what that request does
    kept_tokens: int  # of the sequence that an idle slot still holds


@frozen
class RequestStatus:
    """One request that the engine is at. Its stream may be closed: what follows behind it is told, too."""

    id: RequestId
    stage: Stage
    stages_ms: Mapping[Stage, float]  # in each so far, in the order of their beginnings
    prompt_tokens: int
    done: int  # of these: they are in place
    restored_tokens: int  # of these: they were not computed
    tier: Tier  # where most of the restored ones came from
    completion_tokens: int = 0
    decode_steps: int = 0


@frozen
class PastRequest:
    """One request whose stream has closed, with what its report says and nothing of what was said."""

    id: RequestId
    finish: Finish
    at: float  # when, Unix time
    stages_ms: Mapping[Stage, float]  # what follows behind the stream included, as far as it has gone
    prompt_tokens: int
    restored_tokens: int
    tier: str
    miss: str
    completion_tokens: int
    decode_steps: int
    proposed: int
    accepted: int
    speculation: str  # why nothing (more) was proposed
    kept: int  # rows of it that are kept beyond the device
    kept_reason: str


@frozen
class Totals:
    """Since the start, over all requests whose stream has closed; tokens of answers also of those that go on."""

    finished: Mapping[str, int]  # requests, by how they ended
    hits: Mapping[str, int]  # those with restored tokens, by tier
    misses: Mapping[str, int]  # those that missed some, by why
    restored: Mapping[str, int]  # tokens, by tier
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0


MOST_RUNNING = 64  # requests that are named, those with a slot first: 300 bytes each
MOST_RECENT = 32  # that have ended: 400 bytes each


@frozen
class Activity:
    """What goes on behind a door, and what went on: for people who watch."""

    running: tuple[RequestStatus, ...]  # MOST_RUNNING at most
    recent: tuple[PastRequest, ...]  # the last ones that have ended, the newest first; MOST_RECENT at most
    totals: Totals


@frozen
class Status:
    """What every door tells."""

    state: Literal["ready", "draining"]
    slots: tuple[SlotStatus, ...]
    slots_busy: int
    queue: int  # requests that wait for a slot
    queue_full: bool  # a job that comes now is turned away
    troubles: Mapping[str, str]  # what has broken: whose it is -> what it is
    outages: Mapping[str, str]  # those of them without which nothing is answered
    props: Mapping[str, Any]  # what /props shows besides, ready for JSON


Takes: TypeAlias = Literal["ready", "queue_full", "draining"]


class Door(Protocol):
    """Where jobs enter the engine. Calls are made from the event loop's thread."""

    def submit(self, job: Job) -> Ticket:
        """Never blocks. A full queue shows as a stream whose only message is Closed(finish="queue_full")."""
        ...

    def takes(self) -> Takes:
        """What becomes of a job that comes now; told at once, whatever `status` has to gather."""
        ...

    def status(self) -> Status:
        """A snapshot for /props, /slots and /health."""
        ...

    def activity(self) -> Activity:
        """A snapshot for /props and the page."""
        ...
