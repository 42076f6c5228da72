"""The environment that Ray and Ray Serve read when they are imported, here and in each process of a local Ray.

This module imports neither of them, so that it can be used before.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from engine.fleet.haproxy_script import set_haproxy_script

# Ray's processes listen on loopback only, and look for each other there. Ray calls it so because that is its default on
# these systems; `_node_ip_address` of `ray.init` has no such effect in 2.60.0.
LOOPBACK_ONLY: Final = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
ENVIRONMENT: Final = {
    # HAProxy in front of the ingresses, instead of a proxy in Python that takes 10 ms a request on two cores.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # An ingress that is replaced goes on listening until HAProxy knows it. On a machine with a load of 15 for each
    # core that took 9 s. An ingress that had left after 5 s made HAProxy answer a request with an error of its own.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "15",
    # Busy machines take longer than Ray's defaults of 5 s and 10 s until a proxy and a node are ready.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_raylet_start_wait_time_s": "120",
    # A Ray of one machine is lost without its control process. A signal to the whole process group ends that one too,
    # and the fleet then waited a minute for it, Ray's default. A busy machine may need more than some seconds.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    # A decision about the number of replicas takes little longer than --upscale-delay.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray Serve's metrics of HAProxy cost 0.3 ms a request in a process of their own, and nothing collects them here.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
}
HAPROXY_PORTS: Final = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")


def prepare_environment(address: str) -> None:
    """Set the variables that are not set yet. address: of a running cluster; "": a local Ray will be started."""
    name, value = LOOPBACK_ONLY
    if not address or is_loopback(address):
        os.environ.setdefault(name, value)
    if not address:
        ports = {name: str(find_free_port()) for name in HAPROXY_PORTS}  # two fleets on one machine need two of each
        for name, value in {**ENVIRONMENT, **ports}.items():
            os.environ.setdefault(name, value)
        set_haproxy_script()


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "localhost:"))


def find_free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
