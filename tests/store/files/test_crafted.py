"""Tests with files that were made up, damaged in bulk or mixed: each is put aside and counted, and the
store goes on.
"""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from adapters.store import index_journal
from adapters.store.disk import check_contents
from adapters.store.disk import disk_tier as disk_module
from adapters.store.disk.disk_tier import MAX_WRITER_RESTARTS
from adapters.store.disk.file_names import QUARANTINE
from adapters.store.disk.folder_upkeep import MOST_QUARANTINED
from adapters.store.file_description import read_head
from adapters.store.files import seekable
from adapters.store.files.file_format import parse_head
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.seekable import Damaged
from engine.__main__ import main
from tests.store.disk.test_disk import ONE, TWO, filled, kept, reopened
from tests.store.kit import LAYOUT, OTHER, disk_store, files, save, settled

ALIKE = tuple(range(301, 341))  # as long as ONE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def parts(raw: bytes) -> list[bytes]:
    """A file's frames."""
    count = seekable.parse_frame_count(raw[-seekable.FOOT.size :])
    at, found = 0, list[bytes]()
    for packed, _ in seekable.parse_table(raw[-seekable.compute_table_size(count) :], len(raw)):
        found.append(raw[at : at + packed])
        at += packed
    return found


def content(frame: bytes) -> bytes:
    """The content of a head or of rows. Raises Damaged."""
    has_checksum = zstandard.get_frame_parameters(frame).has_checksum
    target = bytearray(zstandard.get_frame_parameters(frame).content_size)
    (seekable.decompress if has_checksum else seekable.decompress_rows)(frame, memoryview(target))
    return bytes(target)


def joined(frames: list[bytes]) -> bytes:
    """A whole file of these frames, its seek table right."""
    return b"".join([*frames, seekable.encode_table([(len(frame), len(content(frame))) for frame in frames])])


def reheaded(raw: bytes, change: Callable[[dict[str, Any]], str]) -> bytes:
    """The same file with another head, every checksum right. change: the header's text from the header."""
    first, *rows = parts(raw)
    whole = content(first)
    size = int.from_bytes(whole[:8], "little")
    text = change(json.loads(whole[8 : 8 + size])).encode("utf-8", "surrogatepass")
    head = len(text).to_bytes(8, "little") + text + whole[8 + size :]
    return joined([seekable.create_compressor(1).compress(head), *rows])


def saying(name: str, literal: str) -> Callable[[bytes], bytes]:
    """One metadatum replaced by a piece of JSON."""

    def change(header: dict[str, Any]) -> str:
        header["__metadata__"][name] = "HERE"
        return json.dumps(header).replace('"HERE"', literal)

    return lambda raw: reheaded(raw, change)


CRAFTED: Mapping[str, Callable[[bytes], bytes]] = {
    "a start beyond measure": saying("start", "1e999"),
    "a block size beyond measure": saying("grain", "1e999"),
    "a version beyond measure": saying("rekindle_kv", "1e999"),
    "a number of many digits": saying("start", '"' + "9" * 5000 + '"'),
    "a lone surrogate": saying("identity", '"\\ud800"'),
    "an identity that a terminal obeys": saying("identity", '"\\u001b[31m"'),
    "a long identity": saying("identity", '"' + "a" * 5000 + '"'),
    "no identity": saying("identity", "null"),
    "no digest": saying("sums", '"xyz"'),
    "nested": lambda raw: reheaded(raw, lambda _: "[" * 50_000),
    "no metadata": lambda raw: reheaded(raw, lambda _: '{"__metadata__": 7}'),
}


@pytest.mark.parametrize("craft", CRAFTED.values(), ids=CRAFTED.keys())
def test_a_crafted_file_is_put_aside_and_writing_goes_on(
    path: Path, craft: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    filled(path, ONE, TWO)
    (bad, _) = files(path)
    bad.write_bytes(craft(bad.read_bytes()))
    (path / index_journal.NAME).unlink()
    for command in ("ls", "verify"):
        assert main(["cache", command, str(path)]) == (1 if command == "verify" else 0)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        assert "1 damaged" in " ".join(shown.out.split())
    store = reopened(path)
    assert store.collect_figures().build_json()["quarantined"] == 1
    save(store, ALIKE)
    settled(store)
    assert kept(store, ALIKE) == 40
    assert not store.lower_tiers[0].writer.trouble
    assert store.close()


@pytest.mark.parametrize("with_journal", [True, False])
def test_a_number_that_cannot_be_is_not_counted_on_from(path: Path, with_journal: bool) -> None:
    filled(path, ONE)
    (file,) = files(path)
    name = file.name.replace("0000000000000001", "f" * 16)
    assert name != file.name
    file.rename(file.with_name(name))
    if with_journal:
        entry = next(iter(index_journal.parse_journal((path / index_journal.NAME).read_bytes()).entries.values()))
        entry.handle = entry.last_turn = 2**64 - 1
        (path / index_journal.NAME).write_bytes(b"".join(index_journal.encode_snapshot([entry])))
    assert main(["cache", "verify", str(path)]) == 1
    store = reopened(path)
    assert store.collect_figures().build_json()["quarantined"] == 1
    assert store.lower_tiers[0].index.turn < 10
    save(store, ONE)
    settled(store)
    assert kept(store) == 40
    assert store.close()


def sparse(path: Path, count: int) -> None:
    """A file that takes no room and says that it has `count` frames."""
    with path.open("wb") as file:
        file.truncate(seekable.compute_table_size(count) + 100 * count)
        file.seek(-seekable.compute_table_size(count), 2)
        file.write(seekable.HEAD.pack(seekable.SKIPPABLE, seekable.compute_table_size(count) - 8))
        file.seek(-seekable.FOOT.size, 2)
        file.write(seekable.FOOT.pack(count, 0, seekable.SEEKABLE))


def test_memory_does_not_follow_a_claimed_count(path: Path) -> None:
    filled(path, ONE, TWO)
    for file in files(path):
        sparse(file, 30_000_000)
    (path / index_journal.NAME).unlink()
    tracemalloc.start()
    try:
        assert main(["cache", "verify", str(path)]) == 1
        store = reopened(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert store.collect_figures().build_json()["quarantined"] == 2
    assert store.close()


def test_a_file_with_many_hollow_frames_is_not_read_for_ever(path: Path) -> None:
    """Frames that hold 64 MiB of nothing each: contents are cut as ours are, or nothing of them is decoded."""
    filled(path, ONE)
    (file,) = files(path)
    hollow = seekable.create_compressor(1).compress(bytes(64 << 20))
    file.write_bytes(joined([parts(file.read_bytes())[0], hollow, hollow]))
    with file.open("rb") as opened, pytest.raises(Damaged, match="frames' sizes"):
        check_contents.check_run(file.name, opened.fileno())


@pytest.mark.parametrize("with_journal", [True, False])
def test_rows_of_another_run_under_a_valid_head_are_not_taken(path: Path, with_journal: bool) -> None:
    filled(path, ONE, ALIKE)
    one, two = files(path)
    first, second = parts(one.read_bytes()), parts(two.read_bytes())
    assert [len(content(frame)) for frame in first[1:]] == [len(content(frame)) for frame in second[1:]]
    one.write_bytes(joined([first[0], *second[1:]]))
    if with_journal:
        entries = index_journal.parse_journal((path / index_journal.NAME).read_bytes()).entries
        for entry in entries.values():
            entry.size = next(file.stat().st_size for file in (one, two) if entry.keys[-1].hex() in file.name)
        (path / index_journal.NAME).write_bytes(b"".join(index_journal.encode_snapshot(entries.values())))
    else:
        (path / index_journal.NAME).unlink()
    assert main(["cache", "verify", str(path)]) == 1
    store = reopened(path)
    assert len(store.lower_tiers[0].index) == 2, "its head alone tells nothing"
    mixed = ONE if parse_head(content(first[0])).run.tokens == pack_of(ONE) else ALIKE
    with pytest.raises(Damaged, match="not the rows"):
        kept(store, mixed)
    assert store.collect_figures().build_json()["quarantined"] == 1
    assert sorted((kept(store, ONE), kept(store, ALIKE))) == [0, 40]
    assert store.close()


def pack_of(tokens: tuple[int, ...]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("raw", [bytes(10_000), bytes(1), b"rekindle-jou", b"rekindle-journal-3" + bytes(500)])
def test_a_journal_that_a_power_cut_zeroed_is_rebuilt(path: Path, raw: bytes) -> None:
    path.mkdir(mode=0o700)
    (path / index_journal.NAME).write_bytes(raw)
    filled(path, ONE)
    assert index_journal.parse_journal((path / index_journal.NAME).read_bytes()).whole
    assert kept(reopened(path)) == 40


class Watching(PrivateFolder):
    """A folder that counts its listings. It lets no run be read before `go` is set."""

    listings = 0
    go: threading.Event
    done: list[str]

    def list_names(self) -> list[tuple[str, int]]:
        self.listings += 1
        return super().list_names()

    def opener(self, name: str) -> int:
        assert name == index_journal.NAME or self.go.wait(30)
        return super().opener(name)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.done.append(new)


def test_thousands_of_damaged_files_hold_nothing_up(path: Path) -> None:
    filled(path, ONE)
    (file,) = files(path)
    for number in range(2, 402):
        file.with_name(file.name.replace("0000000000000001", f"{number:016x}")).write_bytes(b"not a cache file at all")
    watching = list[Watching]()

    def opened(where: Path) -> PrivateFolder:
        folder = Watching.open(where)
        assert isinstance(folder, Watching)
        folder.go, folder.done = threading.Event(), []
        watching.append(folder)
        return folder

    store = disk_store(path, folder=opened)
    (folder,) = watching
    save(store, ALIKE)
    folder.go.set()
    settled(store)
    written = next(at for at, name in enumerate(folder.done) if name.endswith(".zst") and QUARANTINE not in name)
    assert store.collect_figures().build_json()["quarantined"] == 400
    assert written < 390, "it was written between them"
    assert folder.listings == 1
    assert len(list(path.glob(QUARANTINE + "*"))) == MOST_QUARANTINED
    assert (kept(store), kept(store, ALIKE)) == (40, 40)
    assert store.close()


def test_a_write_that_fails_for_no_known_reason_costs_itself_only(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> list[bytes]:
        raise ZeroDivisionError("a bug")

    store = disk_store(path)
    with monkeypatch.context() as patched:
        patched.setattr(disk_module, "encode_run", bug)
        save(store, ONE)
        settled(store)
    assert store.collect_figures().build_json()["write_errors"] == 1
    save(store, ONE)
    settled(store)
    assert kept(store) == 40
    assert "starts again" in caplog.text
    assert store.lower_tiers[0].writer.trouble == "ZeroDivisionError: a bug"
    assert store.close()


def test_a_writer_that_is_given_up_holds_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> list[bytes]:
        raise ZeroDivisionError("a bug")

    store = disk_store(path)
    monkeypatch.setattr(disk_module, "encode_run", bug)
    sequences = [(number, *ONE) for number in range(50, 50 + MAX_WRITER_RESTARTS + 5)]
    for tokens in sequences:
        save(store, tokens)
    store.lower_tiers[0].writer.join(30)
    assert store.lower_tiers[0].writer.is_dead
    assert store.lower_tiers[0].queued_bytes == 0
    assert store.memory_tier.rows == {}, "nothing waits for it"
    save(store, ONE)
    assert store.collect_figures().build_json()["queued_bytes"] == 0
    assert [thread.trouble for thread in store.threads] == ["ZeroDivisionError: a bug"]
    assert store.close()


def test_closing_twice_is_closing_once(path: Path) -> None:
    store = disk_store(path)
    save(store, ONE)
    assert store.close()
    assert store.close()
    assert kept(reopened(path)) == 40


def test_files_of_the_format_before_are_misses_and_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("adapters.store.files.file_format.VERSION", 2)
        older.setattr(index_journal, "MAGIC", b"rekindle-journal-2\n")
        filled(path, ONE, TWO)
    store = reopened(path)
    assert kept(store) == 0
    assert (store.collect_figures().build_json()["outdated"], store.collect_figures().build_json()["quarantined"]) == (
        2,
        0,
    )
    save(store, ONE)
    settled(store)
    assert kept(store) == 40
    assert store.close()


def test_another_identity_shares_nothing(path: Path) -> None:
    """Neither rows, nor recent prompts, nor a file that was given the other one's name."""
    store = disk_store(path, host=1 << 20)
    save(store, ONE)
    assert store.count_shared_tokens(ONE, 10) == 0
    settled(store)
    assert store.close()
    other = reopened(path, layout=OTHER)
    assert kept(other) == 0
    assert other.count_shared_tokens(ONE, 10) == 0
    save(other, ONE)
    settled(other)
    assert kept(other) == 40
    assert other.close()
    ours, theirs = sorted(files(path), key=lambda file: file.name.partition("-")[2])
    names = {file.name.partition("-")[0] for file in (ours, theirs)}
    assert len(names) == 2, "no key in common"
    assert len(list(path.glob("recent-*"))) == 2
    theirs.write_bytes(ours.read_bytes())
    again = disk_store(path, layout=OTHER)
    with pytest.raises(Damaged):
        kept(again)
    assert again.close()
    assert kept(reopened(path, layout=LAYOUT)) == 40


def test_reads_that_give_less_than_was_asked_for_are_read_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, ONE)
    (run,) = files(path)
    with run.open("rb") as file:
        said = read_head(file.fileno(), run.stat().st_size)
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: real(descriptor, [views[0][:7]], at))
        assert read_head(file.fileno(), run.stat().st_size) == said
