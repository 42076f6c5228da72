"""Tests of the history that is read while the server is ready already: which requests wait for it, and what a stop does
then.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from adapters.http.apis.registry import needs_history
from adapters.http.history import history_loader as recalling
from adapters.http.history import response_store as limits
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.history.persistent_lru import PersistentLru, add_digest
from adapters.http.history.response_store import ResponseStore
from adapters.http.wire.errors import ApiError
from adapters.store.files.private_folder import PrivateFolder
from tests.http.conftest import Site, chat, served

BODY = b" \n{}\n[]"
CONVERSATIONS = [
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/apply-template",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
]


def name(number: int) -> str:
    return f"resp_{number:024x}"


def cabinets() -> dict[str, PersistentLru]:
    return {"responses": ResponseStore(), "turns": TurnMemory()}


async def closed(found: dict[str, PersistentLru]) -> None:
    for store in found.values():
        await store.close()


async def test_of_all_paths_those_of_conversations_wait(site: Site) -> None:
    listed = (await site.client.get("/", headers={"accept": "application/json"})).text
    paths = set(re.findall(r"/[a-z0-9_/{}:-]+", listed)) | set(CONVERSATIONS)
    assert len(paths) > 20
    assert sorted(filter(needs_history, paths)) == sorted(CONVERSATIONS)


async def test_who_may_mean_what_was_said_before_waits_for_it_and_nobody_else_does(folder: Path) -> None:
    found = cabinets()
    recall = HistoryLoader(found, None)
    async with served(folder, recall=recall, allowed_origins=("https://a.example",)) as site:
        answers = list[int]()

        async def ask(post: Callable[[], object]) -> None:
            answers.append((await post()).status_code)  # type: ignore[misc]

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, partial(site.chat, max_tokens=2))
                tasks.start_soon(ask, partial(site.client.get, f"/v1/responses/{name(1)}"))
                assert (await site.complete(max_tokens=2)).status_code == 200
                assert (await site.client.get("/health")).status_code == 200
                shared = {"origin": "https://a.example", "access-control-request-method": "POST"}
                preflight = await site.client.options("/v1/chat/completions", headers=shared)
                assert preflight.status_code == 200
                assert answers == []
                tasks.start_soon(recall.run)
                while len(answers) < 2:  # noqa: ASYNC110 - no event marks it
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
        assert sorted(answers) == [200, 404]


async def test_what_takes_too_long_is_waited_for_in_vain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalling, "MAX_WAIT_S", 0.05)
    async with served(folder, recall=HistoryLoader(cabinets(), None)) as site:
        refused = await site.post("/v1/chat/completions", chat(max_tokens=2))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "What was said before is still being read."


async def test_it_is_read_and_then_followed(tmp_path: Path) -> None:
    before = ResponseStore(PrivateFolder.open(tmp_path / "responses"))
    before.put(name(0), BODY)
    await before.close()
    found = cabinets()
    recall = HistoryLoader(found, tmp_path)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recall.run)
            await recall.wait()
            assert found["responses"].find(name(0)) is not None
            found["responses"].put(name(1), BODY)
            while not (tmp_path / "responses" / name(1)).exists():  # noqa: ASYNC110 - a task writes it
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    await closed(found)


async def test_a_stop_while_it_is_read_ends_it_with_the_file_that_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is removed, nothing more is read, and the requests that waited are asked to come again."""
    for folder in ("responses", "turns"):
        (tmp_path / folder).mkdir(mode=0o700)
    for number in range(5):
        (tmp_path / "responses" / name(number)).write_bytes(add_digest(BODY))
    held, begun, read = threading.Event(), anyio.Event(), list[str]()
    wake, reading = partial(anyio.from_thread.run_sync, begun.set), ResponseStore._read_file  # noqa: SLF001

    def slow(self: ResponseStore, name: str, size: int) -> bytes:
        read.append(name)
        wake()
        assert held.wait(20)
        return reading(self, name, size)

    monkeypatch.setattr(ResponseStore, "_read_file", slow)
    found, refused = cabinets(), list[Exception]()
    recall = HistoryLoader(found, tmp_path)

    async def wait() -> None:
        with pytest.raises(ApiError) as error:
            await recall.wait()
        refused.append(error.value)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as outer, anyio.create_task_group() as tasks:
            tasks.start_soon(recall.run)
            outer.start_soon(wait)
            await begun.wait()
            tasks.cancel_scope.cancel()
            outer.start_soon(released, held)
    assert len(read) == 1
    assert found["turns"].folder is None
    assert [error.status for error in refused] == [503]  # type: ignore[attr-defined]
    await closed(found)
    assert len(list((tmp_path / "responses").glob("resp_*"))) == 5


async def released(held: threading.Event) -> None:
    await anyio.sleep(0.05)  # until the cancellation is there
    held.set()


async def test_a_folder_that_cannot_be_read_costs_what_was_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_: PrivateFolder) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "turns").write_text("no folder")
    monkeypatch.setattr(PrivateFolder, "list_files", gone)
    found = cabinets()
    recall = HistoryLoader(found, tmp_path)
    with anyio.fail_after(20), caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recall.run)
            await recall.wait()
            tasks.cancel_scope.cancel()
    first, second = (record.message for record in caplog.records)
    assert first.startswith("responses of earlier processes cannot be read, and new ones are not kept: [Errno 5]")
    assert second.startswith("the tokens of answers are not kept on disk: ")
    assert [store.folder for store in found.values()] == [None, None]
    await closed(found)


async def test_of_a_file_no_more_is_read_than_one_may_have(tmp_path: Path) -> None:
    folder = PrivateFolder.open(tmp_path)
    (tmp_path / name(0)).write_bytes(add_digest(BODY))
    with (tmp_path / name(1)).open("wb") as huge:
        huge.truncate(1 << 43)  # eight tebibytes of nothing
    archive = ResponseStore(folder)
    archive.load()
    assert len(archive) == 1
    assert not (tmp_path / name(1)).exists()
    await archive.close()


async def test_those_that_were_written_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names do not matter."""
    monkeypatch.setattr(limits, "MAX_RESPONSES", 2)
    folder = PrivateFolder.open(tmp_path)
    for number, age in enumerate((10, 40, 20, 30)):
        (tmp_path / name(number)).write_bytes(add_digest(BODY))
        os.utime(tmp_path / name(number), (1e9 - age, 1e9 - age))
    archive = ResponseStore(folder)
    archive.load()
    assert [number for number in range(4) if archive.find(name(number)) is not None] == [0, 2]
    archive.put(name(9), BODY, lasting=False)
    assert archive.find(name(2)) is None, "the older one of those makes room"
    await archive.close()
