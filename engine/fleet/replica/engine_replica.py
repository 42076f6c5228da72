"""The deployment of replicas: Ray Serve's actor around one server.

The actor starts the server, tells Serve how it is, and stops it. No request passes through the actor: the ingress sends
it to the server itself. What Serve does with the actor reaches the server so:

* It starts a replica: the constructor returns when the model is loaded, and the facts are read then.
* It checks the health: the check fails if the server does not answer.
* It stops a replica: no ingress chooses it any more. Then the server drains as it does at SIGTERM. Requests that arrive
  late are refused, and the ingress sends them to another replica.
* The actor dies: the server drains and ends. The server dies: the actor ends with it. Serve starts a new replica.
  While the old server drains, it keeps its cache folder, and the new replica takes another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
from attrs import evolve
from ray import serve
from ray.util import get_node_ip_address

from adapters.store.files.private_folder import PrivateFolder
from engine.fleet.digests import fetch_routing_stats
from engine.fleet.fleet_options import build_replica_words
from engine.fleet.replica.replica_folder import claim_folder
from engine.fleet.replica.server_process import ServerProcess, ServerTask, start_server
from engine.fleet.replica_facts import ReplicaFacts
from engine.fleet.scaling_policy import LOAD, compute_load
from engine.settings.config_file import parse_values
from engine.settings.preflight import collect_keys

log = logging.getLogger("rekindle.fleet")
LOOPBACK = "127.0.0.1"
ASK_S = 10.0  # for an answer about the server
LATE_S = 5.0  # after the grace period, for the server to end


class EngineReplica:
    """One replica. values: the options of its server that differ from the defaults, by flat name.

    is_local: the whole fleet is on this machine, so the server listens on loopback only.
    """

    def __init__(self, values: Mapping[str, Any], *, is_local: bool) -> None:
        options = parse_values(values)
        self.grace_s = options.http.grace
        self.claim: PrivateFolder | None = claim_folder(options.cache)
        folder = None if self.claim is None else self.claim.path
        host = LOOPBACK if is_local else get_node_ip_address()
        self.name: str = serve.get_replica_context().replica_id.unique_id
        task = ServerTask(build_replica_words(options, host, folder, self.name), self.grace_s + LATE_S)
        self.server: ServerProcess = start_server(task, () if self.claim is None else self.claim.descriptors)
        self.server.watch(end_actor)
        headers = build_headers(collect_keys(options.http))
        self.client = httpx2.Client(base_url=self.server.url, headers=headers, timeout=ASK_S, trust_env=False)
        self.facts = evolve(
            read_facts(self.client, self.server.url),
            folder="" if folder is None else str(folder),
            pid=self.server.process.pid,
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the facts, which Ray Serve hands to every router. Called once."""
        return self.facts.to_metadata()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what this replica holds and how busy it is, for the routers. Called by Ray Serve at an interval."""
        return fetch_routing_stats(self.client)

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Return the id of this replica and its facts, for those who ask all replicas."""
        return self.name, self.facts.to_metadata()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of this replica, for `scaling_policy.py`. Called by Ray Serve at an interval."""
        props = self.client.get("/props").raise_for_status().json()
        return {LOAD: compute_load(props["queue"], props["slots_busy"], props["total_slots"])}

    def check_health(self) -> None:
        """Raise an exception if the server cannot answer. Called by Ray Serve at an interval."""
        self.client.get("/health").raise_for_status()

    def __del__(self) -> None:
        """Drain the server. Called by Ray Serve when the replica is stopped."""
        server = getattr(self, "server", None)
        if server is not None:
            server.stop(self.grace_s + LATE_S)


def end_actor(status: int) -> None:
    """End this actor, because its server has ended with this exit status."""
    log.error("the server of this replica ended by itself, with status %d", status)
    os._exit(1)


def build_headers(keys: Sequence[str]) -> dict[str, str]:
    """Return the headers with which the actor may ask its own server. keys: that the server accepts."""
    return {"authorization": f"Bearer {keys[0]}"} if keys else {}


def read_facts(client: httpx2.Client, url: str) -> ReplicaFacts:
    """Ask the server for its facts."""
    props, about, listed = (client.get(path).raise_for_status().json() for path in ("/props", "/", "/v1/models"))
    return ReplicaFacts.from_answers(url, props, about, listed)
