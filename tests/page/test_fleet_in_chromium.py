"""The page of a fleet: an ingress before two servers with scripted engines, seen in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from attrs import evolve

from adapters.http.app import build_app
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.wire.server import RunningServer, ServerLimits, serve_app
from adapters.metrics import Metrics
from adapters.text.model_text import Text
from engine.fleet.ingress.reading_thread import ReadingThread
from tests.browser import Browser, found
from tests.engine.fleet.conftest import Servers, run_ingress
from tests.engine.play import SETTINGS, ScriptedDevice, engine
from tests.text import small

pytestmark = pytest.mark.skipif(found() is None, reason="no Chromium here: Debian's package is `chromium`")

SHOWN = "!document.querySelector('#fleet').hidden && document.querySelectorAll('#replicas tr').length === 2"
ROWS = "[...document.querySelectorAll('#replicas tr')].map((row) => [...row.children].map((one) => one.textContent))"
PRESSED = "[...document.querySelectorAll('#replicas [aria-pressed=true]')].map((one) => one.textContent).join()"


@asynccontextmanager
async def run_replica(text: Text) -> AsyncIterator[SimpleNamespace]:
    """Run a server with an engine that computes nothing. Yields what a fleet of the tests knows of one."""
    listening: list[RunningServer] = []
    ready = anyio.Event()

    def on_listening(serving: RunningServer) -> None:
        listening.append(serving)
        ready.set()

    options = EdgeOptions(EdgeModel("scripted", 4096, text.tokenizer.size))
    async with (
        engine(evolve(SETTINGS, max_context=4096), ScriptedDevice()) as running,
        anyio.create_task_group() as tasks,
    ):
        app = build_app(running.door, text, options, Metrics())

        async def run() -> None:
            limits = ServerLimits(grace_s=2)
            await serve_app(app, "127.0.0.1", 0, on_listening=on_listening, limits=limits)

        tasks.start_soon(run)
        await ready.wait()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening[0].port}", trust_env=False) as client:
            yield SimpleNamespace(client=client, options=options, serving=listening[0])
        listening[0].stop(now=True)
        await listening[0].end_event.wait()


async def test_all_replicas_are_listed_and_the_chosen_one_is_shown(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = small.write(tmp_path_factory.mktemp("small"))
    texts = [Text.load(folder) for _ in range(3)]
    for text in texts[:2]:
        await text.check()
    thread = ReadingThread()
    await thread.run(texts[2].check)
    program = found()
    assert program is not None
    async with (
        run_replica(texts[0]) as first,
        run_replica(texts[1]) as second,
        Browser.opened(program, tmp_path_factory.mktemp("profile")) as browser,
    ):
        sites: dict[str, Any] = {"a": first, "b": second}
        async with (
            run_ingress(Servers(sites, texts[2], thread)) as fleet,
            browser.page(str(fleet.client.base_url)) as page,
        ):
            await page.until(SHOWN)
            assert await page.text("#fleet-note") == "2 of 2 ready; choose one to see its requests below"
            rows = await page.js(ROWS)
            assert [row[:2] for row in rows] == [["a", "ready"], ["b", "ready"]]
            assert [row[2] for row in rows] == [f"0 of {SETTINGS.slots}"] * 2
            await page.until(f"{PRESSED} === 'a'")
            await page.click("#replicas tr:nth-child(2) button")
            await page.until(f"{PRESSED} === 'b'")
            # The chosen replica is lost. The page shows another one again, and says what has become of it.
            second.serving.stop(now=True)
            await page.until(f"{PRESSED} === 'a'")
            await page.until(f"{ROWS}[1][1] === 'unreachable'")
            assert (await page.text("#fleet-note")).startswith("1 of 2 ready")
        await thread.run(texts[2].aclose)
        thread.stop()
