"""The request of an ingress for a replica: it gives the router the keys of the prompt, and what it knows of replicas.

A call of Ray Serve's handle has the fields of a `RouteRequest` as keyword arguments, and `on_decision`: a function that
the router calls with its `RouteDecision`, in the same process and event loop. The id of a replica is
`RunningReplica.replica_id.unique_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen


@frozen
class RouteKeys:
    """The keys of one prompt.

    keys: of its whole blocks in order, as the store of a replica computes them (`adapters/store/block_keys.py`).
    block_size: tokens of a block. tokens: of the whole prompt. session: the conversation that the caller named, if any.
    salt: what keeps the caller's prefixes apart from others'; it is part of every key already.
    """

    keys: tuple[bytes, ...]
    block_size: int
    tokens: int
    session: str | None = None
    salt: str = ""


@frozen
class RouteRequest:
    """A request for a replica.

    route: the keys of the prompt; None: it could not be read. in_flight: by replica, the requests of this ingress that
    the replica is answering. Serve cannot count them, because answers do not pass through Serve's own calls. avoid:
    replicas that have failed this request, or that could not be reached just now.
    """

    route: RouteKeys | None = None
    in_flight: Mapping[str, int] = field(factory=dict[str, int])
    avoid: frozenset[str] = frozenset()

    @staticmethod
    def from_call(given: Mapping[str, Any]) -> RouteRequest:
        """Read the keyword arguments of a call of the handle."""
        route = given.get("route")
        return RouteRequest(
            route if isinstance(route, RouteKeys) else None,
            given.get("in_flight") or {},
            frozenset(given.get("avoid") or ()),
        )
