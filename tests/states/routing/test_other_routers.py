"""The rules that the router by prefix is compared with."""

from __future__ import annotations

from collections import Counter

import pytest

from states.routing.choose_replica import RouteQuery
from states.routing.other_routers import (
    ConsistentHash,
    CountingRouter,
    LeastQueue,
    PowerOfTwo,
    RayPrefixAffinity,
    RoundRobin,
)
from states.routing.prefix_router import ReplicaAdded, ReplicaRemoved, RequestArrived, RequestEnded

ALL = (RoundRobin, LeastQueue, PowerOfTwo, ConsistentHash, RayPrefixAffinity)


def router_of(kind: type[CountingRouter], names: str) -> CountingRouter:
    router = kind()
    for name in names:
        router.advance(ReplicaAdded(name))
    return router


def send(router: CountingRouter, number: int, prompt: str = "", session: str = "") -> str:
    """prompt: a letter a block."""
    keys = tuple(prompt[: at + 1].encode() for at in range(len(prompt)))
    decision = router.advance(
        RequestArrived(RouteQuery(number, keys, range(10, 10 * len(keys) + 1, 10), 10 * len(keys) + 1, session), 0)
    )
    assert decision is not None
    return decision.replica


@pytest.mark.parametrize("kind", ALL)
def test_every_rule_knows_only_the_replicas_that_are_there(kind):
    router = kind()
    assert router.advance(RequestArrived(RouteQuery(1, (), (), 1), 0)) is None
    router = router_of(kind, "abc")
    router.advance(ReplicaRemoved("b"))
    assert {send(router, number, f"{number}", f"s{number}") for number in range(1, 60)} == {"a", "c"}
    for number in (*range(1, 60), 1, 99):
        router.advance(RequestEnded(number))
    assert set(router.requests.values()) == {0}


def test_round_robin_takes_turns():
    assert "".join(send(router_of(RoundRobin, "abc"), number) for number in range(6)) == "abcabc"


def test_least_queue_keeps_queues_even():
    router = router_of(LeastQueue, "abcd")
    for number in range(42):
        send(router, number)
    assert sorted(router.requests.values()) == [10, 10, 11, 11]


def test_two_choices_keep_queues_nearly_even():
    router = router_of(PowerOfTwo, "abcdefgh")
    for number in range(800):
        send(router, number)
    assert max(router.requests.values()) <= 104


def test_consistent_hashing_moves_few_conversations_when_a_replica_comes():
    router = router_of(ConsistentHash, "abcdefgh")
    before = [send(router, number, session=f"s{number}") for number in range(400)]
    assert max(Counter(before).values()) < 100
    router.advance(ReplicaAdded("i"))
    after = [send(router, 1000 + number, session=f"s{number}") for number in range(400)]
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {"i"}
    assert len(moved) < 100


def test_rays_rule_follows_the_longest_prefix_and_gives_new_prompts_to_the_smallest_tenant():
    router = router_of(RayPrefixAffinity, "ab")
    first = send(router, 1, "xyz")
    assert send(router, 2, "xyzw") == first
    other = send(router, 3, "q")
    assert other != first
    # A tenth of the prompt, or more, is followed, however long the queue is.
    assert all(send(router, number, "xyzw12345") == first for number in range(4, 40))


def test_rays_rule_draws_two_where_queues_differ_too_much():
    router = RayPrefixAffinity(imbalanced=3)
    for name in "ab":
        router.advance(ReplicaAdded(name))
    places = Counter(send(router, number, "xyz") for number in range(60))
    assert min(places.values()) > 20
