"""Deploys a fleet: on a Ray of its own until a signal comes, or on a running cluster."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Sequence

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from engine.fleet.application import INGRESSES, NAME, build_fleet
from engine.fleet.fleet_options import FleetArguments, FleetOptions, list_arguments
from engine.fleet.local_ray import MARK, run_local_ray
from engine.settings.options import Options
from engine.settings.user_error import UserError

NAMESPACE = "serve"
LATE_S = 5.0  # after the grace period, for an ingress to answer
REFUSAL = "UserError:"  # in the line of a traceback that has the sentence for the user
FAILURE = "Error:"  # precedes the traceback in what Ray Serve says about a deployment


def run_local_fleet(options: Options, fleet: FleetOptions) -> int:
    """Run a fleet on this machine until a signal comes. Returns the exit status."""
    began = time.monotonic()
    stop = threading.Event()
    print(f"starting: a Ray of its own with {fleet.replicas} replicas", file=sys.stderr, flush=True)
    with run_local_ray(options):
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has just set handlers of its own
            signal.signal(number, lambda *_: stop.set())
        deploy({**list_arguments(options, fleet), "is_local": True})
        announce_fleet(options, fleet.replicas, time.monotonic() - began)
        stop.wait()
        print("shutting down: running requests may end first", file=sys.stderr, flush=True)
        drain_ingresses(options.http.grace)
    return 0


def drain_ingresses(grace_s: float) -> None:
    """Let all requests end, at most so long. New ones are refused. Ray Serve would stop the proxy under them."""
    draining = serve.get_deployment_handle(INGRESSES, NAME).broadcast("drain", grace_s)
    try:
        counts = draining.results(timeout_s=grace_s + LATE_S, return_exceptions=True)
    except (TimeoutError, DeploymentUnavailableError, RayError) as error:
        print(f"requests may have been cut: {error!r}", file=sys.stderr, flush=True)
        return
    if left := sum(count for count in counts if isinstance(count, int)):
        print(f"{left} requests did not end within {grace_s:g} s (--grace)", file=sys.stderr, flush=True)


def deploy_to_cluster(options: Options, fleet: FleetOptions) -> int:
    """Deploy a fleet on a running cluster, or update the one that runs there. Returns the exit status."""
    try:
        ray.init(address=fleet.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        hint = "set RAY_AUTH_MODE=token if the cluster checks tokens, as a local fleet does"
        raise UserError(f"--address {fleet.address}: {error}; {hint}") from error
    try:
        is_local = MARK in ray.cluster_resources()
        # Has no effect where Ray Serve runs already.
        serve.start(http_options={"host": options.http.host, "port": options.http.port})
        deploy({**list_arguments(options, fleet), "is_local": is_local})
    finally:
        ray.shutdown()
    print(f"deployed  {NAME} with {fleet.replicas} replicas on {fleet.address}", flush=True)
    return 0


def deploy(arguments: FleetArguments) -> None:
    """Deploy the application, and wait until it runs. Replicas of an earlier deployment are replaced one by one.

    Raises UserError if the replicas do not start.
    """
    try:
        serve.run(build_fleet(arguments), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise UserError(f"the replicas do not start: {find_cause([str(error), *list_messages()])}") from error


def list_messages() -> list[str]:
    """Return what Ray Serve says about each deployment of the fleet. The error of `serve.run` has only their names."""
    application = serve.status().applications.get(NAME)
    return [] if application is None else [deployment.message for deployment in application.deployments.values()]


def find_cause(messages: Sequence[str]) -> str:
    """Return the sentence that says why a fleet does not start, from messages that may hold tracebacks.

    That is the last UserError, or else the last line of the last message with an error, or else of the first message.
    """
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    refusals = [line.rpartition(REFUSAL)[2].strip() for line in lines if REFUSAL in line]
    failures = [message for message in messages if FAILURE in message]
    return refusals[-1] if refusals else (failures or messages)[-1 if failures else 0].strip().splitlines()[-1].strip()


def announce_fleet(options: Options, replicas: str, seconds: float) -> None:
    """Print a line that a script can wait for, then a command that a person can paste."""
    host = f"[{options.http.host}]" if ":" in options.http.host else options.http.host
    url = f"http://{host}:{options.http.port}"
    address = ray.get_runtime_context().gcs_address
    print(
        f"ready  {url}  model={options.model.model}  replicas={replicas}  ray={address}  in {seconds:.1f} s", flush=True
    )
    body = json.dumps({"messages": [{"role": "user", "content": "What is Rekindle?"}]})
    key = " -H 'Authorization: Bearer KEY'" if options.http.api_key or options.http.api_key_file else ""
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'", flush=True)
