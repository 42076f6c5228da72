"""Starts a Ray of its own for a fleet on one machine, and Ray Serve's proxy."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve

from engine.settings.options import Options

MARK = "rekindle_local"  # a resource that only such a Ray has
OBJECT_STORE_BYTES = 80 << 20  # about the least that Ray accepts: no request passes through its object store
LOOPBACK = "127.0.0.1"
# What Ray Serve reads from the environment of each of its processes.
ENVIRONMENT = {
    # HAProxy in front of the ingresses, instead of a proxy in Python that takes 10 ms a request on two cores.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A choice of a replica stays in the event loop of the ingress.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # A decision about the number of replicas takes no longer than --upscale-delay.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
}
HAPROXY_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def run_local_ray(options: Options) -> Iterator[None]:
    """Run Ray and Ray Serve on this machine for as long as the block takes. options: where the proxy listens."""
    ports = {name: str(find_free_port()) for name in HAPROXY_PORTS}  # two fleets on one machine need two of each
    for name, value in {**ENVIRONMENT, **ports}.items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        _node_ip_address=LOOPBACK,  # where Ray's own processes listen
        num_cpus=os.cpu_count(),
        resources={MARK: 1},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": options.http.host, "port": options.http.port})
        yield
        serve.shutdown()
    finally:
        ray.shutdown()
