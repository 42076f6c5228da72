"""Tests of the codec that `auto` chose: the choice stays in the folder, where it is hostile input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from adapters.store.disk.file_names import CHOICE, classify_name
from adapters.store.files.codec import Fixed
from engine.settings.options import Options
from tests.store.kit import disk_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def settle(path: Path, measured: Fixed, codec: str = "auto") -> tuple[str, int]:
    """Return the codec with which a start writes its files, and the number of damaged choices that it found."""
    store = disk_store(path, codec=codec)
    (tier,) = store.lower_tiers
    tier.codec_choice.settle(measured)
    found: Any = tier.chooser.choice, tier.damaged_files["codec"]
    assert store.close()
    return found


def test_zstd_is_the_default() -> None:
    assert Options().cache.kv_cache_codec == "zstd"


@pytest.mark.parametrize("first", ["zstd", "store"])
def test_the_first_choice_stays(path: Path, first: Fixed) -> None:
    other: Fixed = "store" if first == "zstd" else "zstd"
    assert settle(path, first) == (first, 0)
    assert settle(path, other) == (first, 0)
    (path / CHOICE).unlink()
    assert settle(path, other) == (other, 0), "without the file it is chosen anew"


@pytest.mark.parametrize("codec", ["zstd", "store"])
def test_a_codec_that_was_asked_for_is_no_choice(path: Path, codec: str) -> None:
    other: Fixed = "store" if codec == "zstd" else "zstd"
    assert settle(path, other, codec) == (codec, 0)
    assert not (path / CHOICE).exists()


@pytest.mark.parametrize("content", [b"", b"gzip\n", b"zstd", b"\xff\x00", b"zstd\n" * 1000])
def test_a_damaged_choice_is_counted_and_made_again(path: Path, content: bytes) -> None:
    settle(path, "zstd")
    (path / CHOICE).write_bytes(content)
    assert settle(path, "store") == ("store", 1)
    assert (path / CHOICE).read_bytes() == b"store\n"
    assert settle(path, "zstd") == ("store", 0)


def test_something_else_in_its_place_is_as_if_it_was_gone(path: Path) -> None:
    settle(path, "zstd")
    (path / CHOICE).unlink()
    (path / CHOICE).mkdir()
    assert settle(path, "store") == ("store", 0)
    (path / CHOICE).rmdir()
    os.mkfifo(path / CHOICE)
    assert settle(path, "zstd") == ("zstd", 0)


@pytest.mark.parametrize(("name", "kind"), [(CHOICE, "codec"), (".new-" + CHOICE, "temporary"), ("codec", "foreign")])
def test_its_name_is_known(name: str, kind: str) -> None:
    assert classify_name(name) == kind
