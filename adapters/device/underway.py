"""What a launch that goes on alone brings on its way, from the lane to the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from attrs import define, field

from effects.all import Outcome
from effects.decode import Decoded

Taken: TypeAlias = tuple[Outcome, ...]  # a decode step of every member, or a chunk of the one prefill


@define(eq=False)
class StepsTaken:
    """Steps of one launch, or chunks, in order, that were not looked at yet.

    The event loop is told of the first of them, and takes all that have come when it gets round to it: so one word is
    on its way at most, and who falls behind the device folds less often. There are no more of them than the launch may
    take steps.
    """

    tell: Callable[[StepsTaken], object]  # from the lane
    _steps: deque[Taken] = field(init=False, factory=deque)
    _told: bool = field(init=False, default=False)

    def put(self, members: Taken) -> None:
        """On the lane: one step, of every member."""
        self._steps.append(members)
        if not self._told:
            self._told = True
            self.tell(self)

    def take(self) -> tuple[Taken, ...]:
        """On the event loop. A step that comes while it looks is told again, or taken now: never neither."""
        self._told = False
        return tuple(joined([self._steps.popleft() for _ in range(len(self._steps))]))


def joined(steps: Iterable[Taken]) -> Iterator[Taken]:
    """Plain steps that follow each other as one, and of chunks the last; of steps with proposals each says something of
    its own.
    """
    whole: Taken | None = None
    for step in steps:
        if whole is not None and not any(isinstance(one, Decoded) and one.proposed for one in (*whole, *step)):
            whole = tuple(map(behind, whole, step))
            continue
        if whole is not None:
            yield whole
        whole = step
    if whole is not None:
        yield whole


def both(one: Decoded, other: Decoded) -> Decoded:
    """Steps of a request, one behind the other; the time is that of a step."""
    steps, proposed, accepted = one.steps + other.steps, one.proposed + other.proposed, one.accepted + other.accepted
    ns = (one.ns * one.steps + other.ns * other.steps) // steps
    logprobs = one.logprobs + other.logprobs
    return Decoded(one.tokens + other.tokens, proposed, logprobs, ns, accepted, steps, other.more)


def going_on(one: Decoded) -> Decoded:
    """What is not its launch's last."""
    return Decoded(one.tokens, one.proposed, one.logprobs, one.ns, one.accepted, one.steps, more=True)


def behind(one: Outcome, other: Outcome) -> Outcome:
    """The same of whatever came; a failure is all that is left to be told, and so is how far a prefill came."""
    return both(one, other) if isinstance(one, Decoded) and isinstance(other, Decoded) else other
