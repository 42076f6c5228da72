"""The imperative shell: one inbox in, one fold in the middle, executors out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define, field, frozen

from effects.all import Ask, Launch
from effects.ids import DeviceFailed, FailureKind, LaneId, StoreFailed
from effects.ports import Notify, Perform, Result, RowsLost, Submit, Underway
from states.events import ForEngine, ForRequest, Happened, SlotsLost
from states.world import Out, World, advance

log = logging.getLogger("rekindle.engine")


@frozen
class Envelope:
    """An event as it entered the world: its place in the order, its time (monotonic), and what it is."""

    seq: int
    at_ns: int
    happened: Happened


@frozen
class Landed:
    """What came of a launch, or has come of it so far."""

    launch: Launch
    result: Result | Underway


@frozen
class Executors:
    """The second table: what carries each effect out.

    submit: a device's lane takes a launch. perform: awaited store effects, a task each. notify: effects nobody awaits,
    done at once, in order, never blocking.
    """

    submit: Mapping[LaneId, Submit]
    perform: Mapping[type, Perform]
    notify: Mapping[type, tuple[Notify, ...]]


Journal = Callable[[Envelope, "tuple[Out, ...]", World], None]
Observe = Callable[[Envelope, "tuple[Out, ...]", World, World], None]


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def failure_kind(error: BaseException) -> FailureKind:
    """What an executor's exception is called in the core."""
    if isinstance(error, RowsLost):
        return "lost"
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
    outcome per lane, or one word of lost rows or of what experts were used in front of it; and of a launch that goes on
    one word before its last. `limit` is the number of live requests that the door allows. An overflow is a bug.
    """

    world: World
    executors: Executors
    clock_ns: Callable[[], int]
    limit: int
    journal: Journal | None = None
    observe: Observe | None = None
    seq: int = 0
    _send: MemoryObjectSendStream[Happened | Landed] = field(init=False)
    _inbox: MemoryObjectReceiveStream[Happened | Landed] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._send, self._inbox = anyio.create_memory_object_stream[Happened | Landed](6 * self.limit)

    def post(self, item: Happened | Landed) -> None:
        self._send.send_nowait(item)

    def close(self) -> None:
        """No more events; `run` returns once what is in the inbox and in flight is done."""
        self._send.close()

    async def run(self) -> None:
        async with self._inbox, anyio.create_task_group() as tasks:
            async for item in self._inbox:
                for happened in landed(item) if isinstance(item, Landed) else (item,):
                    for out in self.fold(happened):
                        self.hand_out(out, tasks)

    def hand_out(self, out: Out, tasks: TaskGroup) -> None:
        if isinstance(out, Launch):
            self.executors.submit[out.lane](out, partial(self.launched, out))
        elif out.effect.outcomes:
            tasks.start_soon(self.perform, out)
        else:
            for notify in self.executors.notify[type(out.effect)]:
                notify(out.request, out.effect)

    def fold(self, happened: Happened) -> tuple[Out, ...]:
        envelope = Envelope(self.seq, self.clock_ns(), happened)
        before = self.world
        self.world, outs = advance(before, happened)
        self.seq += 1
        if self.journal is not None:
            self.journal(envelope, outs, self.world)
        if self.observe is not None:
            self.observe(envelope, outs, before, self.world)
        return outs

    def launched(self, launch: Launch, result: Result | Underway) -> None:
        self.tell(Landed(launch, result))

    async def perform(self, ask: Ask) -> None:
        try:
            outcome = await self.executors.perform[type(ask.effect)](ask.request, ask.effect)
        except Exception as error:
            log.exception("an executor failed")
            for lost in lost_with(error):
                self.tell(lost)
            outcome = StoreFailed(failure_kind(error), describe(error))
        self.tell(ForRequest(ask.request, outcome))

    def tell(self, item: Happened | Landed) -> None:
        try:
            self.post(item)
        except anyio.ClosedResourceError:
            log.debug("it came after the engine closed: %s", item)


def landed(item: Landed) -> Iterator[Happened]:
    """What it says of each member. An outcome that the effect cannot have finds no row: the fold calls it the bug that
    it is.
    """
    launch, result = item.launch, item.result
    if isinstance(result, BaseException):
        log.error("a launch failed: %s", result, exc_info=None if isinstance(result, RowsLost) else result)
        yield from lost_with(result)
        result = (DeviceFailed(failure_kind(result), describe(result)),) * len(launch.asks)
    for outcomes in (result,) if isinstance(result, tuple) else result.take():
        for ask, outcome in zip(launch.asks, outcomes, strict=True):
            yield ForRequest(ask.request, outcome)


def lost_with(error: BaseException) -> tuple[ForEngine, ...]:
    """If rows are gone with it, everybody whose they are hears that first."""
    return (ForEngine(SlotsLost(error.slots)),) if isinstance(error, RowsLost) and error.slots else ()
