"""Publishes what is only on disk: runs that a server found there at its start, from a time without a shared tier.

New runs are queued for all tiers when they are kept. Those that an earlier process has written to the disk only are
read here in the background, one at a time, and queued for the shared tier. The thread rests as long as it works, so it
takes half of a core at most.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor

from attrs import define, field

from adapters.store.block_index import Entry
from adapters.store.disk.disk_tier import DiskTier
from adapters.store.files.seekable import Damaged
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.slab_memory import SlabMemory
from adapters.store.tier import WriteRun, read_run
from adapters.watched_thread import WatchedThread

log = logging.getLogger("rekindle.store")
RETRY_S = 5.0  # between two looks at a store that is away


@define(eq=False)
class DiskPublisher:
    """The thread, which `start` starts and which ends by itself. Both tiers and this have one lock."""

    disk: DiskTier
    shared: SharedTier
    memory: SlabMemory
    lock: threading.RLock
    published: int = 0  # runs that were given to the shared tier
    thread: WatchedThread = field(init=False)
    _closing: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.thread = WatchedThread("disk-publisher", lambda: asyncio.run(self._publish_all()))

    def start(self) -> None:
        """Begin. To be called when the start of the server measures nothing more."""
        self.thread.start()

    def close(self) -> None:
        """End the thread after the run that it reads now. May be called again, and before `start`."""
        self._closing.set()
        if self.thread.is_alive():
            self.thread.join()

    async def _publish_all(self) -> None:
        while not self.shared.is_listed:
            if self._closing.wait(RETRY_S / 10):
                return
        with self.lock:
            found = choose_entries(self.disk)
        with ThreadPoolExecutor(1, "disk-publisher") as worker:
            for entry in found:
                began = time.monotonic()
                while self.shared.trouble and not self._closing.wait(RETRY_S):
                    pass
                if self._closing.is_set():
                    return
                if await self._publish(entry, worker):
                    self._closing.wait(time.monotonic() - began)
        if self.published:
            log.info("%d runs that were only on disk are in the shared tier now", self.published)

    async def _publish(self, entry: Entry, worker: Executor) -> bool:
        """Publish a run unless it is in the shared tier or not on disk any more. Return whether it was read."""
        with self.lock:
            if entry.handle not in self.disk.index.entries or self.shared.catalogue.is_known(entry.run):
                return False
            entry.leases += 1
        loop = asyncio.get_running_loop()
        written = asyncio.Event()

        def finish() -> None:
            loop.call_soon_threadsafe(written.set)

        try:
            rows = await read_run(self.disk, entry, self.memory, worker)
            job = WriteRun(entry.run, rows, finish)
            del rows
            if self.shared.submit(job):
                self.published += 1
                del job
                await written.wait()
        except (Damaged, OSError, MemoryError) as error:  # the disk tier has counted it
            log.info("a run on disk is not published: %s", error)
        finally:
            with self.lock:
                entry.leases -= 1
        return True


def choose_entries(disk: DiskTier) -> list[Entry]:
    """Return the entries that this server could have written, those that others continue first. Called with the lock.

    A draft's rows count only if their prefix leads to the root of today's draft, without a salt.
    """
    own = [entry for entry in disk.index.entries.values() if entry.origin == disk.index.origin]
    own.sort(key=lambda entry: entry.start)
    drafts = keep_drafts_of(disk.layout.compute_root("draft"), own) if disk.layout.draft is not None else set[int]()
    return [entry for entry in own if entry.kind != "draft" or entry.handle in drafts]


def keep_drafts_of(root: bytes, entries: Iterable[Entry]) -> set[int]:
    """Return the handles of the draft's entries that continue its root. entries: in the order of their starts."""
    reached = {root}
    found = set[int]()
    for entry in entries:
        if entry.kind == "draft" and entry.parent in reached:
            reached.update(entry.keys)
            found.add(entry.handle)
    return found
