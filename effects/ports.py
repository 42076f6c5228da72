"""What the edges are given: a door to put jobs in at, and a stream of what becomes of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from attrs import frozen

from effects.all import Launch, Outcome
from effects.ids import RequestId
from effects.job import Job, Report
from effects.stream import EmitTokens, Finish, ReportProgress

CancelReason: TypeAlias = Literal["client_gone", "deadline", "stop_string", "shutdown"]

# Executors are tables, symmetrical to the transition table: effect type -> what carries it out.
Perform: TypeAlias = Callable[[RequestId, Any], Awaitable[Outcome]]
Settle: TypeAlias = Callable[["tuple[Outcome, ...] | BaseException"], None]  # one outcome per ask, in order
Submit: TypeAlias = Callable[[Launch, Settle], None]  # taken at once; settled once, on the event loop
Notify: TypeAlias = Callable[[RequestId, Any], None]


@frozen
class Closed:
    """The end of a stream: `CloseStream` with the times that the engine measured.

    stages_ms: state name (`Waiting`, `Prefilling`, ...) -> milliseconds spent in it until the stream closed.
    """

    finish: Finish
    report: Report
    detail: str
    stages_ms: Mapping[str, float]


Message: TypeAlias = ReportProgress | EmitTokens | Closed


class Ticket(Protocol):
    """One submitted job. Iterating yields its messages in order; the last one is `Closed`, exactly once."""

    @property
    def request(self) -> RequestId: ...

    def __aiter__(self) -> AsyncIterator[Message]: ...

    def cancel(self, reason: CancelReason) -> None:
        """Never blocks; may be called at any time, any number of times. The stream still ends with `Closed`."""
        ...


class SlotStatus(TypedDict):
    """One device slot, as /slots shows it."""

    id: int
    is_processing: bool
    request: RequestId | None  # who holds it
    state: str | None  # what that request does
    kept_tokens: int  # of the sequence that an idle slot still holds


class Status(TypedDict):
    """What every door tells; there may be more, for /props."""

    state: Literal["loading", "ready", "draining", "failed"]
    slots: list[SlotStatus]
    slots_busy: int
    queue: int  # requests that wait for a slot
    queue_full: bool  # a job that comes now is turned away
    troubles: Mapping[str, str]  # what has broken while answers go on: whose it is -> what it is


class Door(Protocol):
    """Where jobs enter the engine. Calls are made from the event loop's thread."""

    def submit(self, job: Job) -> Ticket:
        """Never blocks. A full queue shows as a stream whose only message is Closed(finish="queue_full")."""
        ...

    def status(self) -> Status:
        """A JSON-ready snapshot for /props, /slots and /health."""
        ...
