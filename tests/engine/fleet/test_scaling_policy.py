"""The number of replicas that their loads ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.fleet.scaling_policy import LOAD, choose_replica_count, compute_load


def decide(loads: list[float], current: int = 2) -> int:
    metrics: dict[str, Any] = {LOAD: dict(enumerate(loads))} if loads else {}
    bounds = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 4}
    count, state = choose_replica_count(
        SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=current, **bounds)
    )
    assert state == {}
    return count


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([], 2), ([0.0], 1), ([0.75], 1), ([0.8], 2), ([0.75, 0.75], 2), ([0.3, 0.3], 1), ([9.0], 4), ([0.1] * 4, 1)],
)
def test_a_replica_is_wanted_for_each_three_quarters_of_its_slots(loads: list[float], wanted: int) -> None:
    assert decide(loads) == wanted


def test_requests_that_wait_count_as_load() -> None:
    assert compute_load(queue=3, slots_busy=2, total_slots=2) == 2.5
