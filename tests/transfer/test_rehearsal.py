"""Rows are brought back before anybody waits: from real files past the page cache, from samples, from memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapters.sequence_layout import torch_dtype
from adapters.store.disk.file_names import QUARANTINE
from adapters.store.store import Store
from adapters.transfer import measure_copies as rehearsing
from adapters.transfer.copy_rows import RowMover
from adapters.transfer.measure_copies import CopyMeasurement
from tests.store.kit import BIG, BLOCK_SIZE, LAYOUT, ROWS, disk_store, save, settled

CAPACITY = 64
TOKENS = tuple(range(1, 1 + 12 * BLOCK_SIZE))


class TwoSlots:
    """Two slots of the layout's rows, in memory."""

    is_addressable = True
    spec = ROWS

    @property
    def rows(self) -> TwoSlots:
        """Return itself, as the only part of a target."""
        return self

    def __init__(self) -> None:
        layers = len(ROWS.names) // 2
        self.all = torch.zeros(2, layers, 2, ROWS.heads, CAPACITY, ROWS.width, dtype=torch_dtype(ROWS.dtype))

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self.all[slot, ..., start:stop, :]

    def export(self, slot: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        raise AssertionError("rows are reached where they are")

    def import_rows(self, slot: int, start: int, rows: object) -> None:
        raise AssertionError("rows are reached where they are")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def listed(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def filled(path: Path) -> Store:
    """A new process's store, with three files of an earlier one."""
    store = disk_store(path)
    store.run_bytes = 4 * BLOCK_SIZE * LAYOUT.token_bytes
    save(store, TOKENS)
    settled(store)
    store.close()
    return disk_store(path)


def test_its_own_files_tell_how_fast_they_come_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsing, "MIN_FILE_BYTES", 1)
    store, slots = filled(path), TwoSlots()
    assert store.lower_tiers
    names = listed(path)
    entries, figures = list(store.lower_tiers[0].index.entries.values()), store.collect_figures().build_json()
    with CopyMeasurement(store, (slots,), CAPACITY, BLOCK_SIZE).lease_files(store.lower_tiers[0]) as loads:
        assert len(loads) == 3
        assert all(entry.leases == 1 for entry in entries)
        rehearsal = CopyMeasurement(store, (slots,), CAPACITY, BLOCK_SIZE)
        assert rehearsal.measure_alone(loads) > 0
        assert rehearsal.measure_single(loads) > 0
    assert all(entry.leases == 0 for entry in entries)
    assert slots.all.any(), "no rows came into the slot"
    assert listed(path) == names
    assert store.collect_figures().build_json() == figures, "no request was served, so nothing is counted"
    store.close()


def test_one_after_the_other_the_quickest_tells_and_no_more_are_read_than_there_is_time_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read, clock = filled(path), list[int](), [0]
    rehearsal, row = CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE), store.layout.token_bytes
    monkeypatch.setattr(rehearsing.time, "perf_counter_ns", lambda: clock[0])

    def load(took: int) -> Callable[[], int]:
        def loaded() -> int:
            read.append(took)
            clock[0] += took
            return 1000 * row

        return loaded

    assert rehearsal.measure_single(list(map(load, (4_000_000, 2_000_000, 1_000_000)))) == 2_000
    assert read == [4_000_000, 2_000_000], "of many a few tell enough"
    read.clear()
    assert rehearsal.measure_single(list(map(load, (60_000_000, 2_000_000)))) == 60_000
    assert read == [60_000_000], "there was no time for another one"
    assert rehearsal.measure_single([]) == 0
    store.close()


def test_too_few_of_its_own_tell_nothing(path: Path) -> None:
    store = filled(path)
    assert store.lower_tiers
    with CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE).lease_files(store.lower_tiers[0]) as loads:
        assert loads == []
    store.close()


def test_a_damaged_file_brings_nothing_and_is_put_aside_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsing, "MIN_FILE_BYTES", 1)
    store = filled(path)
    assert store.lower_tiers
    for file in path.glob("*.zst"):
        file.write_bytes(bytes(file.stat().st_size))
    rehearsal = CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE)
    with rehearsal.lease_files(store.lower_tiers[0]) as loads:
        assert rehearsal.measure_alone(loads) == 0
        assert rehearsal.measure_alone(loads) == 0
        assert rehearsal.measure_single(loads) == 0
    assert (store.collect_figures().build_json()["quarantined"], store.damaged_files["run"]) == (3, 3)
    assert len(store.lower_tiers[0].index) == 0
    assert all(name.startswith(QUARANTINE) for name in listed(path) if name.endswith(".zst"))
    store.close()


@pytest.mark.parametrize("codec", ["store", "zstd"])
def test_samples_are_read_and_gone(path: Path, codec: str) -> None:
    store, slots = disk_store(path), TwoSlots()
    assert store.lower_tiers
    slots.all[0, ..., :BLOCK_SIZE, :] = 3
    names, rehearsal = listed(path), CopyMeasurement(store, (slots,), CAPACITY, BLOCK_SIZE)
    with rehearsal.write_samples(store.lower_tiers[0], codec) as loads:  # type: ignore[arg-type]
        assert len(loads) > 0
        assert len(listed(path)) == len(names) + len(loads)
        assert rehearsal.measure_alone(loads) > 0
    assert listed(path) == names
    assert (slots.all[0, ..., :BLOCK_SIZE, :] == 3).all(), "what was read is not what was written"
    store.close()


def test_samples_that_were_left_behind_are_removed_at_the_next_start(path: Path) -> None:
    store = disk_store(path)
    assert store.lower_tiers
    left = CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE).write_samples(store.lower_tiers[0], "store")
    left.__enter__()  # and never left: as after `kill -9`
    assert any(name.startswith(".new-") for name in listed(path))
    store.close()
    again = disk_store(path)
    assert not any(name.startswith(".new-") for name in listed(path))
    again.close()


def test_a_small_budget_has_no_room_for_samples(path: Path) -> None:
    store = disk_store(path, disk=1000)
    assert store.lower_tiers
    rehearsal = CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE)
    with rehearsal.write_samples(store.lower_tiers[0], "store") as loads:
        assert loads == []
        assert rehearsal.measure_alone(loads) == 0
    store.close()


def test_both_sides_at_once(path: Path) -> None:
    store, computed = disk_store(path, disk=BIG), list[int]()
    rehearsal = CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE)
    load_ns, compute_ns = rehearsal.measure_during(rehearsal.create_copies(), lambda: computed.append(1))
    assert load_ns > 0
    assert compute_ns >= 0
    assert computed
    assert RowMover(TwoSlots(), ROWS).is_addressable
    store.close()


def test_a_computation_that_fails_ends_the_loading(path: Path) -> None:
    store = disk_store(path)
    rehearsal = CopyMeasurement(store, (TwoSlots(),), CAPACITY, BLOCK_SIZE)

    def fails() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        rehearsal.measure_during(rehearsal.create_copies(), fails)
    store.close()
