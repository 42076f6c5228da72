"""Measures how prompts of an 8B-shaped model come back from host memory and from a cold disk, compared with computing
them again.

    python -m benchmarks.cuda_store [--record] [--tokens 2048 8192 32768] [--runs 5] [--folder DIR]
        [--kv-dtype int8]
    python -m benchmarks.cuda_store --device cpu --tiny        the same on any machine, to see that it runs

The model has random weights. One run measures how fast page-locked memory is copied, how fast the bytes of the files
are read, and what a restore reaches of that. Then it takes each length three ways: the prompt is computed whole,
restored whole, and split as the planner decides with the rates that it has measured by then (`[0, m)` is computed while
`[m, n)` is loaded). All ways end with the same rows, bit for bit. Figures are medians. Host memory comes first, then
the same entries from disk, each time out of the page cache.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

import anyio
import torch
from attrs import define, field

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.formats.row_format import DTYPE_NAMES, read_row_types
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.numerics.synthetic import RandomWeights
from adapters.store.files.file_format import Layout
from adapters.store.open_store import create_memory, open_store
from adapters.store.store import Store
from adapters.transfer.saver import UNPACED
from adapters.transfer.transfer import Transfer, create_transfer
from benchmarks.arguments import benchmark_parser
from benchmarks.cold import forget, read_raw
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from effects.all import EffectRequest, Launch
from effects.ids import RequestId, SlotId, Tier, Tokens
from effects.job import Sampling
from effects.lookup import FindPrefix, PrefixFound, ReleasePrefix
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from engine.loading.calibration import calibrate_compute
from states import policy, rates
from states.rates import Rates
from states.settings import Settings

BLOCK_SIZE = 64
SLOT = SlotId(0)
COPIED = 1 << 30  # bytes of the raw copy


def kernels_of(device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type == "cuda":
        from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - needs Triton

        return TritonKernels(device)
    return CpuKernels(dtype)


def config_of(given: argparse.Namespace) -> Qwen3Config:
    positions = max(given.tokens) + 1024
    if given.tiny:
        return Qwen3Config(4096, 256, 512, 4, 4, 2, 64, positions, 1e6)
    return Qwen3Config(151936, 4096, 12288, given.layers, 32, 8, 128, positions, 1e6)


@define
class StoreBench:
    """One slot, its executors, and what the planner knows."""

    shard: DenseShard
    lane: DeviceLane
    executor: DeviceExecutor
    store: Store
    moving: Transfer
    settings: Settings
    rates: Rates
    request: int = 0
    _plain: dict[str, Any] = field(factory=dict[str, Any])

    async def perform(self, effect: Any) -> Any:
        (outcome,) = await self.executor.perform(Launch((EffectRequest(RequestId(self.request), effect),)))
        return outcome

    def open(self, prompt: Tokens) -> None:
        self.request += 1
        opening = OpenSlot(SLOT, SLOT, 0, prompt, Sampling())
        self.executor.open(RequestId(self.request), opening)
        self.moving.restorer.place_fence(RequestId(self.request), opening)

    async def compute(self, start: int, stop: int, *, concurrent: bool = False) -> None:
        """Chunk by chunk, as the core asks for it; whole chunks teach the rates."""
        while start < stop:
            end = min(stop, start // self.settings.chunk * self.settings.chunk + self.settings.chunk)
            outcome = await self.perform(RunPrefill(SLOT, start, end))
            assert isinstance(outcome, PrefillAdvanced), outcome
            if end - start == self.settings.chunk:
                self.rates = rates.record_prefill(self.rates, start, end - start, outcome.ns, concurrent=concurrent)
            start = end

    async def run(self, prompt: Tokens, tier: Tier, mode: str) -> dict[str, Any]:
        """Until all rows but the last token's are there. mode: recompute, restore or planner."""
        self.open(prompt)
        started = time.perf_counter()
        request = RequestId(self.request)
        found = self.moving.lookup.find_prefix(request, FindPrefix(prompt, 0))
        if isawaitable(found):  # a tier had to be asked
            found = await found
        assert isinstance(found, PrefixFound), found
        assert found.tier == tier, f"it is in {found.tier} and not in {tier}"
        stop = found.length
        load_start = {"recompute": stop, "restore": 0}.get(
            mode, policy.choose_load_start(self.settings, self.rates, 0, stop, tier)
        )
        restored: list[BlocksRestored] = []
        if load_start == stop:
            self.moving.lookup.release_prefix(request, ReleasePrefix(found.lease))
            await self.compute(0, stop)
        else:

            async def restore() -> None:
                outcome = await self.moving.restorer.restore(
                    request, RestoreBlocks(found.lease, SLOT, load_start, stop)
                )
                assert isinstance(outcome, BlocksRestored), outcome
                restored.append(outcome)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(restore)
                await self.compute(0, load_start, concurrent=True)
        await self.compute(stop, len(prompt) - 1)
        seconds = time.perf_counter() - started
        for one in restored:
            assert (one.start, one.stop) == (load_start, stop), one
            self.rates = rates.record_load(self.rates, tier, stop - load_start, one.ns, concurrent=load_start > 0)
        loaded = sum(one.bytes for one in restored)
        spent = sum(one.ns for one in restored)
        return {
            "seconds": seconds,
            "load_start": load_start,
            "bytes": loaded,
            "rate": loaded / spent * 1e9 if spent else 0.0,
        }

    async def rows(self, prompt: Tokens) -> torch.Tensor:
        return await self.lane.run(lambda: self.shard.rows.view(SLOT, 0, len(prompt) - 1).clone())

    async def same(self, prompt: Tokens, truth: torch.Tensor) -> bool:
        """Bit for bit, asked on the device."""
        there = partial(self.shard.rows.view, SLOT, 0, len(prompt) - 1)
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        kind = kinds[truth.element_size()]
        return await self.lane.run(lambda: torch.equal(there().view(kind), truth.view(kind)))

    async def keep(self, prompt: Tokens, folder: Path) -> dict[str, Any]:
        """Computed, copied out on the lane, and written behind its back."""
        before = set(files_in(folder))
        self.open(prompt)
        await self.compute(0, len(prompt) - 1)
        kept = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        started = time.perf_counter()
        saving = self.moving.saver.save(RequestId(self.request), SaveSnapshot(SLOT, prompt[:kept]))
        self.moving.saver.pace_snapshot(RequestId(self.request), UNPACED)
        saved = await saving
        assert isinstance(saved, SnapshotSaved), saved
        copied = time.perf_counter() - started
        await anyio.to_thread.run_sync(self.settle)
        written = time.perf_counter() - started
        files = sorted(set(files_in(folder)) - before)
        return {"tokens": len(prompt), "bytes": saved.bytes, "copy_s": copied, "write_s": written, "files": files}

    def settle(self) -> None:
        """Until everything is written."""
        while self.store.lower_tiers and self.store.lower_tiers[0].queued_bytes:
            time.sleep(0.005)

    def only_disk(self, prompt: Tokens) -> None:
        """Host memory lets everything go."""
        self.store.memory_tier.index.budget = 0
        found = self.store.find_prefix(prompt, 0)
        assert isinstance(found, tuple), found
        self.store.release(found[0])
        assert not self.store.memory_tier.index.entries


def files_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.zst"))


def raw_copy(device: torch.device) -> float:
    """Bytes a second from page-locked memory to the device (ordinary memory on a CPU)."""
    gpu = device.type == "cuda"
    source = torch.empty(COPIED if gpu else COPIED >> 4, dtype=torch.uint8, pin_memory=gpu).fill_(1)
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return source.nbytes / median(times[1:])


async def compare_modes(
    bench: StoreBench, prompt: Tokens, tier: Tier, runs: int, files: Sequence[Path]
) -> dict[str, Any]:
    """All modes in turn, again and again; the first decode step teaches the planner and is not counted."""
    found: dict[str, list[dict[str, Any]]] = {"recompute": [], "restore": [], "planner": []}
    reads, truth = list[float](), None
    for decode_step in range(runs + 1):
        for mode, results in found.items():
            if tier == "disk":
                forget(files)
            result = await bench.run(prompt, tier, mode)
            if truth is None:
                truth = await bench.rows(prompt)
            assert await bench.same(prompt, truth), f"{mode} from {tier} at {len(prompt)}: other rows"
            if decode_step:
                results.append(result)
        if tier == "disk" and decode_step:
            forget(files)
            read, seconds = read_raw(files)
            reads.append(read / seconds)
    middle = {mode: median([one["seconds"] for one in results]) for mode, results in found.items()}
    best = min(middle["recompute"], middle["restore"])
    rate = median([one["rate"] for one in found["restore"]])
    return {
        "tier": tier,
        "tokens": len(prompt),
        **{f"{mode}_s": seconds for mode, seconds in middle.items()},
        "load_start": median([one["load_start"] for one in found["planner"]]),
        "of_recompute": middle["planner"] / middle["recompute"],
        "of_better": middle["planner"] / best,
        "restore_GB/s": rate / 1e9,
        "raw_GB/s": median(reads) / 1e9 if reads else 0.0,
        "of_raw": rate / median(reads) if reads else 0.0,
        "runs": found,
    }


def build(given: argparse.Namespace, lane: DeviceLane, folder: Path) -> StoreBench:
    """On the lane."""
    config, device = config_of(given), lane.device
    dtype = torch.float32 if given.tiny else torch.bfloat16
    weights, buckets = RandomWeights(config, 0, device, dtype), (*(r for r in BUCKETS if r < given.chunk), given.chunk)
    shard = DenseShard(
        config,
        weights,
        kernels_of(device, dtype),
        ShardPlacement(
            device=device,
            dtype=dtype,
            slots=1,
            capacity=config.max_positions,
            buckets=buckets,
            rows=read_row_types(given.kv_dtype, dtype),
        ),
    )
    layout = Layout("bench", BLOCK_SIZE, shard.rows.spec)
    size = 2 * sum(given.tokens) * layout.token_bytes
    store = open_store(
        layout,
        folder,
        host_bytes=size,
        disk_bytes=2 * size,
        codec="store",
        memory=create_memory(size, pin=device.type == "cuda"),
    )
    assert store is not None
    parts = ExecutorParts(shard, buckets, lane=lane)
    executor = DeviceExecutor(parts)
    moving = create_transfer(store, (shard,), lane, parts.slots.find)
    settings = Settings(
        slots=1, max_context=config.max_positions, chunk=given.chunk, block_size=BLOCK_SIZE, batch_rows=1, store=True
    )
    for _ in range(3):
        calibrate_compute.run_chunk(shard, 0, given.chunk, given.chunk)
    known = Rates(prefill=calibrate_compute.measure_prefill(shard, given.chunk, config.max_positions))
    return StoreBench(shard, lane, executor, store, moving, settings, known)


async def measure_store(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    lane = DeviceLane(given.device)
    started = time.perf_counter()
    copy = await lane.run(partial(raw_copy, lane.device))
    bench = await lane.run(partial(build, given, lane, folder))
    print(f"model ready after {time.perf_counter() - started:.0f} s; raw copy {copy / 1e9:.1f} GB/s", flush=True)
    draw, kept, rows = random.Random(7), list[dict[str, Any]](), list[dict[str, Any]]()
    vocabulary = bench.shard.config.vocab_size
    prompts = [tuple(draw.randrange(vocabulary) for _ in range(count)) for count in given.tokens]
    for prompt in prompts:
        kept.append(await bench.keep(prompt, folder))
    shown = [{name: value for name, value in one.items() if name != "files"} for one in kept]
    print_table("Snapshots: copied out on the lane, then written in the background", shown)
    for tier in ("host", "disk"):
        if tier == "disk":
            bench.only_disk(prompts[0])
        for prompt, one in zip(prompts, kept, strict=True):
            result = await compare_modes(bench, prompt, tier, given.runs, one["files"])
            result["of_copy"] = result["restore_GB/s"] * 1e9 / copy
            rows.append(result)
            print(f"{tier} {len(prompt)} after {time.perf_counter() - started:.0f} s", flush=True)
    assert bench.executor.close(60)
    assert bench.store.close()
    return {
        "kv_dtype": given.kv_dtype,
        "raw_copy_GB/s": copy / 1e9,
        "snapshots": shown,
        "modes": rows,
    }


def make_figures(rows: list[dict[str, Any]], model: str) -> list[Figure]:
    """Compare the planner's choice with computing, and tell the speed of a whole restore."""
    found = list[Figure]()
    for row in rows:
        peers, goal = {"computed": row["recompute_s"]}, Goal(at_most=1.1, against="computed")
        subject = f"{model}, prompt brought back from {row['tier']}"
        found.append(Figure("restart", subject, str(row["tokens"]), "s", row["planner_s"], peers, goal))
    for row in rows:
        if row["tier"] == "host":
            found.append(
                Figure(
                    "continued",
                    f"{model}, restored from host memory",
                    str(row["tokens"]),
                    "GB/s",
                    row["restore_GB/s"],
                    goal=Goal(at_least=45),
                )
            )
    return found


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="four narrow layers instead of an 8B model's")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--kv-dtype", choices=("auto", *DTYPE_NAMES), default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = anyio.run(measure_store, given, Path(folder) / "kv")
    shown = [{name: value for name, value in row.items() if name != "runs"} for row in found["modes"]]
    print_table(
        "Seconds until the prompt's rows are there; planner against recompute and the better forced mode", shown
    )
    publish(
        given,
        "cuda_store",
        {**found, "modes": shown},
        make_figures(shown, "tiny" if given.tiny else "8B shape"),
        given.device,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
