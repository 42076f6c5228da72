"""Answers a planned request, whole or as a stream, until it ends or its client leaves.

No ASGI server tells a handler that its client has left: it must listen. So every answer, streamed or not, has a
watcher on `receive`, and what it hears cancels the jobs at once. The status line waits for the first message of every
job, so that a full queue, a deadline or a failure has its own status; after that an error is the stream's last event.
"""

from __future__ import annotations

import logging
import time
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable, Iterable, Mapping, Sequence

import anyio
from attrs import define, evolve, field
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from adapters.http.answer.access_log import ABOUT, ARRIVED, NOTE, AnswerFigures
from adapters.http.answer.answer_shape import AnswerShape
from adapters.http.answer.job_stream import Ended, Event, Jobs, Progress, Said, running
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.controls import Planned
from adapters.http.wire.connection import ABORT
from adapters.http.wire.error_format import Dialect
from adapters.http.wire.errors import ApiError, failure_of
from adapters.http.wire.retry_after import Turnover
from adapters.text.tokenizer import Tokenizer
from effects.ports import Door

log = logging.getLogger("rekindle.http")
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@define(eq=False)
class Reply:
    """An ASGI application for one request."""

    door: Door
    planned: Sequence[Planned]
    shape: AnswerShape
    dialect: Dialect
    options: EdgeOptions
    tokenizer: Tokenizer
    stream: bool
    progress: bool
    turnover: Turnover
    missed: Callable[[str, Ended], None]  # hears of every choice that ended well, with the answer's id
    headers: Mapping[str, str] = field(factory=dict)  # of this answer, besides its id
    began: bool = field(default=False, init=False)  # the status line is out
    _jobs: Jobs | None = field(default=None, init=False)
    finish: str = field(default="client_gone", init=False)  # for the log
    log: AnswerFigures = field(factory=AnswerFigures, init=False)
    _start: float = field(factory=time.monotonic, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(scope, receive, send)
        finally:
            said = "".join(f" {name}={value.partition(';')[0]}" for name, value in self.headers.items())
            figures = self.log.line(scope.get(ARRIVED, self._start))
            scope[NOTE] = f" {self.shape.id} {self.finish} jobs={len(self.planned)}{figures}{said}"
            scope[ABOUT] = {"answer": self.shape.id, "requests": [] if self._jobs is None else self._jobs.requests}

    def cancel(self) -> None:
        """As if its client had left, but who is still there is told."""
        if self._jobs is not None:
            self._jobs.cancel("client_gone")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            stalled = Alarm(self.options.write_timeout_s, lambda: self._give_up(scope, tasks.cancel_scope))
            quiet = Alarm(self.options.keepalive_s, lambda: tasks.start_soon(self._keep_alive, quiet, timed))

            async def timed(message: Message) -> None:
                quiet.since = None
                if stalled.since is None:  # a sign of life may wait for the client already
                    stalled.since = time.monotonic()
                await send(message)
                quiet.since, stalled.since = time.monotonic(), None

            with running(self.door, self.planned, self.tokenizer, self.options) as run:
                self._jobs = run
                tasks.start_soon(self._watch, receive, run, tasks.cancel_scope)
                with stalled, quiet:
                    await self._answer(run, scope, receive, timed)
            tasks.cancel_scope.cancel()

    async def _watch(self, receive: Receive, run: Jobs, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        run.cancel("client_gone")
        scope.cancel()

    def _give_up(self, scope: Scope, running: anyio.CancelScope) -> None:
        self.finish = "client_stalled"
        if ABORT in scope:
            scope[ABORT]()
        running.cancel()

    async def _keep_alive(self, quiet: Alarm, send: Send) -> None:
        if quiet.left <= 0:  # nothing was sent, or has begun to be, between the ring and this task's turn
            await self._send(send, self.shape.heartbeat())

    async def _answer(self, run: Jobs, scope: Scope, receive: Receive, send: Send) -> None:
        events = Events(run, self.log)
        try:
            await events.begin(len(self.planned))
            if self.stream:
                await self._stream(events, send)
            else:
                await self._whole(events, scope, receive, send)
        except ApiError as error:
            run.cancel("client_gone")
            self.finish = error.code or error.type
            if self.began:
                await self._send(send, self.shape.failed(error), more=False)
            else:
                await self.dialect.response(error, self.shape.id)(scope, receive, send)

    async def _whole(self, events: Events, scope: Scope, receive: Receive, send: Send) -> None:
        texts: dict[int, list[Said]] = {}
        ended: list[Ended] = []
        while came := await events.next():
            for event in came:
                match event:
                    case Said():
                        texts.setdefault(event.index, []).append(event)
                    case Ended():
                        ended.append(self._checked(event))
                        self.missed(self.shape.id, event)
        said = {index: joined(parts) for index, parts in texts.items()}
        ended.sort(key=lambda one: one.index)
        self.finish = ended[0].closed.finish
        body = self.shape.whole(said, ended)
        await JSONResponse(body, headers=self._headers())(scope, receive, send)

    async def _stream(self, events: Events, send: Send) -> None:
        if events.waiting and isinstance(events.waiting[0], Ended):
            self._checked(events.waiting[0])  # a failure before anything was said still has its own status
        headers = {**STREAM_HEADERS, **self._headers()}
        start: Message = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await send(start)
        self.began = True
        await self._send(send, self.shape.opening())
        reports = Reports()
        ended: list[Ended] = []
        while came := await events.next():
            await self._send(send, [frame for event in came for frame in self._frames(event, reports, ended)])
        ended.sort(key=lambda one: one.index)
        self.finish = ended[0].closed.finish
        await self._send(send, self.shape.closing(ended), more=False)

    def _headers(self) -> dict[str, str]:
        return {**self.dialect.headers(self.shape.id), **self.headers}

    def _frames(self, event: Event, reports: Reports, ended: list[Ended]) -> Iterable[bytes]:
        elapsed_ms = 1000 * (time.monotonic() - self._start)
        due = reports.heard(event) if isinstance(event, Progress) else reports.complete(event)
        if self.progress:
            for report in due:
                yield from self.shape.progress(report, elapsed_ms)
        match event:
            case Said():
                yield from self.shape.said(event)
            case Ended():
                ended.append(self._checked(event))
                self.missed(self.shape.id, event)
                yield from self.shape.ended(event)

    def _checked(self, ended: Ended) -> Ended:
        """Raises ApiError unless the choice ended well."""
        if failure_of(ended.closed, 0) is None:
            self.turnover.served(ended.closed)
            return ended
        status = self.door.status()
        failure = failure_of(ended.closed, self.turnover.retry_after(status), status.outages)
        assert failure is not None
        if ended.closed.finish in {"failed", "lost"}:
            log.error("%s failed: %s", self.shape.id, ended.closed.detail, extra={"answer": self.shape.id})
        raise failure

    async def _send(self, send: Send, frames: Iterable[bytes], *, more: bool = True) -> None:
        body = b"".join(frames)
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})


@define(eq=False)
class Alarm:
    """Rings when `seconds` have passed since `since`; None: not at all. To set it is an assignment and no timer, since
    that is done twice a token.
    """

    seconds: float
    ring: Callable[[], object]
    since: float | None = None
    _timer: TimerHandle | None = None

    def __enter__(self) -> None:
        self._look()

    def __exit__(self, *_: object) -> None:
        """What it would have rung refers to it, and to all of a request: the collector need not find that out."""
        if self._timer is not None:
            self._timer.cancel()
        del self.ring

    @property
    def left(self) -> float:
        """Seconds until it could ring first."""
        return self.seconds if self.since is None else self.since + self.seconds - time.monotonic()

    def _look(self) -> None:
        if (left := self.left) <= 0:
            left = self.seconds
            self.ring()
        self._timer = get_running_loop().call_later(left, self._look)


@define(eq=False)
class Events:
    """A run's events, of which the first of every choice is waited for before an answer begins."""

    jobs: Jobs
    log: AnswerFigures
    waiting: list[Event] = field(factory=list)

    async def begin(self, choices: int) -> None:
        """Until every choice was heard, or one has failed."""
        heard: set[int] = set()
        while len(heard) < choices:
            for event in await self.jobs.next():
                self.waiting.append(event)
                heard.add(event.index)
                if isinstance(event, Ended) and failure_of(event.closed, 0) is not None:
                    self.waiting = [event]
                    return

    async def next(self) -> Sequence[Event]:
        """Those that have come, once there are any; nothing after the last."""
        came, self.waiting = self.waiting or await self.jobs.next(), []
        for event in came:
            self.log.heard(event)
        return came


@define(eq=False)
class Reports:
    """Which progress to tell: of one choice, with one `total` and `cached`, starting at what was cached, growing.

    A job reports that it was accepted before it is known what the cache holds. So the first report waits for the next.
    """

    first: Progress | None = None
    told: int | None = None  # `done` of the last report that was passed on

    def heard(self, report: Progress) -> list[Progress]:
        """What to tell now."""
        if self.first is not None and report.index != self.first.index:
            return []
        if self.first is None or (self.told is None and report.cached != self.first.cached):
            self.first = evolve(report, done=report.cached)
        if report.cached != self.first.cached or report.done <= (self.told or self.first.done):
            return []
        due = self.rest()
        self.told = report.done
        return [*due, report]

    def rest(self) -> list[Progress]:
        """The first report, if it still waits."""
        if self.first is None or self.told is not None:
            return []
        self.told = self.first.done
        return [self.first]

    def complete(self, event: Said | Ended) -> list[Progress]:
        """The choice speaks, so its whole prompt is read: its last token, too, from which the first one came."""
        due = self.rest()
        if self.first is None or event.index != self.first.index or self.told == self.first.total:
            return due
        self.told = self.first.total
        return [*due, evolve(self.first, done=self.told)]


def joined(parts: Sequence[Said]) -> Said:
    return Said(
        parts[0].index,
        tuple(piece for part in parts for piece in part.pieces),
        tuple(pick for part in parts for pick in part.picks),
    )
