"""Carries the digests of a replica from its server to the routers, as the routing stats of Ray Serve.

Ray Serve asks the actor of a replica for its routing stats at an interval, and every router sees the newest ones. They
are one message of `engine/core/block_digests.py`, which has the last digests together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import httpx2

from engine.core.block_digests import decode_digests
from engine.core.fleet_paths import DIGEST_PATH
from states.routing.digests import ReplicaDigest

log = logging.getLogger("rekindle.fleet")
STATS_KEY: Final = "rekindle_digests"


def fetch_routing_stats(client: httpx2.Client) -> dict[str, Any]:
    """Return the routing stats of a replica: what its server tells now. Empty if the server does not answer.

    Whether a server is healthy is asked elsewhere; here a missing answer only makes what routers know older.
    """
    try:
        return {STATS_KEY: client.get(DIGEST_PATH).raise_for_status().content}
    except httpx2.HTTPError as error:
        log.info("no digest of this replica: %s", error)
        return {}


def read_routing_stats(stats: Mapping[str, Any]) -> list[ReplicaDigest]:
    """Return the digests in routing stats; none where there are none, or where they cannot be read."""
    message = stats.get(STATS_KEY, b"")
    if not isinstance(message, bytes) or not message:
        return []
    try:
        return decode_digests(message)
    except ValueError as error:
        log.warning("routing stats that are no digests: %s", error)
        return []
