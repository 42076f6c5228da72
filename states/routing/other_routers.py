"""Rules that the router by prefix is compared with. They take the same events and know as much as they usually would.

None of them draws random numbers: a draw is a digest of the request's number, so a run can be repeated.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from attrs import define, field

from states.routing.choose_replica import RouteDecision, RouteQuery
from states.routing.fleet_view import NOTHING
from states.routing.prefix_router import ReplicaAdded, ReplicaRemoved, RequestArrived, RequestEnded, RouterEvent

RING_POINTS = 128  # points of each replica on the ring of consistent hashing
LEAST_MATCH = 10  # percent of a prompt below which Ray's router does not follow the prefix


class Router(Protocol):
    """Takes events, and decides about requests."""

    def advance(self, event: RouterEvent) -> RouteDecision | None:
        """Take one event. Return the decision about a request; None for other events, and if there is no replica."""
        ...


def draw_number(name: str) -> int:
    """Return 64 bits that look random and are always the same for one name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


@define(eq=False)
class CountingRouter:
    """A router that knows how many of its requests are open at each replica. Subclasses choose among the names."""

    requests: dict[str, int] = field(factory=dict[str, int])  # open ones by replica
    open: dict[int, str] = field(factory=dict[int, str])

    def advance(self, event: RouterEvent) -> RouteDecision | None:
        match event:
            case RequestArrived(query):
                return self._route(query)
            case RequestEnded(number):
                replica = self.open.pop(number, "")
                if replica in self.requests:
                    self.requests[replica] -= 1
            case ReplicaAdded(name):
                self.requests.setdefault(name, 0)
            case ReplicaRemoved(name):
                self.requests.pop(name, None)
            case _:
                pass
        return None

    @abstractmethod
    def choose(self, query: RouteQuery) -> str:
        """Return the name of the replica that gets the request."""

    def _route(self, query: RouteQuery) -> RouteDecision | None:
        if not self.requests:
            return None
        name = self.choose(query)
        decision = RouteDecision(name, "least_wait", NOTHING, 0, 0, self.requests[name], 0)
        self.requests[name] += 1
        self.open[query.number] = name
        return decision


@define(eq=False)
class RoundRobin(CountingRouter):
    """Takes the replicas in turn."""

    def choose(self, query: RouteQuery) -> str:
        return list(self.requests)[query.number % len(self.requests)]


@define(eq=False)
class LeastQueue(CountingRouter):
    """Takes the replica with the fewest open requests. Among equals one is drawn."""

    def choose(self, query: RouteQuery) -> str:
        least = min(self.requests.values())
        names = [name for name, count in self.requests.items() if count == least]
        return names[draw_number(f"least {query.number}") % len(names)]


@define(eq=False)
class PowerOfTwo(CountingRouter):
    """Draws two replicas and takes the one with fewer open requests. This is what Ray Serve does by default."""

    def choose(self, query: RouteQuery) -> str:
        return self.choose_of_two(query, list(self.requests))

    def choose_of_two(self, query: RouteQuery, names: Sequence[str]) -> str:
        """Return the one of two drawn replicas that has fewer open requests."""
        first = draw_number(f"first {query.number}") % len(names)
        second = draw_number(f"second {query.number}") % max(1, len(names) - 1)
        second += second >= first and len(names) > 1
        return min(names[first], names[second], key=lambda name: self.requests[name])


@define(eq=False)
class ConsistentHash(CountingRouter):
    """Sends a conversation to the replica whose point follows the conversation's on a ring of hashes."""

    ring: list[tuple[int, str]] = field(factory=list[tuple[int, str]])

    def advance(self, event: RouterEvent) -> RouteDecision | None:
        decision = CountingRouter.advance(self, event)
        if isinstance(event, ReplicaAdded | ReplicaRemoved):
            self.ring = sorted(
                (draw_number(f"{name} {point}"), name) for name in self.requests for point in range(RING_POINTS)
            )
        return decision

    def choose(self, query: RouteQuery) -> str:
        index = bisect_right(self.ring, (draw_number(query.session or f"request {query.number}"), ""))
        return self.ring[index % len(self.ring)][1]


@define(eq=False)
class RayPrefixAffinity(PowerOfTwo):
    """The rule of Ray Serve's `PrefixCacheAffinityRouter`, on block keys instead of characters.

    The replicas that were sent the longest prefix of the prompt before are candidates. If less than a tenth of the
    prompt matches, they are those that were sent the fewest tokens. The candidate with the fewest open requests gets
    it. Where queues differ by more than `imbalanced`, the power of two choices decides. By default they never do, as in
    Ray. The tree of prefixes forgets nothing, as in Ray's default.
    """

    imbalanced: float = float("inf")
    tree: dict[bytes, set[str]] = field(factory=dict[bytes, "set[str]"])
    sent: dict[str, int] = field(factory=dict[str, int])  # tokens by replica

    def choose(self, query: RouteQuery) -> str:
        """Return the replica, and note in the tree that it is sent the blocks of this prompt."""
        name = self._follow_prefix(query)
        before = 0
        for key, stop in zip(query.keys, query.stops, strict=True):
            holders = self.tree.setdefault(key, set())
            if name not in holders:
                self.sent[name] = self.sent.get(name, 0) + stop - before
                holders.add(name)
            before = stop
        return name

    def _follow_prefix(self, query: RouteQuery) -> str:
        names = list(self.requests)
        if max(self.requests.values()) - min(self.requests.values()) > self.imbalanced:
            return self.choose_of_two(query, names)
        matched = 0
        holders = set[str]()
        for key, stop in zip(query.keys, query.stops, strict=True):
            here = self.tree.get(key, set()) & self.requests.keys()
            if not here:
                break
            matched = stop
            holders = here
        if 100 * matched < LEAST_MATCH * query.tokens:
            fewest = min(self.sent.get(name, 0) for name in names)
            holders = {name for name in names if self.sent.get(name, 0) == fewest}
        return min(sorted(holders), key=lambda name: self.requests[name])
