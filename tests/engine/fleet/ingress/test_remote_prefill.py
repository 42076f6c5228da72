"""Prompts that one replica reads for another, as the ingress has it done, over real sockets."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, evolve, field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.http.app import Edge
from engine.core.fleet_paths import DIGEST_PATH, PROMPT_PATH, READ_PATH, REFRESH_PATH
from engine.fleet.ingress import remote_prefill
from engine.fleet.ingress.remote_prefill import LEAST_LIMIT_S, MOST_LIMIT_S, compute_limit
from states.routing.choose_replica import RemotePrefill
from tests.engine.fleet.conftest import FakeFleet, run_ingress, run_servers
from tests.http.conftest import chat

CHAT = "/v1/chat/completions"
PREFILL = RemotePrefill("b", 100, 10**9, 10**8)
ORDER = {"is": "an order"}
READ = {"prompt_tokens": 3000, "published_tokens": 2944}


@define(eq=False)
class ScriptedPaths:
    """The paths for prompts of both servers, which note how they are called. read, refresh, describe: their answers."""

    read: Callable[[], Awaitable[Response]]
    refresh: Callable[[], Awaitable[Response]]
    describe: Callable[[], Awaitable[Response]] = field(factory=lambda: answer(ORDER))
    calls: list[tuple[str, dict[str, str], bytes]] = field(factory=list)  # target, headers, body
    reading: anyio.Event = field(factory=anyio.Event)  # a prompt is being read

    def make_routes(self, _: Edge) -> list[Route]:
        async def read(request: Request) -> Response:
            await self._note(request)
            self.reading.set()
            return await self.read()

        async def refresh(request: Request) -> Response:
            await self._note(request)
            return await self.refresh()

        async def describe(request: Request) -> Response:
            await self._note(request)
            return await self.describe()

        handlers = {PROMPT_PATH: describe, READ_PATH: read, REFRESH_PATH: refresh}
        return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]

    async def _note(self, request: Request) -> None:
        target = f"{request.url.path}?{request.url.query}".removesuffix("?")
        self.calls.append((target, dict(request.headers), await request.body()))


def answer(body: Any, status: int = 200) -> Callable[[], Awaitable[Response]]:
    async def respond() -> Response:
        return JSONResponse(body, status)

    return respond


async def never_answer() -> Response:
    await anyio.sleep_forever()
    raise AssertionError


@asynccontextmanager
async def run_fleet(folder: Path, paths: ScriptedPaths, **options: Any) -> AsyncIterator[FakeFleet]:
    """Run a fleet whose router has the prompts for a read by b."""
    async with (
        run_servers(folder, fleet_routes=paths.make_routes, **options) as servers,
        run_ingress(servers, **options) as fleet,
    ):
        await fleet.app.picker.list_replicas()
        fleet.handle.prefill = PREFILL
        yield fleet


async def count_outcomes(fleet: FakeFleet, **more: Any) -> dict[tuple[str, str], float]:
    """Return how many prompts had which outcome, by reader and outcome."""
    text = (await fleet.client.get("/metrics", **more)).text
    found = re.findall(r'rekindle_fleet_remote_prefills_total\{.*outcome="(\w+)",reader="(\w+)"\} (\S+)', text)
    return {(reader, outcome): float(count) for outcome, reader, count in found}


async def test_another_replica_reads_the_prompt_and_the_answering_one_finds_the_rows(folder: Path) -> None:
    paths = ScriptedPaths(answer(READ), answer({"status": "ok"}))
    body = chat("Hello", max_tokens=4, cache_salt="mine")
    async with run_fleet(folder, paths, api_keys=("first", "second")) as fleet:
        credentials = {"authorization": "Bearer second"}
        answered = await fleet.client.post(CHAT, json=body, headers={**credentials, "x-other": "1"})
        assert answered.status_code == 200
        assert (answered.headers["x-rekindle-replica"], answered.headers["x-rekindle-reader"]) == ("a", "b")
        assert await count_outcomes(fleet, headers=credentials) == {("b", "read"): 1}
        assert not fleet.second.door.tickets
        (described, read, refreshed) = paths.calls
        assert [one[0] for one in paths.calls] == ["/kv/prompt?api=/v1/chat/completions", READ_PATH, REFRESH_PATH]
        assert [one[2] for one in paths.calls] == [answered.request.content, b'{"is":"an order"}', b""]
        assert {one[1]["authorization"] for one in paths.calls} == {"Bearer second"}
        assert (described[1]["content-type"], described[1]["x-other"]) == ("application/json", "1")
        assert all("x-other" not in headers for _, headers, _ in (read, refreshed))


async def test_a_stream_names_the_reader_as_well(folder: Path) -> None:
    async with run_fleet(folder, ScriptedPaths(answer(READ), answer({}))) as fleet:
        answered = await fleet.client.post(CHAT, json=chat("Hello", max_tokens=4, stream=True))
        assert answered.headers["x-rekindle-reader"] == "b"
        assert answered.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("paths", "outcome"),
    [
        (ScriptedPaths(answer(READ), answer({}), answer({}, 409)), "not_described"),
        (ScriptedPaths(answer({}, 503), answer({})), "refused"),
        (ScriptedPaths(answer({**READ, "published_tokens": PREFILL.held}), answer({})), "useless"),
        (ScriptedPaths(answer("no report"), answer({})), "useless"),
        (ScriptedPaths(answer(READ), answer({}, 503)), "not_refreshed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_whatever_fails_the_answering_replica_reads_the_prompt_itself(
    folder: Path, paths: ScriptedPaths, outcome: str
) -> None:
    async with run_fleet(folder, paths) as fleet:
        answered = await fleet.client.post(CHAT, json=chat("Hello", max_tokens=4))
        assert (answered.status_code, answered.headers["x-rekindle-replica"]) == (200, "a")
        assert "x-rekindle-reader" not in answered.headers
        assert await count_outcomes(fleet) == {("b", outcome): 1}


async def test_a_reader_that_dies_while_it_reads_fails_no_request(folder: Path) -> None:
    paths = ScriptedPaths(never_answer, answer({}))
    async with run_fleet(folder, paths) as fleet, anyio.create_task_group() as tasks:
        found: list[int] = []

        async def ask() -> None:
            found.append((await fleet.client.post(CHAT, json=chat("Hello", max_tokens=4))).status_code)

        tasks.start_soon(ask)
        with anyio.fail_after(30):
            await paths.reading.wait()
        assert fleet.app.picker.in_flight == {"a": 1, "b": 1}, "reading is a part of the load of the reader"
        for connection in list(fleet.second.serving.connections):
            connection.raw_transport.abort()
        with anyio.fail_after(30):
            while not found:  # noqa: ASYNC110 - over HTTP
                await anyio.sleep(0.01)
        assert found == [200]
        assert await count_outcomes(fleet) == {("b", "lost"): 1}
        assert not fleet.app.picker.in_flight


async def test_a_reader_that_takes_too_long_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "compute_limit", lambda _: 0.05)
    async with run_fleet(folder, ScriptedPaths(never_answer, answer({}))) as fleet:
        assert (await fleet.client.post(CHAT, json=chat("Hello", max_tokens=4))).status_code == 200
        assert await count_outcomes(fleet) == {("b", "timed_out"): 1}


async def test_a_reader_that_is_not_known_is_not_waited_for(folder: Path) -> None:
    async with run_fleet(folder, ScriptedPaths(answer(READ), answer({}))) as fleet:
        fleet.handle.prefill = evolve(PREFILL, replica="gone")
        assert (await fleet.client.post(CHAT, json=chat("Hello", max_tokens=4))).status_code == 200
        assert await count_outcomes(fleet) == {("gone", "unknown"): 1}


async def test_a_request_that_is_repeated_is_read_elsewhere_only_once(folder: Path) -> None:
    paths = ScriptedPaths(answer(READ), answer({}, 503))
    async with run_fleet(folder, paths) as fleet:
        fleet.first.door.state = "draining"
        answered = await fleet.client.post(CHAT, json=chat("Hello", max_tokens=4))
        assert answered.headers["x-rekindle-replica"] == "b"
        assert await count_outcomes(fleet) == {("b", "not_refreshed"): 1}


@pytest.mark.parametrize("path", [PROMPT_PATH, READ_PATH, REFRESH_PATH, DIGEST_PATH])
async def test_clients_reach_no_path_of_the_fleet_itself(folder: Path, path: str) -> None:
    paths = ScriptedPaths(answer(READ), answer({}))
    async with run_fleet(folder, paths) as fleet:
        for more in ({}, {"replica": "b"}):
            answered = await fleet.client.post(path, params=more, json=chat("Hello"))
            assert (answered.status_code, answered.json()["error"]["code"]) == (404, "unknown_path")
        assert not paths.calls


def test_the_limit_follows_the_estimate_of_the_router() -> None:
    times_ns = (1, 10 * 10**9, 10**12)
    assert [compute_limit(evolve(PREFILL, published_ns=one)) for one in times_ns] == [LEAST_LIMIT_S, 30, MOST_LIMIT_S]
