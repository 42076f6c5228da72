"""The choice of the replica for one request.

Problem. A request is answered soonest where its prompt is already there, and where few others wait. These aims
contradict each other: a conversation's replica may be busy, and a system prompt that everybody shares would draw all
new conversations to one replica.

Idea. `choose_replica` estimates a cost for each replica, in nanoseconds: the wait of its queue, and the time to load
and compute what is missing of the prompt there (`route_prices.py`). The latter counts `Policy.work_weight` times,
because it also delays the requests that come to that replica later. These rules apply:

1. A replica that has far more open requests than the average (`Fleet.limit`) is left out. So no prefix, however long,
   makes one queue grow while others are empty.
2. A conversation stays at its home, where its last request went, unless another replica is cheaper by a margin
   (STAY_SHARE and STAY_NS). Moving it costs time again at later turns.
3. A conversation without a home counts what it will meet there later: each conversation that lives at a replica adds
   `Policy.neighbour_ns`. So new conversations are spread, and a hot system prompt with them.
4. Otherwise the cheapest replica wins, then the one with fewer open requests, then the one with the smaller number.
5. A prompt without a name and without a whole block will never be found again, so it counts no conversations. Of the
   replicas that are nearly as cheap as the cheapest one (NEAR_SHARE and NEAR_NS), it goes to the one with the fewest
   open requests. Costs know nothing of the answers that a replica is giving, and the rates of equal machines differ a
   little: without this rule, short prompts that come together would all go to the replica with the best rates.

Example. Of 16 replicas, all but replica 3 are idle. A prompt of 80,000 tokens is on the disk of replica 3: it takes 5 s
to load there, and 12 s to compute elsewhere. A request with this prompt and no home goes to replica 3 while the queue
there takes less than 35 s = `work_weight` 5 x (12 s - 5 s), if equally many conversations live everywhere (rule 3).

What is known may be stale. Then the replica finds less than was expected and computes it: no decision here can make a
request fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from attrs import evolve, field, frozen

from states.routing.digests import LoadReport
from states.routing.fleet_view import NOTHING, FleetView, KnownReplica, ReplicaGroup, list_numbers

Reason: TypeAlias = Literal["prefix", "least_wait", "home", "home_overloaded", "home_slower", "only_one", "new_session"]

# A home is left if another replica is cheaper by this share of the home's cost (in percent), and by this much.
STAY_SHARE = 50
STAY_NS = 50_000_000
# A replica is nearly as cheap if it costs no more than this share of its own cost more (in percent), or than this much.
NEAR_SHARE = 20
NEAR_NS = 50_000_000
RANK_UNIT = 1 << 16  # open requests of a replica are fewer
EXCLUDED = 1 << 100  # ranks last


@frozen
class Policy:
    """The settings of a router.

    excess, extra_requests: a replica with `limit` open requests gets no more: limit = excess % of the average +
    extra_requests.
    work_weight: how often the time to load and compute a prompt counts. neighbour_ns: what one more conversation at a
    replica counts for a new one. remote_prefill_min_tokens: another replica may compute a prompt that lacks at least so
    many tokens at the one that answers (`remote_prefill.py`); 0: no other replica ever does.
    """

    excess: int = 125
    extra_requests: int = 4
    work_weight: int = 5
    neighbour_ns: int = 500_000_000
    remote_prefill_min_tokens: int = 0


@frozen
class RouteQuery:
    """One request.

    number: of the request; it is never used twice. keys: of the whole blocks that may be reused, in order. stops: for
    each key, the tokens up to the end of its block. tokens: of the whole prompt. session: the conversation; "": none.
    avoid: replicas that are chosen only if there is no other one.
    """

    number: int
    keys: Sequence[bytes] = field(repr=False)
    stops: Sequence[int] = field(repr=False)
    tokens: int
    session: str = ""
    avoid: frozenset[str] = frozenset()


@frozen
class SessionHome:
    """The replica of a conversation's last request. keys: of that prompt.

    valid_until: the number of the replica's digest that will say whether it holds them.
    """

    replica: str
    epoch: int
    valid_until: int
    keys: Sequence[bytes] = field(repr=False)


@frozen
class ReplicaLoads:
    """The load of each replica, by its number. Entries of unused numbers are meaningless.

    free_at: the time when its queue has been computed. sessions: the conversations that live there.
    """

    requests: Sequence[int]
    free_at: Sequence[int]
    sessions: Sequence[int]
    total: int  # open requests of all replicas


@frozen
class RemotePrefill:
    """Another replica reads the prompt first and leaves its rows in the shared tier (`remote_prefill.py`).

    replica: the one that computes the prompt's rows. held: tokens of the prompt that the answering replica has without
    them. published_ns: nanoseconds from the decision until all rows are in the shared tier. load_ns: nanoseconds from
    then until the answering replica has loaded them.
    """

    replica: str
    held: int
    published_ns: int
    load_ns: int


@frozen
class RouteDecision:
    """The replica that gets a request, and why.

    held: tokens by tier (device, host, disk, shared), as far as it and those before it have everything.
    prefill: where another replica reads the prompt first.
    """

    replica: str
    reason: Reason
    held: tuple[int, ...]
    wait_ns: int
    ready_ns: int
    requests: int  # open requests there before this one
    limit: int  # open requests from which on a replica was left out
    home: str = ""
    prefill: RemotePrefill | None = None

    @property
    def work_ns(self) -> int:
        """The time that the replica itself works until the prompt is there."""
        return self.ready_ns if self.prefill is None else self.prefill.load_ns


@frozen
class Candidate:
    """The best replica among those that hold the same and are equally quick.

    wait_ns: until the requests that it has are served. ready_ns: from then until the prompt is there.
    """

    cost_ns: int
    requests: int
    number: int
    wait_ns: int
    ready_ns: int
    blocks: tuple[int, ...]


@frozen
class Fleet:
    """The input of a decision: what replicas hold, how busy they are, the time, and the router's settings."""

    view: FleetView
    loads: ReplicaLoads
    now_ns: int
    policy: Policy

    @property
    def limit(self) -> int:
        """The open requests with which a replica gets no more: above the average, this one included."""
        policy = self.policy
        return policy.excess * (self.loads.total + 1) // (100 * len(self.view.replicas)) + policy.extra_requests


def choose_replica(fleet: Fleet, query: RouteQuery, home: SessionHome | None) -> RouteDecision | None:
    """Choose the replica of a request; None: there is none. The module's docstring has the rules."""
    view = fleet.view
    count = len(view.replicas)
    if not count:
        return None
    at_home = None if home is None or home.replica in query.avoid else view.replicas.get(home.replica)
    groups = view.find_groups(query.keys)
    if home is not None and at_home is not None:
        groups = separate_home(groups, at_home, count_home_blocks(at_home, home, query.keys))
    unwanted = sum(1 << view.replicas[name].number for name in query.avoid & view.replicas.keys())
    if unwanted and unwanted != view.everyone:
        groups = [ReplicaGroup(group.mask & ~unwanted, group.blocks) for group in groups]
    can_return = bool(query.keys or query.session)
    placing = fleet.policy.neighbour_ns if at_home is None and can_return else 0
    ranks = rank_replicas(fleet, placing)
    candidates = [found for group in groups for found in rank_group(fleet, query, group, ranks, placing)]
    best = min(candidates, key=candidate_order, default=None)
    stay = next(
        (candidate for candidate in candidates if at_home is not None and candidate.number == at_home.number), None
    )
    if best is None:
        # All that are left after those to be avoided are at the limit.
        return choose_replica(evolve(fleet, policy=evolve(fleet.policy, extra_requests=1 << 30)), query, home)
    if not can_return:
        best = find_least_busy(best, candidates)
    chosen = best
    reason = explain_choice(best, at_home, stay, count)
    if stay is not None and reason == "home_slower" and not is_much_cheaper(best, stay, STAY_SHARE, STAY_NS):
        chosen = stay
        reason = "home"
    return describe_choice(fleet, chosen, reason, query, "" if home is None else home.replica)


def count_home_blocks(replica: KnownReplica, home: SessionHome, keys: Sequence[bytes]) -> int:
    """Count the blocks of a prompt that its home holds as far as the router itself knows: it sent a prompt there.

    That counts until the replica's own digests say what it has kept of it.
    """
    if replica.reader.epoch != home.epoch or replica.reader.number > home.valid_until:
        return 0
    low = 0
    high = min(len(keys), len(home.keys))
    # Each key stands for everything before it, so equal keys at one index mean equal keys at all earlier indices.
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == home.keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def separate_home(groups: Sequence[ReplicaGroup], home: KnownReplica, presumed: int) -> list[ReplicaGroup]:
    """Return the groups with the home in one of its own, which holds at least the presumed blocks on the device."""
    bit = 1 << home.number
    separated = list[ReplicaGroup]()
    for group in groups:
        if group.mask & bit:
            separated.append(ReplicaGroup(bit, tuple(max(presumed, blocks) for blocks in group.blocks)))
        if group.mask & ~bit:
            separated.append(ReplicaGroup(group.mask & ~bit, group.blocks))
    return separated


def rank_replicas(fleet: Fleet, placing: int) -> list[int]:
    """Return a number for each replica, by which those that hold the same are ordered: the least comes first.

    It is the wait in nanoseconds, with what its conversations count, and below that its open requests. Replicas at the
    limit get EXCLUDED. placing: what each conversation at a replica counts.
    """
    loads = fleet.loads
    now_ns = fleet.now_ns
    ranks = [
        ((free - now_ns if free > now_ns else 0) + placing * sessions) * RANK_UNIT + requests
        for free, sessions, requests in zip(loads.free_at, loads.sessions, loads.requests, strict=True)
    ]
    limit = fleet.limit
    for number, requests in enumerate(loads.requests):
        if requests >= limit:
            ranks[number] = EXCLUDED
        elif requests:
            replica = fleet.view.by_number[number]
            if replica is not None and requests >= replica.load.slots:
                ranks[number] += estimate_slot_wait(replica.load, requests) * RANK_UNIT
    return ranks


def rank_group(
    fleet: Fleet, query: RouteQuery, group: ReplicaGroup, ranks: Sequence[int], placing: int
) -> list[Candidate]:
    """Return the best replica of a group, one for each set of prices in it. ranks: of all replicas."""
    ends = tuple(query.stops[blocks - 1] if blocks else 0 for blocks in group.blocks)
    found = list[Candidate]()
    for prices, mask in fleet.view.price_groups:
        numbers = list_numbers(group.mask & mask)
        if not numbers:
            continue
        number = min(numbers, key=ranks.__getitem__)
        if ranks[number] == EXCLUDED:
            continue
        cost = ranks[number] // RANK_UNIT
        wait = cost - placing * fleet.loads.sessions[number]
        ready = prices.estimate_ready_time(ends, query.tokens)
        cost += fleet.policy.work_weight * ready
        found.append(Candidate(cost, fleet.loads.requests[number], number, wait, ready, group.blocks))
    return found


def estimate_slot_wait(load: LoadReport, open_requests: int) -> int:
    """Return the nanoseconds until a slot is free, where all of them are taken."""
    return load.answer_ns * (open_requests - load.slots + 1) // load.slots


def candidate_order(candidate: Candidate) -> tuple[int, int, int]:
    """Return the key by which candidates are compared: the least is the best."""
    return candidate.cost_ns, candidate.requests, candidate.number


def find_least_busy(best: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest open requests among those that are nearly as cheap as the best one."""
    return min(
        (candidate for candidate in candidates if not is_much_cheaper(best, candidate, NEAR_SHARE, NEAR_NS)),
        key=lambda candidate: (candidate.requests, candidate_order(candidate)),
    )


def explain_choice(best: Candidate, home: KnownReplica | None, stay: Candidate | None, count: int) -> Reason:
    """Return why the best candidate is chosen, before a conversation's wish to stay is considered."""
    if count == 1:
        return "only_one"
    if home is None:
        return "prefix" if best.blocks != NOTHING else "new_session"
    if best.number == home.number:
        return "home"
    return "home_overloaded" if stay is None else "home_slower"


def is_much_cheaper(cheap: Candidate, dear: Candidate, share: int, margin_ns: int) -> bool:
    """Is a replica cheaper than another one by both margins? share: of the other one's cost, in percent."""
    gain = dear.cost_ns - cheap.cost_ns
    return gain > margin_ns and 100 * gain > share * dear.cost_ns


def describe_choice(fleet: Fleet, chosen: Candidate, reason: Reason, query: RouteQuery, home: str) -> RouteDecision:
    """Return the decision for a candidate. home: the conversation's replica so far, or ""."""
    replica = fleet.view.by_number[chosen.number]
    assert replica is not None
    held = tuple(query.stops[blocks - 1] if blocks else 0 for blocks in chosen.blocks)
    return RouteDecision(
        replica.name, reason, held, chosen.wait_ns, chosen.ready_ns, chosen.requests, fleet.limit, home
    )
