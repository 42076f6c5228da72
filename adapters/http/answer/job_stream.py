"""Runs a request's jobs: submits them, turns their messages into text, and sees that every one is ended."""

from __future__ import annotations

from asyncio import Future, TimerHandle, get_running_loop
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import anyio
from attrs import define, evolve, field, frozen

from adapters.http.edge_options import EdgeOptions
from adapters.http.request.controls import Planned
from adapters.text.answer.answer_parser import AnswerParser
from adapters.text.answer.answer_pieces import AnswerPiece, CallBegun, TextPiece, join_text
from adapters.text.detokenize import TextStream
from adapters.text.explain_miss import MissExplanation, explain_miss
from adapters.text.stop_strings import StopStrings
from adapters.text.tokenizer import Tokenizer
from effects.decode import Logprob
from effects.ids import RequestId
from effects.job import Report
from effects.ports import CancelReason, Closed, Door, Ticket
from effects.stream import EmitTokens, ReportProgress

ENGINE_GRACE_S = 5.0  # after a deadline, for the engine to say so itself


@frozen
class Progress:
    """A prompt on its way: `done` of `total` tokens are in place, `cached` of them restored."""

    index: int
    done: int
    total: int
    cached: int


@frozen
class Said:
    """More of an answer, and the tokens read since the last of it (only when logprobs were asked for)."""

    index: int
    pieces: tuple[AnswerPiece, ...]
    picks: tuple[PickedToken, ...] = ()

    @property
    def text(self) -> str:
        return join_text(self.pieces)


@frozen
class PickedToken:
    """A token that was picked, with its logprob and alternatives. said: it is of the answer's text, not of reasoning,
    a call or what marks these.
    """

    token: int
    logprob: Logprob
    said: bool = False


@frozen
class Ended:
    """A choice is complete. `tokens`: those that count, up to the one that completed a stop string.

    stop: the stop string that ended it.  reasoning: how many tokens were.  called: the functions, in their order.
    explained: why no more of the prompt was there.
    """

    planned: Planned
    closed: Closed
    tokens: int
    stop: str | None = None
    reasoning: int = 0
    called: tuple[str, ...] = ()
    explained: MissExplanation | None = None

    @property
    def index(self) -> int:
        return self.planned.index


Event: TypeAlias = Progress | Said | Ended


@define(eq=False)
class Jobs:
    """The jobs of one request while they run. Each of them brings events that end with its `Ended`.

    Nothing is read before it is wanted: what comes meanwhile waits as tokens, and is one event then.
    """

    tokenizer: Tokenizer
    requests: list[RequestId] = field(factory=list)  # as the engine calls them
    _followers: list[JobStream] = field(factory=list)  # of those that have not ended
    _news: Future[None] = field(factory=lambda: get_running_loop().create_future())
    _due: TimerHandle | None = None

    def follow(self, one: Planned, ticket: Ticket) -> None:
        self.requests.append(ticket.request)
        self._followers.append(follower(one, ticket, self.tokenizer))
        ticket.set_listener(self._tell)
        self._tell()

    def _tell(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    def cancel(self, reason: CancelReason) -> None:
        for one in list(self._followers):
            one.ticket.cancel(reason)

    async def next(self) -> Sequence[Event]:
        """What has come, once something has; an end comes alone. Nothing, where all have ended."""
        while self._followers:
            for one in self._followers:
                if one.closed is not None:
                    self._followers.remove(one)
                    return (await self._end(one, one.closed),)
            await self._news
            self._news = get_running_loop().create_future()
            if events := [event for one in self._followers for event in one.heard()]:
                return events
        return ()

    async def _end(self, follower: JobStream, closed: Closed) -> Ended:
        ended, one = follower.ended(closed), follower.one
        if closed.diverged is None:
            return ended
        told = closed.diverged, one.job, one.messages, self.tokenizer
        return evolve(ended, explained=await anyio.to_thread.run_sync(explain_miss, *told))

    def expire(self, seconds: float) -> None:
        """End after so long, even if the engine never says so."""
        self._due = get_running_loop().call_later(seconds, self._expired)

    def _expired(self) -> None:
        self.cancel("deadline")
        self._due = get_running_loop().call_later(ENGINE_GRACE_S, self._overdue)

    def _overdue(self) -> None:
        for one in self._followers:
            report = Report(len(one.one.job.prompt))
            one.overdue = Closed("deadline", report, "the engine did not answer", {})
        self._tell()

    def leave(self) -> None:
        """Nobody waits any more: what has not ended is cancelled."""
        if self._due is not None:
            self._due.cancel()
        self.cancel("client_gone")


@contextmanager
def running(door: Door, planned: Sequence[Planned], tokenizer: Tokenizer, options: EdgeOptions) -> Iterator[Jobs]:
    """Submit all jobs at once. Whatever has not ended when the block is left is cancelled as `client_gone`."""
    run = Jobs(tokenizer)
    try:
        for one in planned:
            run.follow(one, door.submit(one.job))
        if options.request_timeout_s is not None:
            run.expire(options.request_timeout_s)
        yield run
    finally:
        run.leave()


def follower(one: Planned, ticket: Ticket, tokenizer: Tokenizer) -> JobStream:
    controls = tokenizer.controls
    shown = frozenset(controls[name].id for name in one.reader.visible_controls if name in controls)
    text = TextStream(tokenizer, frozenset(one.job.stop_tokens), shown)
    return JobStream(one, ticket, text, one.reader.start_parser(), StopStrings(one.stops))


@define(eq=False)
class JobStream:
    """The way of one ticket's tokens to text, and of the text to what it says. closed: there is no more of it.
    overdue: the end of what the engine has not ended in time, behind all that it has said.
    """

    one: Planned
    ticket: Ticket
    text: TextStream
    parser: AnswerParser
    stops: StopStrings
    tokens: int = 0
    reasoning: int = 0
    closed: Closed | None = None
    overdue: Closed | None = None
    picks: list[PickedToken] = field(factory=list)
    undecided: list[PickedToken] = field(factory=list)  # nothing has come of them yet: they may begin a call
    said: list[AnswerPiece] = field(factory=list)
    made: list[int] = field(factory=list)  # the tokens that it was made of

    def heard(self) -> Iterator[Progress | Said]:
        """What there is: the prompt's progress, and then all that is said, as one."""
        pieces: list[AnswerPiece] = []
        while self.closed is None and (message := self.ticket.next_message()) is not None:
            match message:
                case EmitTokens():
                    pieces += self.read(message)
                case ReportProgress(done, total, cached):
                    yield Progress(self.one.index, done, total, cached)
                case Closed():
                    self.closed = message
                    pieces += self.rest()
        self.closed = self.closed or self.overdue
        if pieces or (self.closed is not None and self.picks):
            yield Said(self.one.index, tuple(pieces), self.taken())

    def read(self, message: EmitTokens) -> list[AnswerPiece]:
        """What these tokens say, up to a stop string or the only call that may be; it cancels the rest of the job."""
        pieces: list[AnswerPiece] = []
        for place, token in enumerate(message.tokens):
            if self.complete:
                break
            if self.one.silent:
                continue
            self.tokens += 1
            self.made.append(token)
            thought = self.parser.is_reasoning
            new = self.stops.push(self.parser.push(self.text.push(token)))
            pieces += new
            self.reasoning += thought or self.parser.is_reasoning
            if message.logprobs and (token not in self.text.hidden_tokens or self.one.job.prompt_logprobs >= 0):
                self.undecided.append(PickedToken(token, message.logprobs[place]))
                self.decide(new, thought or self.parser.is_reasoning)
            if self.complete:
                self.ticket.cancel("stop_string")
        self.said += pieces
        return pieces

    def rest(self) -> list[AnswerPiece]:
        """What was held back."""
        tail = self.stops.push([*self.parser.push(self.text.finish()), *self.parser.finish()])
        tail += self.stops.finish()
        self.said += tail
        self.decide(tail, False)
        self.picks += self.undecided
        self.undecided = []
        return tail

    def decide(self, pieces: Sequence[AnswerPiece], thinking: bool) -> None:
        """Tell the tokens of the text from others, once something has come of them."""
        if not self.undecided or not (pieces or thinking):
            return
        text = 0 if thinking else sum(len(piece.text.encode()) for piece in pieces if isinstance(piece, TextPiece))
        at = len(self.undecided)
        while at and text > 0:  # those in front of the text closed a call, or opened nothing
            at -= 1
            text -= len(self.text.tokenizer.token_bytes(self.undecided[at].token))
        self.picks += [*self.undecided[:at], *(evolve(pick, said=True) for pick in self.undecided[at:])]
        self.undecided = []

    @property
    def complete(self) -> bool:
        return self.stops.found_stop is not None or self.parser.is_closed

    def taken(self) -> tuple[PickedToken, ...]:
        picks, self.picks = tuple(self.picks), []
        return picks

    def ended(self, closed: Closed) -> Ended:
        if self.complete:
            closed = evolve(closed, finish="stop")
        if self.one.silent and closed.finish == "stop":
            closed = evolve(closed, finish="length")
        if self.one.turn is not None and self.stops.found_stop is None and closed.finish in ("stop", "length"):
            self.one.turn.keep(self.one.job, tuple(self.made), self.said)
        called = tuple(piece.name for piece in self.said if isinstance(piece, CallBegun))
        said = self.tokens, self.stops.found_stop, self.reasoning, called
        return Ended(self.one, closed, *said)
