"""Decides how many replicas a fleet has, where `--replicas` names a range. Ray Serve calls it in its controller.

Ray Serve's own policy counts the requests that pass through its handles, and ours do not: an ingress sends them to the
server of a replica itself. So each replica tells its load: the requests that it answers and that wait, as a share of
its slots. Ray Serve averages the loads over half a minute. It follows a decision when it has held for
`upscale_delay_s` or `downscale_delay_s`. A replica that is taken away finishes its requests first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

LOAD: Final = "rekindle_load"  # the name of the metric
USED_SHARE: Final = 0.75  # of all slots: if more are used, a replica is added
SCALING_PATH: Final = "engine.fleet.scaling_policy:choose_replica_count"


def choose_replica_count(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the wanted number of replicas, and no state. context: Ray Serve's `AutoscalingContext`."""
    loads = context.aggregated_metrics.get(LOAD, {}).values()
    if not loads:  # no replica has reported its load yet
        return context.target_num_replicas, {}
    least = context.capacity_adjusted_min_replicas
    return count_wanted_replicas(loads, least, context.capacity_adjusted_max_replicas), {}


def count_wanted_replicas(loads: Iterable[float], least: int, most: int) -> int:
    """Return how many replicas use USED_SHARE of their slots at most. loads: of each replica, 1.0 if all are used."""
    # A sum of floating-point shares may exceed the true one by a rounding error.
    return min(most, max(least, math.ceil(sum(loads) / USED_SHARE - 1e-9)))


def compute_load(queue: int, slots_busy: int, total_slots: int) -> float:
    """Return the load of a replica, as its server shows these figures at `/props`."""
    return (queue + slots_busy) / total_slots


def build_scaling(least: int, most: int, upscale_delay_s: float, downscale_delay_s: float) -> dict[str, Any]:
    """Return Ray Serve's `autoscaling_config`."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "initial_replicas": least,
        "upscale_delay_s": upscale_delay_s,
        "downscale_delay_s": downscale_delay_s,
        "policy": {"policy_function": SCALING_PATH},
    }
