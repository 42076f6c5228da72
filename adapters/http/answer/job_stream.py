"""Run a request's jobs: submit them, turn their messages into text, and make sure that every job ends."""

from __future__ import annotations

import time
from asyncio import Future, TimerHandle, get_running_loop
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import anyio
from attrs import define, evolve, field, frozen

from adapters.http.edge_options import EdgeOptions
from adapters.http.request.plan_jobs import PlannedJob
from adapters.text.answer.answer_parser import AnswerParser
from adapters.text.answer.answer_pieces import AnswerPiece, CallBegun, TextPiece, join_text
from adapters.text.detokenize import TextStream
from adapters.text.explain_miss import MissExplanation, explain_miss
from adapters.text.stop_strings import StopStrings
from adapters.text.tokenizer import Tokenizer
from effects.decode import Logprob
from effects.ids import RequestId, Tokens
from effects.job import Report
from effects.ports import CancelReason, Closed, Door, Ticket
from effects.stream import EmitTokens, ReportProgress

ENGINE_GRACE_S = 5.0  # seconds after a deadline in which the engine may end the job itself


@frozen
class PromptProgress:
    """The progress of a prompt: `done` of `total` tokens are in place, and `cached` of these were not computed."""

    index: int
    done: int
    total: int
    cached: int


@frozen
class AnswerPace:
    """Tokens, and the milliseconds that they took, of a prompt and of its answer so far.

    reused: tokens of the prompt that were not computed: the slot had their rows, or they were loaded.
    """

    reused: int
    computed: int
    prompt_ms: float
    generated: int
    answer_ms: float


@frozen
class AnswerDelta:
    """The next pieces of an answer.

    picks: the tokens since the last delta, only if logprobs were asked for. tokens: all tokens since the last delta.
    measure_pace: returns the pace of the answer up to now. Few clients ask for it.
    """

    index: int
    pieces: tuple[AnswerPiece, ...]
    picks: tuple[PickedToken, ...] = ()
    tokens: Tokens = ()
    measure_pace: Callable[[], AnswerPace] | None = None

    @property
    def text(self) -> str:
        return join_text(self.pieces)


@frozen
class PickedToken:
    """A token that was picked, with its logprob and alternatives.

    is_text: it belongs to the answer's text, not to reasoning, a call, or the tags of these.
    """

    token: int
    logprob: Logprob
    is_text: bool = False


@frozen
class FinishedChoice:
    """A choice that is complete.

    tokens: how many count, up to the one that completed a stop string. stop_string: the one that ended it.
    called_functions: their names, in order. answer_tokens: those that `tokens` counts. miss_explanation: why no more of
    the prompt was in the cache.
    """

    planned_job: PlannedJob
    outcome: Closed
    tokens: int
    stop_string: str | None = None
    reasoning_tokens: int = 0
    called_functions: tuple[str, ...] = ()
    answer_tokens: Tokens = ()
    miss_explanation: MissExplanation | None = None

    @property
    def index(self) -> int:
        return self.planned_job.index


AnswerEvent: TypeAlias = PromptProgress | AnswerDelta | FinishedChoice


@define(eq=False)
class RunningJobs:
    """The jobs of one request while they run. Each job yields events, and its `FinishedChoice` is the last one.

    Messages are read only when the next events are asked for. What arrives meanwhile waits as tokens, and becomes one
    event.
    """

    tokenizer: Tokenizer
    request_ids: list[RequestId] = field(factory=list)  # the engine's ids
    _streams: list[JobStream] = field(factory=list)  # streams of the jobs that have not ended
    _wakeup: Future[None] = field(factory=lambda: get_running_loop().create_future())
    _deadline_timer: TimerHandle | None = None

    def add(self, job: PlannedJob, ticket: Ticket) -> None:
        """Follow the ticket of a job that was submitted."""
        self.request_ids.append(ticket.request)
        self._streams.append(make_job_stream(job, ticket, self.tokenizer))
        ticket.set_listener(self._wake)
        self._wake()

    def _wake(self) -> None:
        if not self._wakeup.done():
            self._wakeup.set_result(None)

    def cancel(self, reason: CancelReason) -> None:
        for stream in list(self._streams):
            stream.ticket.cancel(reason)

    async def next_events(self) -> Sequence[AnswerEvent]:
        """Wait for events and return them. The end of a choice comes alone. Return nothing when all choices have
        ended.
        """
        while self._streams:
            for stream in self._streams:
                if stream.outcome is not None:
                    self._streams.remove(stream)
                    return (await self._finish(stream, stream.outcome),)
            await self._wakeup
            self._wakeup = get_running_loop().create_future()
            if events := [event for stream in self._streams for event in stream.collect()]:
                return events
        return ()

    async def _finish(self, stream: JobStream, closed: Closed) -> FinishedChoice:
        ended = stream.finish(closed)
        planned_job = stream.planned_job
        if closed.diverged is None:
            return ended
        explained = partial(explain_miss, closed.diverged, planned_job.job, planned_job.messages, self.tokenizer)
        return evolve(ended, miss_explanation=await anyio.to_thread.run_sync(explained))

    def start_deadline(self, seconds: float) -> None:
        """Cancel the jobs after some seconds, and end them soon after even if the engine does not answer."""
        self._deadline_timer = get_running_loop().call_later(seconds, self._cancel_expired)

    def _cancel_expired(self) -> None:
        self.cancel("deadline")
        self._deadline_timer = get_running_loop().call_later(ENGINE_GRACE_S, self._end_overdue)

    def _end_overdue(self) -> None:
        for stream in self._streams:
            report = Report(len(stream.planned_job.job.prompt))
            stream.end_overdue(Closed("deadline", report, "the engine did not answer", {}))
        self._wake()

    def close(self) -> None:
        """Cancel the jobs that have not ended, as nothing reads their events any more."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self.cancel("client_gone")


@contextmanager
def run_jobs(
    door: Door, planned: Sequence[PlannedJob], tokenizer: Tokenizer, options: EdgeOptions
) -> Iterator[RunningJobs]:
    """Submit all jobs at once. Jobs that have not ended when the block ends are cancelled as `client_gone`."""
    run = RunningJobs(tokenizer)
    try:
        for planned_job in planned:
            run.add(planned_job, door.submit(planned_job.job))
        if options.times.request_timeout_s is not None:
            run.start_deadline(options.times.request_timeout_s)
        yield run
    finally:
        run.close()


def make_job_stream(job: PlannedJob, ticket: Ticket, tokenizer: Tokenizer) -> JobStream:
    """Return the stream of one job, with its own detokenizer, parser and stop strings."""
    controls = tokenizer.controls
    shown = frozenset(controls[name].id for name in job.reader.visible_controls if name in controls)
    text = TextStream(tokenizer, frozenset(job.job.stop_tokens), shown)
    return JobStream(job, ticket, text, job.reader.start_parser(), StopStrings(job.stop_strings))


@define(eq=False)
class JobStream:
    """Turns the tokens of one job into the pieces of an answer.

    outcome: how the job ended; None while more can come. overdue_outcome: the outcome of a job that the engine did not
    end in time. It takes effect after everything that the engine has sent.
    """

    planned_job: PlannedJob
    ticket: Ticket
    text: TextStream
    parser: AnswerParser
    stop_strings: StopStrings
    token_count: int = 0
    reasoning_count: int = 0
    outcome: Closed | None = None
    overdue_outcome: Closed | None = None
    picks: list[PickedToken] = field(factory=list)
    unclassified_picks: list[PickedToken] = field(factory=list)  # no piece has come of them yet: they may begin a call
    pieces: list[AnswerPiece] = field(factory=list)
    answer_tokens: list[int] = field(factory=list)  # the tokens of the whole answer
    sent_count: int = 0  # the tokens of the answer that deltas have had
    reused_count: int = 0  # the tokens of the prompt that were not computed, as far as is known
    start_s: float = field(factory=time.monotonic)
    first_token_s: float | None = None

    def end_overdue(self, outcome: Closed) -> None:
        """End the stream with this outcome, after everything that the engine has sent."""
        self.overdue_outcome = outcome

    def collect(self) -> Iterator[PromptProgress | AnswerDelta]:
        """Yield what has arrived: the progress of the prompt, and then all pieces as one delta."""
        pieces: list[AnswerPiece] = []
        while self.outcome is None and (message := self.ticket.next_message()) is not None:
            match message:
                case EmitTokens():
                    self.first_token_s = self.first_token_s or time.monotonic()
                    pieces += self.read_tokens(message)
                case ReportProgress(done, total, cached):
                    self.reused_count = cached
                    yield PromptProgress(self.planned_job.index, done, total, cached)
                case Closed():
                    self.outcome = message
                    pieces += self.flush()
        self.outcome = self.outcome or self.overdue_outcome
        if pieces or (self.outcome is not None and self.picks):
            tokens = tuple(self.answer_tokens[self.sent_count :])
            self.sent_count += len(tokens)
            yield AnswerDelta(self.planned_job.index, tuple(pieces), self.take_picks(), tokens, self.measure_pace)

    def measure_pace(self) -> AnswerPace:
        now = time.monotonic()
        first = self.first_token_s or now
        computed = len(self.planned_job.job.prompt) - self.reused_count
        times_ms = 1000 * (first - self.start_s), 1000 * (now - first)
        return AnswerPace(self.reused_count, computed, times_ms[0], self.token_count, times_ms[1])

    def read_tokens(self, message: EmitTokens) -> list[AnswerPiece]:
        """Return the pieces that these tokens make, up to a stop string or the only call that is allowed. Either
        cancels the rest of the job.
        """
        pieces: list[AnswerPiece] = []
        for index, token in enumerate(message.tokens):
            if self.is_complete:
                break
            if self.planned_job.is_silent:
                continue
            self.token_count += 1
            self.answer_tokens.append(token)
            thought = self.parser.is_reasoning
            new = self.stop_strings.push(self.parser.push(self.text.push(token)))
            pieces += new
            self.reasoning_count += thought or self.parser.is_reasoning
            if message.logprobs and (token not in self.text.hidden_tokens or self.planned_job.job.prompt_logprobs >= 0):
                self.unclassified_picks.append(PickedToken(token, message.logprobs[index]))
                self.classify_picks(new, thought or self.parser.is_reasoning)
            if self.is_complete:
                self.ticket.cancel("stop_string")
        self.pieces += pieces
        return pieces

    def flush(self) -> list[AnswerPiece]:
        """Return the pieces that the detokenizer, the parser and the stop strings still held back."""
        tail = self.stop_strings.push([*self.parser.push(self.text.finish()), *self.parser.finish()])
        tail += self.stop_strings.finish()
        self.pieces += tail
        self.classify_picks(tail, False)
        self.picks += self.unclassified_picks
        self.unclassified_picks = []
        return tail

    def classify_picks(self, pieces: Sequence[AnswerPiece], thinking: bool) -> None:
        """Tell the tokens of text from others, once pieces have come of them."""
        if not self.unclassified_picks or not (pieces or thinking):
            return
        text = 0 if thinking else sum(len(piece.text.encode()) for piece in pieces if isinstance(piece, TextPiece))
        at = len(self.unclassified_picks)
        while at and text > 0:  # those in front of the text closed a call, or opened nothing
            at -= 1
            text -= len(self.text.tokenizer.token_bytes(self.unclassified_picks[at].token))
        self.picks += [
            *self.unclassified_picks[:at],
            *(evolve(pick, is_text=True) for pick in self.unclassified_picks[at:]),
        ]
        self.unclassified_picks = []

    @property
    def is_complete(self) -> bool:
        return self.stop_strings.found_stop is not None or self.parser.is_closed

    def take_picks(self) -> tuple[PickedToken, ...]:
        picks = tuple(self.picks)
        self.picks = []
        return picks

    def finish(self, closed: Closed) -> FinishedChoice:
        """Return the finished choice, and store its tokens for the next request of its conversation."""
        if self.is_complete:
            closed = evolve(closed, finish="stop")
        if self.planned_job.is_silent and closed.finish == "stop":
            closed = evolve(closed, finish="length")
        if (
            self.planned_job.pending_turn is not None
            and self.stop_strings.found_stop is None
            and closed.finish in ("stop", "length")
        ):
            self.planned_job.pending_turn.store(self.planned_job.job, tuple(self.answer_tokens), self.pieces)
        called = tuple(piece.name for piece in self.pieces if isinstance(piece, CallBegun))
        said = self.token_count, self.stop_strings.found_stop, self.reasoning_count, called, tuple(self.answer_tokens)
        return FinishedChoice(self.planned_job, closed, *said)
