"""The router by prefix: what it knows of its replicas and conversations, and the events that change it.

`advance` takes one event after the other. Everything that a decision depends on is in those events, so a recorded list
of them gives the same decisions again (`replay_routing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import define, evolve, field, frozen

from states.routing.choose_replica import (
    Fleet,
    Policy,
    ReplicaLoads,
    RouteDecision,
    RouteQuery,
    SessionHome,
    choose_replica,
)
from states.routing.digests import ReplicaDigest
from states.routing.fleet_view import FleetView
from states.routing.remote_prefill import add_remote_prefill

SCANNED_KEYS = 256  # last keys of a prompt among which the end of an earlier prompt is looked for
MOST_HOMES = 1 << 16  # conversations that are remembered; the one that was silent longest is forgotten first
# After so many digests a replica has said whether it holds a prompt that was sent there. The first one may have been
# written before the replica had read the prompt. The second one was not.
DIGESTS_UNTIL_KNOWN = 2


@frozen
class ReplicaAdded:
    """A replica has joined the fleet."""

    replica: str


@frozen
class ReplicaRemoved:
    """A replica has left the fleet."""

    replica: str


@frozen
class DigestArrived:
    """A replica has said what it holds, at this time of the router's clock."""

    replica: str
    digest: ReplicaDigest
    now_ns: int


@frozen
class RequestsCounted:
    """The open requests were counted. A replica that is not named has none."""

    counts: Mapping[str, int]


@frozen
class RequestArrived:
    """A request is to be routed, at this time of the router's clock."""

    query: RouteQuery
    now_ns: int


@frozen
class PrefillEnded:
    """The replica that read the prompt of this request for another one has ended, in whatever way."""

    number: int


@frozen
class RequestEnded:
    """The request has ended, and so has everything that was done for it."""

    number: int


RouterEvent: TypeAlias = (
    ReplicaAdded | ReplicaRemoved | DigestArrived | RequestsCounted | RequestArrived | PrefillEnded | RequestEnded
)


@define(eq=False)
class PrefixRouter:
    """A router. Its lists have an entry for each replica, at the index that the replica has in `view` (`number`).

    homes: by conversation, the replica of its last request.
    """

    policy: Policy = field(factory=Policy)
    view: FleetView = field(factory=FleetView)
    homes: dict[str, SessionHome] = field(factory=dict[str, SessionHome])
    _requests: list[int] = field(factory=list[int])  # open requests
    _free_at: list[int] = field(factory=list[int])  # the time at which the queue will have been computed
    _sessions: list[int] = field(factory=list[int])  # conversations whose home it is
    _ends: dict[bytes, str] = field(factory=dict[bytes, str])  # last key of a prompt -> its conversation
    _open: dict[int, str] = field(factory=dict[int, str])  # request -> its replica
    _readers: dict[int, str] = field(factory=dict[int, str])  # request -> the replica that reads its prompt first

    def advance(self, event: RouterEvent) -> RouteDecision | None:
        """Take in an event. Return the decision about a request; None: there is no replica, or it was another event."""
        match event:
            case RequestArrived(query, now_ns):
                return self._route(query, now_ns)
            case PrefillEnded(number):
                self._count_off(self._readers.pop(number, ""))
            case RequestEnded(number):
                self._count_off(self._readers.pop(number, ""))
                self._count_off(self._open.pop(number, ""))
            case DigestArrived(name, digest, now_ns):
                self._apply_digest(name, digest, now_ns)
            case RequestsCounted(counts):
                for name, replica in self.view.replicas.items():
                    self._requests[replica.number] = counts.get(name, 0)
            case ReplicaAdded(name):
                self._add_replica(name)
            case ReplicaRemoved(name):
                self._remove_replica(name)
        return None

    def _add_replica(self, name: str) -> None:
        if name in self.view.replicas:
            return
        number = self.view.add_replica(name).number
        for values in (self._requests, self._free_at, self._sessions):
            values[number : number + 1] = [0]

    def _remove_replica(self, name: str) -> None:
        replica = self.view.replicas.get(name)
        if replica is not None:
            self.view.remove_replica(name)
            self._requests[replica.number] = 0

    def _apply_digest(self, name: str, digest: ReplicaDigest, now_ns: int) -> None:
        replica = self.view.replicas.get(name)
        if replica is None:
            return
        epoch = replica.reader.epoch
        self.view.apply_digest(name, digest)
        if replica.load is digest.load:
            self._free_at[replica.number] = now_ns + digest.load.wait_ns
        if epoch not in {-1, replica.reader.epoch}:
            self._sessions[replica.number] = 0

    def _route(self, query: RouteQuery, now_ns: int) -> RouteDecision | None:
        loads = ReplicaLoads(self._requests, self._free_at, self._sessions, sum(self._requests))
        if not query.session and query.keys:
            query = evolve(query, session=self._name_conversation(query.keys))
        home = self.homes.get(query.session) if query.session else None
        fleet = Fleet(self.view, loads, now_ns, self.policy)
        decision = choose_replica(fleet, query, home)
        if decision is None:
            return None
        if self.policy.remote_prefill_min_tokens:
            decision = add_remote_prefill(fleet, query, decision)
        if decision.prefill is not None:
            self._readers[query.number] = decision.prefill.replica
            self._add_work(decision.prefill.replica, now_ns, decision.prefill.published_ns)
        self._note_decision(query, decision, home, now_ns)
        return decision

    def _add_work(self, name: str, now_ns: int, work_ns: int) -> None:
        """Count an open request of a replica, and the time that its prompt takes there."""
        number = self.view.replicas[name].number
        self._requests[number] += 1
        self._free_at[number] = max(self._free_at[number], now_ns) + work_ns

    def _name_conversation(self, keys: Sequence[bytes]) -> str:
        """Return a name for the conversation of a prompt whose caller has named none.

        A prompt that continues an earlier one gets the name of that one. Any other gets a new name from its last key.
        """
        for key in reversed(keys[-SCANNED_KEYS:]):
            if (name := self._ends.pop(key, None)) is not None:
                break
        else:
            name = f"from {keys[-1].hex()}"
        self._ends[keys[-1]] = name
        if len(self._ends) > MOST_HOMES:
            del self._ends[next(iter(self._ends))]
        return name

    def _note_decision(self, query: RouteQuery, decision: RouteDecision, home: SessionHome | None, now_ns: int) -> None:
        replica = self.view.replicas[decision.replica]
        self._add_work(replica.name, now_ns, decision.work_ns)
        self._open[query.number] = replica.name
        if not query.session:
            return
        if home is not None:
            del self.homes[query.session]
            self._count_session(home.replica, -1)
        reader = replica.reader
        self.homes[query.session] = SessionHome(
            replica.name, reader.epoch, reader.number + DIGESTS_UNTIL_KNOWN - 1, tuple(query.keys)
        )
        self._count_session(replica.name, 1)
        if len(self.homes) > MOST_HOMES:
            oldest = next(iter(self.homes))
            self._count_session(self.homes.pop(oldest).replica, -1)

    def _count_session(self, name: str, change: int) -> None:
        replica = self.view.replicas.get(name)
        if replica is not None:
            self._sessions[replica.number] = max(0, self._sessions[replica.number] + change)

    def _count_off(self, name: str) -> None:
        """Count an open request less, if there is a replica of this name."""
        replica = self.view.replicas.get(name)
        if replica is not None:
            self._requests[replica.number] = max(0, self._requests[replica.number] - 1)


def replay_routing(policy: Policy, events: Iterable[RouterEvent]) -> list[RouteDecision | None]:
    """Return the decisions about the requests among these events, in order."""
    router = PrefixRouter(policy)
    decisions = list[RouteDecision | None]()
    for event in events:
        decision = router.advance(event)
        if isinstance(event, RequestArrived):
            decisions.append(decision)
    return decisions
