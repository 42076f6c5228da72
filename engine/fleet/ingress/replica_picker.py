"""Asks Ray Serve's router for a replica, and for all of them. Only this module and the router know Serve's handles.

A choice asks the router in this process (`RouterSlot`), and the handle only while that has no replica. Answers do not
pass through Serve's calls: the ingress sends a request to the HTTP server of the replica itself. A call of an actor
took 3 ms on two cores of an AMD EPYC, and reserving a place for it took 4 ms. So a choice reserves nothing, and the
router gets how many requests of this ingress each replica is answering.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
from attrs import define, field, frozen
from ray.serve.exceptions import DeploymentUnavailableError

from engine.fleet.replica_facts import ReplicaFacts
from engine.fleet.router.route_keys import RouteKeys, RouteRequest
from engine.fleet.router.router_slot import RouterSlot
from states.routing.choose_replica import RemotePrefill, RouteDecision

log = logging.getLogger("rekindle.fleet")
DRAWS = 16  # choices that are made to find a replica besides those to avoid, with a router that ignores these
LISTED_S = 1.0  # for so long a list of all replicas is good
LIST_TIMEOUT_S = 5.0
SHUNNED_S = 3.0  # for so long a replica that could not be reached is avoided: Serve has noticed by then
MOST_KNOWN = 4096  # replicas whose facts are remembered


@frozen
class Replica:
    """A replica: its id in Ray Serve, and its facts."""

    id: str
    facts: ReplicaFacts


@frozen
class ReplicaChoice:
    """The replica that gets a request. prefill: where another replica reads the prompt first."""

    replica: Replica
    prefill: RemotePrefill | None = None


@define(eq=False)
class ReplicaPicker:
    """Picks replicas. handle: a handle of the replicas' deployment. routers: where its router is, once it was made."""

    handle: Any
    routers: RouterSlot = field(factory=RouterSlot)
    in_flight: Counter[str] = field(factory=Counter)  # requests of this ingress, by replica
    newest: Replica | None = field(default=None, init=False)  # the replica that was seen for the first time last
    _known: dict[str, Replica] = field(factory=dict, init=False)
    _shunned: dict[str, float] = field(factory=dict, init=False)  # until when, on the monotonic clock
    _listed: tuple[float, tuple[Replica, ...]] = field(default=(0.0, ()), init=False)

    async def find_any(self) -> Replica:
        """Return any replica. Waits while there is none."""
        return (await self.choose(None)).replica

    async def choose(self, route: RouteKeys | None, avoid: frozenset[str] = frozenset()) -> ReplicaChoice:
        """Return what the router chooses. Waits while there is no replica.

        avoid: replicas that have failed this request. One of them is returned only if the router finds no other.
        """
        now = time.monotonic()
        self._shunned = {replica: until for replica, until in self._shunned.items() if until > now}
        unwanted = avoid | self._shunned.keys()
        for _ in range(DRAWS):
            found = await self._draw(route, frozenset(unwanted))
            if found.replica.id not in unwanted:
                break
        return found

    async def _draw(self, route: RouteKeys | None, avoid: frozenset[str]) -> ReplicaChoice:
        """Return the router's choice. Waits while there is no replica, and while none can be started."""
        request = RouteRequest(route, self.in_flight, avoid)
        while True:
            if (found := self._ask_router(request)) is not None:
                return found
            decisions = list[RouteDecision]()
            choice = self.handle.choose_replica(
                route=route, in_flight=self.in_flight, avoid=avoid, on_decision=decisions.append, _reserve=False
            )
            try:
                async with choice as selection:
                    replica = self._remember(selection.replica_id, selection.replica_metadata)
                    # Serve may take another replica than the router has put first.
                    followed = decisions and decisions[-1].replica == replica.id
                    return ReplicaChoice(replica, decisions[-1].prefill if followed else None)
            except DeploymentUnavailableError:
                await anyio.sleep(LISTED_S)

    def _ask_router(self, request: RouteRequest) -> ReplicaChoice | None:
        """Return the choice of the router itself. None: it has no replica, or Serve has not made it yet."""
        router = self.routers.router
        if router is None or (found := router.choose_offered(request)) is None:
            return None
        decision, metadata = found
        return ReplicaChoice(self._remember(decision.replica, metadata), decision.prefill)

    def find(self, replica: str) -> Replica | None:
        """Return a replica that was seen before."""
        return self._known.get(replica)

    def shun(self, replica: str) -> None:
        """Avoid a replica for a while, because it could not be reached."""
        self._shunned[replica] = time.monotonic() + SHUNNED_S

    @contextmanager
    def count_request(self, replica: str) -> Iterator[None]:
        """Count a request of a replica for as long as the block runs."""
        self.in_flight[replica] += 1
        try:
            yield
        finally:
            self.in_flight[replica] -= 1
            if not self.in_flight[replica]:
                del self.in_flight[replica]

    async def list_replicas(self) -> tuple[Replica, ...]:
        """Return all replicas that answer. Asks them at most once a second."""
        read_at, listed = self._listed
        if not listed or time.monotonic() - read_at >= LISTED_S:
            asked = self.handle.broadcast("describe")
            try:
                answers = await asked.results_async(timeout_s=LIST_TIMEOUT_S, return_exceptions=True)
                listed = tuple(self._remember(*answer) for answer in answers if isinstance(answer, tuple))
            except DeploymentUnavailableError:
                listed = ()
            except TimeoutError:
                log.warning("not all replicas have answered within %g s", LIST_TIMEOUT_S)
            self._listed = (time.monotonic(), tuple(sorted(listed, key=lambda replica: replica.id)))
        return self._listed[1]

    def _remember(self, replica: str, metadata: Mapping[str, Any]) -> Replica:
        if replica not in self._known:
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[replica] = self.newest = Replica(replica, ReplicaFacts.from_metadata(metadata))
        return self._known[replica]
