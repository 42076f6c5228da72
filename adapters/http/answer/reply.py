"""Answer a planned request, whole or as a stream, until it ends or its client leaves.

An ASGI server does not tell a handler that its client has left: the handler must listen. So every answer, streamed or
not, has a watcher on `receive`, which cancels the jobs at once. The status line waits for the first message of every
job. So a full queue, a deadline or a failure has a status of its own. After the status line, an error is the last event
of the stream.
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

from adapters.http.answer.access_log import ARRIVED, LOG_IDS, NOTE, AnswerFigures
from adapters.http.answer.answer_shape import AnswerShape
from adapters.http.answer.job_stream import (
    AnswerDelta,
    AnswerEvent,
    FinishedChoice,
    PromptProgress,
    RunningJobs,
    run_jobs,
)
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.plan_jobs import PlannedJob
from adapters.http.wire.connection import ABORT
from adapters.http.wire.error_format import ErrorFormat
from adapters.http.wire.errors import ApiError, find_failure
from adapters.http.wire.retry_after import SlotTime
from adapters.http.wire.write_path import WRITE_NOW, WriteNow, refuse_to_write
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
    """An ASGI application that answers one request."""

    door: Door
    planned_jobs: Sequence[PlannedJob]
    shape: AnswerShape
    error_format: ErrorFormat
    options: EdgeOptions
    tokenizer: Tokenizer
    stream: bool
    shows_progress: bool
    slot_time: SlotTime
    on_choice_end: Callable[[str, FinishedChoice], None]  # called with the answer's id and every choice that ended well
    headers: Mapping[str, str] = field(factory=dict)  # headers of this answer besides its id
    has_started: bool = field(default=False, init=False)  # the status line was sent
    _jobs: RunningJobs | None = field(default=None, init=False)
    finish_reason: str = field(default="client_gone", init=False)  # the reason for the end, for the log
    figures: AnswerFigures = field(factory=AnswerFigures, init=False)
    _write_now: WriteNow = field(default=refuse_to_write, init=False)
    _start: float = field(factory=time.monotonic, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(scope, receive, send)
        finally:
            said = "".join(f" {name}={value.partition(';')[0]}" for name, value in self.headers.items())
            figures = self.figures.format_line(scope.get(ARRIVED, self._start))
            scope[NOTE] = f" {self.shape.id} {self.finish_reason} jobs={len(self.planned_jobs)}{figures}{said}"
            scope[LOG_IDS] = {"answer": self.shape.id, "requests": [] if self._jobs is None else self._jobs.request_ids}

    def cancel(self) -> None:
        """Cancel the jobs as if the client had left. A client that is still there gets the error."""
        if self._jobs is not None:
            self._jobs.cancel("client_gone")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            stalled = Alarm(self.options.times.write_timeout_s, lambda: self._give_up(scope, tasks.cancel_scope))
            quiet = Alarm(self.options.times.keepalive_s, lambda: tasks.start_soon(self._keep_alive, quiet, send_timed))

            async def send_timed(message: Message) -> None:
                quiet.stop()
                if stalled.start is None:  # a sign of life may wait for the client already
                    stalled.restart()
                await send(message)
                quiet.restart()
                stalled.stop()

            given: WriteNow = scope.get(WRITE_NOW, refuse_to_write)

            def write_timed(body: bytes) -> bool:
                """Write at once, if no sign of life is being sent."""
                if stalled.start is not None or not given(body):
                    return False
                quiet.restart()
                return True

            self._write_now = write_timed
            with run_jobs(self.door, self.planned_jobs, self.tokenizer, self.options) as run:
                self._jobs = run
                tasks.start_soon(self._watch, receive, run, tasks.cancel_scope)
                with stalled, quiet:
                    await self._answer(run, scope, receive, send_timed)
            tasks.cancel_scope.cancel()

    async def _watch(self, receive: Receive, run: RunningJobs, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        run.cancel("client_gone")
        scope.cancel()

    def _give_up(self, scope: Scope, running: anyio.CancelScope) -> None:
        self.finish_reason = "client_stalled"
        if ABORT in scope:
            scope[ABORT]()
        running.cancel()

    async def _keep_alive(self, quiet: Alarm, send: Send) -> None:
        if quiet.seconds_left <= 0:  # nothing was sent since the alarm, and nothing is being sent
            await self._send(send, self.shape.stream_heartbeat())

    async def _answer(self, run: RunningJobs, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventReader(run, self.figures)
        try:
            await events.wait_for_choices(len(self.planned_jobs))
            if self.stream:
                await self._stream(events, send)
            else:
                await self._whole(events, scope, receive, send)
        except ApiError as error:
            run.cancel("client_gone")
            self.finish_reason = error.code or error.type
            if self.has_started:
                await self._send(send, self.shape.stream_error(error), more=False)
            else:
                await self.error_format.make_response(error, self.shape.id)(scope, receive, send)

    async def _whole(self, events: EventReader, scope: Scope, receive: Receive, send: Send) -> None:
        texts: dict[int, list[AnswerDelta]] = {}
        ended: list[FinishedChoice] = []
        while came := await events.next_events():
            for event in came:
                match event:
                    case AnswerDelta():
                        texts.setdefault(event.index, []).append(event)
                    case FinishedChoice():
                        ended.append(self._check_choice(event))
                        self.on_choice_end(self.shape.id, event)
        said = {index: join_deltas(parts) for index, parts in texts.items()}
        ended.sort(key=lambda choice: choice.index)
        self.finish_reason = ended[0].outcome.finish
        body = self.shape.build_answer(said, ended)
        await JSONResponse(body, headers=self._headers())(scope, receive, send)

    async def _stream(self, events: EventReader, send: Send) -> None:
        if events.pending and isinstance(events.pending[0], FinishedChoice):
            self._check_choice(events.pending[0])  # a failure before anything was said still has its own status
        headers = {**STREAM_HEADERS, **self._headers()}
        start: Message = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await send(start)
        self.has_started = True
        await self._send(send, self.shape.stream_opening())
        reports = ProgressFilter()
        ended: list[FinishedChoice] = []
        while came := await events.next_events():
            frames = b"".join([frame for event in came for frame in self._frames(event, reports, ended)])
            if frames and not self._write_now(frames):
                await self._send(send, [frames])
        ended.sort(key=lambda choice: choice.index)
        self.finish_reason = ended[0].outcome.finish
        await self._send(send, self.shape.stream_closing(ended), more=False)

    def _headers(self) -> dict[str, str]:
        return {**self.error_format.make_headers(self.shape.id), **self.headers}

    def _frames(self, event: AnswerEvent, reports: ProgressFilter, ended: list[FinishedChoice]) -> Iterable[bytes]:
        elapsed_ms = 1000 * (time.monotonic() - self._start)
        due = reports.add(event) if isinstance(event, PromptProgress) else reports.finish_prompt(event)
        if self.shows_progress:
            for report in due:
                yield from self.shape.stream_progress(report, elapsed_ms)
        match event:
            case AnswerDelta():
                yield from self.shape.stream_delta(event)
            case FinishedChoice():
                ended.append(self._check_choice(event))
                self.on_choice_end(self.shape.id, event)
                yield from self.shape.stream_choice_end(event)

    def _check_choice(self, ended: FinishedChoice) -> FinishedChoice:
        """Return a choice that ended well. Raises ApiError for any other."""
        if find_failure(ended.outcome, 0) is None:
            self.slot_time.add(ended.outcome)
            return ended
        status = self.door.status()
        failure = find_failure(ended.outcome, self.slot_time.estimate_retry_after(status), status.outages)
        assert failure is not None
        if ended.outcome.finish in {"failed", "lost"}:
            log.error("%s failed: %s", self.shape.id, ended.outcome.detail, extra={"answer": self.shape.id})
        raise failure

    async def _send(self, send: Send, frames: Iterable[bytes], *, more: bool = True) -> None:
        body = b"".join(frames)
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})


@define(eq=False)
class Alarm:
    """Calls `on_timeout` when `seconds` have passed since `start`; None: it is stopped.

    Restarting it sets no timer, as that is done twice a token. One timer checks the time that is left.
    """

    seconds: float
    on_timeout: Callable[[], object]
    start: float | None = None
    _timer: TimerHandle | None = None

    def __enter__(self) -> None:
        self._check()

    def __exit__(self, *_: object) -> None:
        """Cancel the timer. `on_timeout` refers to this alarm and to the whole request, so the cycle is broken here."""
        if self._timer is not None:
            self._timer.cancel()
        del self.on_timeout

    def restart(self) -> None:
        """Let the time begin now."""
        self.start = time.monotonic()

    def stop(self) -> None:
        """Let no time pass until `restart`."""
        self.start = None

    @property
    def seconds_left(self) -> float:
        """The least seconds until `on_timeout` can be called."""
        return self.seconds if self.start is None else self.start + self.seconds - time.monotonic()

    def _check(self) -> None:
        if (left := self.seconds_left) <= 0:
            left = self.seconds
            self.on_timeout()
        self._timer = get_running_loop().call_later(left, self._check)


@define(eq=False)
class EventReader:
    """Reads the events of running jobs. It can wait for the first event of every choice before an answer begins."""

    jobs: RunningJobs
    figures: AnswerFigures
    pending: list[AnswerEvent] = field(factory=list)

    async def wait_for_choices(self, choices: int) -> None:
        """Wait until every choice has had an event, or one has failed. The events are kept for `next_events`."""
        heard: set[int] = set()
        while len(heard) < choices:
            for event in await self.jobs.next_events():
                self.pending.append(event)
                heard.add(event.index)
                if isinstance(event, FinishedChoice) and find_failure(event.outcome, 0) is not None:
                    self.pending = [event]
                    return

    async def next_events(self) -> Sequence[AnswerEvent]:
        """Wait for events and return them. Return nothing after the last one."""
        came = self.pending or await self.jobs.next_events()
        self.pending = []
        for event in came:
            self.figures.record(event)
        return came


@define(eq=False)
class ProgressFilter:
    """Decides which reports of progress a client gets: those of one choice, with the same `total` and `cached`. They
    start at what was cached, and grow.

    A job reports that it was accepted before it is known what the cache holds. So the first report waits for the next
    one.
    """

    first: PromptProgress | None = None
    last_done: int | None = None  # `done` of the last report that was passed on

    def add(self, report: PromptProgress) -> list[PromptProgress]:
        """Take a report of a job, and return the reports to send now."""
        if self.first is not None and report.index != self.first.index:
            return []
        if self.first is None or (self.last_done is None and report.cached != self.first.cached):
            self.first = evolve(report, done=report.cached)
        if report.cached != self.first.cached or report.done <= (self.last_done or self.first.done):
            return []
        due = self.take_first()
        self.last_done = report.done
        return [*due, report]

    def take_first(self) -> list[PromptProgress]:
        """Return the first report, if it still waits."""
        if self.first is None or self.last_done is not None:
            return []
        self.last_done = self.first.done
        return [self.first]

    def finish_prompt(self, event: AnswerDelta | FinishedChoice) -> list[PromptProgress]:
        """Return the reports to send before the first text of a choice. Its prompt is complete then, with its last
        token.
        """
        due = self.take_first()
        if self.first is None or event.index != self.first.index or self.last_done == self.first.total:
            return due
        self.last_done = self.first.total
        return [*due, evolve(self.first, done=self.last_done)]


def join_deltas(parts: Sequence[AnswerDelta]) -> AnswerDelta:
    """Return the deltas of one choice as one."""
    return AnswerDelta(
        parts[0].index,
        tuple(piece for part in parts for piece in part.pieces),
        tuple(pick for part in parts for pick in part.picks),
    )
