"""Tests of a folder as a store: our own reading and writing compared with the library's, and a folder that hangs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore")

from adapters.sequence_layout import RowSpec
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files.codec import CodecChooser
from adapters.store.files.file_format import Layout, Run
from adapters.store.files.read_run import RunContent
from adapters.store.files.seekable import Damaged
from adapters.store.shared import folder_client
from adapters.store.shared.borrowed_parts import BorrowedParts
from adapters.store.shared.folder_client import FolderClient
from adapters.store.shared.object_client import ObjectClient, ObjectExists, StoreUnreachable
from adapters.store.shared.open_client import open_client
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.tier import WriteRun

pytestmark = pytest.mark.timeout(60)
NAME = "0123/run"
CONTENT = bytes(range(256)) * 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a folder, 100 % ours"


@pytest.fixture
def client(root: Path) -> Iterator[FolderClient]:
    opened = open_client(root.as_uri())
    assert isinstance(opened, FolderClient)
    yield opened
    opened.close()


def read_all(content: RunContent) -> bytes:
    with content.read_piece(0, content.size) as piece:
        return bytes(piece)


def read(client: ObjectClient, decode: object = read_all, then: object = lambda _: None) -> bytes:
    """Read the object as a run is read."""

    async def run() -> bytes:
        with ThreadPoolExecutor(1) as workers:
            return await client.read_content(NAME, len(CONTENT), workers, decode, then)  # type: ignore[arg-type]

    return asyncio.run(run())


def write(client: ObjectClient, *parts: bytes, replace: bool = False) -> None:
    asyncio.run(client.write_object(NAME, parts, replace=replace))


def test_the_library_and_the_folders_own_client_see_the_same_objects(root: Path, client: FolderClient) -> None:
    library = ObjectClient(client.url, client._store)  # noqa: SLF001
    write(client, CONTENT[:700], CONTENT[700:])
    assert read(client) == read(library) == CONTENT
    (facts,) = asyncio.run(client.list_objects("0123"))
    assert (facts.name, facts.size) == (NAME, len(CONTENT))
    asyncio.run(client.remove_object(NAME))
    write(library, CONTENT)
    assert read(client) == CONTENT
    assert [path.name for path in root.rglob("*")] == ["0123", "run"]


def test_an_object_is_replaced_only_where_that_is_allowed(root: Path, client: FolderClient) -> None:
    write(client, CONTENT)
    with pytest.raises(ObjectExists):
        write(client, b"other")
    assert read(client) == CONTENT
    write(client, b"other", replace=True)
    assert (root / NAME).read_bytes() == b"other"
    assert [path.name for path in (root / "0123").iterdir()] == ["run"]


def test_what_a_killed_writer_leaves_is_no_object(root: Path, client: FolderClient) -> None:
    write(client, CONTENT)
    (root / f"{NAME}#{7 << 50}").write_bytes(CONTENT[:100])
    assert [facts.name for facts in asyncio.run(client.list_objects("0123"))] == [NAME]


def test_a_writer_that_fails_leaves_nothing(root: Path, client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.writev

    def fill_up(descriptor: int, parts: Sequence[bytes]) -> int:
        if len(parts[0]) == 500:
            raise OSError(28, "No space left on device")
        return written(descriptor, [parts[0]])

    monkeypatch.setattr(os, "writev", fill_up)
    with pytest.raises(StoreUnreachable, match="No space left"):
        write(client, CONTENT[:600], CONTENT[:500])
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_writes_may_take_less_than_they_are_given(client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: written(descriptor, [parts[0][:100]]))
    write(client, CONTENT)
    assert read(client) == CONTENT


def test_no_pipe_and_no_folder_is_read(root: Path, client: FolderClient) -> None:
    (root / NAME).mkdir(parents=True)
    with pytest.raises(Damaged, match="no file"):
        read(client)
    (root / NAME).rmdir()
    os.mkfifo(root / NAME)
    with pytest.raises(Damaged, match="no file"):
        read(client)


def test_what_is_not_there_and_what_cannot_be_read_are_told_apart(root: Path, client: FolderClient) -> None:
    with pytest.raises(FileNotFoundError):
        read(client)
    root.rmdir()
    root.touch()  # a folder that has gone
    with pytest.raises(StoreUnreachable, match="Not a directory"):
        read(client)
    with pytest.raises(StoreUnreachable, match="Not a directory"):
        write(client, CONTENT)


def test_a_folder_that_hangs_costs_one_limit_and_changes_nothing_later(
    client: FolderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_client, "compute_limit", lambda _: 0.05)
    write(client, CONTENT)
    goes_on, has_ended = threading.Event(), threading.Event()
    used = list[bytes]()

    def hang(content: RunContent) -> bytes:
        goes_on.wait(30)
        threading.Timer(0.1, has_ended.set).start()  # after the caller's function would have been called
        return read_all(content)

    with pytest.raises(StoreUnreachable, match=r"no answer within 0\.1 s from file:///"):
        read(client, hang, used.append)
    goes_on.set()
    assert has_ended.wait(30)
    assert not used
    assert read(client, then=used.append) == CONTENT
    assert used == [CONTENT]


def test_what_was_read_in_time_is_waited_for(client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are on their way into a slot are never left behind."""
    monkeypatch.setattr(folder_client, "compute_limit", lambda _: 0.2)
    write(client, CONTENT)
    used = list[bytes]()

    def copy_slowly(found: bytes) -> None:
        threading.Event().wait(0.5)
        used.append(found)

    assert read(client, then=copy_slowly) == CONTENT
    assert used == [CONTENT]


def test_a_write_that_hangs_ends_for_its_caller(client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    written = os.writev

    def hang(descriptor: int, parts: Sequence[bytes]) -> int:
        goes_on.wait(30)
        return written(descriptor, parts)

    monkeypatch.setattr(folder_client, "compute_patient_limit", lambda _: 0.05)
    monkeypatch.setattr(os, "writev", hang)
    with pytest.raises(StoreUnreachable, match="no answer"):
        write(client, CONTENT)
    goes_on.set()


def lend() -> tuple[BorrowedParts, weakref.ref[Buffer]]:
    """Return the parts of CONTENT, some of which show a buffer, and a reference to it that does not keep it."""
    rows = Buffer(torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8))
    view = rows.data.numpy().data
    return BorrowedParts([view[:500], b"", view[500:]], rows), weakref.ref(rows)


def test_rows_that_were_written_are_free_before_the_caller_knows_it(root: Path, client: FolderClient) -> None:
    parts, rows = lend()

    async def run() -> bool:
        await client.write_object(NAME, parts)
        return rows() is None

    assert asyncio.run(run())
    assert (root / NAME).read_bytes() == CONTENT
    lost, rows = lend()
    with pytest.raises(ObjectExists):
        asyncio.run(client.write_object(NAME, lost))
    assert rows() is None


def test_rows_are_kept_for_a_thread_that_hangs(client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows in the same memory would be written under this name."""
    goes_on = threading.Event()
    written = os.writev

    def hang(descriptor: int, parts: Sequence[bytes]) -> int:
        goes_on.wait(30)
        return written(descriptor, parts)

    monkeypatch.setattr(folder_client, "compute_patient_limit", lambda _: 0.05)
    monkeypatch.setattr(os, "writev", hang)
    parts, rows = lend()
    with pytest.raises(StoreUnreachable, match="no answer"):
        asyncio.run(client.write_object(NAME, parts))
    del parts
    assert rows() is not None
    goes_on.set()
    end = time.monotonic() + 30
    while rows() is not None:
        assert time.monotonic() < end, "the thread has ended and its rows are kept"
        time.sleep(0.002)
    assert read(client) == CONTENT


def test_a_tier_lets_go_of_rows_before_it_says_that_they_are_written(root: Path, client: FolderClient) -> None:
    layout = Layout("ab" * 16, 4, RowSpec(("layers.0.k",), 1, 16 << 10, "I8"))
    root_key, packed = layout.compute_root("rows"), pack_tokens(range(8))
    run = Run(0, root_key, chain_keys(root_key, packed, 4), packed)
    rows = Buffer(torch.arange(layout.compute_size("rows", 8), dtype=torch.int32).to(torch.uint8))
    expected, kept = rows.data.clone(), weakref.ref(rows)
    ends = list[tuple[bool, int]]()
    limits = SharedLimits(1 << 30, 0, 1e9)
    tier = SharedTier(client, layout, threading.RLock(), limits, CodecChooser("store"))
    tier.start()
    job = WriteRun(run, rows, lambda: ends.append((kept() is None, tier.queued_bytes)))
    del rows
    assert tier.submit(job)
    del job
    tier._publisher.watch_writes().result(30)  # noqa: SLF001
    assert ends == [(True, 0)]
    assert [path.stat().st_size for path in (root / root_key.hex()).iterdir()] == [tier.counts["written_bytes"]]
    (entry,) = tier.index.entries.values()
    memory = SlabMemory(1 << 20)
    with ThreadPoolExecutor(1) as workers:
        found = asyncio.run(tier.read(entry, memory, workers))
    assert torch.equal(found.data, expected)
    assert tier.close(30)
