"""The router as Ray Serve calls it: with replicas that carry routing stats, and requests that carry keys."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

pytest.importorskip("ray", reason="the extra `fleet` is not installed")

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter

from engine.core.block_digests import encode_digests
from engine.fleet.digests import STATS_KEY
from engine.fleet.router.prefix_router import ROUTER_PATH, PrefixRequestRouter, build_query
from engine.fleet.router.route_keys import RouteKeys, RouteRequest
from engine.fleet.router.routing_trace import TracedRouter, replay_trace
from states.rates import Rates
from states.routing.choose_replica import RouteDecision
from states.routing.digests import LoadReport, ReplicaDigest, TierChange

KEYS = tuple(f"key {number:2}".encode().ljust(16) for number in range(8))
RATES = Rates((1_000_000,), {"host": 1000})


class OfflineRouter(PrefixRequestRouter):
    """The router without the parts of Ray Serve that need a cluster."""

    def __init__(self, **how: Any) -> None:
        self.initialize_state(**how)


def replica(name: str, blocks: int = 0, number: int = 1, rates: Rates = RATES) -> Any:
    digest = ReplicaDigest(1, number, True, (TierChange("host", frozenset(KEYS[:blocks])),), LoadReport(0, 2, 0, rates))
    stats = {STATS_KEY: encode_digests([digest])}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def request(**given: Any) -> Any:
    return SimpleNamespace(kwargs=given)


def route(session: str | None = None) -> RouteKeys:
    return RouteKeys(KEYS, 64, 64 * len(KEYS) + 1, session)


async def names(router: PrefixRequestRouter, replicas: list[Any], pending: Any) -> list[list[str]]:
    ranks = await router.choose_replicas(replicas, pending)
    return [[one.replica_id.unique_id for one in rank] for rank in ranks]


async def test_the_replica_with_the_longest_prefix_comes_first_and_the_others_follow():
    replicas = [replica("a", 2), replica("b", 8), replica("c")]
    assert await names(OfflineRouter(), replicas, request(route=route())) == [["b"], ["a", "c"]]


async def test_requests_in_flight_and_replicas_to_avoid_are_heard():
    replicas = [replica("a", 8), replica("b"), replica("c")]
    busy = request(route=route(), in_flight={"a": 90})
    assert (await names(OfflineRouter(), replicas, busy))[0] != ["a"]
    assert (await names(OfflineRouter(), replicas, request(route=route(), avoid=frozenset("a"))))[0] != ["a"]


async def test_a_replica_that_is_not_offered_is_not_chosen():
    router = OfflineRouter()
    both = [replica("a", 8), replica("b")]
    await names(router, both, request(route=route()))
    assert await names(router, both[1:], request(route=route())) == [["b"]]


async def test_anything_that_cannot_be_read_costs_speed_only():
    broken = replica("a", 8)
    broken.routing_stats = {STATS_KEY: b"no digest"}
    silent = replica("b")
    silent.routing_stats = {}
    for pending in (None, request(), request(route=None), request(route="keys"), request(route=route())):
        ranks = await names(OfflineRouter(), [broken, silent], pending)
        assert {name for rank in ranks for name in rank} == {"a", "b"}
    assert await names(OfflineRouter(), [], request(route=route())) == []


async def test_newer_stats_replace_older_ones():
    router = OfflineRouter()
    await names(router, [replica("a", 8), replica("b")], request(route=route()))
    now = [replica("a", 0, number=2), replica("b", 8, number=2)]
    assert (await names(router, now, request(route=route("new"))))[0] == ["b"]


def test_a_session_of_one_caller_is_none_of_another():
    one = build_query(1, RouteKeys(KEYS, 64, 1000, "chat", "owner 1"), frozenset())
    other = build_query(1, RouteKeys(KEYS, 64, 1000, "chat", "owner 2"), frozenset())
    assert one.session != other.session


def test_the_last_token_is_never_reused():
    assert len(build_query(1, RouteKeys(KEYS, 64, 512), frozenset()).keys) == 7
    assert len(build_query(1, RouteKeys(KEYS, 64, 513), frozenset()).keys) == 8


def test_ray_serve_has_the_methods_that_are_overridden():
    for name in ("update_replicas", "choose_replicas"):
        theirs = inspect.signature(getattr(RequestRouter, name)).parameters
        assert [*inspect.signature(getattr(PrefixRequestRouter, name)).parameters] == [*theirs], name
    assert "kwargs" in inspect.signature(RequestRouter.initialize_state).parameters


async def test_a_router_writes_a_trace_where_that_is_asked_for(tmp_path: Path):
    router = OfflineRouter(trace_folder=str(tmp_path))
    await names(router, [replica("a", 2), replica("b", 8)], request(route=route()))
    (trace,) = tmp_path.iterdir()  # noqa: ASYNC240 - a test
    assert replay_trace(trace) == 1
    assert isinstance(router.router, TracedRouter)
    router.router.file.close()


@pytest.mark.parametrize(("threshold", "reader"), [(0, ""), (100, "b")])
async def test_the_caller_hears_the_decision_and_who_reads_the_prompt(threshold: int, reader: str):
    router = OfflineRouter(remote_prefill_min_tokens=threshold)
    shared = Rates((1_000_000,), {"host": 1000, "shared": 1000})
    replicas = [replica("a", 2, rates=shared), replica("b", rates=shared)]
    decisions: list[RouteDecision] = []
    pending = request(route=route(), in_flight={"a": 2}, on_decision=decisions.append)
    assert await names(router, replicas, pending) == [["a"], ["b"]]
    (decision,) = decisions
    assert decision.replica == "a"
    assert ("" if decision.prefill is None else decision.prefill.replica) == reader


def offered(name: str, blocks: int) -> Any:
    one = replica(name, blocks)
    one.replica_metadata = {"url": f"http://{name}"}
    return one


def test_the_ingress_gets_the_decision_and_the_facts_without_a_call_of_the_handle():
    router = OfflineRouter()
    given = RouteRequest(route())
    assert router.choose_offered(given) is None, "Serve has named no replica yet"
    router.offered = {"a": offered("a", 2), "b": offered("b", 8)}
    for name, one in router.offered.items():
        router.read_digests(name, one.routing_stats)
    found = router.choose_offered(given)
    assert found is not None
    assert (found[0].replica, found[1]) == ("b", {"url": "http://b"})
    elsewhere = router.choose_offered(evolve(given, avoid=frozenset("b")))
    assert elsewhere is not None
    assert elsewhere[0].replica == "a"
    router.offered.pop("b")
    left = router.choose_offered(given)
    assert left is not None
    assert left[0].replica == "a", "a replica whose actor has died is not chosen"


CARRIED = """
import pickle, sys
from engine.fleet.router import router_slot
router = object.__new__(pickle.loads(sys.stdin.buffer.read()))
router.initialize_state()
from engine.fleet.router.prefix_router import PrefixRequestRouter
print(router_slot.NEWEST.router is router, isinstance(router, PrefixRequestRouter))
"""


def test_the_class_as_serve_carries_it_notes_its_router_where_the_ingress_looks():
    """Serve carries a copy of the router's module, which is another module than the one that others import."""
    config = RequestRouterConfig(request_router_class=ROUTER_PATH)
    command = [sys.executable, "-c", CARRIED]
    carried = config._serialized_request_router_cls  # noqa: SLF001 - this is what reaches an ingress
    done = subprocess.run(command, input=carried, capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == [b"True", b"False"], done.stderr
