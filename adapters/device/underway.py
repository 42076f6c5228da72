"""What a launch that goes on alone brings on its way, from the lane to the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from attrs import define, field

from effects.all import Outcome
from effects.decode import Decoded


@define(eq=False)
class StepsTaken:
    """Steps of one launch, in order, that were not looked at yet.

    The event loop is told of the first of them, and takes all that have come when it gets round to it: so one word is
    on its way at most, and who falls behind the device folds less often. There are no more of them than the launch may
    take steps.
    """

    tell: Callable[[StepsTaken], object]  # from the lane
    _steps: deque[tuple[Decoded, ...]] = field(init=False, factory=deque)
    _told: bool = field(init=False, default=False)

    def put(self, members: tuple[Decoded, ...]) -> None:
        """On the lane: one step, of every member."""
        self._steps.append(members)
        if not self._told:
            self._told = True
            self.tell(self)

    def take(self) -> tuple[tuple[Decoded, ...], ...]:
        """On the event loop. A step that comes while it looks is told again, or taken now: never neither."""
        self._told = False
        return tuple(joined(self._come()))

    def _come(self) -> Iterator[tuple[Decoded, ...]]:
        with suppress(IndexError):
            while True:
                yield self._steps.popleft()


def joined(steps: Iterator[tuple[Decoded, ...]]) -> Iterator[tuple[Decoded, ...]]:
    """Plain steps that follow each other as one; of those with proposals each says something of its own."""
    whole: tuple[Decoded, ...] | None = None
    for step in steps:
        if whole is not None and not any(one.proposed for one in (*whole, *step)):
            whole = tuple(map(both, whole, step))
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


def behind(one: Outcome, other: Outcome) -> Outcome:
    """The same of whatever came; a failure is all that is left to be told."""
    return both(one, other) if isinstance(one, Decoded) and isinstance(other, Decoded) else other
