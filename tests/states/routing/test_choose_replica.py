"""The rules by which a replica is chosen, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from states.rates import Rates, estimate_prefill_time
from states.routing.choose_replica import Policy, RouteQuery
from states.routing.digests import LoadReport, ReplicaDigest, TierChange
from states.routing.fleet_view import FleetView, list_numbers
from states.routing.prefix_router import (
    DigestArrived,
    PrefixRouter,
    ReplicaAdded,
    ReplicaRemoved,
    RequestArrived,
    RequestEnded,
    RequestsCounted,
    replay_routing,
)
from states.routing.route_prices import TIERS, make_prices, round_rates
from tests.examples import count_examples

MS = 1_000_000
RATES = Rates((1 * MS,), {"host": MS // 100, "disk": MS // 10, "shared": MS // 2})
KEYS = tuple(f"k{number}".encode() for number in range(10))


def ask(
    number: int, session: str = "", keys: tuple[bytes, ...] = KEYS, avoid: frozenset[str] = frozenset()
) -> RouteQuery:
    return RouteQuery(number, keys, range(64, 64 * len(keys) + 1, 64), 64 * len(keys) + 1, session, avoid)


POLICY = Policy()


def fleet(count: int, policy: Policy = POLICY, **held: dict[str, int]) -> PrefixRouter:
    """A router with replicas a, b, c ..., each with so many blocks of KEYS by tier."""
    router = PrefixRouter(policy)
    for name in "abcdefgh"[:count]:
        router.advance(ReplicaAdded(name))
        tell(router, name, 1, **held.get(name, {}))
    return router


def tell(router: PrefixRouter, name: str, number: int, *, wait_ns: int = 0, epoch: int = 1, **held: int) -> None:
    changes = tuple(TierChange(tier, frozenset(KEYS[:blocks])) for tier, blocks in held.items())
    load = LoadReport(wait_ns, slots=2, answer_ns=1000 * MS, rates=RATES)
    router.advance(DigestArrived(name, ReplicaDigest(epoch, number, True, changes, load), 0))


def route(router: PrefixRouter, query: RouteQuery, now_ns: int = 0) -> tuple[str, str]:
    decision = router.advance(RequestArrived(query, now_ns))
    assert decision is not None
    return decision.replica, decision.reason


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        ({"b": {"disk": 9}}, "b"),
        ({"b": {"disk": 9}, "c": {"host": 9}}, "c"),
        ({"b": {"host": 9}, "c": {"device": 9}}, "c"),
        ({"b": {"device": 2}, "c": {"disk": 9}}, "c"),
        ({"b": {"device": 9}, "c": {"host": 10}}, "c"),
        ({"a": {"shared": 9}, "b": {"shared": 9}}, "a"),
        ({"a": {"shared": 9}, "b": {"disk": 9}}, "b"),
        ({}, "a"),
    ],
)
def test_the_replica_that_is_ready_first_is_chosen(held, chosen):
    assert route(fleet(3, **held), ask(1))[0] == chosen


def test_a_block_in_the_shared_tier_counts_for_all():
    router = fleet(3, a={"shared": 10})
    router.advance(RequestsCounted({"a": 2}))
    decision = router.advance(RequestArrived(ask(1), 0))
    assert decision is not None
    assert decision.replica == "b"
    assert decision.held == (0, 0, 0, 640)


@pytest.mark.parametrize(("late_ns", "chosen"), [(-10 * MS, "a"), (10 * MS, "b")])
def test_a_queue_outweighs_a_prefix_when_it_is_long_enough(late_ns, chosen):
    router = fleet(2, a={"device": 10})
    tell(router, "a", 2, device=10, wait_ns=POLICY.work_weight * 640 * MS + late_ns)
    assert route(router, ask(1))[0] == chosen


@pytest.mark.parametrize(("open_requests", "chosen"), [(3, "a"), (4, "a"), (5, "b")])
def test_a_replica_with_far_more_requests_than_the_average_gets_no_more(open_requests, chosen):
    """With five requests on four replicas, one may have 1.25 * 6 / 4 requests, rounded down, and four more."""
    router = fleet(4, a={"device": 10})
    router.advance(RequestsCounted({"a": open_requests, "c": 5 - open_requests, "d": 0}))
    decision = router.advance(RequestArrived(ask(1), 0))
    assert decision is not None
    assert (decision.replica, decision.limit) == (chosen, 5)


def test_requests_that_have_ended_count_no_more():
    router = fleet(2)
    route(router, ask(1))
    route(router, ask(2, "s"))
    for number in (1, 2, 2, 99):
        router.advance(RequestEnded(number))
    assert router.advance(RequestArrived(ask(3), 10**12)).requests == 0


def test_a_conversation_stays_at_home_before_its_replica_has_told_anything():
    router = fleet(3)
    home, reason = route(router, ask(1, "s"))
    assert reason == "new_session"
    router.advance(RequestEnded(1))
    assert route(router, ask(2, "s"), 10_000 * MS) == (home, "home")


def test_a_home_is_believed_until_the_replica_itself_must_have_told():
    router = fleet(2)
    home, _ = route(router, ask(1, "s"))
    router.advance(RequestEnded(1))
    for number in (2, 3):
        decision = router.advance(RequestArrived(ask(10 + number, "s"), 0))
        assert decision is not None
        assert decision.held[0] == 640
        router.advance(RequestEnded(10 + number))
        if number == 2:
            tell(router, home, 2)
    tell(router, home, 3)
    tell(router, home, 4)
    tell(router, home, 5)
    decision = router.advance(RequestArrived(ask(20, "s"), 0))
    assert decision is not None
    assert decision.held[0] == 0


def test_a_home_that_is_overloaded_is_left():
    router = fleet(4)
    home, _ = route(router, ask(1, "s"))
    router.advance(RequestsCounted({home: 50}))
    moved, reason = route(router, ask(2, "s"))
    assert (moved != home, reason) == (True, "home_overloaded")


def test_a_home_is_left_only_for_one_that_is_sooner_by_the_margin():
    router = fleet(2, a={"device": 10}, b={"device": 9})
    home, _ = route(router, ask(1, "s"))
    assert home == "a"
    router.advance(RequestEnded(1))
    tell(router, "a", 2, device=10, wait_ns=210 * MS)
    assert route(router, ask(2, "s"))[0] == "a"
    router.advance(RequestEnded(2))
    tell(router, "a", 3, device=10, wait_ns=900 * MS)
    assert route(router, ask(3, "s")) == ("b", "home_slower")


def test_a_hot_head_is_spread_over_replicas():
    router = fleet(4, a={"device": 5})
    now = 0
    places = []
    for number in range(1, 41):
        now += 10_000 * MS
        keys = (*KEYS[:5], *(f"{number} {place}".encode() for place in range(5)))
        places.append(route(router, ask(number, f"s{number}", keys), now)[0])
        router.advance(RequestEnded(number))
    assert min(places.count(name) for name in "abcd") >= 8


@pytest.mark.parametrize(("name", "keys"), [("", ()), ("", KEYS), ("s", ())])
def test_prompts_that_no_replica_holds_are_spread_although_rates_differ(name, keys):
    """Four requests, each after the last one's prompt was read. The rates of equal machines differ by some percent."""
    router = fleet(2)
    for replica, prefill_ns in (("a", 100_000), ("b", 115_000)):
        load = LoadReport(0, slots=4, answer_ns=1000 * MS, rates=Rates((prefill_ns,)))
        router.advance(DigestArrived(replica, ReplicaDigest(1, 2, True, (), load), 0))
    asked = [ask(one, name and f"{name}{one}", tuple(b"%d" % one + key for key in keys)) for one in range(1, 5)]
    places = [route(router, query, query.number * 100 * MS)[0] for query in asked]
    assert places.count("a") == 2


def test_short_prompts_go_where_fewer_requests_are_open_wherever_conversations_live():
    router = fleet(2)
    for number in range(1, 4):
        home, _ = route(router, ask(number, f"s{number}", tuple(b"%d" % number + key for key in KEYS)))
        router.advance(RequestEnded(number))
    fuller = home
    places = [route(router, ask(number, keys=()), number * 10**12)[0] for number in (10, 11)]
    assert places.count(fuller) == 1


def test_a_replica_that_is_far_slower_gets_no_prompt_as_long_as_another_one_is_free():
    router = fleet(2)
    for replica, prefill_ns in (("a", 1 * MS), ("b", 4 * MS)):
        load = LoadReport(0, slots=4, answer_ns=1000 * MS, rates=Rates((prefill_ns,)))
        router.advance(DigestArrived(replica, ReplicaDigest(1, 2, True, (), load), 0))
    assert [route(router, ask(number, keys=(b"%d" % number,) * 10))[0] for number in (1, 2)] == ["a", "a"]


def test_replicas_to_be_avoided_are_chosen_only_if_there_is_no_other():
    router = fleet(2, a={"device": 10})
    assert route(router, ask(1, avoid=frozenset("a")))[0] == "b"
    assert route(router, ask(2, avoid=frozenset("ab")))[0] == "a"


def test_a_conversation_without_a_name_is_known_by_the_prompt_that_it_continues():
    router = fleet(3)
    router.advance(RequestsCounted({"a": 1, "c": 1}))
    assert route(router, ask(1, keys=KEYS[:6])) == ("b", "new_session")
    router.advance(RequestEnded(1))
    assert route(router, ask(2, keys=KEYS[:9]), 10_000 * MS) == ("b", "home")
    assert route(router, ask(3, keys=KEYS), 20_000 * MS) == ("b", "home")
    assert len(router.homes) == 1


def test_a_replica_that_has_not_told_its_rates_is_taken_to_be_like_others():
    router = fleet(2, b={"device": 5})
    router.advance(ReplicaAdded("c"))
    assert [mask for _, mask in router.view.price_groups] == [0b111]
    assert route(router, ask(1))[0] == "b"


def test_without_replicas_there_is_no_decision():
    router = PrefixRouter()
    assert router.advance(RequestArrived(ask(1), 0)) is None
    router.advance(ReplicaAdded("a"))
    assert route(router, ask(2)) == ("a", "only_one")
    router.advance(ReplicaRemoved("a"))
    assert router.advance(RequestArrived(ask(3), 0)) is None


def test_a_removed_replica_leaves_nothing_to_the_one_that_gets_its_number():
    router = fleet(2, a={"device": 10})
    router.advance(ReplicaRemoved("a"))
    router.advance(ReplicaAdded("z"))
    assert router.view.replicas["z"].number == 0
    decision = router.advance(RequestArrived(ask(1), 0))
    assert decision is not None
    assert decision.held == (0, 0, 0, 0)


EVENTS = st.lists(
    st.one_of(
        st.sampled_from([ReplicaAdded(name) for name in "abc"] + [ReplicaRemoved(name) for name in "abc"]),
        st.builds(
            DigestArrived,
            st.sampled_from("abcd"),
            st.builds(
                ReplicaDigest,
                st.integers(1, 2),
                st.integers(1, 6),
                st.booleans(),
                st.lists(
                    st.builds(
                        TierChange,
                        st.sampled_from([*TIERS, "tape"]),
                        st.frozensets(st.sampled_from(KEYS)),
                        st.frozensets(st.sampled_from(KEYS)),
                    ),
                    max_size=2,
                ).map(tuple),
                st.builds(LoadReport, st.integers(0, 10**9), st.integers(1, 3), st.integers(0, 10**9), st.just(RATES)),
            ),
            st.integers(0, 10**9),
        ),
        st.builds(
            RequestArrived,
            st.builds(
                ask,
                st.integers(1, 1000),
                st.sampled_from(["", "s", "t"]),
                st.just(KEYS),
                st.frozensets(st.sampled_from("abc")),
            ),
            st.integers(0, 10**9),
        ),
        st.builds(RequestsCounted, st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9))),
        st.builds(RequestEnded, st.integers(1, 1000)),
    ),
    max_size=40,
)


@settings(max_examples=count_examples(150), deadline=None)
@given(EVENTS)
def test_whatever_is_known_a_request_gets_a_replica_that_is_there_and_replays_alike(events):
    router = PrefixRouter()
    there = set[str]()
    decisions = []
    for event in events:
        decision = router.advance(event)
        match event:
            case ReplicaAdded(name):
                there.add(name)
            case ReplicaRemoved(name):
                there.discard(name)
            case RequestArrived():
                decisions.append(decision)
                assert (decision is None) == (not there)
                assert decision is None or decision.replica in there
    assert replay_routing(Policy(), events) == decisions


@settings(max_examples=count_examples(100), deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10)] * 4), min_size=1, max_size=12))
def test_groups_say_of_each_replica_what_it_holds(depths):
    """Each replica's blocks by tier. With at most eight depths in a tier, nothing is rounded."""
    depths = [(device % 3 * 5, host % 3 * 5, disk % 3 * 5, shared) for device, host, disk, shared in depths]
    view = FleetView()
    for number, blocks in enumerate(depths):
        view.add_replica(str(number))
        changes = tuple(TierChange(tier, frozenset(KEYS[:count])) for tier, count in zip(TIERS, blocks, strict=True))
        view.apply_digest(str(number), ReplicaDigest(1, 1, True, changes))
    found = {number: group.blocks for group in view.find_groups(KEYS) for number in list_numbers(group.mask)}
    shared = max(blocks[3] for blocks in depths)
    assert found == {
        number: (device, max(device, host), max(device, host, disk), max(device, host, disk, shared))
        for number, (device, host, disk, _) in enumerate(depths)
    }


@settings(max_examples=count_examples(100), deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(0, 300_000), st.integers(0, 300_000))
def test_prices_are_the_planners_times(prefill, start, length):
    rates = Rates(tuple(prefill))
    expected = estimate_prefill_time(rates, start, start + length) if any(prefill) else length
    assert make_prices(rates).estimate_prefill_time(start, start + length) == expected


def test_told_rates_are_within_an_eighth():
    rates = Rates(tuple(range(1, 5000, 7))[:60], {"host": 12345})
    rounded = round_rates(rates)
    pairs = [*zip(rates.prefill, rounded.prefill, strict=True), (rates.loads["host"], rounded.loads["host"])]
    assert all(abs(one - other) * 8 <= one for one, other in pairs)
