"""A launch while it runs: its members, those that join it, and the way of their outcomes to the event loop.

Theory of operation
-------------------

A launch may take many decode steps on the lane before the engine hears of the last one. Tokens have to be sent while it
goes on, and requests have to be able to join and leave. Three objects share the work:

* `RunningBatch`, on the lane: the launch that goes on. Requests join it between two steps (`join`, `take_joining`), and
  it ends when other work needs the lane (`serve_and_check_stop`).
* `OutcomeQueue`, between the threads: the outcomes of each step, in order. The lane puts them in. The first one wakes
  the event loop, which takes all that are there when its turn comes. So at most one wake-up is under way, and an event
  loop that falls behind merges several steps into one outcome instead of falling behind further.
* `InFlightRequests`, on the event loop: for each request of a launch its lane and the callback for its outcomes.

Invariants:

* A request has outcomes with `more` set, then one without; then it is in no launch any more.
* `OutcomeQueue.members` are the requests that have not had their last outcome. If the launch raises, exactly these
  fail.
* Merging changes only how outcomes are grouped: plain steps that follow each other become one, and of the chunks of a
  prefill the last one stays. Steps with proposals are never merged: each of them says how many proposals were accepted.

Example: steps give request 1 the tokens 5, 6, 7 while the event loop is busy. It gets one `Decoded((5, 6, 7),
steps=3)`.
"""

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

REPEATED = (Decoded, PrefillAdvanced)  # outcomes that a launch may have several of for one request


@define(eq=False)
class OutcomeQueue:
    """Outcomes of steps, or of prefill chunks, that the event loop has not taken yet, in order.

    It holds at most as many entries as the launch may take steps. wake_reader: called on the lane when the first entry
    comes. members: requests without a last outcome; only the lane changes them until the launch is done.
    """

    wake_reader: Callable[[OutcomeQueue], object]
    members: dict[RequestId, None]
    _steps: deque[Sequence[RequestOutcome]] = field(init=False, factory=deque)
    _is_reader_woken: bool = field(init=False, default=False)

    def put(self, step: Sequence[RequestOutcome]) -> None:
        """Add the outcomes of one step, of all members or some of them. Called on the lane."""
        for request, outcome in step:
            if not has_more_to_come(outcome):
                self.members.pop(request, None)
        self._steps.append(step)
        if not self._is_reader_woken:
            self._is_reader_woken = True
            self.wake_reader(self)

    def take(self) -> tuple[RequestOutcome, ...]:
        """Take all outcomes, merged. Called on the event loop."""
        # Cleared first: a step that is put while this looks is either taken now, or wakes the event loop again.
        self._is_reader_woken = False
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        return tuple(steps[0] if len(steps) == 1 else merge_steps(steps))


@define(eq=False)
class RunningBatch:
    """The launch that runs, and the requests that join it between two steps. Used on the lane only.

    before_report: called before outcomes are reported. has_changed: a request has joined or ended, so the members are
    not those that copies were planned for. Nothing is copied then. It is so from the beginning where prompts go along.
    """

    outcomes: OutcomeQueue
    lane: DeviceLane
    before_report: Callable[[], object]
    has_changed: bool = False
    _joining: list[EffectRequest] = field(init=False, factory=list[EffectRequest])

    def join(self, effect_requests: Sequence[EffectRequest]) -> None:
        """Make these requests members. They have their first row in the next step."""
        self.outcomes.members |= dict.fromkeys(effect_request.request for effect_request in effect_requests)
        self._joining += effect_requests

    def take_joining(self) -> list[EffectRequest]:
        """Return the effect requests of those that have joined since the last call."""
        effect_requests = self._joining
        self._joining = []
        self.has_changed = self.has_changed or bool(effect_requests)
        return effect_requests

    def serve_and_check_stop(self) -> bool:
        """Carry out the short work that waits for the lane, then say whether the launch should end here.

        Called between two steps. Requests that have just joined get one step before other work gets the lane.
        """
        return self.lane.serve_between_steps() and not self._joining

    def report_outcomes(self, outcomes: Sequence[RequestOutcome]) -> None:
        """Report the outcomes of a step to the event loop."""
        self.before_report()
        self.has_changed = self.has_changed or not all(has_more_to_come(outcome) for _, outcome in outcomes)
        self.outcomes.put(outcomes)

    def report_some(self, outcomes: Sequence[RequestOutcome]) -> None:
        """Report outcomes that belong to no step, if there are any."""
        if outcomes:
            self.report_outcomes(outcomes)


@define(eq=False)
class InFlightRequests:
    """The requests of all launches that are under way: for each its lane, and the callback for its outcomes.

    Used on the event loop. abandoned: requests that are given up; lanes read it and `count` as well.
    """

    abandoned: set[RequestId] = field(init=False, factory=set[RequestId])
    _launched: dict[RequestId, tuple[DeviceLane, DeliverOutcomes]] = field(init=False, factory=dict)

    def begin(
        self, launch: Launch, lane: DeviceLane, done: DeliverOutcomes, wake: Callable[..., object]
    ) -> tuple[OutcomeQueue, Callable[[BaseException], None]]:
        """Enter a launch. Return the queue for its outcomes, and what the lane calls if the launch raises."""
        requests = [effect_request.request for effect_request in launch.effect_requests]

        def wake_reader(queue: OutcomeQueue) -> None:
            with suppress(RuntimeError):  # the event loop has closed, and with it every caller
                wake(self._deliver, queue)

        def deliver_failure(error: BaseException) -> None:
            with suppress(RuntimeError):
                wake(self._fail, queue, error)

        queue = OutcomeQueue(wake_reader, dict.fromkeys(requests))
        self._launched |= dict.fromkeys(requests, (lane, done))
        return queue, deliver_failure

    @property
    def count(self) -> int:
        """The number of requests in launches."""
        return len(self._launched)

    def lane_of(self, request: RequestId) -> DeviceLane | None:
        """Return the lane of the launch that the request is in; None if it is in none."""
        return self._launched[request][0] if request in self._launched else None

    def abandon(self, request: RequestId) -> None:
        """Give the request up until its last outcome, if it is in a launch."""
        if request in self._launched:
            self.abandoned.add(request)

    def _deliver(self, queue: OutcomeQueue) -> None:
        found = dict[DeliverOutcomes, list[RequestOutcome]]()
        for request, outcome in queue.take():
            found.setdefault(self._launched[request][1], []).append((request, outcome))
            if not has_more_to_come(outcome):
                self._remove(request)
        for done, outcomes in found.items():
            done(outcomes)

    def _fail(self, queue: OutcomeQueue, error: BaseException) -> None:
        found = dict[DeliverOutcomes, list[RequestId]]()
        for request in queue.members:
            found.setdefault(self._remove(request), []).append(request)
        for done, requests in found.items():
            done(LaunchFailed(tuple(requests), error))

    def _remove(self, request: RequestId) -> DeliverOutcomes:
        self.abandoned.discard(request)
        return self._launched.pop(request)[1]


def merge_steps(steps: Iterable[Sequence[RequestOutcome]]) -> Iterator[RequestOutcome]:
    """Merge the outcomes of several steps, per request.

    Plain steps that follow each other become one outcome, and of prefill chunks the last one stays. Steps with
    proposals, and failures, stay as they are.
    """
    whole = dict[RequestId, Outcome]()
    for step in steps:
        met = [(whole[request], outcome) for request, outcome in step if request in whole]
        if any(isinstance(other, DeviceFailed) or has_proposals(one) or has_proposals(other) for one, other in met):
            yield from whole.items()
            whole.clear()
        for request, outcome in step:
            whole[request] = combine_outcomes(whole[request], outcome) if request in whole else outcome
    yield from whole.items()


def has_proposals(outcome: Outcome) -> bool:
    """Was anything proposed in this step, by this member, or copied by another one?"""
    return isinstance(outcome, Decoded) and (outcome.proposed > 0 or outcome.rows > 0)


def add_decode_steps(earlier: Decoded, later: Decoded) -> Decoded:
    """Return two outcomes of a request as one. Its time is the mean of a step, if that of both was measured."""
    steps = earlier.steps + later.steps
    proposed = earlier.proposed + later.proposed
    accepted = earlier.accepted + later.accepted
    ns = (earlier.ns * earlier.steps + later.ns * later.steps) // steps if earlier.ns and later.ns else 0
    logprobs = earlier.logprobs + later.logprobs
    return Decoded(
        *(earlier.tokens + later.tokens, proposed, logprobs, ns, accepted, steps, later.more, later.matched),
        copied=earlier.copied + later.copied,
        rows=max(earlier.rows, later.rows),
        branched=earlier.branched or later.branched,
        on_branch=earlier.on_branch + later.on_branch,
    )


def as_last_outcome(outcome: Outcome) -> Outcome:
    """Return the outcome of a decode step as the last one of its launch for the request."""
    if not isinstance(outcome, Decoded):
        return outcome
    # A launch of one step has this for each of its members. `evolve` would take three times as long.
    return Decoded(
        outcome.tokens,
        outcome.proposed,
        outcome.logprobs,
        outcome.ns,
        outcome.accepted,
        outcome.steps,
        more=False,
        matched=outcome.matched,
        copied=outcome.copied,
        rows=outcome.rows,
        branched=outcome.branched,
        on_branch=outcome.on_branch,
    )


def has_more_to_come(outcome: Outcome) -> bool:
    """Do more outcomes of this launch follow for the request?"""
    return isinstance(outcome, REPEATED) and outcome.more


def combine_outcomes(earlier: Outcome, later: Outcome) -> Outcome:
    """Return two outcomes of a request as one. A failure, or how far a prefill came, replaces what was before it."""
    return add_decode_steps(earlier, later) if isinstance(earlier, Decoded) and isinstance(later, Decoded) else later


async def perform_launch(submit: SubmitLaunch, launch: Launch) -> tuple[Outcome, ...]:
    """Submit a launch and return the combined outcome of each request. A cancelled caller waits for it as well."""
    finished = anyio.Event()
    outcomes = dict[RequestId, Outcome]()
    errors = list[BaseException]()

    def collect(arrived: Sequence[RequestOutcome] | LaunchFailed) -> None:
        if isinstance(arrived, LaunchFailed):
            errors.append(arrived.error)
        else:
            for request, outcome in arrived:
                earlier = outcomes.get(request)
                outcomes[request] = outcome if earlier is None else combine_outcomes(earlier, outcome)
        if errors or (
            len(outcomes) == len(launch.effect_requests) and not any(map(has_more_to_come, outcomes.values()))
        ):
            finished.set()

    submit(launch, collect)
    with anyio.CancelScope(shield=True):
        await finished.wait()
    for error in errors:
        raise error
    return tuple(outcomes[effect_request.request] for effect_request in launch.effect_requests)
