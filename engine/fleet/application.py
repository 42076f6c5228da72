"""The Ray Serve application: a deployment of replicas, and a deployment of ingresses before it.

`build_fleet` is what a file for `serve deploy` names as its `import_path`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from engine.fleet.fleet_options import FleetArguments, FleetOptions, ReplicaRange, read_gpus
from engine.fleet.ingress.direct_requests import IMPORT_PATH as MIDDLEWARES
from engine.fleet.ingress.ingress_replica import IngressReplica
from engine.fleet.ingress.open_requests import MOST_REQUESTS
from engine.fleet.replica.engine_replica import LATE_S, EngineReplica
from engine.fleet.router.prefix_router import ROUTER_PATH
from engine.fleet.scaling_policy import build_scaling
from engine.settings.config_file import parse_values
from engine.settings.preload import gpu_driver

NAME = "rekindle"
REPLICAS = "replica"
INGRESSES = "ingress"
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 15.0
STATS_PERIOD_S = 1.0  # between two reports of what a replica holds
INGRESS_GRACE_S = 60.0  # for the requests of an ingress that is replaced
# Requests and choices of a replica stay in one event loop of an ingress. Each change of the thread would cost 0.2 ms.
INGRESS_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES,
}

# Ray would kill the server of an actor that dies, with its streams. The server drains instead, and ends by itself.
REPLICA_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}


def choose_scaling(arguments: FleetArguments) -> dict[str, Any]:
    """Return the options of a deployment that decide how many replicas there are. Raises ValueError."""
    replicas = ReplicaRange.parse(str(arguments.get("replicas", FleetOptions().replicas)))
    if replicas.is_fixed:
        return {"num_replicas": replicas.least}
    delays = float(arguments["upscale_delay_s"]), float(arguments["downscale_delay_s"])
    return {"autoscaling_config": build_scaling(replicas.least, replicas.most, *delays)}


def configure_router(arguments: FleetArguments) -> RequestRouterConfig:
    """Return the router of requests to replicas."""
    return RequestRouterConfig(
        request_router_class=ROUTER_PATH,
        request_router_kwargs={"remote_prefill_min_tokens": int(arguments.get("prefill_elsewhere", 0))},
        request_routing_stats_period_s=STATS_PERIOD_S,
    )


def build_fleet(arguments: FleetArguments) -> serve.Application:
    """Return the application. Ray Serve calls this with the arguments of a file. Raises ValueError."""
    values = dict(arguments.get("options", {}))
    is_local = bool(arguments.get("is_local", False))
    options = parse_values(values)
    gpus = read_gpus(options, has_gpu=gpu_driver() is not None)
    engines = serve.deployment(
        EngineReplica,
        name=REPLICAS,
        **choose_scaling(arguments),
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={
            # On one machine Ray must not refuse a replica because the cores are counted already.
            "num_cpus": 0 if is_local or gpus else max(1, options.runtime.threads),
            "num_gpus": gpus,
            "runtime_env": {"env_vars": REPLICA_ENVIRONMENT},
        },
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.http.grace + 2 * LATE_S,
        request_router_config=configure_router(arguments),
    )
    ingresses = serve.deployment(
        serve.ingress()(IngressReplica),
        name=INGRESSES,
        num_replicas=1 if is_local else 2,
        # The new ingress starts before the old one stops. Ray Serve would otherwise stop a single one first. On two
        # cores of an AMD EPYC with little load, the longest request of an update took 2.5 s instead of 6.7 s.
        max_surge_percent=100,
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": INGRESS_ENVIRONMENT}},
        logging_config={"enable_access_log": False},  # the ingress has a log of its own
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=INGRESS_GRACE_S,
    )
    return ingresses.bind(values, engines.bind(values, is_local=is_local))
