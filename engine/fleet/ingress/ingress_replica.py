"""The deployment of ingresses: the application behind Ray Serve's proxy, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from attrs import define, field
from starlette.types import ASGIApp, Receive, Scope, Send

from adapters.http.edge_options import (
    AccessOptions,
    EdgeModel,
    EdgeOptions,
    EdgeTimes,
    RequestDefaults,
    RequestLimits,
)
from adapters.http.guard import Guard
from adapters.http.page import files
from adapters.metrics import Metrics
from adapters.text.model_text import Text
from engine import __version__
from engine.fleet.ingress.direct_requests import SLOT
from engine.fleet.ingress.ingress_app import FLEET, IngressApp
from engine.fleet.ingress.key_finder import KeyFinder
from engine.fleet.ingress.open_requests import OpenRequests
from engine.fleet.ingress.prompt_keys import PromptReader
from engine.fleet.ingress.reading_thread import ReadingThread
from engine.fleet.ingress.replica_picker import ReplicaPicker
from engine.fleet.router.router_slot import NEWEST
from engine.loading.load_text import begin_text
from engine.settings.config_file import parse_values
from engine.settings.options import Options, evolve_options
from engine.settings.output.log_format import configure
from engine.settings.preflight import prepare_options


class IngressReplica:
    """One ingress. values: the options of the servers that differ from the defaults, by flat name.

    replicas: Ray Serve's handle of the replicas' deployment.
    """

    def __init__(self, values: Mapping[str, Any], replicas: Any) -> None:
        # Only replicas write traces and use the cache folder. An ingress may run on a machine without these folders.
        options = prepare_options(evolve_options(parse_values(values), trace=None, kv_cache_dir=None))
        configure(options.diagnostics.log_format, options.diagnostics.log_level)
        self.gate = IngressGate(options, begin_text(options.model).result(), ReplicaPicker(replicas, NEWEST))
        SLOT.app = self.gate

    async def drain(self, grace_s: float) -> int:
        """Take no more requests. Return how many have not ended after the grace period. Called when the fleet stops."""
        return await self.gate.open_requests.drain(grace_s)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application. Ray Serve calls this after the constructor."""
        return self.gate


@define(eq=False)
class IngressGate:
    """The application of an ingress, which is built for the first request: by then there is a replica."""

    options: Options
    text: Text
    picker: ReplicaPicker
    thread: ReadingThread = field(factory=ReadingThread)
    open_requests: OpenRequests = field(factory=OpenRequests)
    guard: Guard | None = field(default=None, init=False)
    _building: anyio.Lock = field(factory=anyio.Lock, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
            return
        guard = self.guard or await self._build()
        await guard(scope, receive, send)

    async def _build(self) -> Guard:
        async with self._building:
            if self.guard is None:
                await self.thread.run(self.text.check)
                replica = await self.picker.find_any()
                paths = frozenset({*replica.facts.paths, *files.load_files(), FLEET})
                self.guard = self._build_guard(paths)
            return self.guard

    def _build_guard(self, paths: frozenset[str]) -> Guard:
        """Return the application of the ingress behind the guard of the HTTP server."""
        edge = build_ingress_edge_options(self.options, self.text)
        metrics = Metrics()
        finder = KeyFinder(PromptReader(self.text, edge), edge.limits.max_body, self.thread)
        app = IngressApp(self.picker, finder, edge, metrics, open_requests=self.open_requests)
        return Guard(app, edge.access, metrics, paths, None)


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Tell the server that the application has started, and that it has ended."""
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


def build_ingress_edge_options(options: Options, text: Text) -> EdgeOptions:
    """Return the options of the ingress's HTTP server.

    It loads no model, so the model's facts, its device limits and compression have their defaults. The replicas check
    what depends on those.
    """
    http = options.http
    names = EdgeModel("", 0, 0, options.model.alias, options.model.any_model, version=__version__)
    return EdgeOptions(
        names,
        RequestDefaults(text.sampling, options.cache.default_scope, stabilize=http.stabilize),
        AccessOptions(http.api_key, (http.host, *http.allow_host), http.allow_origin),
        RequestLimits(http.max_body << 20),
        EdgeTimes(request_timeout_s=http.request_timeout),
    )
