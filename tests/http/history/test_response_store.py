"""Tests of the responses that are kept: within the limits, over a restart, and with any files in the folder."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.history import persistent_lru
from adapters.http.history import response_store as limits
from adapters.http.history.persistent_lru import digest_body
from adapters.http.history.response_store import (
    ResponseFolder,
    ResponseStore,
    StoredResponse,
    decode_header,
    decode_response,
    is_whole_response,
)
from adapters.store.files.private_folder import PrivateFolder

OPTIONS = EdgeOptions(EdgeModel("small", 4096, 500))


def name(number: int) -> str:
    return f"resp_{number:024x}"


def one(number: int, previous: int | None = None, text: str = "hi") -> StoredResponse:
    before = None if previous is None else name(previous)
    response = {"id": name(number), "previous_response_id": before, "output": [{"text": text}]}
    return StoredResponse(response, [{"role": "user", "content": text}])


def shown(archive: ResponseStore, number: int) -> StoredResponse | None:
    raw = archive.find(name(number))
    return None if raw is None else decode_response(raw, OPTIONS)


async def written(folder: Path, fill: Callable[[ResponseStore], object]) -> None:
    """Fill a store in the folder, and close it, as a process does."""
    archive = ResponseStore(PrivateFolder.open(folder))
    archive.load()
    fill(archive)
    await archive.close()


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != "LOCK")


def opened(folder: Path) -> ResponseStore:
    archive = ResponseStore(PrivateFolder.open(folder))
    archive.load()
    return archive


async def test_a_restart_finds_what_was_kept(tmp_path: Path) -> None:
    def fill(archive: ResponseStore) -> None:
        for number in range(3):
            ResponseFolder(archive).store(name(number), one(number, number - 1 if number else None, f"täxt {number}"))
        archive.remove(name(2))

    await written(tmp_path, fill)
    archive = opened(tmp_path)
    assert [shown(archive, number) for number in range(3)] == [one(0, None, "täxt 0"), one(1, 0, "täxt 1"), None]
    found = ResponseFolder(archive).find_conversation(name(1), 1 << 20)
    assert found is not None
    assert [decode_response(raw, OPTIONS).response["id"] for raw in found] == [name(0), name(1)]
    await archive.close()
    assert {file.stat().st_mode & 0o777 for file in files(tmp_path)} == {0o600}


async def test_the_folder_follows_while_the_server_runs(tmp_path: Path) -> None:
    archive = opened(tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(archive.run)
        ResponseFolder(archive).store(name(1), one(1))
        with anyio.fail_after(60):
            while not (tmp_path / name(1)).exists():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            archive.remove(name(1))
            while (tmp_path / name(1)).exists():  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert files(tmp_path) == []
        tasks.cancel_scope.cancel()
    await archive.close()


@pytest.mark.parametrize("call", ["create", "append", "sync", "shut", "rename", "sync_folder"])
async def test_what_was_being_written_when_the_server_stops_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The call under way is completed and waited for, so no other process finds the file half written."""
    archive, carried_out = opened(tmp_path), getattr(PrivateFolder, call)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*what: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return carried_out(*what)

    monkeypatch.setattr(PrivateFolder, call, slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(archive.run)
        ResponseFolder(archive).store(name(1), one(1))
        await anyio.to_thread.run_sync(begun.wait, 30)
        tasks.cancel_scope.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
    assert [file.name for file in files(tmp_path)] == [name(1)]
    await archive.close()
    assert shown(opened(tmp_path), 1) == one(1)


@pytest.mark.parametrize("patience", [0, 20])
async def test_a_slow_disk_is_waited_for_as_long_as_the_server_has_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    archive, write, go_on = opened(tmp_path), PrivateFolder.write_file, threading.Event()

    def slow(folder: PrivateFolder, name: str, parts: Sequence[bytes]) -> int:
        assert go_on.wait(30)
        return write(folder, name, parts)

    monkeypatch.setattr(persistent_lru, "CLOSING_S", 0.01)
    monkeypatch.setattr(PrivateFolder, "write_file", slow)
    ResponseFolder(archive).store(name(1), one(1))
    if patience:
        asyncio.get_running_loop().call_later(0.1, go_on.set)
    await archive.close(anyio.current_time() + patience)
    assert (shown(opened(tmp_path), 1) == one(1)) == bool(patience)
    go_on.set()


async def test_those_that_were_used_longest_ago_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RESPONSES", 3)

    def fill(archive: ResponseStore) -> None:
        for number in range(3):
            ResponseFolder(archive).store(name(number), one(number, 0 if number == 1 else None))
        assert ResponseFolder(archive).find_conversation(name(1), 1 << 20) is not None
        ResponseFolder(archive).store(name(3), one(3))
        ResponseFolder(archive).store(name(4), one(4))
        assert [archive.find(name(number)) is not None for number in range(5)] == [True, False, False, True, True]

    await written(tmp_path, fill)
    left = [file.name for file in files(tmp_path)]
    assert left == [name(0), name(3), name(4)]


async def test_a_start_keeps_the_newest_within_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(archive: ResponseStore) -> None:
        for number in range(5):
            ResponseFolder(archive).store(name(number), one(number))

    await written(tmp_path, fill)
    for number in range(5):
        os.utime(tmp_path / name(number), (number, number))
    monkeypatch.setattr(limits, "MAX_RESPONSES", 2)
    archive = opened(tmp_path)
    assert [archive.find(name(number)) is not None for number in range(5)] == [False, False, False, True, True]
    await archive.close()
    assert len(files(tmp_path)) == 2


def test_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 3000)
    monkeypatch.setattr(limits, "MAX_RESPONSE_BYTES", 2000)
    archive = ResponseStore()
    assert not ResponseFolder(archive).store(name(0), one(0, text="x" * 2000))
    for number in range(1, 6):
        assert ResponseFolder(archive).store(name(number), one(number, text="x" * 500))
    assert len(archive) == 2
    with pytest.raises(OverflowError):
        ResponseFolder(archive).find_conversation(name(5), 100)


def test_nobody_finds_what_another_caller_put_there() -> None:
    archive = ResponseStore()
    ours, theirs = ResponseFolder(archive, "a" * 64), ResponseFolder(archive, "b" * 64)
    assert ours.store(name(1), one(1))
    assert theirs.store(name(2), one(2, 1))
    assert ours.find(name(1)) is not None
    assert theirs.find(name(1)) is None
    assert not theirs.remove(name(1))
    assert theirs.find_conversation(name(2), 1 << 20) is None
    assert ours.remove(name(1))


def test_a_chain_that_is_broken_or_a_ring_ends() -> None:
    archive = ResponseStore()
    ResponseFolder(archive).store(name(1), one(1, 0))
    assert ResponseFolder(archive).find_conversation(name(1), 1 << 20) is None
    ResponseFolder(archive).store(name(0), one(0, 1))
    found = ResponseFolder(archive).find_conversation(name(1), 1 << 20)
    assert found is not None
    assert len(found) == 2


async def test_damaged_and_foreign_files_are_no_responses(tmp_path: Path) -> None:
    await written(tmp_path, lambda archive: ResponseFolder(archive).store(name(1), one(1)))
    good = (tmp_path / name(1)).read_bytes()
    (tmp_path / name(2)).write_bytes(good[:-1])
    (tmp_path / name(3)).write_bytes(b"")
    (tmp_path / name(4)).symlink_to(tmp_path / name(1))
    os.mkfifo(tmp_path / name(5))
    (tmp_path / name(6)).mkdir()
    (tmp_path / ".new-resp_x").write_bytes(b"half")
    (tmp_path / "notes").write_bytes(b"another program's")
    body = b"\n[]\n[]"
    (tmp_path / name(7)).write_bytes(digest_body(body) + b"\n" + body)
    archive = opened(tmp_path)
    found = [number for number in range(8) if archive.find(name(number)) is not None]
    assert found == [1, 7]
    with pytest.raises(ValueError, match="no response"):
        shown(archive, 7)
    await archive.close()
    assert (tmp_path / "notes").exists()
    assert not (tmp_path / ".new-resp_x").exists()
    assert not (tmp_path / name(2)).exists()


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_do_harm(tail: bytes, signed: bool) -> None:
    raw = (digest_body(tail) if signed else b"0" * 64) + b"\n" + tail
    if is_whole_response(raw):
        decode_header(raw)
        try:
            kept = decode_response(raw, OPTIONS)
        except ValueError:
            return
        assert isinstance(kept.output, list)


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b"[" + b"[]," * 200_000 + b"[]]", b'{"a": 1e999}', b'"\\ud800"', b"\xff"],
    ids=["deep", "many", "infinite", "surrogate", "bytes"],
)
def test_what_is_read_back_has_the_limits_of_a_body(line: bytes) -> None:
    for response, items in ((line, b"[]"), (b"{}", line)):
        body = b"\n".join((b" ", response, items))
        with pytest.raises(ValueError):  # noqa: PT011 - each says what it is
            decode_response(digest_body(body) + b"\n" + body, OPTIONS)


async def test_a_disk_that_fails_costs_a_restart_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive = opened(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PrivateFolder, "write_file", full)
    ResponseFolder(archive).store(name(1), one(1))
    ResponseFolder(archive).store(name(2), one(2))
    await archive.close()
    assert shown(archive, 2) == one(2)
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
