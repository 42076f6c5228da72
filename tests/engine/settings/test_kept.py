"""Tests of the measurements that a start keeps: the next start finds them, and starts at the same time agree on one.

A damaged file is counted, reported once and measured again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from adapters.metrics import Metrics
from adapters.models.numerics.probe_result import Numerics
from engine.settings.calibration_cache import LARGEST, CalibrationCache

KEY = "0123"
FOUND = Numerics("buckets", (4, 8, 64), 64, 64, "torch-cpu", 2, "x" * 16, 0.5, 10, 3)


@pytest.fixture
def kept(tmp_path: Path) -> CalibrationCache:
    return CalibrationCache(tmp_path / "rekindle")


def start(kept: CalibrationCache, make: Callable[[], int]) -> int:
    return CalibrationCache(kept.folder).load_or_make(KEY, make, str, int)


def never() -> int:
    raise AssertionError("it was kept")


def left(kept: CalibrationCache) -> list[str]:
    return [file.name for file in (kept.folder / "numerics").iterdir()]


def test_made_once(kept: CalibrationCache) -> None:
    assert not kept.has_proof(KEY)
    assert start(kept, lambda: 7) == 7
    assert start(kept, never) == 7
    assert kept.has_proof(KEY)
    assert left(kept) == [f"{KEY}.json"]


def in_place(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replaced(file: Path) -> object:
        file.unlink()
        return make(file)

    return replaced


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "zeros": lambda file: file.write_bytes(bytes(300)),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "deep": lambda file: file.write_bytes(b"[" * 100_000),
    "large": lambda file: file.write_bytes(file.read_bytes() + b" " * LARGEST),
    "of another version": lambda file: file.write_text(json.dumps({**json.loads(FOUND.to_json()), "version": 1})),
    "a folder": in_place(Path.mkdir),
    "a pipe": in_place(os.mkfifo),
    "a link to itself": in_place(lambda file: file.symlink_to(file)),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_counted_told_once_and_made_up_for(
    kept: CalibrationCache, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    made = list[int]()

    def begun() -> CalibrationCache:
        mine = CalibrationCache(kept.folder)

        def probe() -> Numerics:
            made.append(1)
            return FOUND

        assert mine.load_or_make(KEY, probe, Numerics.to_json, Numerics.from_json) == FOUND
        return mine

    assert begun().damaged == {"numerics": 0, "rates": 0}
    file = kept.locate("numerics", KEY)
    harm(file)
    with caplog.at_level(logging.WARNING):
        mine = begun()
    assert len(made) == 2
    (record,) = caplog.records
    assert "damaged" in record.getMessage()
    assert record.exc_info is None
    metrics = Metrics()
    metrics.watch_damage(lambda: mine.damaged)
    lines = metrics.render()[0].decode().splitlines()
    assert 'rekindle_damaged_files_total{what="numerics"} 1.0' in lines
    assert 'rekindle_damaged_files_total{what="rates"} 0.0' in lines
    if not file.is_dir():  # a folder in its place is not removed
        assert begun().damaged["numerics"] == 0
        assert len(made) == 2
    assert len(left(kept)) == 1


def test_the_start_that_is_done_first_decides_for_those_beside_it(kept: CalibrationCache) -> None:
    """Processes that started at once served one set of products each; the next start knew only the last one's."""

    def slow() -> int:
        assert start(kept, lambda: 1) == 1
        return 2

    assert start(kept, slow) == 1
    assert start(kept, never) == 1


def test_many_at_once_agree(kept: CalibrationCache) -> None:
    count = 8
    made = Barrier(count)

    def one(number: int) -> int:
        def make() -> int:
            made.wait(30)
            return number

        return start(kept, make)

    with ThreadPoolExecutor(count) as pool:
        found = set(pool.map(one, range(count)))
    assert len(found) == 1
    assert start(kept, never) in found
    assert len(left(kept)) == 1


def test_a_home_that_cannot_be_written(kept: CalibrationCache) -> None:
    kept.folder.parent.mkdir(parents=True, exist_ok=True)
    kept.folder.write_text("a file where the folder should be")
    assert start(kept, lambda: 1) == 1
    assert start(kept, lambda: 2) == 2


def test_who_waits_is_told_before_something_is_proven_and_only_then(kept: CalibrationCache) -> None:
    calls = list[str]()
    mine = CalibrationCache(kept.folder, proving=lambda: calls.append("proving"))
    assert mine.load_or_make(KEY, lambda: len(calls), str, int) == 1
    assert mine.load_or_make(KEY, never, str, int) == 1
    assert calls == ["proving"]
