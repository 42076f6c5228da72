"""What is answered while the model loads, and while what was said before is read."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from adapters.http.archive import Archive
from adapters.http.page import files
from adapters.http.turn_memory import TurnMemory
from adapters.store.folder import Folder
from engine.options import Options
from engine.recall import follow
from engine.serve import Gate


async def test_the_page_is_there_before_the_model_and_nothing_else_is() -> None:
    transport = httpx.ASGITransport(Gate())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        page = await client.get("/", headers={"accept": "text/html"})
        assert (page.status_code, page.content) == (200, files.files()[files.PAGE].body)
        assert page.headers["content-security-policy"] == files.POLICY
        assert (await client.get("/page/app.js")).status_code == 200
        for method, path in (
            ("GET", "/"),
            ("GET", "/events"),
            ("GET", "/health"),
            ("POST", "/page"),
            ("GET", "/page/x"),
        ):
            refused = await client.request(method, path)
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, "Loading model")
            assert refused.headers["retry-after"] == "1"


async def through(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("here")(scope, receive, send)


async def test_who_may_refer_to_what_was_said_before_waits_for_it_and_nobody_else_does() -> None:
    gate, asked = Gate(through), list[str]()
    referring = [("POST", "/v1/chat/completions"), ("GET", "/responses/resp_1"), ("DELETE", "/v1/responses/resp_1")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost") as client:

        async def ask(method: str, path: str) -> None:
            answer = await client.request(method, path)
            assert answer.text == "here"
            asked.append(f"{method} {path}")

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for one in referring:
                    tasks.start_soon(ask, *one)
                await anyio.wait_all_tasks_blocked()
                for path in ("/health", "/v1/models", "/metrics", "/"):
                    await ask("GET", path)
                for path in ("/v1/completions", "/completion"):
                    await ask("POST", path)
                assert len(asked) == 6
                gate.recalled.set()
        assert sorted(asked[6:]) == sorted(f"{method} {path}" for method, path in referring)


async def test_what_was_said_is_read_and_then_followed(tmp_path: Path) -> None:
    options, recalled = Options(kv_cache_dir=tmp_path), anyio.Event()
    before = Archive(Folder.open(tmp_path / "responses"))
    before.put("resp_" + 24 * "0", b" \n{}\n[]")
    await before.close()
    archive, memory = Archive(), TurnMemory()
    cabinets = {"responses": archive, "turns": memory}
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, cabinets, options, recalled)
            await recalled.wait()
            assert list(archive._raw) == ["resp_" + 24 * "0"]  # noqa: SLF001
            archive.put("resp_" + 24 * "1", b" \n{}\n[]")
            while len(list((tmp_path / "responses").glob("resp_*"))) < 2:  # noqa: ASYNC110 - a task writes it
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    for cabinet in cabinets.values():
        await cabinet.close()


async def test_a_stop_while_it_is_read_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, recalled, held, begun = Options(kv_cache_dir=tmp_path), anyio.Event(), threading.Event(), anyio.Event()
    wake = partial(anyio.from_thread.run_sync, begun.set)

    def slow(self: Archive) -> None:
        wake()
        held.wait(20)

    monkeypatch.setattr(Archive, "load", slow)
    archive = Archive()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, {"responses": archive}, options, recalled)
            await begun.wait()
            tasks.cancel_scope.cancel()
            held.set()
    assert recalled.is_set()
    await archive.close()


async def test_a_folder_that_cannot_be_read_costs_what_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_: Folder) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "turns").write_text("no folder")
    monkeypatch.setattr(Folder, "files", gone)
    options, recalled = Options(kv_cache_dir=tmp_path), anyio.Event()
    cabinets = {"responses": Archive(), "turns": TurnMemory()}
    with anyio.fail_after(20), caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, cabinets, options, recalled)
            await recalled.wait()
            tasks.cancel_scope.cancel()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "responses are not kept on disk",
        "the tokens of answers are not kept on disk",
    ]
    for cabinet in cabinets.values():
        await cabinet.close()
