"""Runs a request's jobs: submits them, turns their messages into text, and sees that every one is ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define, evolve, field, frozen

from adapters.http.controls import Planned
from adapters.http.options import EdgeOptions
from adapters.text.answer.pieces import AnswerPiece, text_of
from adapters.text.answer.reader import AnswerParser
from adapters.text.detokenize import TextStream
from adapters.text.explain import Explained, explain
from adapters.text.tokenizer import Tokenizer
from effects.decode import Logprob
from effects.ids import RequestId
from effects.job import Report
from effects.ports import CancelReason, Closed, Door, Ticket
from effects.stream import EmitTokens, ReportProgress

BUFFERED_EVENTS = 16
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
        return text_of(self.pieces)


@frozen
class PickedToken:
    """A token that was picked, with its logprob and alternatives."""

    token: int
    logprob: Logprob


@frozen
class Ended:
    """A choice is complete. `tokens`: those that count, up to the one that completed a stop string.

    stop: the stop string that ended it.  reasoning: how many tokens were.  called: the functions, in their order.
    broken: the stop string stands in the last call's arguments.  explained: why no more of the prompt was there.
    """

    planned: Planned
    closed: Closed
    tokens: int
    stop: str | None = None
    reasoning: int = 0
    called: tuple[str, ...] = ()
    broken: bool = False
    explained: Explained | None = None

    @property
    def index(self) -> int:
        return self.planned.index


Event: TypeAlias = Progress | Said | Ended


@define(eq=False)
class Jobs:
    """The jobs of one request while they run. Each of them sends events that end with its `Ended`."""

    events: MemoryObjectReceiveStream[Event]
    tickets: dict[int, Ticket] = field(factory=dict)  # by index; those that have not ended
    requests: list[RequestId] = field(factory=list)  # as the engine calls them

    def cancel(self, reason: CancelReason) -> None:
        for ticket in list(self.tickets.values()):
            ticket.cancel(reason)


@asynccontextmanager
async def running(
    door: Door, planned: Sequence[Planned], tokenizer: Tokenizer, options: EdgeOptions
) -> AsyncIterator[Jobs]:
    """Submit all jobs at once. Whatever has not ended when the block is left is cancelled as `client_gone`."""
    send, receive = anyio.create_memory_object_stream[Event](BUFFERED_EVENTS)
    run = Jobs(receive)
    try:
        async with receive, send, anyio.create_task_group() as tasks:
            for one in planned:
                run.tickets[one.index] = ticket = door.submit(one.job)
                run.requests.append(ticket.request)
            for one in planned:
                tasks.start_soon(_follow, run, one, tokenizer, options, send)
            if options.request_timeout_s is not None:
                tasks.start_soon(_deadline, run, options.request_timeout_s)
            yield run
            tasks.cancel_scope.cancel()
    finally:
        run.cancel("client_gone")


async def _deadline(run: Jobs, seconds: float) -> None:
    await anyio.sleep(seconds)
    run.cancel("deadline")


async def _follow(
    run: Jobs, one: Planned, tokenizer: Tokenizer, options: EdgeOptions, send: MemoryObjectSendStream[Event]
) -> None:
    """One ticket to the end, even if the engine never ends it."""
    controls = tokenizer.controls
    shown = frozenset(controls[name].id for name in one.reader.controls if name in controls)
    text = TextStream(tokenizer, one.stops, frozenset(one.job.stop_tokens), shown)
    follower = Follower(one, run.tickets[one.index], text, one.reader.start())
    limit = None if options.request_timeout_s is None else options.request_timeout_s + ENGINE_GRACE_S
    with anyio.move_on_after(limit):
        ended = await follower.follow(send)
        del run.tickets[one.index]
        if (diverged := ended.closed.diverged) is not None:
            missed = await anyio.to_thread.run_sync(explain, diverged, one.job, one.messages, tokenizer)
            ended = evolve(ended, explained=missed)
        await send.send(ended)
        return
    await send.send(follower.ended(Closed("deadline", Report(len(one.job.prompt)), "the engine did not answer", {})))


@define(eq=False)
class Follower:
    """The way of one ticket's tokens to text, and of the text to what it says."""

    one: Planned
    ticket: Ticket
    text: TextStream
    parser: AnswerParser
    tokens: int = 0
    reasoning: int = 0
    broken: bool = False
    picks: list[PickedToken] = field(factory=list)
    said: list[AnswerPiece] = field(factory=list)
    made: list[int] = field(factory=list)  # the tokens that it was made of

    async def follow(self, send: MemoryObjectSendStream[Event]) -> Ended:
        index = self.one.index
        async for message in self.ticket:
            match message:
                case ReportProgress(done, total, cached):
                    await send.send(Progress(index, done, total, cached))
                case EmitTokens():
                    if pieces := self.read(message):
                        await send.send(Said(index, tuple(pieces), self.taken()))
                case Closed():
                    tail = self.parser.push(self.text.finish())
                    self.broken = self.text.stopped is not None and self.parser.calling
                    tail += self.parser.finish()
                    self.said += tail
                    if tail or self.picks:
                        await send.send(Said(index, tuple(tail), self.taken()))
                    return self.ended(message)
        raise AssertionError("a ticket's messages end with Closed")

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
            thought = self.parser.thinking
            pieces += self.parser.push(self.text.push(token))
            self.reasoning += thought or self.parser.thinking
            if message.logprobs and (token not in self.text.hidden or self.one.job.prompt_logprobs >= 0):
                self.picks.append(PickedToken(token, message.logprobs[place]))
            if self.complete:
                self.ticket.cancel("stop_string")
        self.said += pieces
        return pieces

    @property
    def complete(self) -> bool:
        return self.text.stopped is not None or self.parser.closed

    def taken(self) -> tuple[PickedToken, ...]:
        picks, self.picks = tuple(self.picks), []
        return picks

    def ended(self, closed: Closed) -> Ended:
        if self.complete:
            closed = evolve(closed, finish="stop")
        if self.one.silent and closed.finish == "stop":
            closed = evolve(closed, finish="length")
        if self.one.turn is not None and self.text.stopped is None and closed.finish in ("stop", "length"):
            self.one.turn.keep(self.one.job, tuple(self.made), self.said)
        said = self.tokens, self.text.stopped, self.reasoning, tuple(self.parser.called), self.broken
        return Ended(self.one, closed, *said)
