"""The router by prefix as Ray Serve calls it. All that is known of Serve's interface for routers is in this module.

Serve makes one `PrefixRequestRouter` in each process that holds a handle of the replicas, that is in each ingress. It
calls `choose_replicas` for each call of the handle, with what the caller has given (`route_keys.py`), and
`update_replicas` when replicas come, go or have new routing stats. The decision is
`states/routing/choose_replica.py`'s. The ingress finds the router in this process (`router_slot.py`) and
asks it directly (`choose_offered`): a call of the handle takes as long again as the decision.

The interface is alpha, so the version of Ray is pinned (2.60.0, the extra `fleet`). Where it changes, this module and
`replica_picker.py` are to be read again, and `tests/engine/fleet/router/test_prefix_router.py` tells whether they still
fit.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from engine.fleet.digests import STATS_KEY, read_routing_stats
from engine.fleet.router.route_keys import RouteKeys, RouteRequest
from engine.fleet.router.router_slot import note_router
from engine.fleet.router.routing_trace import TracedRouter
from states.routing.choose_replica import Policy, RouteDecision, RouteQuery
from states.routing.prefix_router import (
    DigestArrived,
    PrefixRouter,
    ReplicaAdded,
    ReplicaRemoved,
    RequestArrived,
    RequestEnded,
    RequestsCounted,
)

log = logging.getLogger("rekindle.fleet")
ROUTER_PATH = "engine.fleet.router.prefix_router:PrefixRequestRouter"


class PrefixRequestRouter(RequestRouter):
    """Chooses the replica that will have the prompt first.

    Replicas that Serve does not offer, and a failure here, cost speed only: the other replicas follow in the answer.
    """

    def initialize_state(self, trace_folder: str = "", remote_prefill_min_tokens: int = 0) -> None:
        """Make the router. Called by Ray Serve once, with what `request_router_kwargs` has.

        trace_folder: where the router of each process writes its trace (`routing_trace.py`); "": nowhere.
        remote_prefill_min_tokens: as in `Policy`.
        """
        policy = Policy(remote_prefill_min_tokens=remote_prefill_min_tokens)
        self.router: PrefixRouter | TracedRouter = PrefixRouter(policy)
        if trace_folder:
            self.router = open_traced_router(Path(trace_folder), self.router)
        self.asked = 0
        self.seen: dict[str, bytes] = {}  # replica -> the message that was read last
        self.offered: dict[str, RunningReplica] = {}  # what Serve has named last
        note_router(self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, and what they tell. Called by Ray Serve at each change."""
        super().update_replicas(replicas)
        self.offered = {get_name(replica): replica for replica in replicas}
        for name in self.seen.keys() - self.offered.keys():
            self.router.advance(ReplicaRemoved(name))
            del self.seen[name]
        for name, replica in self.offered.items():
            self.read_digests(name, replica.routing_stats)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Offer a replica no more. Called by Ray Serve where a call of its actor has failed."""
        super().on_replica_actor_died(replica_id)
        self.offered.pop(str(replica_id.unique_id), None)

    def choose_offered(self, request: RouteRequest) -> tuple[RouteDecision, Mapping[str, Any]] | None:
        """Choose among the replicas that Serve has named last. `LocalRouter` has the details."""
        decision = self.decide(request, self.offered.keys())
        chosen = None if decision is None else self.offered.get(decision.replica)
        return None if decision is None or chosen is None else (decision, chosen.replica_metadata)

    def read_digests(self, name: str, stats: Mapping[str, Any]) -> None:
        """Take in what a replica tells, unless it is the same as before."""
        if name not in self.seen:
            self.seen[name] = b""
            self.router.advance(ReplicaAdded(name))
        message = stats.get(STATS_KEY, b"")
        if message == self.seen[name]:
            return
        self.seen[name] = message
        now = time.monotonic_ns()
        for digest in read_routing_stats(stats):
            self.router.advance(DigestArrived(name, digest, now))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others. Called by Ray Serve for each request."""
        if not candidate_replicas:
            return []
        by_name = {get_name(replica): replica for replica in candidate_replicas}
        for name, replica in by_name.items():
            self.read_digests(name, replica.routing_stats)
        given = {} if pending_request is None else pending_request.kwargs
        decision = self.decide(RouteRequest.from_call(given), by_name.keys())
        if decision is not None and (on_decision := given.get("on_decision")) is not None:
            on_decision(decision)
        if decision is None or decision.replica not in by_name:
            return [list(candidate_replicas)]
        chosen = by_name.pop(decision.replica)
        return [[chosen], list(by_name.values())] if by_name else [[chosen]]

    def decide(self, request: RouteRequest, offered: Set[str]) -> RouteDecision | None:
        """Return the decision. offered: names of the replicas to choose from."""
        self.asked += 1
        self.router.advance(RequestsCounted(dict(request.in_flight)))
        query = build_query(self.asked, request.route, request.avoid | (self.seen.keys() - offered))
        decision = self.router.advance(RequestArrived(query, time.monotonic_ns()))
        # The caller counts its open requests itself, and tells them with the next one.
        self.router.advance(RequestEnded(self.asked))
        log.debug("request %d: %s", self.asked, decision)
        return decision


def open_traced_router(folder: Path, router: PrefixRouter) -> TracedRouter:
    """Return the router with a trace of its own in the folder. Lines are written as they come. Raises OSError."""
    path = folder / f"router-{os.getpid()}-{time.time_ns()}.jsonl"
    return TracedRouter(router, path.open("w", encoding="utf-8", buffering=1))


def get_name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)


def build_query(number: int, route: RouteKeys | None, avoid: frozenset[str]) -> RouteQuery:
    """Return what the router is asked. route: None if the prompt could not be read."""
    if route is None:
        return RouteQuery(number, (), (), 1, avoid=avoid)
    # The last token of a prompt is always computed.
    usable = max(0, route.tokens - 1) // route.block_size
    keys = route.keys[:usable]
    stops = range(route.block_size, route.block_size * len(keys) + 1, route.block_size)
    # A name of one caller is no name of another's conversation.
    session = f"{route.salt}\0{route.session}" if route.session else ""
    return RouteQuery(number, keys, stops, route.tokens, session, avoid)
