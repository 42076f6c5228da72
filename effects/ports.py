"""Interfaces at the edges of the engine: the door at which jobs are submitted, and the functions of executors.

The HTTP server uses `Door` and `Ticket`. The event loop uses `PerformEffect`, `SubmitLaunch` and `NotifyEffect`.
"""

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
    "LoadingScorer",
    "Compressing",
    "UnloadingScorer",
    "UnparkingDraft",
    "Prefilling",
    "Speculating",
    "Snapshotting",
    "Parking",
    "Draining",
    "Recovering",
    "Yielding",
]
"""What a request does, as clients see it in answers, /slots, /props and metrics. These names are a public format."""
QUEUE_STAGES: tuple[Stage, ...] = ("Waiting",)
PROMPT_STAGES: tuple[Stage, ...] = (
    *("LookingUp", "Restoring", "LoadingScorer", "Compressing", "UnloadingScorer", "UnparkingDraft", "Prefilling"),
    *("Recovering", "Yielding"),
)
ANSWER_STAGES: tuple[Stage, ...] = ("Speculating",)

# Executors are tables from the type of an effect to the function that carries it out.
PerformEffect: TypeAlias = Callable[[RequestId, Any], "Awaitable[Outcome] | Outcome"]


RequestOutcome: TypeAlias = tuple[RequestId, Outcome]


@frozen(eq=False)
class LaunchFailed:
    """A launch raised an exception."""

    requests: tuple[RequestId, ...]  # in the launch, whose last outcome had not been delivered
    error: BaseException


DeliverOutcomes: TypeAlias = Callable[["Sequence[RequestOutcome] | LaunchFailed"], None]
# Returns at once. Outcomes are delivered on the event loop, as often as there are any, in the order in which they came.
# Every effect has one last outcome, and before it any number of outcomes which say that more follow.
SubmitLaunch: TypeAlias = Callable[[Launch, DeliverOutcomes], None]
NotifyEffect: TypeAlias = Callable[[RequestId, Any], None]


class RowsLost(Exception):
    """Raised by an executor when the rows of these slots are lost, and not only the effect that it carried out.

    slots: empty if the requests that hold them know it already.
    """

    def __init__(self, slots: Iterable[SlotId], why: str) -> None:
        super().__init__(why)
        self.slots = tuple(slots)


# Tokens of a kept sequence that are reported. Each has a character or more, and no more characters are shown.
MAX_DIVERGED_TOKENS = 64


@frozen
class Divergence:
    """The point where a prompt differs from the most similar sequence that is kept under the same salt."""

    at: int  # tokens that both begin with
    tokens: Tokens  # that follow there in the kept sequence
    tier: Tier  # that has the kept sequence; `none`: only its tokens are remembered, among the recent prompts


@frozen
class Closed:
    """The end of a stream: `CloseStream` with the times that the engine measured."""

    finish: Finish
    report: Report
    detail: str
    stages_ms: Mapping[Stage, float]  # milliseconds in each stage until the stream closed
    diverged: Divergence | None = None  # where a kept sequence differed, if that is why rows were missing

    def spent_ms(self, stages: Collection[Stage]) -> float:
        """Return the milliseconds spent in these stages together."""
        return sum(spent for stage, spent in self.stages_ms.items() if stage in stages)


Message: TypeAlias = ReportProgress | EmitTokens | Closed


class Ticket(Protocol):
    """One submitted job. Its messages come in order; the last one is `Closed`, exactly once."""

    @property
    def request(self) -> RequestId: ...

    def next_message(self) -> Message | None:
        """Return the next message; None: there is none yet."""
        ...

    def set_listener(self, listener: Callable[[], object]) -> None:
        """Have the listener called on the event loop whenever a message has come."""
        ...

    def __aiter__(self) -> AsyncIterator[Message]:
        """Yield all messages, for a caller that waits for nothing else."""
        ...

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the job. Never blocks, and may be called at any time. The stream still ends with `Closed`."""
        ...


@frozen
class SlotStatus:
    """One slot of the device, as /slots shows it."""

    id: int
    is_processing: bool
    request: RequestId | None  # that holds it
    state: Stage | None  # what that request does
    kept_tokens: int  # of the sequence that an idle slot still holds


@frozen
class RequestStatus:
    """One request that the engine works on. Its stream may be closed already, while its rows are saved."""

    id: RequestId
    stage: Stage
    stages_ms: Mapping[Stage, float]  # milliseconds in each stage so far, in the order in which they began
    prompt_tokens: int
    done: int  # prompt tokens that are in place
    restored_tokens: int  # as in `Report`: prompt tokens that were not computed
    tier: Tier  # that most of these came from
    completion_tokens: int = 0
    decode_steps: int = 0
    follows: RequestId | None = None  # the request whose rows it waits for, to go on from them
    follows_rows: int = 0  # of these rows
    follows_wait_ms: float = 0  # until they are there, as estimated when the request began to wait
    follows_compute_ms: float = 0  # to compute them instead, as estimated then


@frozen
class PastRequest:
    """One request whose stream has closed: what its report says, and nothing of its text."""

    id: RequestId
    finish: Finish
    at: float  # Unix time at which the stream closed
    stages_ms: Mapping[Stage, float]  # milliseconds in each stage, those after the close of the stream included
    prompt_tokens: int
    restored_tokens: int
    tier: str
    miss: str
    completion_tokens: int
    decode_steps: int
    proposed: int
    accepted: int
    speculation: str  # why nothing, or nothing more, was proposed
    kept: int  # rows that are kept beyond the device
    kept_reason: str


@frozen
class Totals:
    """Totals since the start, of all requests whose stream has closed. Tokens of running answers count as well."""

    finished: Mapping[str, int]  # requests, by the way they ended
    hits: Mapping[str, int]  # requests with restored tokens, by tier
    misses: Mapping[str, int]  # requests that missed some tokens, by reason
    restored: Mapping[str, int]  # tokens, by tier
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0


MAX_RUNNING_SHOWN = 64  # requests, those with a slot first; each takes 300 bytes
MAX_RECENT_SHOWN = 32  # requests that have ended; each takes 400 bytes


@frozen
class Activity:
    """The requests of an engine, running and ended, for people who watch it."""

    running: tuple[RequestStatus, ...]  # MAX_RUNNING_SHOWN at most
    recent: tuple[PastRequest, ...]  # the last ones that have ended, the newest first; MAX_RECENT_SHOWN at most
    totals: Totals


class Props(Protocol):
    """Further entries of /props, which become JSON only where an answer is written."""

    def build_json(self) -> Mapping[str, Any]:
        """Return the entries by name."""
        ...


@frozen
class Status:
    """The status of an engine, as every door reports it."""

    state: Literal["ready", "draining"]
    slots: tuple[SlotStatus, ...]
    total_slots: int  # requests that are served at once; those that are being saved have further slots
    slots_busy: int
    queue: int  # requests that wait for a slot
    queue_full: bool  # a job that is submitted now is turned away
    troubles: Mapping[str, str]  # what has failed, by the part that has failed
    outages: Mapping[str, str]  # those of them without which no request is answered
    props: Props  # further entries of /props


JobAcceptance: TypeAlias = Literal["ready", "queue_full", "draining"]


class Door(Protocol):
    """The place where jobs enter the engine. It is called on the event loop's thread only."""

    def submit(self, job: Job) -> Ticket:
        """Submit a job. Never blocks. If the queue is full, the only message is `Closed(finish="queue_full")`."""
        ...

    def get_acceptance(self) -> JobAcceptance:
        """Return what would become of a job that is submitted now. This is quick, while `status` has to gather much."""
        ...

    def status(self) -> Status:
        """Return a snapshot for /props, /slots and /health."""
        ...

    def activity(self) -> Activity:
        """Return a snapshot for /props and the page."""
        ...
