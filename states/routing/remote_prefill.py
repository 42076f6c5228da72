"""Lets an idle replica read a long prompt for the one that answers it: prefill elsewhere.

To read a prompt means to have all of its rows: those that a replica lacks are loaded or computed.

Problem. A conversation stays at its home, which has most of its prompt. If much of the new prompt is missing there,
reading it delays all answers that the home is giving.

Idea. With a shared tier, an idle replica can read the prompt and publish its rows. The home then loads them, which
takes its time for moving bytes only. The detour is chosen where it takes less time than reading at home costs all
requests there: each open request of the home is delayed by as much as the new one.

Example. Prompts are read at 20 us a token, and a token's rows move in 2 us. The home lacks 10,000 tokens and has 3 open
requests, so reading there costs 4 x 200 ms. The detour takes 200 ms to read, 20 ms to publish and 20 ms to load.
"""

from __future__ import annotations

from attrs import evolve, frozen

from states.routing.choose_replica import Fleet, RemotePrefill, RouteDecision, RouteQuery
from states.routing.fleet_view import KnownReplica, list_numbers
from states.routing.route_prices import SHARED_TIER


@frozen
class Reader:
    """A replica that could read a prompt for another one.

    prompt_ns: nanoseconds that it would take to have all rows of the prompt in its own memory.
    """

    replica: KnownReplica
    prompt_ns: int


def add_remote_prefill(fleet: Fleet, query: RouteQuery, decision: RouteDecision) -> RouteDecision:
    """Return the decision, with the replica that reads the prompt first if that costs less.

    Publishing rows is taken to be as slow as loading them.
    """
    target = fleet.view.replicas[decision.replica]
    held = max(decision.held)
    missing = query.tokens - held
    load_ns = missing * target.prices.loads.get(SHARED_TIER, 0)
    if missing < fleet.policy.remote_prefill_min_tokens or not load_ns:
        return decision
    reader = find_quickest_reader(fleet, query, target)
    if reader is None:
        return decision
    published_ns = reader.prompt_ns + load_ns
    home_cost_ns = decision.wait_ns + decision.ready_ns * (1 + decision.requests)
    if published_ns + load_ns >= home_cost_ns:
        return decision
    remote = RemotePrefill(reader.replica.name, held, published_ns, load_ns)
    return evolve(decision, prefill=remote, ready_ns=max(0, published_ns + load_ns - decision.wait_ns))


def find_quickest_reader(fleet: Fleet, query: RouteQuery, target: KnownReplica) -> Reader | None:
    """Return the idle replica that would have the whole prompt first; None if no other replica is idle.

    Of equally quick ones, the number of the request decides, so that the work is spread.
    """
    view = fleet.view
    readers = list[Reader]()
    for group in view.find_groups(query.keys):
        ends = tuple(query.stops[blocks - 1] if blocks else 0 for blocks in group.blocks)
        for number in list_numbers(group.mask & ~(1 << target.number)):
            replica = view.by_number[number]
            if replica is not None and replica.name not in query.avoid and is_idle(fleet, number):
                readers.append(Reader(replica, replica.prices.estimate_ready_time(ends, query.tokens)))
    count = len(view.by_number)
    return min(
        readers, key=lambda reader: (reader.prompt_ns, (reader.replica.number - query.number) % count), default=None
    )


def is_idle(fleet: Fleet, number: int) -> bool:
    """Return whether a replica has no open request, as far as the router knows, and computes no prompt."""
    return not fleet.loads.requests[number] and fleet.loads.free_at[number] <= fleet.now_ns
