"""The imperative shell: one inbox in, one fold in the middle, executors out."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio
from anyio.abc import TaskGroup
from attrs import define, field, frozen

from effects.all import EffectRequest, Launch, Outcome
from effects.ids import DeviceFailed, FailureKind, LaneId, StoreFailed
from effects.ports import LaunchFailed, NotifyEffect, PerformEffect, RequestOutcome, RowsLost, SubmitLaunch
from states.events import ForEngine, ForRequest, Happened, SlotsLost
from states.world import Output, World, advance

log = logging.getLogger("rekindle.engine")


@frozen
class Envelope:
    """An event as it entered the world: its place in the order, its time (monotonic), and what it is."""

    seq: int
    at_ns: int
    happened: Happened


@frozen
class Executors:
    """The second table: what carries each effect out.

    submit: a device's lane takes a launch. perform: store effects, answered at once or awaited, each in a task of its
    own then. notify: effects nobody awaits, done at once, in order, never blocking.
    """

    submit: Mapping[LaneId, SubmitLaunch]
    perform: Mapping[type, PerformEffect]
    notify: Mapping[type, tuple[NotifyEffect, ...]]


Journal = Callable[[Envelope, "tuple[Output, ...]", World], None]
Observe = Callable[[Envelope, "tuple[Output, ...]", World, World], None]


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
    """Events go in through `post`, which never blocks: each is folded at once, and what it asks for handed out, on
    the event loop and by whoever brings it. A turn of the loop for each would be a wait for the interpreter, which the
    lane wants as well.

    The inbox holds what comes before `run` has begun, or of an event while it is folded: of each live request, of which
    the door allows `limit`, its submission, a cancellation and what an executor answers at once.
    """

    world: World
    executors: Executors
    clock_ns: Callable[[], int]
    limit: int
    journal: Journal | None = None
    observe: Observe | None = None
    seq: int = 0
    _inbox: deque[Happened] = field(init=False, factory=deque[Happened])  # the first is being folded, while it runs
    _tasks: TaskGroup | None = field(init=False, default=None)
    _ended: anyio.Event = field(init=False, factory=anyio.Event)
    _bug: BaseException | None = field(init=False, default=None)

    def post(self, happened: Happened) -> None:
        """Raises ClosedResourceError where no more events are taken, and what its fold raises: a bug, with which `run`
        ends, too.
        """
        if self._ended.is_set():
            raise anyio.ClosedResourceError
        self._inbox.append(happened)
        if self._tasks is not None and len(self._inbox) == 1:
            self._take_in(self._tasks)

    def close(self) -> None:
        """No more events; `run` returns once what is in flight is done."""
        self._ended.set()

    async def run(self) -> None:
        """Until it is closed. Raises the bug that has ended it, whoever brought the event."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._take_in(self._tasks)
                await self._ended.wait()
                if self._bug is not None:
                    raise self._bug
        finally:
            self.close()

    def _take_in(self, tasks: TaskGroup) -> None:
        try:
            while self._inbox:
                for out in self.fold(self._inbox[0]):
                    self.hand_out(out, tasks)
                self._inbox.popleft()
        finally:
            if self._inbox:  # it was not folded, or not handed out: a bug
                self._bug = sys.exc_info()[1]
                self.close()

    def hand_out(self, out: Output, tasks: TaskGroup) -> None:
        if isinstance(out, Launch):
            self.executors.submit[out.lane](out, self.landed)
        elif out.effect.outcomes:
            with self.outcome() as found:
                answer = self.executors.perform[type(out.effect)](out.request, out.effect)
                if isinstance(answer, Awaitable):
                    tasks.start_soon(self.perform, out, answer)
                else:
                    found.append(answer)
            self.answered(out, found)
        else:
            for notify in self.executors.notify[type(out.effect)]:
                notify(out.request, out.effect)

    def fold(self, happened: Happened) -> tuple[Output, ...]:
        envelope = Envelope(self.seq, self.clock_ns(), happened)
        before = self.world
        self.world, outs = advance(before, happened)
        self.seq += 1
        if self.journal is not None:
            self.journal(envelope, outs, self.world)
        if self.observe is not None:
            self.observe(envelope, outs, before, self.world)
        return outs

    def landed(self, told: Sequence[RequestOutcome] | LaunchFailed) -> None:
        """What came of a launch, or has come of it so far. An outcome that the effect cannot have finds no row: the
        fold calls it the bug that it is.
        """
        for happened in failures(told) if isinstance(told, LaunchFailed) else (ForRequest(*one) for one in told):
            self.tell(happened)

    async def perform(self, ask: EffectRequest, answer: Awaitable[Outcome]) -> None:
        with self.outcome() as found:
            found.append(await answer)
        self.answered(ask, found)

    @contextmanager
    def outcome(self) -> Iterator[list[Outcome]]:
        """For what an executor answers; where it raises instead, for what became of that."""
        found = list[Outcome]()
        try:
            yield found
        except RowsLost as error:  # another process has died, which no traceback explains
            log.warning("an executor failed: %s", error)
            found.append(self._failed(error))
        except Exception as error:
            log.exception("an executor failed")
            found.append(self._failed(error))

    def _failed(self, error: BaseException) -> StoreFailed:
        for lost in lost_with(error):
            self.tell(lost)
        return StoreFailed(failure_kind(error), describe(error))

    def answered(self, ask: EffectRequest, found: list[Outcome]) -> None:
        for outcome in found:
            self.tell(ForRequest(ask.request, outcome))

    def tell(self, happened: Happened) -> None:
        try:
            self.post(happened)
        except anyio.ClosedResourceError:
            log.debug("it came after the engine closed: %s", happened)


def failures(failed: LaunchFailed) -> Iterator[Happened]:
    """What a launch that raised means to each member that had no last outcome yet."""
    error = failed.error
    log.error("a launch failed: %s", error, exc_info=None if isinstance(error, RowsLost) else error)
    yield from lost_with(error)
    for request in failed.requests:
        yield ForRequest(request, DeviceFailed(failure_kind(error), describe(error)))


def lost_with(error: BaseException) -> tuple[ForEngine, ...]:
    """If rows are gone with it, everybody whose they are hears that first."""
    return (ForEngine(SlotsLost(error.slots)),) if isinstance(error, RowsLost) and error.slots else ()
