"""The choice of the replica that reads a prompt for another one, as tables."""

from __future__ import annotations

import pytest
from attrs import evolve

from states.routing.choose_replica import Policy, RouteDecision, RouteQuery, SessionHome
from states.routing.digests import LoadReport, ReplicaDigest, TierChange
from states.routing.prefix_router import (
    DigestArrived,
    PrefillEnded,
    PrefixRouter,
    RequestArrived,
    RequestEnded,
    RequestsCounted,
)
from tests.states.routing.test_choose_replica import KEYS, MS, RATES, ask, fleet

HOME = SessionHome("a", 1, 9, KEYS[:1])
QUICK = evolve(RATES, loads={"disk": MS // 100, "shared": MS // 100})
BUSY = {"a": 2}


def sharing_fleet(count: int, threshold: int = 100, shared_ns: int = MS // 100, **held: int) -> PrefixRouter:
    """A fleet whose replicas hold so many blocks on their disks. The conversation `s` lives at a."""
    router = fleet(count, Policy(remote_prefill_min_tokens=threshold))
    load = LoadReport(0, 2, 0, evolve(QUICK, loads={**QUICK.loads, "shared": shared_ns}))
    for name in "abcdefgh"[:count]:
        changes = (TierChange("disk", frozenset(KEYS[: held.get(name, 0)])),)
        router.advance(DigestArrived(name, ReplicaDigest(1, 2, True, changes, load), 0))
    return router


def decide(router: PrefixRouter, query: RouteQuery, now_ns: int = 0, **open_requests: int) -> RouteDecision:
    """Return the decision about a prompt of which the home a has the first block. open_requests: counted anew."""
    router.homes["s"] = HOME
    if open_requests:
        router.advance(RequestsCounted(open_requests))
    decision = router.advance(RequestArrived(query, now_ns))
    assert decision is not None
    assert decision.replica == "a"
    return decision


@pytest.mark.parametrize(
    ("threshold", "open_requests", "shared_ns", "elsewhere"),
    [
        (0, 2, MS // 100, False),  # off
        (100, 2, MS // 100, True),
        (900, 2, MS // 100, False),  # too few tokens are missing
        (100, 0, MS // 100, False),  # reading it delays no other request
        (100, 2, MS, False),  # moving the rows takes longer than that
        (100, 2, 0, False),  # there is no shared tier
    ],
)
def test_a_long_prompt_is_read_elsewhere_where_that_is_asked_for_and_costs_less(
    threshold: int, open_requests: int, shared_ns: int, elsewhere: bool
) -> None:
    decision = decide(sharing_fleet(2, threshold, shared_ns), ask(5, "s"), a=open_requests)
    assert (decision.prefill is not None) == elsewhere
    if decision.prefill is not None:
        assert (decision.prefill.replica, decision.prefill.held) == ("b", 64)
        assert decision.work_ns == decision.prefill.load_ns < decision.ready_ns


def test_replicas_that_work_or_are_to_be_avoided_do_not_read() -> None:
    assert decide(sharing_fleet(2), ask(5, "s"), a=2, b=1).prefill is None
    assert decide(sharing_fleet(2), ask(5, "s", avoid=frozenset("b")), a=2).prefill is None
    router = sharing_fleet(2)
    load = LoadReport(50 * MS, 2, 0, QUICK)
    router.advance(DigestArrived("b", ReplicaDigest(1, 3, False, (), load), 0))
    assert decide(router, ask(5, "s"), a=2).prefill is None


def test_the_idle_replica_that_has_most_of_the_prompt_reads_it() -> None:
    prefill = decide(sharing_fleet(4, a=2, c=5), ask(5, "s"), a=2).prefill
    assert prefill is not None
    assert prefill.replica == "c"


def test_equal_replicas_read_in_turn() -> None:
    readers = [decide(sharing_fleet(4), ask(number, "s"), a=2).prefill for number in range(4)]
    assert {one.replica for one in readers if one is not None} == {"b", "c", "d"}


def test_the_time_of_reading_counts_as_load_until_it_is_over() -> None:
    router = sharing_fleet(2)
    first = decide(router, ask(5, "s"), a=2).prefill
    assert first is not None
    # An ingress counts its open requests anew each time. What a reader works at is known until its next digest.
    assert decide(router, ask(6, "s"), a=2).prefill is None
    assert decide(router, ask(7, "s"), now_ns=first.published_ns, a=2).prefill is not None


@pytest.mark.parametrize("end", [PrefillEnded, RequestEnded])
def test_a_reader_has_an_open_request_until_the_reading_or_the_request_has_ended(
    end: type[PrefillEnded | RequestEnded],
) -> None:
    router = sharing_fleet(2)
    first = decide(router, ask(5, "s"), a=2).prefill
    assert first is not None
    later_ns = 100 * first.published_ns
    assert decide(router, ask(6, "s"), later_ns).prefill is None
    router.advance(RequestEnded(6))
    router.advance(end(5))
    assert decide(router, ask(7, "s"), later_ns).prefill is not None
