"""The imperative shell: one inbox in, one fold in the middle, executors out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define, field, frozen

from effects.all import Ask, Launch, Outcome
from effects.ids import DeviceFailed, FailureKind, RequestId, StoreFailed
from effects.ports import Notify, Perform, Submit
from states.events import Event
from states.world import Out, World, advance

T = TypeVar("T")
log = logging.getLogger("rekindle.engine")


@frozen
class Envelope:
    """An event as it entered the world: its place in the order, its time (monotonic), and whom it is for."""

    seq: int
    at_ns: int
    request: RequestId
    event: Event


@frozen
class Executors:
    """The second table: what carries each effect out.

    submit: the device lane takes a launch. perform: awaited store effects, a task each. notify: effects nobody awaits,
    done at once, in order, never blocking.
    """

    submit: Submit
    perform: Mapping[type, Perform]
    notify: Mapping[type, tuple[Notify, ...]]


Journal = Callable[[Envelope, "tuple[Out, ...]", World], None]
Observe = Callable[[Envelope, "tuple[Out, ...]", World, World], None]


@frozen
class Broken:
    """An executor raised."""

    kind: FailureKind
    detail: str


async def attempt(work: Awaitable[T]) -> T | Broken:
    try:
        return await work
    except Exception as error:
        log.exception("an executor failed")
        return Broken(failure_kind(error), describe(error))


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def failure_kind(error: BaseException) -> FailureKind:
    """What an executor's exception is called in the core."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, TimeoutError):
        return "timed_out"
    if isinstance(error, OSError):
        return "io"
    return "broken"


@define
class Runner:
    """Events go in through `post`, which never blocks.

    The inbox holds what can be on its way at most: for each live request its submission, one cancellation and one
    outcome per lane; `limit` is the number of live requests that the door allows. An overflow is a bug.
    """

    world: World
    executors: Executors
    clock_ns: Callable[[], int]
    limit: int
    journal: Journal | None = None
    observe: Observe | None = None
    seq: int = 0
    _send: MemoryObjectSendStream[tuple[RequestId, Event]] = field(init=False)
    _inbox: MemoryObjectReceiveStream[tuple[RequestId, Event]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._send, self._inbox = anyio.create_memory_object_stream[tuple[RequestId, Event]](4 * self.limit)

    def post(self, request: RequestId, event: Event) -> None:
        self._send.send_nowait((request, event))

    def close(self) -> None:
        """No more events; `run` returns once what is in the inbox and in flight is done."""
        self._send.close()

    async def run(self) -> None:
        async with self._inbox, anyio.create_task_group() as tasks:
            async for request, event in self._inbox:
                for out in self.fold(request, event):
                    if isinstance(out, Launch):
                        self.executors.submit(out, partial(self.launched, out))
                    elif out.effect.outcomes:
                        tasks.start_soon(self.perform, out)
                    else:
                        for notify in self.executors.notify[type(out.effect)]:
                            notify(out.request, out.effect)

    def fold(self, request: RequestId, event: Event) -> tuple[Out, ...]:
        envelope = Envelope(self.seq, self.clock_ns(), request, event)
        before = self.world
        self.world, outs = advance(before, request, event)
        self.seq += 1
        if self.journal is not None:
            self.journal(envelope, outs, self.world)
        if self.observe is not None:
            self.observe(envelope, outs, before, self.world)
        return outs

    def launched(self, launch: Launch, outcomes: tuple[Outcome, ...] | BaseException) -> None:
        if isinstance(outcomes, BaseException):
            log.error("a launch failed", exc_info=outcomes)
            outcomes = (DeviceFailed(failure_kind(outcomes), describe(outcomes)),) * len(launch.asks)
        for ask, outcome in zip(launch.asks, outcomes, strict=True):
            self.settle(ask, outcome)

    async def perform(self, ask: Ask) -> None:
        outcome = await attempt(self.executors.perform[type(ask.effect)](ask.request, ask.effect))
        self.settle(ask, StoreFailed(outcome.kind, outcome.detail) if isinstance(outcome, Broken) else outcome)

    def settle(self, ask: Ask, outcome: Outcome) -> None:
        """An outcome that the effect cannot have finds no row: the fold calls it the bug that it is."""
        try:
            self.post(ask.request, outcome)
        except anyio.ClosedResourceError:
            log.debug("an outcome came after the engine closed: %s", outcome)
