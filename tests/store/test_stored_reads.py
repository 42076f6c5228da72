"""Runs that a tier reads several of in one call: what becomes of one does not concern the others."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.sequence_layout import RowSpec
from adapters.store import stored_reads
from adapters.store.block_index import Entry
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.disk.disk_tier import DiskTier
from adapters.store.disk.file_names import QUARANTINE
from adapters.store.disk.run_file_reader import RunFileReader
from adapters.store.files.codec import CodecChooser, create_compressor
from adapters.store.files.file_format import Layout, Run, encode_run
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.read_run import RunFile
from adapters.store.files.seekable import Damaged
from adapters.store.open_store import create_index
from adapters.store.run_read import RunRead, give_error, take_batch
from adapters.store.shared import call_limit
from adapters.store.shared.object_client import ObjectGone, StoreUnreachable
from adapters.store.shared.object_names import name_entry
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.tier import ReadableTier, WriteRun

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(find_library() is None, reason="no compiled library")]
LAYOUT = Layout("ab" * 16, 4, RowSpec(("layers.0.k",), 1, 64 << 10, "I8"))
TOKENS = 8  # half a MiB
RUNS = 5
GOOD = (0, 4)  # the others are harmed


def make_run(number: int) -> Run:
    root, packed = LAYOUT.compute_root("rows"), pack_tokens(range(TOKENS * number, TOKENS * (number + 1)))
    return Run(0, root, chain_keys(root, packed, LAYOUT.block_size), packed)


def make_rows(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, LAYOUT.compute_size("rows", TOKENS), dtype=np.uint8)


def write_runs(tier: ReadableTier) -> list[Entry]:
    """Write all runs to a tier, and return their entries in order."""
    written = threading.Semaphore(0)
    for number in range(RUNS):
        rows = Buffer(torch.from_numpy(make_rows(number)))
        assert tier.submit(WriteRun(make_run(number), rows, written.release))
    for _ in range(RUNS):
        assert written.acquire(timeout=30)
    return sorted(tier.index.entries.values(), key=lambda entry: entry.run.tokens)


def read_together(tier: ReadableTier, entries: Sequence[Entry]) -> tuple[list[RunRead], list[int]]:
    """Read all runs in one call. Return the reads, and the numbers of those whose callers were told, in order."""
    results = list[int]()
    reads = [RunRead(entry, lambda _, number=number: results.append(number)) for number, entry in enumerate(entries)]
    coming = [reads]
    with ThreadPoolExecutor(2) as workers:
        asyncio.run(tier.read(lambda: coming.pop() if coming else [], SlabMemory(), workers))
    return reads, results


def check_reads(reads: Sequence[RunRead], results: Sequence[int], good: Sequence[int]) -> None:
    assert [number for number, read in enumerate(reads) if read.error is None] == [*good]
    assert sorted(results) == [*good]
    for number, read in enumerate(reads):
        assert (read.buffer is None) == (read.error is not None)
        if read.buffer is not None:
            assert np.array_equal(read.buffer.data.numpy(), make_rows(number))
        elif read.error is not None:
            assert read.error.__traceback__ is None, "its frames keep memory"


def flip_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    folder = PrivateFolder.open(tmp_path / "kv")
    tier = DiskTier(folder, LAYOUT, create_index(LAYOUT, 1 << 30), threading.RLock(), CodecChooser("store"))
    tier.start()
    yield tier
    assert tier.close()


def test_a_harmed_file_of_the_disk_concerns_no_other(
    disk: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk._reader.processors = 1  # noqa: SLF001 - so that no thread helps
    entries = write_runs(disk)
    paths = [tmp_path / "kv" / disk.get_file_name(entry) for entry in entries]
    flip_bit(paths[1])
    paths[2].unlink()
    paths[3].rename(tmp_path / "elsewhere")
    paths[3].symlink_to(tmp_path / "elsewhere")
    alone = list[Entry]()
    open_run = RunFileReader._open_run  # noqa: SLF001

    def note_run(reader: RunFileReader, read: RunRead, memory: SlabMemory) -> tuple[RunFile, Buffer]:
        alone.append(read.entry)
        return open_run(reader, read, memory)

    monkeypatch.setattr(RunFileReader, "_open_run", note_run)
    reads, results = read_together(disk, entries)
    check_reads(reads, results, GOOD)
    assert [*map(type, (reads[1].error, reads[2].error, reads[3].error))] == [Damaged, *[FileNotFoundError] * 2]
    assert alone == entries[1:4], "the others were read in one call"
    figures = disk.collect_figures().build_json()
    assert (figures["quarantined"], figures["read_errors"]) == (1, 2)
    assert figures["read_bytes"] == sum(entries[number].size for number in GOOD)
    assert sum(path.name.startswith(QUARANTINE) for path in (tmp_path / "kv").iterdir()) == 1
    assert [*disk.index.entries] == [entries[number].handle for number in GOOD]


def test_files_of_the_disk_that_are_not_cached_are_read_past_the_cache(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk._reader.processors = 1  # noqa: SLF001
    entries = write_runs(disk)
    monkeypatch.setattr(stored_reads, "read_files", lambda planned, *_, **__: ["not_cached"] * len(planned))
    check_reads(*read_together(disk, entries), range(RUNS))


def test_a_harmed_object_of_a_folder_concerns_no_other(tmp_path: Path) -> None:
    """One is damaged, one is gone, and one is compressed, which another server may have done."""
    tier = open_shared(tmp_path)
    entries = write_runs(tier)
    paths = [tmp_path / name_entry(tier.catalogue.root, entry) for entry in entries]
    flip_bit(paths[1])
    paths[2].unlink()
    packed = b"".join(encode_run(make_run(3), LAYOUT, make_rows(3).data, create_compressor("zstd")))
    paths[3].write_bytes(packed)
    entries[3].size = len(packed)
    reads, results = read_together(tier, entries)
    check_reads(reads, results, (0, 3, 4))
    assert [*map(type, (reads[1].error, reads[2].error))] == [Damaged, ObjectGone]
    assert (tier.counts["damaged"], tier.counts["read_errors"]) == (1, 1)
    assert tier.availability.is_usable, "a run that is gone is a miss"
    # A listing that comes meanwhile has new entries for both objects that were replaced, since their versions are new.
    with tier.lock:
        found = [entry.handle in tier.index.entries for entry in (*entries[:3], entries[4])]
        assert found == [True, False, False, True]
        assert entries[3].run.tokens in [entry.run.tokens for entry in tier.index.entries.values()]
    assert tier.close(30)


def test_a_folder_that_hangs_fails_all_reads_within_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_shared(tmp_path)
    entries = write_runs(tier)
    goes_on, has_ended = threading.Event(), threading.Event()
    read = stored_reads.read_files

    def hang(*args: object, **more: object) -> object:
        goes_on.wait(30)
        threading.Timer(0.1, has_ended.set).start()  # after the callers would have been told
        return read(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(call_limit, "compute_limit", lambda _: 0.05)
    monkeypatch.setattr(stored_reads, "read_files", hang)
    reads, results = read_together(tier, entries)
    assert {type(read.error) for read in reads} == {StoreUnreachable}
    assert not tier.availability.is_usable
    goes_on.set()
    assert has_ended.wait(30)
    assert not results
    assert not any(read.buffer for read in reads)
    assert tier.close(30)


def test_what_is_copied_on_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are on their way into a slot are never left behind. Each batch has a limit of its own."""
    tier = open_shared(tmp_path)
    entries = write_runs(tier)
    monkeypatch.setattr(call_limit, "compute_limit", lambda _: 0.3)
    reads = [RunRead(entry, lambda _: threading.Event().wait(0.2)) for entry in entries]
    coming = [reads[2:], reads[:2]]
    with ThreadPoolExecutor(2) as workers:
        asyncio.run(tier.read(lambda: coming.pop() if coming else [], SlabMemory(), workers))
    check_reads(reads, range(RUNS), range(RUNS))
    assert tier.close(30)


def open_shared(folder: Path):
    pytest.importorskip("obstore")
    from adapters.store.shared.open_client import open_client  # noqa: PLC0415
    from adapters.store.shared.shared_tier import SharedTier  # noqa: PLC0415

    limits = SharedLimits(1 << 30, 0, 1e9)
    tier = SharedTier(open_client(folder.as_uri()), LAYOUT, threading.RLock(), limits, CodecChooser("store"))
    tier._reader.processors = 1  # noqa: SLF001 - so that no thread helps
    tier.start()
    return tier


def test_no_memory_for_a_run_concerns_no_other(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    disk._reader.processors = 1  # noqa: SLF001
    entries = write_runs(disk)
    allocate = SlabMemory.allocate
    left = [2]

    def allocate_twice(memory: SlabMemory, size: int) -> Buffer:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return allocate(memory, size)

    monkeypatch.setattr(SlabMemory, "allocate", allocate_twice)
    reads, results = read_together(disk, entries)
    check_reads(reads, results, (0, 1))
    assert {type(read.error) for read in reads[2:]} == {MemoryError}


@pytest.mark.parametrize(
    ("waiting", "run_bytes", "batch_bytes", "length"),
    [(96, 4, 16, 4), (96, 4, 15, 3), (31, 4, 16, 3), (15, 4, 16, 1), (2, 4, 16, 1), (96, 32, 16, 1), (96, 4, 0, 1)],
)
def test_a_task_takes_what_is_read_together_and_no_more_than_its_share(
    waiting: int, run_bytes: int, batch_bytes: int, length: int
) -> None:
    queue = deque(range(waiting))
    assert take_batch(queue, 8, batch_bytes, lambda _: ("disk", run_bytes)) == [*range(length)]
    assert [*queue] == [*range(length, waiting)]


def test_a_batch_comes_from_one_tier_and_counts_every_run() -> None:
    """A short run first must not let many long ones in."""
    runs = [("disk", 1), ("disk", 6), ("disk", 6), ("shared", 1), ("shared", 1), ("disk", 1)]
    queue = deque(runs)
    batches = list[list[tuple[str, int]]]()
    while queue:
        batches.append(take_batch(queue, 1, 8, lambda run: run))
    assert batches == [runs[:2], runs[2:3], runs[3:5], runs[5:]]


def test_an_error_lets_go_of_the_memory_that_was_read_into() -> None:
    read = RunRead(None)  # type: ignore[arg-type]
    with pytest.raises(Damaged) as caught:
        raise Damaged("second") from OSError("first")
    assert caught.value.__traceback__ is not None
    give_error(read, caught.value)
    assert read.error is caught.value
    assert (read.error.__traceback__, read.error.__cause__, read.error.__context__) == (None, None, None)
