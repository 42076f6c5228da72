"""The event loop of the engine: events go in, the fold decides, and executors carry out what it asks for.

This is the only place that changes the world. `post` takes an event, `fold` gives it to `states.world.advance`, and
`dispatch` hands each effect to the executor that carries it out. What an executor answers comes back through `post` as
the next event. Timers (`StartTimer`) are carried out here, because the core has no clock.
"""

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
from effects.ids import DeviceFailed, FailureKind, LaneId, RequestId, StoreFailed
from effects.ports import LaunchFailed, NotifyEffect, PerformEffect, RequestOutcome, RowsLost, SubmitLaunch
from effects.timer import StartTimer
from states.events import EffectOutcome, ForEngine, ForLaunch, ForRequest, Happened, SlotsLost, TimerElapsed
from states.world import Output, World, advance

log = logging.getLogger("rekindle.engine")


@frozen
class Envelope:
    """An event as it entered the world: its number in the order, its time (monotonic), and what it is."""

    seq: int
    at_ns: int
    happened: Happened


@frozen
class Executors:
    """The functions that carry each effect out.

    submit: by lane, takes a launch. perform: by type, effects of the store, answered at once or awaited; those that are
    awaited run in tasks of their own. notify: by type, effects without an outcome, called at once and in order; they
    never block.
    """

    submit: Mapping[LaneId, SubmitLaunch]
    perform: Mapping[type, PerformEffect]
    notify: Mapping[type, tuple[NotifyEffect, ...]]


Journal = Callable[[Envelope, "tuple[Output, ...]", World], None]
Observe = Callable[[Envelope, "tuple[Output, ...]", World, World], None]


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception in one line."""
    return f"{type(error).__name__}: {error}"


def failure_kind(error: BaseException) -> FailureKind:
    """Return the name that the core has for the exception of an executor."""
    if isinstance(error, RowsLost):
        return "lost"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, TimeoutError):
        return "timed_out"
    if isinstance(error, OSError):
        return "io"
    return "broken"


@define(eq=False)
class WorldWaiter:
    """A task that waits until `is_met` is true of the world; `met` is set then."""

    is_met: Callable[[World], bool]
    met: anyio.Event = field(factory=anyio.Event)


@define
class EventLoop:
    """Folds events into the world, one at a time, and dispatches what each asks for.

    `post` never blocks. An event is folded at once, in the task that posts it: a turn of the asyncio loop for each
    event would make it wait for the interpreter, which the device thread needs as well.

    The inbox holds events that come before `run` has begun, or while another event is folded. It is bounded, because
    `Submissions` refuses a job where `limit` requests are live (`submission.py`). Each of them has at most its
    submission, a cancellation and what an executor answers at once.
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
    _closing: anyio.Event = field(init=False, factory=anyio.Event)
    _waiters: list[WorldWaiter] = field(init=False, factory=list["WorldWaiter"])
    _bug: BaseException | None = field(init=False, default=None)

    def post(self, happened: Happened) -> None:
        """Fold an event, or queue it behind the one that is being folded.

        Raises ClosedResourceError if no more events are taken. Raises what the fold raises, which is a bug; `run` ends
        with it as well.
        """
        if self._closing.is_set():
            raise anyio.ClosedResourceError
        self._inbox.append(happened)
        if self._tasks is not None and len(self._inbox) == 1:
            self._process_inbox(self._tasks)

    def close(self) -> None:
        """Take no more events. `run` returns when what is in flight has ended."""
        self._closing.set()

    async def run(self) -> None:
        """Run until the loop is closed. Raises the bug that has ended it, whichever task posted the event."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._process_inbox(self._tasks)
                await self._closing.wait()
                if self._bug is not None:
                    raise self._bug
        finally:
            self.close()

    async def wait_until_idle(self) -> None:
        """Wait until no request is live and no event waits to be folded."""
        await self.wait_until(lambda world: not world.requests)

    async def wait_until(self, is_met: Callable[[World], bool]) -> None:
        """Wait until the world is as wanted and no event waits to be folded. is_met: called after events, so quick."""
        while self._inbox or not is_met(self.world):
            waiter = WorldWaiter(is_met)
            self._waiters.append(waiter)
            try:
                await waiter.met.wait()
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def _process_inbox(self, tasks: TaskGroup) -> None:
        try:
            while self._inbox:
                for out in self.fold(self._inbox[0]):
                    self.dispatch(out, tasks)
                self._inbox.popleft()
            for waiter in [waiter for waiter in self._waiters if waiter.is_met(self.world)]:
                self._waiters.remove(waiter)
                waiter.met.set()
        finally:
            if self._inbox:  # it was not folded, or not handed out: a bug
                self._bug = sys.exc_info()[1]
                self.close()

    def dispatch(self, out: Output, tasks: TaskGroup) -> None:
        """Hand an effect or a launch to its executor, and post what the executor answers at once."""
        if isinstance(out, Launch):
            self.executors.submit[out.lane](out, self.post_launch_outcomes)
        elif out.effect.outcomes:
            with self.collect_outcome() as found:
                answer = self.executors.perform[type(out.effect)](out.request, out.effect)
                if isinstance(answer, Awaitable):
                    tasks.start_soon(self.await_outcome, out, answer)
                else:
                    found.append(answer)
            self.post_outcomes(out, found)
        elif isinstance(out.effect, StartTimer):
            tasks.start_soon(self.run_timer, out.effect)
        else:
            for notify in self.executors.notify[type(out.effect)]:
                notify(out.request, out.effect)

    def fold(self, happened: Happened) -> tuple[Output, ...]:
        """Fold one event into the world, tell the journal and the observer, and return what it asks for."""
        envelope = Envelope(self.seq, self.clock_ns(), happened)
        before = self.world
        self.world, outs = advance(before, happened)
        self.seq += 1
        if self.journal is not None:
            self.journal(envelope, outs, self.world)
        if self.observe is not None:
            self.observe(envelope, outs, before, self.world)
        return outs

    def post_launch_outcomes(self, outcomes: Sequence[RequestOutcome] | LaunchFailed) -> None:
        """Post what came of a launch, or what has come of it so far.

        An outcome that the effect cannot have finds no transition, and the fold raises that as the bug that it is.
        """
        events = launch_failure_events(outcomes) if isinstance(outcomes, LaunchFailed) else group_outcomes(outcomes)
        for happened in events:
            self.post_if_open(happened)

    async def run_timer(self, timer: StartTimer) -> None:
        """Post that the timer has elapsed when its delay has passed. It ends without an event when the loop closes."""
        with anyio.move_on_after(timer.delay_ns / 1e9):
            await self._closing.wait()
            return
        self.post_if_open(ForEngine(TimerElapsed(timer.name, timer.number)))

    async def await_outcome(self, effect_request: EffectRequest, answer: Awaitable[Outcome]) -> None:
        """Await the answer of an executor and post it."""
        with self.collect_outcome() as found:
            found.append(await answer)
        self.post_outcomes(effect_request, found)

    @contextmanager
    def collect_outcome(self) -> Iterator[list[Outcome]]:
        """Yield a list for the answer of an executor. If the executor raises, its failure becomes the answer."""
        found = list[Outcome]()
        try:
            yield found
        except RowsLost as error:  # another process has died, which no traceback explains
            log.warning("an executor failed: %s", error)
            found.append(self._handle_failure(error))
        except Exception as error:
            log.exception("an executor failed")
            found.append(self._handle_failure(error))

    def _handle_failure(self, error: BaseException) -> StoreFailed:
        for lost in slots_lost_events(error):
            self.post_if_open(lost)
        return StoreFailed(failure_kind(error), describe_error(error))

    def post_outcomes(self, effect_request: EffectRequest, found: list[Outcome]) -> None:
        """Post the answers to an effect as events of its request."""
        for outcome in found:
            self.post_if_open(ForRequest(effect_request.request, outcome))

    def post_if_open(self, happened: Happened) -> None:
        """Post an event. After the engine has closed, log and drop it."""
        try:
            self.post(happened)
        except anyio.ClosedResourceError:
            log.debug("an event came after the engine closed: %s", happened)


def group_outcomes(outcomes: Sequence[RequestOutcome]) -> Iterator[Happened]:
    """Yield outcomes of a launch as events, in order.

    One event has the outcomes that follow each other, up to the second one of the same request.
    """
    group = list[RequestOutcome]()
    requests = set[RequestId]()
    for outcome in outcomes:
        if outcome[0] in requests:
            yield make_launch_event(group)
            group = []
            requests = set()
        requests.add(outcome[0])
        group.append(outcome)
    if group:
        yield make_launch_event(group)


def make_launch_event(outcomes: Sequence[RequestOutcome]) -> Happened:
    """Return the event of outcomes that come at once. A single one is the event of its request."""
    if len(outcomes) == 1:
        return ForRequest(*outcomes[0])
    return ForLaunch(tuple([EffectOutcome(*outcome) for outcome in outcomes]))


def launch_failure_events(failed: LaunchFailed) -> Iterator[Happened]:
    """Yield the failure of a launch as an event of every request in it that had no last outcome yet."""
    error = failed.error
    log.error("a launch failed: %s", error, exc_info=None if isinstance(error, RowsLost) else error)
    yield from slots_lost_events(error)
    for request in failed.requests:
        yield ForRequest(request, DeviceFailed(failure_kind(error), describe_error(error)))


def slots_lost_events(error: BaseException) -> tuple[ForEngine, ...]:
    """Return the event for all requests whose rows are gone with this error. It comes before their own failures."""
    return (ForEngine(SlotsLost(error.slots)),) if isinstance(error, RowsLost) and error.slots else ()
