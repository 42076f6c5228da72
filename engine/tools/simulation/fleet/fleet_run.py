"""Simulates one router: conversations begin, each request goes to a replica, and replicas tell what they hold.

Digests take `DIGEST_NS` from the change to the router. So what a router by prefix knows is as stale as in a real fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

from attrs import define, evolve, field, frozen

from adapters.store.block_index import BlockIndex
from effects.ids import Tier
from engine.tools.simulation.fleet.fleet_tally import FleetFigures, FleetRequest, InfinitePaths, compute_figures
from engine.tools.simulation.fleet.lean_replica import LeanReplica, RoutedRequest
from engine.tools.simulation.fleet.prompt_paths import PieceChain
from engine.tools.simulation.fleet.replica_store import ReplicaStore, SharedStore
from engine.tools.simulation.logged_clients import Sender
from engine.tools.simulation.logs.logged_requests import Request, Session
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.virtual_clock import Clock
from states.routing.choose_replica import Policy, RouteDecision, RouteQuery
from states.routing.digests import DigestWriter
from states.routing.other_routers import (
    ConsistentHash,
    LeastQueue,
    PowerOfTwo,
    RayPrefixAffinity,
    RoundRobin,
    Router,
)
from states.routing.prefix_router import (
    DigestArrived,
    PrefillEnded,
    PrefixRouter,
    ReplicaAdded,
    RequestArrived,
    RequestEnded,
)
from states.settings import Settings

DIGEST_NS = 2_000_000_000
PREFIX = "prefix"
OTHER_ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-queue": LeastQueue,
    "power-of-two": PowerOfTwo,
    "consistent-hash": ConsistentHash,
    "ray-prefix": RayPrefixAffinity,
}


def make_router(name: str, policy: Policy) -> Router:
    """Return a router by its name. policy: of the one by prefix."""
    return PrefixRouter(policy) if name == PREFIX else OTHER_ROUTERS[name]()


@frozen
class FleetSetup:
    """The part of a simulation that is the same for every router. Budgets are bytes; shared_budget = 0: no shared tier.

    arrivals_ns: the time in which all conversations begin. remote_prefill_min_tokens: as in `Policy`.
    """

    settings: Settings
    costs: Costs
    replicas: int
    conversations: int
    arrivals_ns: int
    host_budget: int
    disk_budget: int
    shared_budget: int = 0
    remote_prefill_min_tokens: int = 0
    seed: int = 0


@define(eq=False)
class FleetRun:
    """One router before its replicas."""

    setup: FleetSetup
    sessions: Sequence[Session]
    chains: Mapping[int, PieceChain]
    name: str
    on_answered: Callable[[], None] = lambda: None  # called when a request has been answered
    clock: Clock = field(factory=Clock)
    router: Router = field(init=False)
    replicas: list[LeanReplica] = field(init=False)
    shared: SharedStore | None = field(init=False)
    decisions: list[RouteDecision] = field(factory=list[RouteDecision])
    requests: list[FleetRequest] = field(factory=list[FleetRequest])
    _writers: list[DigestWriter] = field(init=False)
    _telling: set[int] = field(factory=set[int])  # replicas whose digest is on its way
    _infinite: InfinitePaths = field(factory=InfinitePaths)
    _sent: int = 0
    _last: dict[int, str] = field(factory=dict[int, str])  # conversation -> the replica of its last request
    _counts: dict[str, int] = field(
        factory=lambda: {"longest_queue": 0, "moves": 0, "read_elsewhere": 0, "read_bytes": 0, "written_bytes": 0}
    )

    def __attrs_post_init__(self) -> None:
        setup = self.setup
        self.router = make_router(self.name, Policy(remote_prefill_min_tokens=setup.remote_prefill_min_tokens))
        self.shared = SharedStore(self._create_index(setup.shared_budget)) if setup.shared_budget else None
        self._writers = [DigestWriter(1, whole_every=1 << 30) for _ in range(setup.replicas)]
        self.replicas = [self._create_replica(number) for number in range(setup.replicas)]
        for number in range(setup.replicas):
            self.router.advance(ReplicaAdded(str(number)))
            self._plan_digest(number)

    def _create_index(self, budget: int) -> BlockIndex:
        return BlockIndex(budget, self.setup.settings.block_size)

    def _create_replica(self, number: int) -> LeanReplica:
        setup = self.setup
        rates = setup.costs.build_rates(shared=setup.shared_budget > 0)
        host = self._create_index(setup.host_budget)
        disk = self._create_index(setup.disk_budget)
        changed = partial(self._note_change, number)
        store = ReplicaStore(setup.costs, self.clock, host, disk, self.shared, changed)
        settings = evolve(setup.settings, rates=rates)
        return LeanReplica(settings, rates, setup.costs, self.clock, store)

    def run(self) -> FleetFigures:
        """Send every request, and return the figures."""
        random = Random(self.setup.seed)  # noqa: S311 - arrivals that can be repeated
        starts = sorted(random.randrange(max(1, self.setup.arrivals_ns)) for _ in range(self.setup.conversations))
        order = list[Session]()
        for copy, start in enumerate(starts, 1):
            order = order or random.sample(self.sessions, len(self.sessions))
            session = order.pop()
            for agent in session.agents:
                Sender(agent, self.clock, start - session.start_ns, partial(self._send, copy), self.on_answered).next()
        while self.clock.step():
            pass
        assert len(self.requests) == self._sent, "a request that was never answered"
        if self.shared is not None:
            self._counts["read_bytes"] = self.shared.read_bytes
            self._counts["written_bytes"] = self.shared.written_bytes
        return compute_figures(
            self.name, self.requests, [replica.lane.busy_ns for replica in self.replicas], self._counts
        )

    def _send(self, copy: int, request: Request, answered: Callable[[], None]) -> None:
        path = self.chains[id(request)].build_path(copy)
        infinite = self._infinite.count_shared_tokens(path)
        self._sent += 1
        number = self._sent
        usable = path.usable
        query = RouteQuery(number, path.keys[:usable], path.stops[:usable], path.tokens, str(copy))
        decision = self.router.advance(RequestArrived(query, self.clock.now))
        assert decision is not None, "a fleet has replicas"
        self.decisions.append(decision)
        self._counts["moves"] += self._last.get(copy, decision.replica) != decision.replica
        self._last[copy] = decision.replica
        target = self.replicas[int(decision.replica)]
        routed = RoutedRequest(path, self.clock.now)

        def close_request() -> None:
            self._tally(routed, decision, infinite)
            self.router.advance(RequestEnded(number))
            answered()

        routed.on_closed = close_request

        def go_on() -> None:
            self.router.advance(PrefillEnded(number))
            self._submit(target, routed)

        if decision.prefill is not None:
            self._counts["read_elsewhere"] += 1
            prompt = evolve(path, keys=path.keys[:usable], stops=path.stops[:usable])
            reading = RoutedRequest(prompt, self.clock.now, reads_only=True)
            reading.on_closed = go_on
            self._submit(self.replicas[int(decision.prefill.replica)], reading)
        else:
            self._submit(target, routed)

    def _submit(self, replica: LeanReplica, request: RoutedRequest) -> None:
        replica.submit(request)
        self._counts["longest_queue"] = max(self._counts["longest_queue"], replica.open_requests)

    def _tally(self, routed: RoutedRequest, decision: RouteDecision, infinite: int) -> None:
        path = routed.path
        self.requests.append(
            FleetRequest(
                int(decision.replica),
                routed.sent,
                routed.first,
                self.clock.now,
                path.tokens,
                path.answer,
                infinite,
                routed.found,
                routed.restored,
                decision.requests,
            )
        )
        self.on_answered()

    def _note_change(self, number: int, tier: Tier, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Note that a replica holds other blocks than before. It tells so a moment later."""
        if self.name == PREFIX:
            self._writers[number].note_change(tier, added, removed)
            self._plan_digest(number)

    def _plan_digest(self, number: int) -> None:
        if self.name == PREFIX and number not in self._telling:
            self._telling.add(number)
            self.clock.at(self.clock.now + DIGEST_NS, partial(self._tell, number))

    def _tell(self, number: int) -> None:
        self._telling.discard(number)
        replica = self.replicas[number]
        digest = self._writers[number].write(replica.report_load())
        self.router.advance(DigestArrived(str(number), digest, self.clock.now))
