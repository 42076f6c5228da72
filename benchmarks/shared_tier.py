"""The shared tier: answers that were restored on one server from what another has read, and the speed of the store.

`python -m benchmarks.shared_tier [--prompts 300] [--models demo,demo-hybrid] [--store file|s3]
[--only exactness,rates] [--cores 8,2]`

**Exactness.** Server B computes every prompt cold, alone and without a draft. Server A, another process whose layers
are split (`--writer`), reads the same prompts, publishes their rows, those of its draft and its recurrent states, and
is killed (`kill -9`). B has no disk and keeps nothing in host memory. It is asked again and restores from the shared
tier, whatever that is worth. Tokens are compared.

**Rates.** The bytes of objects that are read and written in a second, against the client library alone with the same
objects and as many requests at once: by the tier's own client (`moved`), and by the whole tier, which also encodes,
decodes, checks and copies. The goals are those of the whole tier, which is more than moving bytes. Passes take turns;
medians. Objects of a folder are read before, so that no way is the first to read them. With `--cores`, all of it is
measured on so many of the cores, each number in a process of its own.

The client alone reads in three ways: on an event loop; with calls that block, on threads that a loop asks; and with
such calls on threads alone. The quickest one counts. What each side does: the client returns the bytes of a whole
object in memory that it allocates and frees, and compares nothing. The tier is asked by an event loop, as a restore
asks it. It opens the object, compares the sums of all blocks, the whole head with the tokens, and the table, and
brings the rows to memory of the server, which is mapped already.

A folder is read at the speed of memory, and there the checks of the whole tier cost as much processor time as reading.
So the same is measured with stores that give fewer MB/s (`--paces`, 1250 and 125 by default: 10 and 1 Gbit/s). Each
operation takes as long as its bytes take at that rate, all operations of one direction together. What is read is
decoded when all of its bytes have come. Fetching it from an object store goes on meanwhile, as it does for the client
alone.

Processor seconds per GB are those of this process. They say what a way costs where other work shares the machine.
`encode_alone` and `decode_alone` are those of one thread that does nothing else. From them and from what the client
alone takes follows a *bound*: the ratio that the whole tier could reach if the cores did nothing else and never waited.
`moto`'s server takes a core of its own. With two cores it shares them with the client, and so it does with the whole
tier, which then slows the server down. `--client-cores 2` on a larger machine leaves the other cores to the server.

`s3` is `moto`'s server process, written in Python: a real process that speaks the protocol, and slower than any store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import anyio
import torch
from attrs import define, evolve, field

from adapters.processors import count_processors
from adapters.sequence_layout import RowSpec
from adapters.store.block_index import Entry
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files.codec import CodecChooser, Fixed
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Layout, Run, encode_run
from adapters.store.files.read_run import PIECE_BYTES, RunContent, fill_target
from adapters.store.files.same_thread_executor import SameThreadExecutor
from adapters.store.run_read import BATCH_BYTES, RunRead, take_batch
from adapters.store.shared.object_client import Folder, ObjectClient, ReadLimit
from adapters.store.shared.object_pieces import ObjectPieces
from adapters.store.shared.open_client import open_client
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.publisher import UPLOADS
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.store import RUNS_IN_FLIGHT
from adapters.store.tier import WriteRun
from adapters.text.model_text import Text
from benchmarks.arguments import benchmark_parser
from benchmarks.exactness import FULL, Comparison, make_random_jobs, together
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import Options, build_options
from engine.settings.paths import find_model_folder
from tests.store.shared_servers import BUCKET, find_moto, moto_server

RUN_BYTES = 4 << 20
RUNS = 24  # of a store that gives 125 MB/s or less: they take 0.8 s
QUICK_RUNS = 48  # of a quicker one: at 1250 MB/s they take 0.16 s, so that the start counts little
FOLDER_RUNS = 96  # of a folder that is read at the speed of memory
FOLDER_ROUNDS = 4  # in which all runs are read then: in one round they would be read within 20 ms
SLOW_MB_S = 125.0
CODEC_RUNS = 8  # that are encoded and decoded alone
WAITING_BYTES = 1 << 30  # that may wait to be written
PASSES = 6  # an even number: in every other pass the ways come in the reverse order
SLOW_PASSES = 2  # of a slow store, whose rate is that of its pace
BLOCK = 64
CLIENT_WAYS = {
    "client_read": "an event loop",
    "threads_read": "threads, asked by an event loop",
    "bare_read": "threads alone",
}
T = TypeVar("T")
Row: TypeAlias = dict[str, Any]  # of a table: names, and numbers or words


def shared_tier(target: LoadedModel) -> SharedTier:
    assert target.transfer is not None
    tier = target.transfer.store.find_tier(SharedTier)
    assert tier is not None
    return tier


# --- exactness ---


def reader_options(given: argparse.Namespace, model: str, url: str) -> Options:
    nothing = {"kv_cache_budget": 0, "host_cache_budget": 0, "kv_cache_min_tokens": 0}
    return build_options(model=model, slots=4, threads=given.threads, kv_shared_tier=url, **nothing)


def writer_options(given: argparse.Namespace, model: str, url: str) -> Options:
    kept = {"kv_cache_budget": 0, "host_cache_budget": 4096, "kv_cache_min_tokens": 0}
    split = {"target_devices": given.writer} if given.writer else {}
    return build_options(model=model, slots=4, threads=given.threads, kv_shared_tier=url, **kept, **split)


async def jobs_of(given: argparse.Namespace, model: str) -> list[Any]:
    text = Text.load(find_model_folder(reader_options(given, model, "").model))
    jobs = make_random_jobs(given.prompts, tuple(text.tokenizer.end_tokens))
    await text.aclose()
    return jobs


async def write_and_die(given: argparse.Namespace, model: str, url: str) -> None:
    """Answer all prompts, publish everything, and be killed."""
    target = await load_target(writer_options(given, model, url))
    await together(target, [evolve(job, scope=FULL) for job in await jobs_of(given, model)])
    tier = shared_tier(target)
    while not tier.is_complete:  # noqa: ASYNC110 - nothing else says so
        await anyio.sleep(0.05)
    figures = tier.collect_figures().build_json()
    dropped = sum(count for name, count in figures.items() if name.startswith("dropped"))
    assert figures["written"], figures
    assert not dropped, figures
    print(f"A wrote {figures['written']} runs, {figures['written_bytes'] >> 20} MiB", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


async def compare_answers(given: argparse.Namespace, model: str, url: str) -> Row:
    jobs = await jobs_of(given, model)
    target = await load_target(reader_options(given, model, url))
    with tempfile.TemporaryDirectory() as folder:
        compared = Comparison(target, jobs, Path(folder), [], [])
        silent = [evolve(job, speculate=False) for job in jobs]
        compared.plain = await together(target, silent, at_once=1)
        words = [sys.executable, "-m", "benchmarks.shared_tier", *sys.argv[1:], "--leave", url, "--models", model]
        ended = await anyio.run_process(words, check=False, stderr=None, stdout=None)
        assert ended.returncode == -signal.SIGKILL, ended.returncode
        await settle(shared_tier(target))
        await compared.run("from the shared tier, of a process that was killed", compared.restored)
    figures = shared_tier(target).collect_figures().build_json()
    draft = sum(1 for entry in shared_tier(target).index.entries.values() if entry.kind == "draft")
    states = sum(1 for entry in shared_tier(target).index.entries.values() if entry.kind == "state")
    await target.close()
    prompt_tokens = sum(len(job.prompt) for job in jobs)
    row = {"model": model, **compared.rows[0], "prompt_tokens": prompt_tokens, "draft_runs": draft, "states": states}
    assert row["tier"] == "shared", row
    return row | {"read_bytes": figures["read_bytes"], "damaged": figures["damaged"]}


async def settle(tier: SharedTier) -> None:
    """Until no listing brings anything new."""
    before = -1
    while before != (now := len(tier.index.entries)) or not now:
        before = now
        await anyio.sleep(12)


# --- rates ---


@lru_cache(1)
def make_rows(size: int, count: int) -> list[torch.Tensor]:
    """Return so many tensors of so many bytes, uint8, which are random bf16 numbers."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size // 2, generator=generator).to(torch.bfloat16).view(torch.uint8) for _ in range(count)]


def make_runs(layout: Layout, count: int, codec: Fixed) -> list[tuple[Run, Buffer, list[bytes]]]:
    """Runs of random bf16 rows, with the files that they become."""
    tokens = RUN_BYTES // layout.token_bytes // BLOCK * BLOCK
    found = list[tuple[Run, Buffer, list[bytes]]]()
    root = layout.compute_root("rows")
    size = layout.compute_size("rows", tokens)
    for number, data in enumerate(make_rows(size, count)):
        packed = pack_tokens(range(number * tokens, (number + 1) * tokens))
        run = Run(0, root, chain_keys(root, packed, BLOCK), packed)
        file = encode_run(run, layout, data.numpy().data, CodecChooser(codec).create_compressor())
        found.append((run, Buffer(data), file))
    return found


@define
class Pace:
    """A rate that operations share, on any event loops. bytes_a_s: infinite for no limit."""

    bytes_a_s: float
    _free_s: float = 0.0  # when the bytes that were taken so far have passed
    _lock: threading.Lock = field(factory=threading.Lock)

    async def run(self, work: Awaitable[T], size: int) -> T:
        """Await work that moves so many bytes; it ends when they have passed."""
        end_s = self.take(size)
        done = await work
        await sleep_until(end_s)
        return done

    def take(self, size: int) -> float:
        """Return the time at which so many bytes have passed, after those that were taken before."""
        now_s = time.perf_counter()
        with self._lock:
            self._free_s = max(now_s, self._free_s) + size / self.bytes_a_s
            return self._free_s


async def sleep_until(end_s: float) -> None:
    if (left_s := end_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s)


@define(eq=False)
class PacedLimit:
    """A limit of a call that also waits until the bytes have passed that it begins to read."""

    plain: ReadLimit
    pace: Pace

    def begin(self, size: int) -> None:
        end_s = self.pace.take(size)
        if (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self.plain.begin(size)

    def claim(self) -> None:
        self.plain.claim()


@define(eq=False)
class PacedClient(ObjectClient):
    """A client of a store that gives a limited rate.

    plain: does the work. What is read is decoded when the store has given all of its bytes, and not earlier.
    """

    plain: ObjectClient
    pace: Pace

    @property
    def folder(self) -> Folder | None:
        return None if self.plain.folder is None else self

    async def read_object(self, name: str, size: int) -> list[memoryview]:
        return await self.pace.run(self.plain.read_object(name, size), size)

    async def read_content(
        self,
        name: str,
        size: int,
        workers: Executor,
        decode: Callable[[RunContent], T],
        then: Callable[[T], object],
    ) -> T:
        end_s = self.pace.take(size)

        def decode_later(content: RunContent) -> T:
            if (left_s := end_s - time.perf_counter()) > 0:  # even a sleep of 0 s lets go of the interpreter
                time.sleep(left_s)
            return decode(content)

        return await self.plain.read_content(name, size, workers, decode_later, then)

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        written = self.plain.write_object(name, parts, replace=replace)
        await self.pace.run(written, sum(map(len, parts)))

    async def read_files(self, read: Callable[[Callable[[str], str], ReadLimit], T]) -> T:
        assert self.plain.folder is not None
        return await self.plain.folder.read_files(
            lambda locate, limit: read(locate, PacedLimit(limit, self.pace))  # each batch as its bytes pass
        )

    async def write_file(self, name: str, size: int, write: Callable[[str, str], T]) -> T:
        assert self.plain.folder is not None
        return await self.pace.run(self.plain.folder.write_file(name, size, write), size)

    def close(self) -> None:
        self.plain.close()


def make_paced(url: str, bytes_a_s: float) -> PacedClient:
    plain = open_client(url)
    return PacedClient(url, plain._store, plain, Pace(bytes_a_s))  # noqa: SLF001 - the library alone is compared with


async def time_client_writes(client: PacedClient, files: Sequence[bytes], mark: str) -> float:
    from obstore import put_async  # noqa: PLC0415

    names = [(f"plain-{mark}/{number}", file) for number, file in enumerate(files)]
    store = client._store  # noqa: SLF001 - the library alone is what is compared with

    async def work() -> None:
        while names:
            name, file = names.pop()
            await client.pace.run(put_async(store, name, file, mode="create", use_multipart=False), len(file))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(UPLOADS)))
    return time.perf_counter() - began


def name_reads(folder: str, sizes: Sequence[int], rounds: int) -> list[tuple[str, int]]:
    """Return the names and sizes of all objects in a folder, as often as there are rounds."""
    return [(f"{folder}/{number}", size) for number, size in enumerate(sizes)] * rounds


async def time_client_reads(client: PacedClient, sizes: Sequence[int], mark: str, rounds: int) -> float:
    """The library's calls for event loops."""
    from obstore import get_async  # noqa: PLC0415

    names = name_reads(f"plain-{mark}", sizes, rounds)
    store = client._store  # noqa: SLF001

    async def read(name: str) -> None:
        await (await get_async(store, name)).bytes_async()

    async def work() -> None:
        while names:
            name, size = names.pop()
            await client.pace.run(read(name), size)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(RUNS_IN_FLIGHT)))
    return time.perf_counter() - began


async def time_thread_reads(client: PacedClient, sizes: Sequence[int], mark: str, rounds: int) -> float:
    """The library's calls that block, on as many threads."""
    from obstore import get  # noqa: PLC0415

    names = name_reads(f"plain-{mark}", sizes, rounds)
    store = client._store  # noqa: SLF001

    def read(name: str) -> None:
        get(store, name).bytes()

    with ThreadPoolExecutor(RUNS_IN_FLIGHT) as threads:

        async def work() -> None:
            loop = asyncio.get_running_loop()
            while names:
                name, size = names.pop()
                await client.pace.run(loop.run_in_executor(threads, read, name), size)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(RUNS_IN_FLIGHT)))
        return time.perf_counter() - began


def time_bare_reads(client: PacedClient, sizes: Sequence[int], mark: str, rounds: int) -> float:
    """The same calls on as many threads that take one name after another, without an event loop."""
    from obstore import get  # noqa: PLC0415

    names = deque(name_reads(f"plain-{mark}", sizes, rounds))
    store = client._store  # noqa: SLF001

    def work() -> None:
        while True:
            try:
                name, size = names.popleft()
            except IndexError:
                return
            end_s = client.pace.take(size)
            get(store, name).bytes()
            if (left_s := end_s - time.perf_counter()) > 0:
                time.sleep(left_s)

    with ThreadPoolExecutor(RUNS_IN_FLIGHT) as threads:
        began = time.perf_counter()
        for future in [threads.submit(work) for _ in range(RUNS_IN_FLIGHT)]:
            future.result()
        return time.perf_counter() - began


async def time_moved_writes(client: ObjectClient, files: Sequence[bytes], mark: str) -> float:
    names = [(f"moved-{mark}/{number}", file) for number, file in enumerate(files)]

    async def work() -> None:
        while names:
            name, file = names.pop()
            await client.write_object(name, [file])

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(UPLOADS)))
    return time.perf_counter() - began


def drain(content: RunContent) -> None:
    """Read a content, and do nothing with it."""
    for at in range(0, content.size, PIECE_BYTES):
        with content.read_piece(at, min(PIECE_BYTES, content.size - at)):
            pass


async def time_moved_reads(
    client: ObjectClient, sizes: Sequence[int], mark: str, workers: Executor, rounds: int
) -> float:
    names = name_reads(f"moved-{mark}", sizes, rounds)

    async def work() -> None:
        while names:
            await client.read_content(*names.pop(), workers, drain, lambda _: None)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(RUNS_IN_FLIGHT)))
    return time.perf_counter() - began


def time_tier_writes(tier: SharedTier, runs: Sequence[tuple[Run, Buffer, list[bytes]]]) -> float:
    began = time.perf_counter()
    for run, rows, _ in runs:
        assert tier.submit(WriteRun(run, rows, lambda: None))
    tier._publisher.watch_writes().result()  # noqa: SLF001 - as the fleet's own paths wait
    return time.perf_counter() - began


async def time_tier_reads(tier: SharedTier, memory: SlabMemory, workers: ThreadPoolExecutor, rounds: int = 1) -> float:
    """The whole tier, asked as a restore asks it: by as many tasks, each for some runs at a time."""
    entries = deque([*tier.index.entries.values()] * rounds)

    def describe(_: Entry) -> tuple[str, int]:
        return tier.name, RUN_BYTES

    lock = threading.Lock()

    async def work() -> None:
        reads = list[RunRead]()

        def take() -> list[RunRead]:
            nonlocal reads
            assert all(read.buffer is not None for read in reads)
            with lock:
                batch = take_batch(entries, RUNS_IN_FLIGHT, tier.batch_bytes, describe) if entries else []
            reads = [RunRead(entry) for entry in batch]
            return reads

        await tier.read(take, memory, workers)
        assert not reads

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(RUNS_IN_FLIGHT)))
    return time.perf_counter() - began


def time_codec(runs: Sequence[tuple[Run, Buffer, list[bytes]]], layout: Layout, codec: Fixed) -> tuple[float, float]:
    """Return the processor seconds per GB of files in which one thread encodes runs, and decodes and checks them."""
    some = runs[:CODEC_RUNS]
    compressor = CodecChooser(codec).create_compressor()
    target = memoryview(bytearray(len(some[0][1].data)))
    contents = [ObjectPieces([memoryview(b"".join(file))]) for _, _, file in some]
    spent_s = [inf, inf]
    for _ in range(3):
        marks = [time.thread_time()]
        for run, rows, _ in some:
            encode_run(run, layout, rows.data.numpy().data, compressor)
        marks.append(time.thread_time())
        for content, (run, _, _) in zip(contents, some, strict=True):
            fill_target(content, Expected(content.size, run, layout), SameThreadExecutor(), target)
        marks.append(time.thread_time())
        spent_s = [min(pair) for pair in zip(spent_s, (end - begin for begin, end in pairwise(marks)), strict=True)]
    size = sum(content.size for content in contents)
    return 1e9 * spent_s[0] / size, 1e9 * spent_s[1] / size


def compute_bound(rate: float, client_s: float, codec_s: float, cores: int) -> float:
    """Return the ratio that the whole tier could reach on so many cores. rate: of the client alone, MB/s.

    client_s, codec_s: processor seconds per GB of the client alone, and of encoding or decoding alone.
    """
    return min(1.0, 1e3 * cores / (client_s + codec_s) / rate)


def open_paced_tier(url: str, layout: Layout, codec: Fixed, bytes_a_s: float) -> SharedTier:
    """Open the tier with a client whose store gives this rate."""
    limits = SharedLimits(WAITING_BYTES, 0, inf)
    tier = SharedTier(make_paced(url, bytes_a_s), layout, threading.RLock(), limits, CodecChooser(codec))
    tier.start()
    return tier


def read_whole_folder(folder: Path) -> None:
    """Read every file twice.

    The system notes the first two reads of a page, and they take up to a fifth more time. The client's ways read the
    same objects, one way after another, and the tier has its own: without this it alone would always pay for that.
    """
    space = threading.local()

    def read(path: Path) -> None:
        space.bytes = getattr(space, "bytes", None) or bytearray(RUN_BYTES + (64 << 10))
        with path.open("rb", buffering=0) as file:
            while file.readinto(space.bytes):
                pass

    with ThreadPoolExecutor(RUNS_IN_FLIGHT) as threads:
        for _ in range(2):
            deque(threads.map(read, [path for path in folder.rglob("*") if path.is_file()]), 0)


def measure_way(way: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds that a way took, and the processor seconds of this process."""
    before_s = time.process_time()
    return way(), time.process_time() - before_s


def measure_pass(  # noqa: PLR0917 - as `measure_rates` has them
    url: str, layout: Layout, codec: Fixed, turn: int, memory: SlabMemory, bytes_a_s: float
) -> dict[str, float]:
    """Return MB/s and processor seconds per GB of every way, on the same objects.

    memory: mapped before, as a server's is. bytes_a_s: of the store.
    """
    is_folder = url.startswith("file:")
    unpaced = FOLDER_RUNS if is_folder else QUICK_RUNS  # moto's server keeps all objects in memory
    count = RUNS if bytes_a_s <= 1e6 * SLOW_MB_S else QUICK_RUNS if bytes_a_s < inf else unpaced
    rounds = FOLDER_ROUNDS if is_folder and bytes_a_s == inf else 1
    runs = make_runs(layout, count, codec)
    files = [b"".join(parts) for _, _, parts in runs]
    sizes = [*map(len, files)]
    mark = f"{layout.compute_root('rows').hex()}"
    client = make_paced(url, bytes_a_s)
    tier = open_paced_tier(url, layout, codec, bytes_a_s)
    with ThreadPoolExecutor(2 * RUNS_IN_FLIGHT) as workers:
        ways: list[tuple[str, Callable[[], float]]] = [
            ("client_write", lambda: asyncio.run(time_client_writes(client, files, mark))),
            ("moved_write", lambda: asyncio.run(time_moved_writes(client, files, mark))),
            ("tier_write", lambda: time_tier_writes(tier, runs)),
        ]
        reads: list[tuple[str, Callable[[], float]]] = [
            ("client_read", lambda: asyncio.run(time_client_reads(client, sizes, mark, rounds))),
            ("threads_read", lambda: asyncio.run(time_thread_reads(client, sizes, mark, rounds))),
            ("bare_read", lambda: time_bare_reads(client, sizes, mark, rounds)),
            ("moved_read", lambda: asyncio.run(time_moved_reads(client, sizes, mark, workers, rounds))),
            ("tier_read", lambda: asyncio.run(time_tier_reads(tier, memory, workers, rounds))),
        ]
        order = -1 if turn % 2 else 1
        found = {name: measure_way(way) for name, way in ways[::order]}
        if is_folder:
            read_whole_folder(Path(url.removeprefix("file://")))
        found |= {name: measure_way(way) for name, way in reads[::order]}
    encode_s, decode_s = time_codec(runs, layout, codec)
    figures = tier.collect_figures().build_json()
    assert (figures["written"], figures["read_bytes"]) == (count, rounds * figures["written_bytes"]), figures
    assert tier.close(60)
    client.close()
    if is_folder:  # files that are gone are not written to the disk beside the next pass
        shutil.rmtree(url.removeprefix("file://"))
    moved = {name: sum(sizes) * (1 if name.endswith("write") else rounds) for name in found}
    speeds = {name: moved[name] / seconds / 1e6 for name, (seconds, _) in found.items()}
    spent = {f"{name}_cpu": 1e9 * spent / moved[name] for name, (_, spent) in found.items()}
    return speeds | spent | {"encode_alone": encode_s, "decode_alone": decode_s}


def choose_client_way(rows: Sequence[dict[str, float]]) -> str:
    """Let the client alone read in the quickest of its ways, and return which that is."""
    best = max(CLIENT_WAYS, key=lambda way: median([row[way] for row in rows]))
    for row in rows:
        row["client_read"] = row[best]
        row["client_read_cpu"] = row[f"{best}_cpu"]
    return CLIENT_WAYS[best]


def measure_rates(url: str, store: str, codec: Fixed, pace: float, passes: int) -> Row:
    """Medians of MB/s over all passes but the first, which warms up. pace: MB/s of the store."""
    rows = list[dict[str, float]]()
    buffers = RUNS_IN_FLIGHT * (1 + BATCH_BYTES // RUN_BYTES)
    memory = SlabMemory(buffers * RUN_BYTES)
    memory.map_buffers(RUN_BYTES, buffers)
    for turn in range((passes if pace > SLOW_MB_S else SLOW_PASSES) + 1):
        layout = Layout(f"rates {store} {codec} {pace} {turn}", BLOCK, RowSpec(("rows",), 8, 512, "BF16"))
        rows.append(measure_pass(url, layout, codec, turn, memory, 1e6 * pace))
    found_way = choose_client_way(rows[1:])
    names = [(way, what) for what in ("write", "read") for way in ("client", "moved", "tier")]
    found: Row = {"store": store if pace == inf else f"{store} at {pace:g} MB/s", "codec": codec}
    found["client_reads_on"] = found_way
    found |= {f"{way}_{what}_MB/s": median([row[f"{way}_{what}"] for row in rows[1:]]) for way, what in names}
    found |= {f"{way}_{what}_cpu_s/GB": median([row[f"{way}_{what}_cpu"] for row in rows[1:]]) for way, what in names}
    cores = count_processors() - (not url.startswith("file:"))
    for what, alone in (("write", "encode_alone"), ("read", "decode_alone")):
        found[f"{alone}_cpu_s/GB"] = median([row[alone] for row in rows[1:]])
        bounds = [
            compute_bound(row[f"client_{what}"], row[f"client_{what}_cpu"], row[alone], max(1, cores))
            for row in rows[1:]
        ]
        found[f"tier_{what}_bound"] = median(bounds)
    for way, what in names:
        if way != "client":
            ratios = [row[f"{way}_{what}"] / row[f"client_{what}"] for row in rows[1:]]
            found[f"{way}_{what}_ratio"] = median(ratios)
    return found


# --- all of it ---


@contextmanager
def opened_store(kind: str) -> Iterator[str]:
    """The URL of an empty store."""
    if kind == "file":
        with tempfile.TemporaryDirectory() as folder:
            yield f"file://{folder}/shared"
        return
    command = find_moto()
    assert command is not None, "pip install 'moto[server]', or name its command in REKINDLE_MOTO_SERVER"
    with moto_server(command):
        yield f"s3://{BUCKET}/shared"


def make_exactness(answers: Sequence[Row], store: str) -> list[Figure]:
    found = list[Figure]()
    for row in answers:
        subject = f"restored on B from what A published, {store}, {row['jobs']} prompts"
        found.append(Figure("exactness", subject, row["model"], "differ", row["differing"], goal=Goal(at_most=0)))
    return found


def make_rates(rates: Sequence[Row], cores: int) -> list[Figure]:
    """Return the figures of the whole tier. cores: of the machine; a row of fewer says how many it had."""
    found = list[Figure]()
    for what in ("write", "read"):
        for row in rates:
            store, _, pace = row["store"].partition(" at ")  # for instance "file at 125 MB/s"
            subject = f"shared tier ({store}), {what}s over its client's, whole"
            at = (pace.removesuffix(" MB/s") or "full") + (" zstd" if row["codec"] == "zstd" else "")
            fewer = row.get("cores", cores)
            ratio = round(row[f"tier_{what}_ratio"], 2)
            at += f", {fewer} cores" if fewer != cores else ""
            found.append(Figure("restart", subject, at, "x", ratio, goal=Goal(at_least=0.9)))
    return found


def bind_to_cores(count: int) -> None:
    """Let this process, and all threads that it starts later, use the first of its cores only."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def measure_on_cores(counts: Sequence[int]) -> list[Row]:
    """Measure rates on each number of cores, in processes that have no other cores from the start."""
    found = list[Row]()
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rates.json")
            words = ["--cores", "", "--only", "rates", "--first-cores", str(count), "--leave-rates", str(file)]
            subprocess.run([sys.executable, "-m", "benchmarks.shared_tier", *sys.argv[1:], *words], check=True)
            found += [{"cores": count, **row} for row in json.loads(file.read_text())]
    return found


def measure_all_rates(given: argparse.Namespace, url: str) -> list[Row]:
    """Measure every store and codec that was asked for."""
    asked = product(map(float, given.paces.split(",")), given.codecs.split(","))
    return [measure_rates(url, given.store, codec, pace, given.passes) for pace, codec in asked]


def parse_words() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--models", default="demo,demo-hybrid")
    parser.add_argument("--store", default="file", choices=("file", "s3"))
    parser.add_argument("--only", default="exactness,rates")
    parser.add_argument("--writer", default="cpu:0,ipc+cpu:0", help="as --target-devices, of the server that writes")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--paces", default="inf,1250,125", help="MB/s of stores; inf: the store's own speed")
    parser.add_argument("--codecs", default="store,zstd")
    parser.add_argument("--passes", type=int, default=PASSES, help="of a store that is not slow, besides the first")
    parser.add_argument("--client-cores", type=int, default=0, help="cores of this process, once the server runs")
    parser.add_argument("--cores", default="", help="measure rates on so many cores, one number after another")
    parser.add_argument("--leave", default="", help=argparse.SUPPRESS)
    parser.add_argument("--first-cores", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--leave-rates", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_exactness(given: argparse.Namespace, url: str) -> list[Row]:
    return [anyio.run(compare_answers, given, model, url) for model in given.models.split(",")]


def main() -> int:
    given = parse_words()
    if given.leave:
        anyio.run(write_and_die, given, given.models, given.leave)
    if given.first_cores:
        bind_to_cores(given.first_cores)
    answers, rates = list[Row](), list[Row]()
    with opened_store(given.store) as url:
        if "exactness" in given.only:
            answers = measure_exactness(given, url)
        if given.client_cores:
            bind_to_cores(given.client_cores)
        if "rates" in given.only:
            counts = [int(count) for count in given.cores.split(",") if count]
            rates = measure_on_cores(counts) if counts else measure_all_rates(given, url)
    if given.leave_rates:
        Path(given.leave_rates).write_text(json.dumps(rates))
        return 0
    if answers:
        print_table("Restored on B from what A published, against answers computed cold", answers)
        publish(given, f"shared_tier-{given.store}", {"answers": answers}, make_exactness(answers, given.store), "cpu")
    if rates:
        print_table("The store through the tier and through its client alone; medians", rates)
        figures = make_rates(rates, count_processors())
        publish(given, f"shared_tier_rates-{given.store}", {"rates": rates}, figures, "cpu")
    return 1 if any(row["differing"] for row in answers) else 0


if __name__ == "__main__":
    raise SystemExit(main())
