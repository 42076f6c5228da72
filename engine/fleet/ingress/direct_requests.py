"""Hands requests to the ingress of this process before Ray Serve has touched them.

Problem. Ray Serve serves an ingress by its own layer: for each request it makes metadata and ids, starts two tasks that
watch for a client that leaves, and writes metrics and a log. That is a fifth of the processor time of a request in an
ingress. The ingress does all of it itself: it watches its clients, counts and logs its requests, and has limits.

Idea. Ray Serve's HTTP servers take middlewares, which `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names. Ours is the
outermost layer. It passes on what Ray Serve answers itself, which are paths that begin with `/-/`.

What follows from it:
* Ray Serve does not count these requests. When it stops an ingress, it waits for the HTTP server instead, which ends
  when all requests are answered (`INGRESS_GRACE_S`). On a cluster HAProxy counts requests for Ray Serve's metrics.
* The header `x-request-id` is that of the replica, as without a fleet.
* Where Ray Serve uses its proxy in Python, requests come through an actor's call and never pass here.
"""

from __future__ import annotations

from typing import Final

from attrs import define, field
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

IMPORT_PATH: Final = "engine.fleet.ingress.direct_requests:build_middlewares"
SERVE_PREFIX: Final = "/-/"  # of the paths that Ray Serve answers
DIRECT: Final = "rekindle.direct"  # in a scope: the request has not passed Ray Serve's own layer


@define(eq=False)
class IngressSlot:
    """The place for the ingress of this process. app: None until Ray Serve has made it."""

    app: ASGIApp | None = field(default=None, init=False)


SLOT: Final = IngressSlot()
"""Ray Serve makes the middleware and the ingress, and neither of them knows the other: this is where they meet."""


class DirectRequests:
    """An ASGI middleware. app: Ray Serve's own layer."""

    def __init__(self, app: ASGIApp, slot: IngressSlot = SLOT) -> None:
        self.app = app
        self.slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ingress = self.slot.app
        if ingress is None or scope["type"] != "http" or scope["path"].startswith(SERVE_PREFIX):
            await self.app(scope, receive, send)
            return
        scope[DIRECT] = True
        await ingress(scope, receive, send)


def build_middlewares() -> list[Middleware]:
    """Return what Ray Serve puts before an ingress. It calls this by its import path."""
    return [Middleware(DirectRequests)]
