"""The time to load rows from a shared store: measured with samples at a start, and kept for the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from adapters.sequence_layout import RowSpec
from adapters.store.files.codec import CodecChooser
from adapters.store.files.file_format import Layout
from adapters.store.shared.folder_client import FolderClient
from adapters.store.shared.object_client import StoreUnreachable
from adapters.store.shared.open_client import open_client
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.shared_tier import SharedTier
from engine.loading.calibration.calibrate_shared import MOST_NS, SAMPLES, SharedTimes, find_shared_time
from engine.settings.calibration_cache import CalibrationCache

pytest.importorskip("obstore")
KEY = "ab" * 16


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SharedTier]:
    layout = Layout("ab" * 16, 4, RowSpec(("layers.0.k",), 1, 8, "I8"))
    client = open_client(f"file://{tmp_path}/shared")
    tier = SharedTier(client, layout, threading.RLock(), SharedLimits(1 << 20, 0, inf), CodecChooser("store"))
    tier.start()
    yield tier
    assert tier.close()


@define
class TimedSamples:
    """Stands for `CopyMeasurement`: real samples, and times that are said. counts: the samples of each writing."""

    tier_folder: Path
    single: int = 100
    together: int = 30
    counts: list[int] = field(factory=list)

    @contextmanager
    def write_shared_samples(self, tier: SharedTier, count: int) -> Iterator[Sequence[str]]:
        with tier.write_samples([b"rows"], count) as names:
            assert [(self.tier_folder / name).read_bytes() for name in names] == [b"rows"] * count
            self.counts.append(count)
            yield names

    def measure_single(self, _: Sequence[str]) -> int:
        return self.single

    def measure_alone(self, loads: Sequence[str]) -> int:
        assert len(loads) == SAMPLES, "so many are read at once"
        return self.together


def start(tier: SharedTier, clock: Any, folder: Path) -> int:
    return find_shared_time(tier, clock, CalibrationCache(folder / "kept"), KEY)


def test_a_first_start_measures_and_the_next_one_reads_a_single_sample(tier: SharedTier, tmp_path: Path) -> None:
    clock = TimedSamples(tmp_path / "shared")
    assert start(tier, clock, tmp_path) == 30
    clock.single = 150
    assert start(tier, clock, tmp_path) == 45, "in proportion to what one run takes now"
    assert clock.counts == [SAMPLES, 1]
    assert not list((tmp_path / "shared" / "samples").iterdir()), "they are removed again"


@pytest.mark.parametrize("single", [5, 5000], ids=["nearer", "farther"])
def test_a_store_that_has_changed_is_measured_again(tier: SharedTier, tmp_path: Path, single: int) -> None:
    clock = TimedSamples(tmp_path / "shared")
    start(tier, clock, tmp_path)
    clock.single = single
    clock.together = 7
    assert [start(tier, clock, tmp_path) for _ in range(2)] == [7, 7]
    assert clock.counts == [SAMPLES, 1, SAMPLES, 1]


def test_a_store_that_fails_has_no_time_and_nothing_is_kept(
    tier: SharedTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise StoreUnreachable("it is gone")

    clock = TimedSamples(tmp_path / "shared")
    with monkeypatch.context() as patched:
        patched.setattr(FolderClient, "write_object", fail)
        assert start(tier, clock, tmp_path) == 0
    assert "could not be measured: it is gone" in caplog.text
    clock.single = 0  # a sample cannot be read
    clock.together = 0
    assert start(tier, clock, tmp_path) == 0
    clock = TimedSamples(tmp_path / "shared")
    assert start(tier, clock, tmp_path) == 30
    assert clock.counts == [SAMPLES]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 1, "together": 0, "single": 5}', '{"version": 1, "together": 3}']
)
def test_what_was_not_kept_by_this_version_is_measured_again(tier: SharedTier, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        SharedTimes.from_json(text)
    CalibrationCache(tmp_path / "kept").remember(KEY, text)
    clock = TimedSamples(tmp_path / "shared", MOST_NS + 1, MOST_NS + 1)
    assert start(tier, clock, tmp_path) == MOST_NS + 1
    assert clock.counts == [SAMPLES]
    assert start(tier, clock, tmp_path) <= MOST_NS, "what is kept has a limit"
