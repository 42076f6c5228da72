"""The place where an ingress finds the router of its process.

Ray Serve makes the router and the ingress, and neither of them knows the other. Ray Serve carries the router's class
with a copy of its module, so what that module holds is not what others import from it. A module that it imports is
the same for all, so the router notes itself here by a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from attrs import define

from engine.fleet.router.route_keys import RouteRequest
from states.routing.choose_replica import RouteDecision


class LocalRouter(Protocol):
    """A router that an ingress can ask without a call of Ray Serve's handle."""

    def choose_offered(self, request: RouteRequest) -> tuple[RouteDecision, Mapping[str, Any]] | None:
        """Choose among the replicas that Ray Serve has named last.

        Returns the decision, and the facts of its replica as Ray Serve carries them; None: there is no replica.
        """
        ...


@define(eq=False)
class RouterSlot:
    """The place for a router. router: None until Ray Serve has made one."""

    router: LocalRouter | None = None


NEWEST: Final = RouterSlot()
"""The router that was made last. An ingress has one handle of the replicas, so it is that of this handle."""


def note_router(router: LocalRouter) -> None:
    """Note the router of this process. Called by the router itself when it is ready."""
    NEWEST.router = router
