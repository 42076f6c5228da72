"""Loading times are there before the first request: kept ones are hostile input, and the first decision is the last."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.numerics.synthetic import RandomWeights
from adapters.sequence_layout import RowSpec
from adapters.store.files.file_format import Layout
from adapters.store.open_store import open_store
from adapters.store.store import Store
from adapters.transfer.measure_copies import CopyMeasurement
from engine.loading.calibration import calibrate_compute
from engine.loading.calibration.calibrate_restore import (
    RestoreTimes,
    add_restore_times,
    build_restore_key,
    load_or_measure_times,
)
from engine.settings.calibration_cache import LARGEST, CalibrationCache
from states import policy
from states import rates as world_rates
from states.rates import Rates, record_load, record_prefill
from states.settings import Settings

FOUND = RestoreTimes(
    from_memory=900, from_files=2_000, prefill_slowdown=1100, load_slowdown=1500, single=4_000, zstd=800
)
CHUNK = 64


def kept(folder: Path) -> RestoreTimes | None:
    return CalibrationCache(folder).recall("a", RestoreTimes.from_json)


def keep(folder: Path, loading: RestoreTimes) -> None:
    CalibrationCache(folder).remember("a", loading.to_json())


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    keep(tmp_path, FOUND)
    assert kept(tmp_path) == FOUND


GOOD = json.loads(FOUND.to_json())
HOSTILE = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"{",
    "deep": b"[" * 4000,
    "a list": b"[]",
    "a number": b"7",
    "another version": json.dumps({**GOOD, "version": 2}).encode(),
    "no version": json.dumps({name: value for name, value in GOOD.items() if name != "version"}).encode(),
    "a field too many": json.dumps({**GOOD, "path": "/etc/passwd"}).encode(),
    "a field too few": json.dumps({name: value for name, value in GOOD.items() if name != "from_files"}).encode(),
    "negative": json.dumps({**GOOD, "from_files": -1}).encode(),
    "a single one that is negative": json.dumps({**GOOD, "single": -1}).encode(),
    "a single one and no disk": json.dumps({**GOOD, "from_files": 0}).encode(),
    "too much": json.dumps({**GOOD, "from_files": 10**12}).encode(),
    "a fraction": json.dumps({**GOOD, "from_files": 1.5}).encode(),
    "not finite": json.dumps({**GOOD, "from_files": float("inf")}).encode(),
    "true": json.dumps({**GOOD, "from_files": True}).encode(),
    "words": json.dumps({**GOOD, "from_memory": "7"}).encode(),
    "a list of ratios": json.dumps({**GOOD, "zstd": [800]}).encode(),
    "an endless ratio": json.dumps({**GOOD, "zstd": 10**12}).encode(),
    "quicker together than alone": json.dumps({**GOOD, "load_slowdown": 999}).encode(),
    "endlessly slow together": json.dumps({**GOOD, "prefill_slowdown": 10**9}).encode(),
    "many digits": FOUND.to_json().replace("2000", "2" * 3900).encode(),
    "large": FOUND.to_json().encode() + b" " * LARGEST,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_time_is_none_and_counted(tmp_path: Path, content: bytes) -> None:
    keep(tmp_path, FOUND)
    mine = CalibrationCache(tmp_path)
    mine.locate("rates", "a").write_bytes(content)
    assert mine.recall("a", RestoreTimes.from_json) is None
    assert mine.damaged["rates"] == 1


@pytest.mark.parametrize("days", [-1, 8])
def test_an_old_one_is_none_and_no_damage(tmp_path: Path, days: int) -> None:
    keep(tmp_path, FOUND)
    mine, then = CalibrationCache(tmp_path), time.time() - days * 86400
    os.utime(mine.locate("rates", "a"), (then, then))
    assert mine.recall("a", RestoreTimes.from_json) is None
    assert mine.damaged["rates"] == 0


# A small model, a real folder.


@pytest.fixture
def shard() -> Pipeline:
    config = Qwen3Config(512, 64, 128, 2, 2, 1, 32, 512, 1e6)
    weights = RandomWeights(config, 0, torch.device("cpu"), torch.float32)
    buckets = (*(bucket for bucket in BUCKETS if bucket < CHUNK), CHUNK)
    where: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    kernels = CpuKernels(torch.float32)
    return Pipeline(
        (DenseShard(config, weights, kernels, ShardPlacement(slots=1, capacity=512, buckets=buckets, **where)),)
    )


@pytest.fixture
def opened(tmp_path: Path, shard: Pipeline) -> Callable[..., Store]:
    def made(identity: str = "a", **limits: Any) -> Store:
        names = tuple(f"layers.{layer}.{part}" for layer in shard.spec.layers for part in "kv")
        layout = Layout(identity, 64, RowSpec(names, 1, 32, "F32"))
        store = open_store(layout, tmp_path / "kv", disk_bytes=1 << 30, **limits)
        assert store is not None
        return store

    return made


def settings(rates: Rates) -> Settings:
    return Settings(slots=1, max_context=512, chunk=CHUNK, block_size=64, store=True, rates=rates)


def never(*_: object) -> None:
    raise AssertionError("nothing of today could contradict it")


def test_a_folder_without_files_is_measured_once_and_then_remembered(
    tmp_path: Path, shard: Pipeline, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    first = add_restore_times(Rates(prefill=(1000,)), store, shard, chunk=CHUNK, kept=CalibrationCache(tmp_path))
    assert store.close()
    assert first.loads.keys() == {"host", "disk"}
    assert min(first.loads.values()) > 0
    assert min(first.prefill_slowdown, first.load_slowdown) >= 1000
    assert first.prefill == (1000,)
    assert {file.name for file in (tmp_path / "kv").iterdir()} <= {"LOCK", "journal", "auto-codec"}, (
        "samples do not stay"
    )
    (tmp_path / "kv" / "auto-codec").unlink()
    (file,) = (tmp_path / "rates").iterdir()
    file.write_text(FOUND.to_json())
    store = opened()
    monkeypatch.setattr(CopyMeasurement, "create_copies", never)
    again = add_restore_times(Rates(prefill=(1000,)), store, shard, chunk=CHUNK, kept=CalibrationCache(tmp_path))
    assert again == FOUND.add_to(Rates(prefill=(1000,)), {"host": FOUND.from_memory, "disk": FOUND.from_files})
    assert store.lower_tiers
    assert store.lower_tiers[0].chooser.choice == "zstd"
    assert store.close()
    other = opened("another model")
    assert build_restore_key(other, shard, CHUNK) != file.stem, "what another model's rows take says nothing"
    assert other.close()


@pytest.mark.parametrize(
    ("before", "single", "several", "disk"),
    [
        pytest.param(FOUND, 4_000, never, 2_000, id="as before"),
        pytest.param(FOUND, 2_000, never, 1_000, id="a quicker disk"),
        pytest.param(FOUND, 8_000, never, 4_000, id="a slower disk"),
        pytest.param(evolve(FOUND, from_files=1), 3_000, never, 1, id="never nothing"),
        pytest.param(FOUND, 1_999, lambda *_: 900, 900, id="a much quicker disk"),
        pytest.param(FOUND, 8_001, lambda *_: 2_100, 2_100, id="much slower once"),
        pytest.param(evolve(FOUND, single=0), 4_000, lambda *_: 1_000, 1_000, id="only samples so far"),
        pytest.param(evolve(FOUND, single=0), 0, lambda *_: 0, 2_000, id="no file can be read"),
        pytest.param(FOUND, 0, lambda *_: 0, 2_000, id="no file can be read any more"),
    ],
)
def test_of_what_was_kept_the_disk_is_as_a_few_of_its_own_files_say(
    tmp_path: Path,
    shard: Pipeline,
    opened: Callable[..., Store],
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: RestoreTimes,
    single: int,
    several: Callable[..., int],
    disk: int,
) -> None:
    store, mine = opened(codec="store"), CalibrationCache(tmp_path)
    rehearsal = CopyMeasurement(store, shard.parts, shard.spec.capacity, CHUNK)
    monkeypatch.setattr(CopyMeasurement, "lease_files", lambda _, __: Given([lambda: 1]))
    monkeypatch.setattr(CopyMeasurement, "measure_single", lambda *_: single)
    monkeypatch.setattr(CopyMeasurement, "measure_alone", several)
    monkeypatch.setattr(CopyMeasurement, "create_copies", never)
    monkeypatch.setattr(CopyMeasurement, "write_samples", never)
    keep(tmp_path, before)
    assert load_or_measure_times(mine, "a", rehearsal, never) == evolve(
        before, from_files=disk, single=single or before.single
    )
    is_known = several is not never and single
    assert kept(tmp_path) == (evolve(before, from_files=disk, single=single) if is_known else before)
    assert store.close()


def test_files_of_its_own_are_measured_where_nothing_was_kept(
    tmp_path: Path, shard: Pipeline, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then a start reads a few of them, one after the other."""
    store, mine = opened(codec="store"), CalibrationCache(tmp_path)
    rehearsal = CopyMeasurement(store, shard.parts, shard.spec.capacity, CHUNK)
    assert store.lower_tiers
    with rehearsal.write_samples(store.lower_tiers[0], "store") as loads:
        monkeypatch.setattr(CopyMeasurement, "lease_files", lambda _, __: Given(loads))
        first = load_or_measure_times(mine, "a", rehearsal, None)
        assert min(first.from_memory, first.from_files, first.single) > 0
        assert kept(tmp_path) == first
        read = CopyMeasurement.measure_single  # whose time is the machine's, and may be another one by now
        monkeypatch.setattr(CopyMeasurement, "measure_single", lambda *these: read(*these) and first.single)
        monkeypatch.setattr(CopyMeasurement, "measure_alone", never)
        assert load_or_measure_times(mine, "a", rehearsal, None) == first.scale_to(first.single)
    assert store.close()


def test_auto_writes_what_it_chose_at_its_first_start_whatever_is_measured_later(
    tmp_path: Path, shard: Pipeline, opened: Callable[..., Store]
) -> None:
    """The fault: it was measured anew, and chose otherwise from start to start by a few hundredths."""
    chosen = []
    for number, ratio in enumerate((800, 1100, 950)):
        store = opened(codec="auto")
        mine = CalibrationCache(tmp_path / str(number))
        mine.remember(build_restore_key(store, shard, CHUNK), evolve(FOUND, zstd=ratio).to_json())
        add_restore_times(Rates(prefill=(1000,)), store, shard, chunk=CHUNK, kept=mine)
        assert store.lower_tiers
        chosen.append(store.lower_tiers[0].chooser.choice)
        assert store.close()
    assert chosen == ["zstd", "zstd", "zstd"]
    assert (tmp_path / "kv" / "auto-codec").read_text() == "zstd\n"


@pytest.mark.parametrize(
    ("codec", "ratio", "said"),
    [("zstd", 1201, True), ("zstd", 1200, False), ("zstd", 0, False), ("store", 1500, False), ("auto", 1500, False)],
)
def test_a_slow_zstd_is_told_with_the_option_that_helps(
    tmp_path: Path,
    shard: Pipeline,
    opened: Callable[..., Store],
    caplog: pytest.LogCaptureFixture,
    *,
    codec: str,
    ratio: int,
    said: bool,
) -> None:
    store, mine = opened(codec=codec), CalibrationCache(tmp_path)
    mine.remember(build_restore_key(store, shard, CHUNK), evolve(FOUND, zstd=ratio).to_json())
    with caplog.at_level("INFO", logger="rekindle"):
        add_restore_times(Rates(prefill=(1000,)), store, shard, chunk=CHUNK, kept=mine)
    lines = [one.getMessage() for one in caplog.records if "--kv-cache-codec" in one.getMessage()]
    assert bool(lines) == said
    assert not said or "1.20 times" in lines[0]
    assert store.lower_tiers
    assert store.lower_tiers[0].chooser.choice == ("store" if codec == "auto" else codec)
    assert store.close()


def test_zstd_is_compared_with_plain_files_at_the_first_start(
    tmp_path: Path, shard: Pipeline, opened: Callable[..., Store]
) -> None:
    store, mine = opened(codec="zstd"), CalibrationCache(tmp_path)
    add_restore_times(Rates(prefill=(1000,)), store, shard, chunk=CHUNK, kept=mine)
    found = mine.recall(build_restore_key(store, shard, CHUNK), RestoreTimes.from_json)
    assert found is not None
    assert found.zstd > 0
    assert not (tmp_path / "kv" / "auto-codec").exists(), "nothing was chosen"
    assert store.close()


class Given:
    """A context around what is there anyway."""

    def __init__(self, loads: Any) -> None:
        self.loads = loads

    def __enter__(self) -> Any:
        return self.loads

    def __exit__(self, *_: object) -> None:
        pass


def test_what_cannot_be_measured_is_not_known_and_nothing_fails(
    tmp_path: Path, shard: Pipeline, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    store, rates = opened(), Rates(prefill=(1000,))
    assert store.lower_tiers
    monkeypatch.setattr(store.lower_tiers[0].folder, "create", full)
    assert add_restore_times(rates, store, shard, chunk=CHUNK, kept=CalibrationCache(tmp_path)) == rates
    assert store.close()


@pytest.mark.parametrize("length", [64, 256, 448])
@pytest.mark.parametrize("load_ns", [10, 900, 1100, 100_000])
def test_the_first_decision_is_the_hundredth(length: int, load_ns: int) -> None:
    """Times that are known from the start decide as the same times do after a hundred requests taught them."""
    first = RestoreTimes(from_memory=load_ns, from_files=load_ns, prefill_slowdown=1200, load_slowdown=1100).add_to(
        Rates(prefill=(1000,)), {"host": load_ns, "disk": load_ns}
    )
    taught = Rates()
    for _ in range(100):
        taught = loading_taught(taught, load_ns)
    for tier in ("host", "disk"):
        fronts = {policy.choose_load_start(settings(rates), rates, 0, length, tier) for rates in (first, taught)}
        assert len(fronts) == 1
    unknown = policy.choose_load_start(settings(first), evolve(first, loads={"host": load_ns}), 0, length, "disk")
    assert unknown == 0, "only what is not known is trusted"


def loading_taught(rates: Rates, load_ns: int) -> Rates:
    rates = record_prefill(rates, 0, 100, 100_000, concurrent=False)
    for tier in ("host", "disk"):
        rates = record_load(rates, tier, 100, 100 * load_ns, concurrent=False)
        rates = record_load(rates, tier, 100, 110 * load_ns, concurrent=True)
    return record_prefill(rates, 0, 100, 120_000, concurrent=True)


def test_a_slow_disk_is_not_trusted_by_the_first_request() -> None:
    """The fault: a new process knew nothing of its disk, and restored in 250 ms what it computes in 55."""
    known_at_start = RestoreTimes(from_files=61_000, from_memory=3_000).add_to(
        Rates(prefill=(25_000, 26_000)), {"disk": 61_000, "host": 3_000}
    )
    house = evolve(settings(known_at_start), chunk=1024)
    assert policy.choose_load_start(house, known_at_start, 0, 1984, "disk") == 1984
    assert policy.choose_load_start(house, known_at_start, 0, 1984, "host") == 0
    assert policy.choose_load_start(house, Rates(prefill=(25_000, 26_000)), 0, 1984, "disk") == 0


def test_the_first_span_is_one_constant() -> None:
    assert not hasattr(calibrate_compute, "BAND")
    assert calibrate_compute.FIRST_SPAN is world_rates.FIRST_SPAN
