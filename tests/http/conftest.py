"""A server on a real socket, in front of the fake engine, with a tokenizer trained in this session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from attrs import define
from starlette.routing import Route

from adapters.http.app import Edge, build_app
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.frozen_messages import FrozenMessages
from adapters.http.history.histories import Histories
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.history.response_store import ResponseStore
from adapters.http.wire.server import RunningServer, ServerLimits, serve_app
from adapters.metrics import Metrics
from adapters.store.files.private_folder import PrivateFolder
from adapters.text.model_text import Text
from effects.job import Job
from engine.settings.options import evolve_options
from tests.http.fake_door import DIGESTS, FakeDoor
from tests.plain_http import NO_TLS
from tests.text import small


@define(eq=False)
class Site:
    """A running server and everything behind it."""

    client: httpx.AsyncClient
    door: FakeDoor
    text: Text
    options: EdgeOptions
    serving: RunningServer
    metrics: Metrics
    memory: TurnMemory
    frozen: FrozenMessages | None = None

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **more)

    async def chat(self, content: str = "Hello", **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat(content, **fields))

    async def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    def say(self, text: str) -> list[int]:
        """From now on every answer is this text, byte-pair encoded, then the end token. Returns its tokens."""
        (tokens,) = self.text.tokenizer.encode_now([text])
        return self.say_tokens([*tokens])

    def say_tokens(self, tokens: list[int]) -> list[int]:
        def script(job: Job) -> Iterator[int]:
            yield from tokens

        self.door.script = script
        return tokens


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@asynccontextmanager
async def served(
    folder: Path,
    *,
    door: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    kept: Path | None = None,
    turns: Path | None = None,
    frozen: FrozenMessages | None = None,
    recall: HistoryLoader | None = None,
    fleet_routes: Callable[[Edge], Sequence[Route]] = lambda _: (),
    **options: Any,
) -> AsyncIterator[Site]:
    """kept: where responses are.  turns: where the tokens of answers are.  recall: who may mean these waits for it."""
    text = Text.load(folder)
    await text.check()
    edge = evolve_options(EdgeOptions(EdgeModel("small", 4096, text.tokenizer.size)), **options)
    metrics = Metrics()
    archive = ResponseStore(None if kept is None else PrivateFolder.open(kept))
    archive.load()
    memory = TurnMemory(None if turns is None else PrivateFolder.open(turns))
    memory.load()
    listening: list[RunningServer] = []
    ready = anyio.Event()

    def on_listening(serving: RunningServer) -> None:
        listening.append(serving)
        ready.set()

    async with FakeDoor.opened(DIGESTS, **door or {}) as fake, anyio.create_task_group() as tasks:
        histories = Histories(archive, memory, frozen, recall)
        app = build_app(fake, text, edge, metrics, histories, fleet_routes=fleet_routes)

        limits = ServerLimits(**{"grace_s": 2} | (server or {}))

        async def run() -> None:
            await serve_app(app, "127.0.0.1", 0, on_listening=on_listening, limits=limits)

        tasks.start_soon(run)
        tasks.start_soon(archive.run)
        tasks.start_soon(memory.run)
        await ready.wait()
        address = f"http://127.0.0.1:{listening[0].port}"
        pool = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=address, timeout=20, limits=pool, trust_env=False, verify=NO_TLS
        ) as client:
            yield Site(client, fake, text, edge, listening[0], metrics, memory, frozen)
        listening[0].stop(now=True)
        await listening[0].end_event.wait()
        await archive.close()
        await memory.close()
        tasks.cancel_scope.cancel()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
async def shared(folder: Path) -> AsyncIterator[Site]:
    """One server for tests that only send requests."""
    async with served(folder) as site:
        yield site


@pytest.fixture
async def site(shared: Site) -> AsyncIterator[Site]:
    """The same server with its engine as new, for tests that look at it or change it."""
    shared.door.reset()
    yield shared
    shared.door.reset()
