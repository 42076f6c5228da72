"""The paths by which a fleet has prompts read on one server for another, over real sockets, with whole engines."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import httpx
import msgspec
import pytest
from attrs import define

pytest.importorskip("obstore")

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slot_table import SlotTable
from adapters.http.app import build_app
from adapters.http.edge_options import CompressionDefaults, EdgeModel, EdgeOptions
from adapters.http.wire.server import RunningServer, ServerLimits, serve_app
from adapters.store.block_keys import pack_tokens
from adapters.store.files.file_format import Layout
from adapters.store.open_store import SharedStoreSettings, open_store
from adapters.store.shared.folder_client import FolderClient
from adapters.store.shared.object_names import SERVERS
from adapters.store.store import Store
from adapters.text.model_text import Text
from adapters.transfer.transfer import create_transfer
from effects.residency import LoadModel, ModelLoaded
from engine.core.fleet_paths import PROMPT_PATH, READ_PATH, REFRESH_PATH
from engine.loading.load_target import LoadedModel
from engine.serving.fleet_routes import make_fleet_routes
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import evolve_options
from tests.engine.loading.test_stateful import BUCKETS, SETTINGS, ReadBack, clocks, prompt
from tests.models.recurrent_shard import VOCAB
from tests.plain_http import NO_TLS
from tests.text import small

__all__ = ("clocks",)  # a fixture that every test of this module uses

COMPLETIONS = "/v1/completions"
PROMPT = list(prompt(1, 100))
USABLE = 96  # tokens of its whole blocks
KEYS = ("first-key", "second-key")


@define
class ReadingServer:
    """A server with a shared tier and nothing else beyond the device."""

    client: httpx.AsyncClient
    engine: Engine
    store: Store[Any]

    async def describe(self, body: dict[str, Any], api: str = COMPLETIONS, **more: Any) -> httpx.Response:
        """Return what another server has to read for a request."""
        return await self.client.post(PROMPT_PATH, params={"api": api}, json=body, **more)

    async def read(self, order: bytes, **more: Any) -> httpx.Response:
        return await self.client.post(READ_PATH, content=order, **more)

    async def complete(self, body: dict[str, Any], **more: Any) -> tuple[str, int]:
        """Return the answer, and how many tokens were restored from the shared tier."""
        answer = (await self.client.post(COMPLETIONS, json=body, **more)).raise_for_status().json()
        about = answer["rekindle"]
        return answer["choices"][0]["text"], about["restored_tokens"] if about["tier"] == "shared" else 0

    async def count_answers(self, path: str, status: int) -> int:
        """Return how many requests for a path were answered with this status."""
        text = (await self.client.get("/metrics")).text
        found = [line for line in text.splitlines() if f'"{path}"' in line and f'"{status}"' in line]
        return sum(line.startswith("rekindle_http_responses_total") for line in found)


@asynccontextmanager
async def serve_sharing(text_folder: Path, shared: Path | None, **options: Any) -> AsyncIterator[ReadingServer]:
    """Run a server on a free port. shared: the folder that is the store. options: of the HTTP edge."""
    text = Text.load(text_folder)
    await text.check()
    lane = DeviceLane()
    shard = ReadBack(SETTINGS.slots, SETTINGS.max_context, BUCKETS, state_block=16, state_checkpoints=3)
    place = None if shared is None else SharedStoreSettings(f"file://{shared}", 0, 1e9)
    layout = Layout("34" * 16, SETTINGS.block_size, shard.rows.spec, state=shard.states.specs)
    opening = partial(open_store, layout, None, host_bytes=0 if place else 1 << 20, shared=place)
    store = await anyio.to_thread.run_sync(opening)
    assert store is not None
    slots = SlotTable()
    moving = create_transfer(store, (shard,), lane, slots.find)
    parts = ExecutorParts(
        shard,
        BUCKETS,
        lane,
        handlers={LoadModel: lambda *_: ModelLoaded()},
        keep_state=moving.saver.save_checkpoint,
        slots=slots,
    )
    executor = DeviceExecutor(parts)
    edge = evolve_options(EdgeOptions(EdgeModel("small", SETTINGS.max_context, VOCAB)), **options)
    target = cast(LoadedModel, SimpleNamespace(identity="34" * 16, transfer=moving))
    async with (
        run_engine(SETTINGS, executor, transfer=moving, paranoid=True) as running,
        anyio.create_task_group() as tasks,
    ):
        routes = make_fleet_routes(running.submissions, target)
        app = build_app(running.submissions, text, edge, running.metrics, fleet_routes=routes)
        listening: list[RunningServer] = []
        ready = anyio.Event()

        def on_listening(serving: RunningServer) -> None:
            listening.append(serving)
            ready.set()

        async def run() -> None:
            await serve_app(app, "127.0.0.1", 0, on_listening=on_listening, limits=ServerLimits(grace_s=2))

        tasks.start_soon(run)
        await ready.wait()
        url = f"http://127.0.0.1:{listening[0].port}"
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=NO_TLS) as client:
            yield ReadingServer(client, running, store)
        listening[0].stop(now=True)
        await listening[0].end_event.wait()
    assert executor.close()
    moving.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write(tmp_path_factory.mktemp("small"))


def ask(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **more}


def make_order(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({"tokens": pack_tokens(PROMPT), "boundaries": [], "salt": "", **changes})


async def test_what_one_server_has_read_another_restores_at_once(folder: Path, tmp_path: Path) -> None:
    async with serve_sharing(folder, None) as alone:
        expected, _ = await alone.complete(ask())
    async with serve_sharing(folder, tmp_path) as reader, serve_sharing(folder, tmp_path) as other:
        order = await other.describe(ask(stream=True, n=2, logprobs=1))
        assert (order.status_code, msgspec.msgpack.decode(order.content)) == (200, msgspec.msgpack.decode(make_order()))
        found = await reader.read(order.content)
        assert (found.status_code, found.json()) == (200, {"prompt_tokens": 100, "published_tokens": USABLE})
        refreshed = await other.client.post(REFRESH_PATH)
        assert (refreshed.status_code, refreshed.json()) == (200, {"status": "ok"})
        assert await other.complete(ask()) == (expected, USABLE)


async def test_a_prompt_that_another_server_has_published_already_counts(folder: Path, tmp_path: Path) -> None:
    async with serve_sharing(folder, tmp_path) as one, serve_sharing(folder, tmp_path) as other:
        for server in (one, other):
            assert (await server.read(make_order())).json()["published_tokens"] == USABLE


async def test_rows_of_one_key_are_not_found_by_another(folder: Path, tmp_path: Path) -> None:
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    salted = ask(cache_salt="ours")
    async with (
        serve_sharing(folder, tmp_path, api_keys=KEYS) as reader,
        serve_sharing(folder, tmp_path, api_keys=KEYS) as other,
    ):
        for path in (PROMPT_PATH, READ_PATH, REFRESH_PATH):
            for credentials in ({}, {"authorization": "Bearer wrong"}):
                assert (await other.client.post(path, headers=credentials)).status_code == 401
        order = (await other.describe(salted, headers=first)).content
        assert (await reader.read(order, headers=first)).json()["published_tokens"] == USABLE
        assert (await other.client.post(REFRESH_PATH, headers=second)).status_code == 200
        assert (await other.complete(salted, headers=second))[1] == 0
        assert (await other.complete(ask(), headers=first))[1] == 0
        assert (await other.complete(salted, headers=first))[1] == USABLE


async def test_an_order_of_one_key_reads_nothing_for_another(folder: Path, tmp_path: Path) -> None:
    """The salt in an order is the request's. A reader adds the key of the one who sends the order."""
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    async with serve_sharing(folder, tmp_path, api_keys=KEYS) as server:
        order = (await server.describe(ask(), headers=first)).content
        assert (await server.read(order, headers=second)).status_code == 200
        assert (await server.complete(ask(), headers=first))[1] == 0


async def test_bodies_are_bounded(folder: Path, tmp_path: Path) -> None:
    async with serve_sharing(folder, tmp_path, max_body=1000) as server:
        assert (await server.describe(ask(user="x" * 1000))).status_code == 413
        assert (await server.read(make_order(salt="x" * 1000))).status_code == 413
        assert (await server.client.post(REFRESH_PATH, content=b"x")).status_code == 413

        async def send_parts() -> AsyncIterator[bytes]:
            yield b"x"

        assert (await server.client.post(REFRESH_PATH, content=send_parts())).status_code == 413


@pytest.mark.parametrize(
    ("body", "api", "status"),
    [
        ({}, "/v1/embeddings", 400),
        ({}, "", 400),
        ({"prompt": []}, COMPLETIONS, 400),
        ({"prefix_cache": {"scope": "off"}}, COMPLETIONS, 409),
    ],
)
async def test_what_cannot_be_read_elsewhere_is_not_described(
    folder: Path, tmp_path: Path, body: dict[str, Any], api: str, status: int
) -> None:
    async with serve_sharing(folder, tmp_path) as server:
        assert (await server.describe(ask(**body), api)).status_code == status


async def test_a_prompt_that_may_be_compressed_is_not_described(folder: Path, tmp_path: Path) -> None:
    scored = CompressionDefaults(mode="always", max_scored_tokens=200)
    async with serve_sharing(folder, tmp_path, compression=scored) as server:
        assert (await server.describe(ask())).status_code == 409


async def test_orders_that_cannot_be_are_refused(folder: Path, tmp_path: Path) -> None:
    async with serve_sharing(folder, tmp_path) as server:
        for order in (
            b"",
            b"no order",
            make_order(tokens=b""),
            make_order(tokens=b"abc"),
            make_order(tokens=pack_tokens([VOCAB])),
            make_order(tokens=pack_tokens([-1])),
            make_order(tokens=pack_tokens([5] * SETTINGS.max_context)),
            make_order(boundaries=[101]),
            make_order(boundaries=[8, 4]),
            make_order(boundaries=[-1]),
        ):
            assert (await server.read(order)).status_code == 400, order[:40]
        assert not server.engine.event_loop.seq, "the engine has seen none of them"


async def test_without_a_shared_tier_there_are_no_such_paths(folder: Path) -> None:
    async with serve_sharing(folder, None) as server:
        assert (await server.describe(ask())).status_code == 404
        assert (await server.read(make_order())).status_code == 404
        assert (await server.client.post(REFRESH_PATH)).status_code == 404


async def test_a_caller_that_leaves_ends_the_reading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes no rows, so a reading that is not cancelled would never end."""
    is_writing = threading.Event()
    may_end = threading.Event()
    write_now = FolderClient.write_object

    async def write(client: FolderClient, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        if name.startswith(SERVERS):  # a report of the server itself, which may come before the reading begins
            await write_now(client, name, parts, replace=replace)
            return
        is_writing.set()
        await anyio.to_thread.run_sync(may_end.wait)

    async with serve_sharing(folder, tmp_path) as server:
        monkeypatch.setattr(FolderClient, "write_object", write)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.read, make_order())
            assert await anyio.to_thread.run_sync(is_writing.wait, 30)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(30):
            while not await server.count_answers(READ_PATH, 499):  # noqa: ASYNC110 - over HTTP
                await anyio.sleep(0.01)
        may_end.set()
