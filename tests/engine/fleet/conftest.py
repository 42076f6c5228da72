"""An ingress on a real socket before servers with fake engines. Ray is replaced by an object with the same calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from attrs import define, evolve, field
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.guard import Guard
from adapters.http.page import files
from adapters.http.wire.server import RunningServer, ServerLimits, serve_app
from adapters.metrics import Metrics
from adapters.text.model_text import Text
from engine.fleet.ingress.ingress_app import FLEET, IngressApp
from engine.fleet.ingress.key_finder import KeyFinder
from engine.fleet.ingress.prompt_keys import PromptReader
from engine.fleet.ingress.reading_thread import ReadingThread
from engine.fleet.ingress.replica_picker import ReplicaPicker
from engine.fleet.replica_facts import ReplicaFacts
from engine.settings.options import evolve_options
from states.routing.choose_replica import RemotePrefill, RouteDecision
from tests.http.conftest import Site, served
from tests.plain_http import NO_TLS
from tests.text import small

IDENTITY = "0" * 32
BLOCK = 8
NO_SERVER = "http://127.0.0.1:1"


@define(eq=False)
class FakeHandle:
    """A handle of a deployment. It chooses the first replica that need not be avoided.

    calls: the arguments of each call of `choose_replica`. prefill: the remote prefill that its router's decisions name.
    """

    replicas: dict[str, ReplicaFacts]
    prefill: RemotePrefill | None = None
    calls: list[dict[str, Any]] = field(factory=list)

    @asynccontextmanager
    async def choose_replica(self, **call: Any) -> AsyncIterator[SimpleNamespace]:
        self.calls.append(call)
        while not self.replicas:  # noqa: ASYNC110 - tests change them
            await anyio.sleep(0.01)
        name = next((one for one in self.replicas if one not in call["avoid"]), next(iter(self.replicas)))
        held = (0, 0, 0, 0)
        call["on_decision"](RouteDecision(name, "new_session", held, 0, 0, 0, 0, prefill=self.prefill))
        yield SimpleNamespace(replica_id=name, replica_metadata=self.replicas[name].to_metadata())

    def broadcast(self, method: str) -> SimpleNamespace:
        assert method == "describe"

        async def results_async(**_: Any) -> list[tuple[str, dict[str, Any]]]:
            if not self.replicas:
                raise DeploymentUnavailableError(DeploymentID("replica"))
            return [(name, facts.to_metadata()) for name, facts in self.replicas.items()]

        return SimpleNamespace(results_async=results_async)


@define(eq=False)
class FakeFleet:
    """An ingress that runs, its replicas by their names, and a client of it."""

    client: httpx.AsyncClient
    sites: dict[str, Site]
    handle: FakeHandle
    app: IngressApp

    def cut_first(self) -> None:
        """Break the connections of the first replica, as its death does."""
        for connection in list(self.first.serving.connections):
            connection.raw_transport.abort()

    def lose_first(self) -> None:
        """Give the first replica an address where no server listens."""
        self.handle.replicas["a"] = evolve(self.handle.replicas["a"], url=NO_SERVER)

    @property
    def first(self) -> Site:
        return self.sites["a"]

    @property
    def second(self) -> Site:
        return self.sites["b"]


@define(eq=False)
class Servers:
    """Two servers by their names, and a tokenizer for ingresses with the thread on which it is used."""

    sites: dict[str, Site]
    text: Text
    thread: ReadingThread

    def reset(self) -> None:
        for site in self.sites.values():
            site.door.reset()
            site.door.hang_after = None
            site.door.step_s = 0.0
            site.door.waiting = 0


@asynccontextmanager
async def run_servers(folder: Path, **options: Any) -> AsyncIterator[Servers]:
    """Run two servers. options: of their HTTP edges."""
    async with served(folder, **options) as first, served(folder, **options) as second:
        text = Text.load(folder)
        thread = ReadingThread()
        await thread.run(text.check)
        yield Servers({"a": first, "b": second}, text, thread)
        await thread.run(text.aclose)
        thread.stop()


@asynccontextmanager
async def run_ingress(servers: Servers, **options: Any) -> AsyncIterator[FakeFleet]:
    """Run an ingress before servers. options: of its HTTP edge."""
    async with AsyncExitStack() as stack:
        first = servers.sites["a"]
        about = (await first.client.get("/", headers=credentials(options))).json()
        facts = ReplicaFacts(
            "", IDENTITY, BLOCK, "small", 4096, first.options.model.vocab, 4, tuple(about["endpoints"])
        )
        urls = {name: str(site.client.base_url).rstrip("/") for name, site in servers.sites.items()}
        handle = FakeHandle({name: evolve(facts, url=url) for name, url in urls.items()})
        edge = evolve_options(EdgeOptions(EdgeModel("", 0, 0)), **options)
        metrics = Metrics()
        finder = KeyFinder(PromptReader(servers.text, edge), edge.limits.max_body, servers.thread)
        app = IngressApp(ReplicaPicker(handle), finder, edge, metrics)
        stack.push_async_callback(app.relay.close)
        guard = Guard(app, edge.access, metrics, frozenset({*about["endpoints"], *files.load_files(), FLEET}), None)
        url = await stack.enter_async_context(run_application(guard))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=NO_TLS)
        )
        yield FakeFleet(client, servers.sites, handle, app)


def credentials(options: dict[str, Any]) -> dict[str, str]:
    return {"x-api-key": options["api_keys"][0]} if "api_keys" in options else {}


@asynccontextmanager
async def run_application(guard: Guard) -> AsyncIterator[str]:
    """Serve the ingress, which has no lifespan of its own. Yields its URL."""
    listening: list[RunningServer] = []
    ready = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
        else:
            await guard(scope, receive, send)

    def on_listening(serving: RunningServer) -> None:
        listening.append(serving)
        ready.set()

    async def run() -> None:
        await serve_app(app, "127.0.0.1", 0, on_listening=on_listening, limits=ServerLimits(grace_s=2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await ready.wait()
        yield f"http://127.0.0.1:{listening[0].port}"
        listening[0].stop(now=True)
        await listening[0].end_event.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
async def servers(folder: Path) -> AsyncIterator[Servers]:
    async with run_servers(folder) as running:
        yield running


@pytest.fixture
async def fleet(servers: Servers) -> AsyncIterator[FakeFleet]:
    servers.reset()
    async with run_ingress(servers) as running:
        yield running
    servers.reset()
