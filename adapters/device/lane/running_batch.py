"""What a launch brings, from the lane to the event loop: all at once, or on its way where it goes on alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import anyio
from attrs import define, field

from adapters.device.lane.lane import DeviceLane
from effects.all import EffectRequest, Launch, Outcome
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId
from effects.ports import DeliverOutcomes, LaunchFailed, RequestOutcome, SubmitLaunch
from effects.prefill import PrefillAdvanced


@define(eq=False)
class OutcomeQueue:
    """What steps of a launch, or chunks, have brought, in order, that was not looked at yet.

    The event loop is told of the first of them, and takes all that have come when it gets round to it: so one word is
    on its way at most, and who falls behind the device folds less often. There are no more of them than the launch may
    take steps. members: of the launch, to whom no last outcome was told; the lane's, until it is done with the launch.
    """

    tell: Callable[[OutcomeQueue], object]  # from the lane
    members: dict[RequestId, None]
    _steps: deque[Sequence[RequestOutcome]] = field(init=False, factory=deque)
    _told: bool = field(init=False, default=False)

    def put(self, step: Sequence[RequestOutcome]) -> None:
        """On the lane: a step of every member, or what came of some of them."""
        for request, outcome in step:
            if not goes_on(outcome):
                self.members.pop(request, None)
        self._steps.append(step)
        if not self._told:
            self._told = True
            self.tell(self)

    def take(self) -> tuple[RequestOutcome, ...]:
        """On the event loop. A step that comes while it looks is told again, or taken now: never neither."""
        self._told = False
        return tuple(joined([self._steps.popleft() for _ in range(len(self._steps))]))


@define(eq=False)
class RunningBatch:
    """On the lane: who is in the launch that it is at, and who joins them. report: called before anything is told."""

    steps: OutcomeQueue
    lane: DeviceLane
    report: Callable[[], object]
    _joining: list[EffectRequest] = field(init=False, factory=list[EffectRequest])

    def join(self, asks: Sequence[EffectRequest]) -> None:
        self.steps.members |= dict.fromkeys(ask.request for ask in asks)
        self._joining += asks

    def joined(self) -> list[EffectRequest]:
        """Those who have joined since somebody asked; they have their first step next."""
        asks, self._joining = self._joining, []
        return asks

    def halted(self) -> bool:
        """Between two steps: are there to be no more? Who joins has one before anybody who waits has the lane."""
        return self.lane.interrupted() and not self._joining

    def tell(self, told: Sequence[RequestOutcome]) -> None:
        self.report()
        self.steps.put(told)


@define(eq=False)
class InFlightRequests:
    """On the event loop: of each request that a launch is under way for, its lane and who hears what comes of it.
    abandoned: those of them that are given up; lanes look at it.
    """

    abandoned: set[RequestId] = field(init=False, factory=set[RequestId])
    _flying: dict[RequestId, tuple[DeviceLane, DeliverOutcomes]] = field(init=False, factory=dict)

    def begin(
        self, launch: Launch, lane: DeviceLane, done: DeliverOutcomes, wake: Callable[..., object]
    ) -> tuple[OutcomeQueue, Callable[[BaseException], None]]:
        """What the lane puts outcomes into, and what it tells of a failure."""
        requests = [ask.request for ask in launch.asks]

        def told(steps: OutcomeQueue) -> None:
            with suppress(RuntimeError):  # the event loop has closed, so nobody waits any more
                wake(self._heard, steps)

        def failed(error: BaseException) -> None:
            with suppress(RuntimeError):
                wake(self._failed, steps, error)

        steps = OutcomeQueue(told, dict.fromkeys(requests))
        self._flying |= dict.fromkeys(requests, (lane, done))
        return steps, failed

    def lane_of(self, request: RequestId) -> DeviceLane | None:
        return self._flying[request][0] if request in self._flying else None

    def abandon(self, request: RequestId) -> None:
        if request in self._flying:
            self.abandoned.add(request)

    def _heard(self, steps: OutcomeQueue) -> None:
        found = dict[DeliverOutcomes, list[RequestOutcome]]()
        for request, outcome in steps.take():
            found.setdefault(self._flying[request][1], []).append((request, outcome))
            if not goes_on(outcome):
                self._land(request)
        for done, told in found.items():
            done(told)

    def _failed(self, steps: OutcomeQueue, error: BaseException) -> None:
        found = dict[DeliverOutcomes, list[RequestId]]()
        for request in steps.members:
            found.setdefault(self._land(request), []).append(request)
        for done, requests in found.items():
            done(LaunchFailed(tuple(requests), error))

    def _land(self, request: RequestId) -> DeliverOutcomes:
        self.abandoned.discard(request)
        return self._flying.pop(request)[1]


def joined(steps: Iterable[Sequence[RequestOutcome]]) -> Iterator[RequestOutcome]:
    """Of each, plain steps that follow each other as one, and of chunks the last; steps with proposals, and failures,
    each say something of their own.
    """
    whole = dict[RequestId, Outcome]()
    for step in steps:
        met = [(whole[request], outcome) for request, outcome in step if request in whole]
        if any(isinstance(other, DeviceFailed) or proposes(one) or proposes(other) for one, other in met):
            yield from whole.items()
            whole.clear()
        for request, outcome in step:
            whole[request] = behind(whole[request], outcome) if request in whole else outcome
    yield from whole.items()


def proposes(outcome: Outcome) -> bool:
    return isinstance(outcome, Decoded) and outcome.proposed > 0


def both(one: Decoded, other: Decoded) -> Decoded:
    """Steps of a request, one behind the other; the time is that of a step."""
    steps, proposed, accepted = one.steps + other.steps, one.proposed + other.proposed, one.accepted + other.accepted
    ns = (one.ns * one.steps + other.ns * other.steps) // steps
    logprobs = one.logprobs + other.logprobs
    return Decoded(one.tokens + other.tokens, proposed, logprobs, ns, accepted, steps, other.more)


def going_on(one: Decoded) -> Decoded:
    """What is not its launch's last."""
    return Decoded(one.tokens, one.proposed, one.logprobs, one.ns, one.accepted, one.steps, more=True)


def goes_on(outcome: Outcome) -> bool:
    """Do more of them follow?"""
    return isinstance(outcome, Decoded | PrefillAdvanced) and outcome.more


def behind(one: Outcome, other: Outcome) -> Outcome:
    """The same of whatever came; a failure is all that is left to be told, and so is how far a prefill came."""
    return both(one, other) if isinstance(one, Decoded) and isinstance(other, Decoded) else other


async def performed(submit: SubmitLaunch, launch: Launch) -> tuple[Outcome, ...]:
    """Submit a launch, wait for what comes of all its steps, and return that. A cancelled caller waits all the same."""
    finished, outcomes, errors = anyio.Event(), dict[RequestId, Outcome](), list[BaseException]()

    def done(told: Sequence[RequestOutcome] | LaunchFailed) -> None:
        if isinstance(told, LaunchFailed):
            errors.append(told.error)
        else:
            for request, outcome in told:
                outcomes[request] = behind(outcomes[request], outcome) if request in outcomes else outcome
        if errors or (len(outcomes) == len(launch.asks) and not any(map(goes_on, outcomes.values()))):
            finished.set()

    submit(launch, done)
    with anyio.CancelScope(shield=True):
        await finished.wait()
    for error in errors:
        raise error
    return tuple(outcomes[ask.request] for ask in launch.asks)
