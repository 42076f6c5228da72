"""The shared tier: runs in an object store that several servers of one identity use, as `--kv-shared-tier` names it.

The problem: what one server has computed, others should restore, bit for bit. Servers come and go, and write the same
runs at the same time. The store may be slow or gone at any moment.

How it works. A run is one object, with the name and the content of a file of the disk tier (`object_names.py`). A
thread with an event loop of its own does everything that no request waits for:

* It *refreshes* every few seconds, and when it is asked to (`refresher.py`): it lists the store, reads the beginnings
  of new objects into an index (`catalogue.py`), and takes part in garbage collection (`garbage_policy.py`).
* It *publishes*: it encodes runs that snapshots bring, and writes them (`publisher.py`).

Lookups ask the index in memory and never the store. A read fetches the object in ranges on the caller's event loop and
decodes it on the caller's threads, with the same checks as a file (`fill_target`). From a folder, runs are read on
threads of its client: several in one call, or piece by piece (`object_reader.py`). Then they are runs like any other.

An operation that fails or takes too long takes the tier away until a refresh works again (`store_health.py`). While it
is away its index is empty to callers, so prompts are looked up in the other tiers and computed; /health names the
reason.

Invariants: the index is changed under the store's lock only. This server tells the collectors every few seconds which
marked runs it still uses (its report). If that is older than STALE_S, it finds nothing, so it never uses a run that
others may delete.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import ClassVar

from attrs import define, evolve, field

from adapters.cache_figures import TierFigures
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.files.codec import CodecChooser
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Layout
from adapters.store.kept_answers import NotePrompt
from adapters.store.recent_prompts import RecentPrompts
from adapters.store.run_read import BATCH_BYTES, ReadSource
from adapters.store.shared.availability import Availability, read_clock
from adapters.store.shared.catalogue import Catalogue
from adapters.store.shared.garbage_collector import GarbageCollector
from adapters.store.shared.object_client import ObjectClient
from adapters.store.shared.object_names import name_sample
from adapters.store.shared.object_reader import ObjectReader
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.publisher import TASKS, UPLOADS, Publisher
from adapters.store.shared.refresher import Refresher
from adapters.store.shared.store_url import StoreUnusable
from adapters.store.slab_memory import SlabMemory
from adapters.store.tier import WriteRun
from adapters.watched_thread import WatchedThread
from effects.ids import Tier

log = logging.getLogger("rekindle.store")

MAX_RESTARTS = 16
COUNTED = (
    "written", "already_there", "collected", "damaged", "other_format", "outages", "write_errors", "read_errors",
    "dropped_outage", "dropped_queue_full", "dropped_no_room", "written_bytes", "read_bytes",
)  # fmt: skip


@define(eq=False)
class SharedTier:
    """The tier, opened by `start`. Its lock is the store's. clock: as `read_clock`."""

    name: ClassVar[Tier] = "shared"
    client: ObjectClient
    layout: Layout
    lock: threading.RLock
    limits: SharedLimits
    chooser: CodecChooser
    recent_prompts: RecentPrompts = field(factory=RecentPrompts)
    answers: ClassVar[None] = None
    clock: Callable[[], float] = read_clock
    server: str = field(factory=lambda: secrets.token_hex(8))
    counts: Counter[str] = field(factory=Counter[str])
    catalogue: Catalogue = field(init=False)
    thread: WatchedThread = field(init=False)
    _publisher: Publisher = field(init=False)
    _collector: GarbageCollector = field(init=False)
    _reader: ObjectReader = field(init=False)
    _empty: BlockIndex = field(init=False)
    availability: Availability = field(init=False)
    _refresher: Refresher = field(init=False)
    _loop: asyncio.AbstractEventLoop | None = None
    _wake: asyncio.Event = field(factory=asyncio.Event)  # jobs have come, or the tier closes
    _closing: bool = False

    def __attrs_post_init__(self) -> None:
        root = self.layout.compute_root("rows")
        index = BlockIndex(self.limits.budget, self.layout.block_size, root)
        self._empty = BlockIndex(self.limits.budget, self.layout.block_size, root)
        self.availability = Availability(self.lock, self.counts, self.clock)
        self.catalogue = Catalogue(root, index, self.lock, self.counts)
        self._reader = ObjectReader(self.client, self.layout, self.catalogue, self.availability, self.counts)
        self._publisher = Publisher(
            self.client,
            self.layout,
            self.catalogue,
            self.chooser,
            self.limits,
            self.availability.report_failure,
            self.clock,
            self.counts,
        )
        self._collector = GarbageCollector(
            self.client, self.catalogue, self.server, self.limits, self.clock, self.counts
        )
        self._refresher = Refresher(
            self.client,
            self.catalogue,
            self._collector,
            self.availability,
            self.layout.block_size,
            self.clock,
            self.counts,
        )
        self.thread = WatchedThread(
            "shared-store", lambda: asyncio.run(self._serve()), died=self._give_up, restarts=MAX_RESTARTS
        )

    # --- start and end ---

    def start(self) -> None:
        """Sign on, which shows that the store can be written, and list it once. Raises StoreUnusable."""
        try:
            asyncio.run(self._sign_on())
        except OSError as error:
            self._close_parts()
            raise StoreUnusable(str(error)) from error
        self.thread.start()

    async def _sign_on(self) -> None:
        await self._collector.write_report()
        await self._collector.read_marks()
        await self.client.list_objects(self.catalogue.root.hex())

    def close(self, timeout_s: float = 10) -> bool:
        """Write what is queued and sign off. Return False if that takes too long. May be called again."""
        with self.lock:
            self._closing = True
        self._wake_thread()
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            return False
        self._close_parts()
        return True

    def _close_parts(self) -> None:
        self._reader.close()
        self._publisher.close()
        self.client.close()

    # --- from any thread ---

    @property
    def index(self) -> BlockIndex:
        """The index of what can be read now: an empty one while the store is away."""
        return self.catalogue.index if self.availability.is_usable else self._empty

    @property
    def is_complete(self) -> bool:
        """Say whether nothing is queued, and no refresh follows at once to read what is left of the last listing."""
        return self.is_listed and self._publisher.is_idle

    @property
    def is_listed(self) -> bool:
        """Say whether everything that was in the store at the start is in the index."""
        return self._refresher.is_listed

    @property
    def trouble(self) -> str:
        """The reason why nothing is found in the tier now, in one line; empty where it can be used."""
        return self.availability.trouble

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return (self.thread,)

    @property
    def damaged_files(self) -> Mapping[str, int]:
        return {"shared": self.counts["damaged"]}

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows that are not encoded yet. What is encoded needs no memory of the store any more."""
        return self._publisher.queued_bytes

    def touch(self, entry: Entry) -> None:
        """Count a lookup that found this entry. Called with the lock."""
        self.catalogue.touch(entry, self.clock())

    def submit(self, job: WriteRun | NotePrompt) -> bool:
        """Queue a run. Return False if it is refused. Prompts are not shared: each server compares with its own."""
        if isinstance(job, NotePrompt):
            job.finish()
            return True
        with self.lock:
            usable = self.availability.is_usable and not self._closing and not self.thread.is_dead
            taken = self._publisher.submit(job, usable=usable)
        if taken:
            self._wake_thread()
        return taken

    def request_refresh(self) -> Future[bool]:
        """List the store at once. The result says whether what others have published before this call is found now."""
        return self._refresher.request()

    def watch_writes(self) -> Future[None]:
        """Return a future that is done when all runs that are queued now have been written or given up."""
        return self._publisher.watch_writes()

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of runs that are best read together: of a folder some, of other stores one run."""
        return 0 if self.client.folder is None else BATCH_BYTES

    async def read(self, take: ReadSource, memory: SlabMemory, workers: Executor) -> None:
        """Read runs as `ReadableTier` describes it. An object that is damaged or gone is not found any more."""
        await self._reader.read(take, memory, workers)

    # --- measurements, before any request is served ---

    @contextmanager
    def write_samples(self, parts: Sequence[bytes], count: int) -> Iterator[list[str]]:
        """Yield the names of objects with this content, written for a measurement and removed again. Raises OSError."""
        names = [name_sample(self.server, number) for number in range(count)]
        try:
            asyncio.run(self._write_all(names, parts))
            yield names
        finally:
            with suppress(OSError):
                asyncio.run(self._remove_all(names))

    async def _write_all(self, names: Sequence[str], parts: Sequence[bytes]) -> None:
        await asyncio.gather(*(self.client.write_object(name, parts, replace=True) for name in names))

    async def _remove_all(self, names: Sequence[str]) -> None:
        await asyncio.gather(*map(self.client.remove_object, names))

    def read_sample(self, name: str, expected: Expected, target: memoryview) -> None:
        """Read a sample as a run is read. Called on a thread without an event loop. Raises Damaged, OSError."""
        self._reader.read_sample(name, expected, target)

    def collect_figures(self) -> TierFigures:
        with self.lock:
            own: dict[str, int | str] = {
                "url": self.client.url,
                "usable": self.availability.is_usable,
                "trouble": self.trouble,
                "held_bytes": self.catalogue.count_held_bytes(),
                "dropped_writes": sum(self.counts[f"dropped_{why}"] for why in ("outage", "queue_full", "no_room")),
                "queued_bytes": self._publisher.queued_bytes + self._publisher.uploading_bytes,
                **{name: self.counts[name] for name in COUNTED},
            }
            return evolve(self.catalogue.index.collect_figures(), more=own)

    # --- the tier's thread ---

    def _wake_thread(self) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wake.set)

    async def _serve(self) -> None:
        """Refresh and publish until the tier closes, then write what is left and sign off."""
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            refreshing = tasks.create_task(self._refresher.keep_refreshing())
            running = set[asyncio.Task[None]]()
            uploads = asyncio.Semaphore(UPLOADS)
            self._start_publishing(tasks, running, uploads)
            while not self._closing:
                await self._wake.wait()
                self._wake.clear()
                self._start_publishing(tasks, running, uploads)
            refreshing.cancel()
        with suppress(OSError):
            await self._collector.remove_report()

    def _start_publishing(
        self, tasks: asyncio.TaskGroup, running: set[asyncio.Task[None]], uploads: asyncio.Semaphore
    ) -> None:
        """Start tasks that empty the queue, as many as run at once: a slow upload must not hold the others up."""
        for _ in range(TASKS - len(running)):
            task = tasks.create_task(self._publisher.empty_queue(uploads))
            running.add(task)
            task.add_done_callback(running.discard)

    def _give_up(self) -> None:
        """Find nothing and accept no more jobs: the thread has failed too often."""
        with self.lock:
            self._closing = True
        self.availability.end("its thread has died")
        self._publisher.give_up()
