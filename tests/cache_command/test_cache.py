"""`rekindle cache` on real folders: what it shows, finds wrong, takes away, and leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters import demo
from adapters.store.disk import survey_folder
from adapters.store.lease import Miss
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens
from engine.__main__ import main
from engine.tools.cache.collect_garbage import RemovalOptions, gc
from tests.store.kit import LAYOUT, OTHER, disk_store, files, save, settled

HEAD = tuple(range(100, 164))
FIRST, SECOND, THIRD = (*HEAD, *range(200, 240)), (*HEAD, *range(300, 348)), tuple(range(400, 432))


def fill(path: Path, *sequences: Tokens, other: bool = False) -> None:
    """A folder as a server leaves it."""
    store = disk_store(path, layout=OTHER if other else LAYOUT)
    for tokens in sequences:
        save(store, tokens)
        settled(store)
    assert store.close()


def used(path: Path, tokens: Tokens) -> int:
    """A server finds so many of these tokens there."""
    store = disk_store(path)
    try:
        found = store.find_prefix((*tokens, 1), 0)
        if isinstance(found, Miss):
            return 0
        name, lease = found
        store.release(name)
        return lease.length
    finally:
        store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fill(tmp_path / "kv", FIRST, SECOND, THIRD)
    return tmp_path / "kv"


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


# --- ls ---


def test_ls_shows_sequences_with_what_they_share_counted_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, HEAD, other=True)
    before = content(path)
    assert main(["cache", "ls", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["journal_whole"]
    assert found["bytes"] == sum(map(len, before.values()))
    one = next(each for each in found["identities"] if each["identity"] == LAYOUT.identity)
    assert one["tokens"] == len(HEAD) + 40 + 48 + 32
    assert one["bytes"] == sum(sequence["bytes"] for sequence in one["sequences"])
    assert [(each["tokens"], each["new_from"]) for each in one["sequences"]] == [(32, 0), (112, 64), (104, 0)]
    assert all(each["whole"] for each in one["sequences"])
    assert len(found["identities"]) == 2
    assert main(["cache", "ls", str(path)]) == 0
    text = shown(capsys)
    for said in (LAYOUT.identity[:12], OTHER.identity[:12], "from token", "last use (turn)", "64"):
        assert said in text
    assert content(path) == before


def test_ls_counts_hits_and_shows_what_was_used_last_first(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert used(path, FIRST) == used(path, FIRST) == len(FIRST)
    assert main(["cache", "ls", str(path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["identities"]
    first = one["sequences"][0]
    assert (first["tokens"], first["new_from"], first["hits"]) == (104, 0, 2)
    assert first["last_used_turn"] == one["last_used_turn"]


def test_ls_shows_text_that_no_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tokens,) = Tokenizer.load(demo.FOLDER).encode_now(["You are \x1b[31m a careful\n[bold]agent\x07 of ours. " * 8])
    fill(tmp_path / "kv", tokens)
    assert main(["cache", "ls", str(tmp_path / "kv"), "--text"]) == 0
    raw = capsys.readouterr().out
    assert "You are [31m a careful [bold]agent of ours." in raw
    assert not {"\x1b", "\x07"} & set(raw)
    assert main(["cache", "ls", str(tmp_path / "kv"), "--text", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["identities"]
    assert one["sequences"][0]["text"].startswith("You are [31m a careful [bold]agent")


def test_ls_says_what_else_lies_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = files(path)[0]
    bad.write_bytes(b"short")
    (path / f"damaged-{bad.name}").write_bytes(b"1")
    (path / f".new-{bad.name}").write_bytes(b"1")
    (path / "notes").write_bytes(b"1")
    (path / "journal").unlink()
    assert main(["cache", "ls", str(path)]) == 0
    text = shown(capsys)
    for said in ("1 damaged", "1 set aside as damaged", "1 unfinished", "1 not ours", "journal is missing"):
        assert said in text


def test_a_sequence_whose_front_was_lost_is_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = survey_folder.open_for_survey(path)
    found = survey_folder.survey(folder)
    folder.close()
    (trunk,) = (one for one in found.kept if one.entry.stop == len(FIRST))
    (path / trunk.name).unlink()
    assert main(["cache", "ls", str(path)]) == 0
    assert "front gone" in shown(capsys)
    assert main(["cache", "verify", str(path)]) == 0, "nothing that is there is damaged"


# --- verify ---


def flip(at: float) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[int(at * (len(raw) - 1))] ^= 0x10
        file.write_bytes(raw)

    return change


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def another(file: Path) -> None:
    """The whole, good content of another run."""
    other = next(one for one in files(file.parent) if one != file)
    file.write_bytes(other.read_bytes())


DAMAGES = (*(flip(at) for at in (0, 0.2, 0.5, 0.8, 1)), cut, empty, another)


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_what_is_damaged_and_changes_nothing(
    path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "verify", str(path)]) == 0
    assert "0 damaged" in shown(capsys)
    bad = files(path)[1]
    damage(bad)
    before = content(path)
    assert main(["cache", "verify", str(path)]) == 1
    text = shown(capsys)
    assert bad.name in text
    assert "1 damaged" in text
    assert main(["cache", "verify", str(path), "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["damaged"]) == [bad.name]
    assert content(path) == before


def test_verify_reads_other_identities_and_recent_prompts_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, FIRST, other=True)
    store = disk_store(path)
    store.count_shared_tokens(FIRST, 3)
    settled(store)
    store.close()
    (recents,) = path.glob("recent-*")
    assert main(["cache", "verify", str(path)]) == 0
    capsys.readouterr()
    recents.write_bytes(b"nothing of ours")
    assert main(["cache", "verify", str(path)]) == 1
    assert recents.name in shown(capsys)


def test_looking_is_possible_while_a_server_owns_the_folder(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = disk_store(path)
    try:
        assert main(["cache", "ls", str(path)]) == 0
        assert main(["cache", "verify", str(path)]) == 0
        assert main(["cache", "gc", str(path), "--dry-run"]) == 0
        capsys.readouterr()
        assert main(["cache", "gc", str(path)]) == 2
        assert "another process is using this cache folder" in capsys.readouterr().err
    finally:
        store.close()


# --- gc ---


def test_gc_takes_away_what_is_of_no_use_and_leaves_the_rest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, *good = files(path)
    (path / f"damaged-{bad.name}").write_bytes(b"12345")
    (path / f".new-{bad.name}").write_bytes(b"123")
    (path / "notes").write_bytes(b"mine")
    bad.write_bytes(b"short")
    before = content(path)
    assert main(["cache", "gc", str(path), "--dry-run"]) == 0
    assert "would be freed" in shown(capsys)
    assert content(path) == before
    assert main(["cache", "gc", str(path)]) == 0
    assert "freed" in shown(capsys)
    assert {file.name for file in path.iterdir()} == {*(file.name for file in good), "journal", "LOCK", "notes"}
    assert main(["cache", "verify", str(path)]) == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_gc_removes_what_verify_finds_damaged(path: Path, damage: Callable[[Path], None]) -> None:
    _, bad, *others = files(path)
    damage(bad)
    before = content(path)
    assert main(["cache", "gc", str(path), "--dry-run"]) == 0
    assert content(path) == before
    assert main(["cache", "gc", str(path)]) == 0
    assert not bad.exists()
    assert all(file.read_bytes() == before[file.name] for file in others)
    assert main(["cache", "verify", str(path)]) == 0


def test_gc_leaves_recent_prompts_of_a_newer_version(path: Path) -> None:
    newer = path / f"recent-{'0' * 32}"
    newer.write_bytes(b"rekindle-recent-2\nmore")
    assert main(["cache", "gc", str(path)]) == 0
    assert newer.read_bytes() == b"rekindle-recent-2\nmore"
    newer.write_bytes(b"rekindle-rotten")
    assert main(["cache", "gc", str(path)]) == 0
    assert not newer.exists()


def test_gc_takes_nothing_that_only_looks_like_ours(path: Path) -> None:
    theirs = ["damaged-car.jpg", ".new-hope.mkv", "recent-invoices.txt"]
    for name in theirs:
        (path / name).write_text("mine")
    assert main(["cache", "gc", str(path), "--all"]) == 0
    assert {file.name for file in path.iterdir()} == {*theirs, "journal", "LOCK"}


def test_gc_declines_a_folder_that_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("LOCK", "journal", "damaged-car.jpg", "recent-invoices.txt"):
        (tmp_path / name).write_text("mine")
    before = content(tmp_path)
    assert main(["cache", "gc", str(tmp_path), "--all"]) == 2
    assert "no cache folder" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_gc_keeps_one_identity(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {file.name for file in files(path)}
    fill(path, FIRST, THIRD, other=True)
    assert main(["cache", "gc", str(path), "--identity", "zz"]) == 2
    assert f"{LAYOUT.identity[:12]}" in capsys.readouterr().err
    assert main(["cache", "gc", str(path), "--identity", LAYOUT.identity[:4]]) == 0
    assert {file.name for file in files(path)} == ours


def test_gc_shrinks_to_a_budget_as_the_server_would(path: Path) -> None:
    """The entry that was not used for longest goes first."""
    used(path, SECOND)
    size = sum(file.stat().st_size for file in files(path))
    gc(path, RemovalOptions(budget=size - 1), dry_run=False)
    assert len(files(path)) == 2
    assert used(path, SECOND) == len(SECOND)
    assert used(path, THIRD) == 0
    assert main(["cache", "gc", str(path), "--budget", "0"]) == 0
    assert files(path) == []
    assert main(["cache", "verify", str(path)]) == 0


def test_gc_of_everything_leaves_an_empty_cache(path: Path) -> None:
    fill(path, FIRST, other=True)
    assert main(["cache", "gc", str(path), "--all"]) == 0
    assert sorted(file.name for file in path.iterdir()) == ["LOCK", "journal"]
    fill(path, FIRST)
    assert files(path)


# --- what is no cache ---


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_what_is_no_cache_is_one_line_and_exit_status_2(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.jpg").write_text("hello")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("file", "folder", "link", "nowhere"):
        assert main(["cache", command, str(tmp_path / name)]) == 2
        shown = capsys.readouterr()
        assert shown.err.count("\n") == 1
        assert name in shown.err
        assert shown.out == ""
    assert not (tmp_path / "nowhere").exists()
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["photo.jpg"]
