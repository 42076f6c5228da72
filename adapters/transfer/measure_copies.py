"""Measures how fast rows are loaded on this machine, from files and from host memory, before any request is served.

It uses what will serve: the same readers, as many runs at once, and the same copies into a slot. Where a figure is
known from an earlier start, single runs are read one after the other to find out whether it still holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import TypeAlias

import numpy as np
import torch
from attrs import define, field

from adapters.store.block_index import Entry
from adapters.store.block_keys import KEY_BYTES, TOKEN_BYTES
from adapters.store.disk.disk_tier import DiskTier
from adapters.store.files.codec import CODECS, Fixed, create_compressor
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Run, encode_run, format_name
from adapters.store.files.private_folder import TEMPORARY
from adapters.store.files.seekable import Damaged
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.slab_memory import Buffer
from adapters.store.store import RUNS_IN_FLIGHT, Store
from adapters.store.tier import ReadableTier
from adapters.transfer.copy_rows import RowMover, TargetPart, create_movers

LIMIT_NS = 40_000_000  # a measurement begins no run after that; up to six that are under way are finished
SINGLE_NS = 20_000_000  # no run is read by itself after that
MAX_SINGLE_LOADS = 2  # runs that are read by themselves: the first one finds a disk that was idle
MAX_RUNS = 2 * RUNS_IN_FLIGHT  # kept files that are read
SAMPLE_BYTES = 4 << 20  # content bytes of a file that is only written to be read
MIN_FILE_BYTES = 2 * SAMPLE_BYTES  # bytes of kept files; fewer do not show how fast many files are read
BUDGET_SHARE = 4  # samples take a quarter of the budget for files at most, while they are there

Load: TypeAlias = Callable[[], int]  # the bytes of rows that it brought into the slot


@define(eq=False)
class CopyMeasurement:
    """Measurements with one store and one unused slot. Called on the lane before any request is served.

    Raises OSError or MemoryError, or RuntimeError where a device has no memory. target: the parts of the target.
    capacity: rows of the slot. computed_rows: how many of its first rows belong to tokens. Times are nanoseconds to
    load one token's rows, those of a draft included; 0 means that nothing was measured.
    """

    store: Store[ReadableTier]
    target: Sequence[TargetPart]
    capacity: int
    computed_rows: int
    _movers: tuple[RowMover, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._movers = create_movers([part.rows for part in self.target], self.store.layout.rows)

    def measure_alone(self, loads: Sequence[Load]) -> int:
        """Return the time with as many loads at once as a restore has. Each load is made at most once."""
        end = time.perf_counter_ns() + LIMIT_NS
        with ThreadPoolExecutor(RUNS_IN_FLIGHT, "rehearsal") as pool:
            return self._start_loads(pool, iter(loads), lambda: time.perf_counter_ns() > end)()

    def measure_single(self, loads: Sequence[Load]) -> int:
        """Return the shortest time of a few loads, made one after the other, as far as there is time."""
        end = time.perf_counter_ns() + SINGLE_NS
        times = list[int]()
        for load in loads[:MAX_SINGLE_LOADS]:
            started = time.perf_counter_ns()
            if done := load():
                times.append(max(1, (time.perf_counter_ns() - started) * self._token_bytes // done))
            if time.perf_counter_ns() > end:
                break
        return min(times, default=0)

    def measure_during(self, loads: Sequence[Load], compute: Callable[[], object]) -> tuple[int, int]:
        """Return the times of loads and of one `compute` while both run at once. `compute` runs at least once."""
        started = time.perf_counter_ns()
        times = list[int]()
        over = list[bool]()
        with ThreadPoolExecutor(RUNS_IN_FLIGHT, "rehearsal") as pool:
            finished = self._start_loads(pool, cycle(loads), lambda: bool(over))
            try:
                while not times or time.perf_counter_ns() - started < LIMIT_NS:
                    before = time.perf_counter_ns()
                    compute()
                    times.append(time.perf_counter_ns() - before)
            finally:
                over.append(True)
            return finished(), sum(times) // len(times)

    def _start_loads(
        self, pool: ThreadPoolExecutor, loads: Iterator[Load], over: Callable[[], bool]
    ) -> Callable[[], int]:
        started = time.perf_counter_ns()

        def work() -> int:
            done = 0
            for load in loads:
                done += load()
                if over():
                    break
            return done

        futures = [pool.submit(work) for _ in range(RUNS_IN_FLIGHT)]

        def wait_for_result() -> int:
            done = sum(future.result() for future in futures)
            took = time.perf_counter_ns() - started
            return max(1, took * self._token_bytes // done) if done else 0

        return wait_for_result

    @property
    def _token_bytes(self) -> int:
        """Bytes of one token's rows, those of a draft included."""
        layout = self.store.layout
        return layout.token_bytes + (0 if layout.draft is None else layout.draft.rows.token_bytes)

    # --- what is loaded ---

    def create_copies(self) -> list[Load]:
        """Return loads that copy from host memory."""
        tokens = self._count_tokens(self.store.run_bytes)
        buffers = [
            self.store.memory.allocate(self.store.layout.compute_size("rows", tokens)) for _ in range(RUNS_IN_FLIGHT)
        ]
        for buffer in buffers:
            buffer.data.numpy().fill(0)
        return [partial(self._copy_in, buffer, tokens, number) for number, buffer in enumerate(buffers)]

    @contextmanager
    def lease_files(self, disk: DiskTier) -> Iterator[list[Load]]:
        """Yield loads of kept files, leased while they are read. Yield none where they are too few to tell."""
        index = disk.index
        with self.store.lock:
            mine = [entry for entry in index.entries.values() if entry.kind == "rows" and entry.origin == index.origin]
            chosen = sorted(mine, key=lambda entry: -entry.size)[:MAX_RUNS]
            for entry in chosen:
                entry.leases += 1
        enough = sum(entry.size for entry in chosen) >= MIN_FILE_BYTES
        try:
            yield [self._make_file_load(disk, entry, number) for number, entry in enumerate(chosen)] if enough else []
        finally:
            with self.store.lock:
                for entry in chosen:
                    entry.leases -= 1

    def _make_file_load(self, disk: DiskTier, entry: Entry, number: int) -> Load:
        expected = Expected(entry.size, entry.run, disk.layout)
        return partial(self._read_file, disk, disk.get_file_name(entry), expected, number, entry)

    @contextmanager
    def write_samples(self, disk: DiskTier, codec: Fixed) -> Iterator[list[Load]]:
        """Yield loads of sample files, which are written for this and removed again; no more than there is time for."""
        parts, expected = self._make_sample(codec)
        names = list[str]()
        most = min(RUNS_IN_FLIGHT, disk.index.budget // BUDGET_SHARE // expected.size)
        end = time.perf_counter_ns() + LIMIT_NS
        try:
            while len(names) < most and (not names or time.perf_counter_ns() < end):
                names.append(
                    TEMPORARY + format_name(expected.run.keys[-1], RUNS_IN_FLIGHT * CODECS.index(codec) + len(names))
                )
                with os.fdopen(disk.folder.create(names[-1]), "wb") as file:
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
            yield [partial(self._read_file, disk, name, expected, number) for number, name in enumerate(names)]
        finally:
            for name in names:
                with suppress(OSError):
                    disk.folder.remove(name)

    @contextmanager
    def write_shared_samples(self, tier: SharedTier, count: int) -> Iterator[list[Load]]:
        """Yield loads of sample objects in a shared store, which are written for this and removed again."""
        parts, expected = self._make_sample(tier.chooser.choice)
        with tier.write_samples(parts, count) as names:
            yield [partial(self._read_object, tier, name, expected, number) for number, name in enumerate(names)]

    def _make_sample(self, codec: Fixed) -> tuple[list[bytes], Expected]:
        """Return the file of a run that is not kept, and what a reader expects of it."""
        layout = self.store.layout
        tokens = self._count_tokens(min(SAMPLE_BYTES, self.store.run_bytes))
        keys = (bytes(KEY_BYTES),) * (tokens // layout.block_size)
        run = Run(0, layout.compute_root("rows"), keys, bytes(tokens * TOKEN_BYTES))
        parts = encode_run(run, layout, self._make_content(tokens), create_compressor(codec))
        return parts, Expected(sum(map(len, parts)), run, layout)

    def _read_object(self, tier: SharedTier, name: str, expected: Expected, number: int) -> int:
        """Read a sample object into the slot and return its bytes; 0 if the store fails."""
        length = expected.run.length
        buffer = self.store.memory.allocate(self.store.layout.compute_size("rows", length))
        try:
            tier.read_sample(name, expected, buffer.data.numpy().data)
        except (Damaged, OSError):
            return 0
        return self._copy_in(buffer, length, number)

    def _count_tokens(self, size: int) -> int:
        """Return the tokens whose rows have `size` bytes, in whole blocks, as far as a slot has them; at least one."""
        block_size = self.store.layout.block_size
        return max(1, min(size // self.store.layout.token_bytes, self.capacity) // block_size) * block_size

    def _make_content(self, tokens: int) -> memoryview:
        """Return real rows of this model, repeated at distances that zstd does not see."""
        known = min(tokens, self.computed_rows)
        there = torch.empty(known * self.store.layout.token_bytes, dtype=torch.uint8)
        for mover in self._movers:
            mover.copy_out(0, (0, known), there)
        return np.resize(there.numpy(), self.store.layout.compute_size("rows", tokens)).data

    def _read_file(self, disk: DiskTier, name: str, expected: Expected, number: int, entry: Entry | None = None) -> int:
        """Read a file into the slot and return its bytes. entry: that of a kept run; None for a sample."""
        run = expected.run
        layout = disk.layout
        buffer = self.store.memory.allocate(layout.compute_size("rows", run.length))
        try:
            disk.read_past_cache(name, expected, buffer.data.numpy().data)
        except Damaged as error:
            if entry is not None:
                disk.quarantine(entry, str(error))
            return 0
        except OSError:
            return 0  # a restore that needs the file will report it
        return self._copy_in(buffer, run.length, number)

    def _copy_in(self, buffer: Buffer, tokens: int, number: int) -> int:
        """Copy a run into the slot behind the ones before it, as far as there is room, and return its bytes."""
        count = min(tokens, self.capacity)
        at = number % (self.capacity // count) * count
        for mover in self._movers:
            if mover.is_addressable:
                mover.copy_in(0, (at, at + count), buffer.data, at)
        return buffer.data.nbytes
