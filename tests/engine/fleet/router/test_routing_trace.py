"""A router's trace gives its decisions again, and tells where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.fleet.router.routing_trace import RoutingDiffers, TracedRouter, replay_trace
from states.rates import Rates
from states.routing.choose_replica import Policy, RouteQuery
from states.routing.digests import LoadReport, ReplicaDigest, TierChange
from states.routing.prefix_router import (
    DigestArrived,
    PrefixRouter,
    ReplicaAdded,
    ReplicaRemoved,
    RequestArrived,
    RequestEnded,
    RequestsCounted,
)

KEYS = tuple(f"key {number}".encode() for number in range(5))


def record(path: Path) -> list[str]:
    query = RouteQuery(1, KEYS, range(64, 321, 64), 330, "s", frozenset({"c"}))
    load = LoadReport(5, 2, 9, Rates((70, 80), {"host": 3}))
    with path.open("w") as file:
        router = TracedRouter(PrefixRouter(Policy(extra_requests=2)), file)
        decisions = [
            router.advance(event)
            for event in (
                RequestArrived(query, 0),
                ReplicaAdded("a"),
                ReplicaAdded("b"),
                DigestArrived("b", ReplicaDigest(1, 1, True, (TierChange("host", frozenset(KEYS)),), load), 5),
                RequestsCounted({"a": 1}),
                RequestArrived(query, 9),
                RequestEnded(1),
                ReplicaRemoved("b"),
                RequestArrived(query, 12),
            )
        ]
    return [one.replica for one in decisions if one is not None]


def test_a_replay_decides_alike(tmp_path: Path) -> None:
    assert record(tmp_path / "trace") == ["b", "a"]
    assert replay_trace(tmp_path / "trace") == 3


def test_a_decision_that_differs_is_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path)
    path.write_text(path.read_text().replace('"replica":"b","reason"', '"replica":"a","reason"'))
    with pytest.raises(RoutingDiffers, match="line 9: recorded"):
        replay_trace(path)


@pytest.mark.parametrize(
    "line", ["", "{}", "[]", "null", '{"is":"RequestEnded"}', '{"is":"RequestEnded","number":"x"}']
)
def test_a_line_that_is_no_record_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace"
    record(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 14 is no record"):
        replay_trace(path)
