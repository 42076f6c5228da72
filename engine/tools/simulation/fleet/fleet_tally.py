"""Counts what became of the requests of a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from engine.tools.simulation.fleet.prompt_paths import PromptPath
from engine.tools.simulation.tally import compute_quantile, compute_share


@frozen(eq=False)
class FleetRequest:
    """The figures of one request. Times are nanoseconds."""

    replica: int
    sent: int
    first: int
    closed: int
    tokens: int
    answer: int
    infinite: int  # tokens that one infinite cache would have had
    found: int
    restored: int
    met: int  # open requests that it met at its replica


@frozen
class FleetFigures:
    """The figures of one router."""

    router: str
    replicas: int
    requests: int
    prompt_tokens: int
    infinite_hit_tokens: int
    hit_tokens: int
    of_infinite: float
    computed_tokens: int
    longest_queue: int  # open requests of one replica, being served or waiting
    mean_queue: float  # open requests that a request met
    busiest: float  # busy time of the busiest replica, compared with the average
    read_bytes: int  # from the shared tier
    written_bytes: int  # to it
    moves: int  # requests that went elsewhere than the conversation's last one
    read_elsewhere: int  # prompts that another replica read
    first_token_ms: tuple[float, float, float]  # median, 90th and 99th percentile
    token_ms: float  # of an answer after its first one, on average
    hours: float  # of the virtual clock


@define
class InfinitePaths:
    """A cache that forgets nothing: the keys of every prompt and answer, from when they are sent."""

    keys: set[bytes] = field(factory=set[bytes])

    def count_shared_tokens(self, path: PromptPath) -> int:
        """Return how many prompt tokens are cached and usable, and add the prompt and its answer."""
        there = 0
        for key, stop in zip(path.keys[: path.usable], path.stops, strict=False):
            if key not in self.keys:
                break
            there = stop
        self.keys.update(path.keys)
        return there


def compute_figures(
    router: str, requests: Sequence[FleetRequest], busy: Sequence[int], counts: dict[str, int]
) -> FleetFigures:
    """Return the figures of a run. busy: time by replica. counts: those that are not of single requests."""
    waits = [(request.first - request.sent) / 1e6 for request in requests]
    found = sum(request.found for request in requests)
    infinite = sum(request.infinite for request in requests)
    later = sum(request.answer - 1 for request in requests)
    decoding = sum(request.closed - request.first for request in requests)
    return FleetFigures(
        router=router,
        replicas=len(busy),
        requests=len(requests),
        prompt_tokens=sum(request.tokens for request in requests),
        infinite_hit_tokens=infinite,
        hit_tokens=found,
        of_infinite=compute_share(found, infinite),
        computed_tokens=sum(request.tokens - request.restored for request in requests),
        mean_queue=compute_share(sum(request.met for request in requests), len(requests)),
        busiest=compute_share(max(busy) * len(busy), sum(busy)),
        first_token_ms=(compute_quantile(waits, 0.5), compute_quantile(waits, 0.9), compute_quantile(waits, 0.99)),
        token_ms=compute_share(decoding, later) / 1e6,
        hours=max((request.closed for request in requests), default=0) / 3.6e12,
        **counts,
    )


@frozen
class FinishedFleet:
    """The result of one router. waits_ms: to the first token of each request."""

    figures: FleetFigures
    waits_ms: tuple[float, ...]
