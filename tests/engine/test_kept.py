"""What is measured at a start and kept: found by the next one, and one and the same for all that start at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from engine.folders import user_folder
from engine.kept import LARGEST, kept

KEY = "0123"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return user_folder() / "numerics"


def start(make: Callable[[], int]) -> int:
    return kept(KEY, make, str, int)


def never() -> int:
    raise AssertionError("it was kept")


def test_made_once(home: Path) -> None:
    assert start(lambda: 7) == 7
    assert start(never) == 7
    assert [file.name for file in home.iterdir()] == [f"{KEY}.json"]


@pytest.mark.parametrize("content", ["", "nonsense", "9" * (LARGEST + 1)])
def test_what_nobody_can_read_is_made_again(home: Path, content: str) -> None:
    home.mkdir(parents=True)
    (home / f"{KEY}.json").write_text(content)
    assert start(lambda: 7) == 7
    assert start(never) == 7
    assert len(list(home.iterdir())) == 1


def test_the_start_that_is_done_first_decides_for_those_beside_it() -> None:
    """Processes that started at once served one set of products each; the next start knew only the last one's."""

    def slow() -> int:
        assert start(lambda: 1) == 1
        return 2

    assert start(slow) == 1
    assert start(never) == 1


def test_many_at_once_agree(home: Path) -> None:
    count = 8
    made = Barrier(count)

    def one(number: int) -> int:
        def make() -> int:
            made.wait(30)
            return number

        return start(make)

    with ThreadPoolExecutor(count) as pool:
        found = set(pool.map(one, range(count)))
    assert len(found) == 1
    assert start(never) in found
    assert len(list(home.iterdir())) == 1


def test_a_home_that_cannot_be_written(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("a file where the folder should be")
    assert start(lambda: 1) == 1
    assert start(lambda: 2) == 2
