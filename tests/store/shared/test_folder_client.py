"""Tests of a folder as a store: our own reading and writing compared with the library's, and a folder that hangs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore")

from adapters.sequence_layout import RowSpec
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files.codec import Codec, CodecChooser
from adapters.store.files.file_format import Layout, Run
from adapters.store.files.read_run import RunContent
from adapters.store.files.seekable import Damaged
from adapters.store.shared import folder_client, publisher
from adapters.store.shared.folder_client import FolderClient, write_file
from adapters.store.shared.object_client import ObjectClient, ObjectExists, StoreUnreachable
from adapters.store.shared.open_client import open_client
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.publisher import LentRows, write_from_rows
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.stored_reads import fill_memory
from adapters.store.tier import WriteRun, read_run

pytestmark = pytest.mark.timeout(60)
NAME = "0123/run"
CONTENT = bytes(range(256)) * 5
LAYOUT = Layout("ab" * 16, 4, RowSpec(("layers.0.k",), 1, 16 << 10, "I8"))


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
    written = os.write

    def fill_up(descriptor: int, data: bytes) -> int:
        if len(data) == 500:
            raise OSError(28, "No space left on device")
        return written(descriptor, data)

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(StoreUnreachable, match="No space left"):
        write(client, CONTENT[:600], CONTENT[:500])
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_writes_may_take_less_than_they_are_given(client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: written(descriptor, data[:100]))
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
    written = os.write

    def hang(descriptor: int, data: bytes) -> int:
        goes_on.wait(30)
        return written(descriptor, data)

    monkeypatch.setattr(folder_client, "compute_patient_limit", lambda _: 0.05)
    monkeypatch.setattr(os, "write", hang)
    with pytest.raises(StoreUnreachable, match="no answer"):
        write(client, CONTENT)
    goes_on.set()


def test_rows_are_kept_for_a_thread_that_hangs(client: FolderClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows in the same memory would be written under this name."""
    goes_on = threading.Event()

    class Slow:
        def __init__(self, run: Run, layout: Layout, address: int) -> None:
            self.address = address

        def write(self, temporary: str, path: str, *, replace: bool) -> int:
            goes_on.wait(30)
            write_file(temporary, path, [ctypes.string_at(self.address, len(CONTENT))], replace=replace)
            return len(CONTENT)

    asyncio.run(client.write_object("0123/another run", [b""]))
    monkeypatch.setattr(folder_client, "compute_patient_limit", lambda _: 0.05)
    monkeypatch.setattr(publisher, "RowsToWrite", Slow)
    held = LentRows(Buffer(torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)), len(CONTENT), None)
    assert held.rows is not None
    kept = weakref.ref(held.rows)
    write = partial(write_from_rows, Run(0, b"", (), b""), LAYOUT, held, replace=False)
    with pytest.raises(StoreUnreachable, match="no answer"):
        asyncio.run(client.write_file(NAME, len(CONTENT), write))
    held.rows = None
    assert kept() is not None
    goes_on.set()
    end = time.monotonic() + 30
    while kept() is not None:
        assert time.monotonic() < end, "the thread has ended and its rows are kept"
        time.sleep(0.002)
    assert read(client) == CONTENT


@pytest.mark.parametrize("codec", ["store", "zstd"])
def test_a_tier_lets_go_of_rows_before_it_says_that_they_are_written(
    root: Path, client: FolderClient, codec: Codec
) -> None:
    layout = LAYOUT
    origin, packed = layout.compute_root("rows"), pack_tokens(range(8))
    run = Run(0, origin, chain_keys(origin, packed, 4), packed)
    rows = Buffer(torch.arange(layout.compute_size("rows", 8), dtype=torch.int32).to(torch.uint8))
    expected, kept = rows.data.clone(), weakref.ref(rows)
    ends = list[tuple[bool, int]]()
    limits = SharedLimits(1 << 30, 0, 1e9)
    tier = SharedTier(client, layout, threading.RLock(), limits, CodecChooser(codec))
    tier.start()
    job = WriteRun(run, rows, lambda: ends.append((kept() is None, tier.queued_bytes)))
    del rows
    assert tier.submit(job)
    del job
    tier.watch_writes().result(30)
    assert ends == [(True, 0)]
    assert [path.stat().st_size for path in (root / origin.hex()).iterdir()] == [tier.counts["written_bytes"]]
    (entry,) = tier.index.entries.values()
    for processors in (1, 64):
        tier._reader.processors = processors  # noqa: SLF001 - with helpers and without
        with ThreadPoolExecutor(1) as workers:
            found = asyncio.run(read_run(tier, entry, SlabMemory(), workers))
        assert torch.equal(found.data, expected)
    assert tier.close(30)


@pytest.mark.parametrize(
    ("reads", "processors", "alone"),
    [(1, 1, True), (1, 2, False), (2, 2, True), (3, 8, False), (4, 8, True), (4, 64, True)],
)
def test_a_few_reads_at_once_are_helped_where_processors_are_free(reads: int, processors: int, alone: bool) -> None:
    assert fill_memory(reads, processors) is alone
