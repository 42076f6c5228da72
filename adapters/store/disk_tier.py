"""The disk tier: an index of files, one thread that writes them behind everybody's back, and readers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from aiofiles.threadpool import wrap
from attrs import define, field

from adapters.store import index_journal
from adapters.store.block_index import Entry, Index
from adapters.store.codec_choice import ChoiceFile
from adapters.store.file_description import entry_in, entry_of, no_collection
from adapters.store.file_names import what
from adapters.store.files.codec import DECODERS, Chooser, Fixed
from adapters.store.files.file_format import MOST_HANDLE, Layout, Newer, Outdated, encode, file_name, parse_name
from adapters.store.files.private_folder import LOCK, Folder
from adapters.store.files.read_run import Expected, RunFile
from adapters.store.files.seekable import Damaged
from adapters.store.folder_upkeep import Upkeep
from adapters.store.index_journal_file import JournalFile
from adapters.store.recent_prompts import Recents
from adapters.store.recent_prompts_file import RecentFile
from adapters.store.slab_memory import Buffer, Memory
from adapters.store.tier import Note, Write
from adapters.watched_thread import WatchedThread

log = logging.getLogger("rekindle.store")

COUNTED = ("quarantined", "outdated", "newer", "rebuilt", "write_errors", "read_errors", "written_bytes", "read_bytes")
RESTARTS = 16  # of the writer's thread: what fails more often does not get better by beginning again
MOST_QUEUED = 1 << 30  # bytes that may wait to be written, beyond what memory holds anyway

Transition: TypeAlias = Callable[[Buffer], object]


@define(eq=False)
class Disk:
    """Opened by `start`; `lock` guards the index, which readers and the writer share with the rest of the store.

    recents: the prompts that are brought back at the start, and kept in a file of their own for each identity.
    """

    folder: Folder
    layout: Layout
    index: Index
    lock: threading.RLock
    chooser: Chooser
    recents: Recents = field(factory=Recents)
    most_queued: int = MOST_QUEUED
    queued: int = 0
    _queue: SimpleQueue[Write | Note | None] = field(factory=SimpleQueue)
    _readers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(DECODERS, "store-reader"))
    writer: WatchedThread = field(init=False)
    _closing: bool = False  # nothing more is taken
    _begun: threading.Event = field(factory=threading.Event)  # the journal is whole, or cannot be written
    _ended: bool = False  # the writer's thread has been told so
    _unknown: list[str] = field(factory=list[str])
    _upkeep: Upkeep = field(init=False)
    _journal: JournalFile = field(init=False)
    _recent: RecentFile = field(init=False)
    _choice: ChoiceFile = field(init=False)
    _chosen: Fixed | None = None  # by `auto`, at an earlier start

    def __attrs_post_init__(self) -> None:
        self.writer = WatchedThread("store-writer", self._work, died=self._give_up, restarts=RESTARTS)
        self._upkeep = Upkeep(self.folder, self.lock)
        self._journal = JournalFile(self.index, self._upkeep)
        self._recent = RecentFile(self.recents, self.index.origin, self._upkeep)
        self._choice = ChoiceFile(self._upkeep)

    # --- start and end ---

    def start(self) -> None:
        """The journal's entries are there at once; files that it does not know are read by the writer's thread."""
        began = time.perf_counter()
        with no_collection():
            self._load(dict(self.folder.names()))
        self._evict(0, in_journal=False)
        self.writer.start()
        self._begun.wait()
        if self.index.entries:
            log.info("%d kept runs, known after %.0f ms", len(self.index), 1e3 * (time.perf_counter() - began))

    def _load(self, listing: dict[str, int]) -> None:
        kept = self._journal.read(listing)
        listing.pop(LOCK, None)
        self._chosen = self._choice.read(listing)
        there = [entry for entry in kept.entries.values() if listing.get(self.name(entry)) == entry.size]
        for entry in self.index.fill(there):
            del listing[self.name(entry)]  # known, and not looked at: what follows is about the others
        self._recent.load(listing)
        for name in [name for name in listing if what(name) == "temporary"]:
            self._upkeep.remove(name)
            del listing[name]
        self._unknown = [name for name in listing if what(name) == "run"]
        numbers = (named[1] for name in self._unknown if (named := parse_name(name)) and named[1] <= MOST_HANDLE)
        self.index.turn = max(self.index.turn, *numbers, 0)  # what is written before they are read is called otherwise
        self._upkeep.found(listing)
        self._journal.stale = not kept.whole or len(kept.entries) != len(self.index)

    def close(self, timeout_s: float = 10) -> bool:
        """Write what is queued, then let the folder go. False if that took longer; the lock goes with the process.

        It may be closed again.
        """
        with self.lock:
            if not self._closing:
                self._queue.put(None)
            self._closing = True
        self.writer.join(timeout_s)
        if self.writer.is_alive():
            return False
        self._readers.shutdown()
        self.folder.close()
        return True

    # --- from any thread ---

    @property
    def counts(self) -> Counter[str]:
        return self._upkeep.counts

    @property
    def damaged(self) -> Mapping[str, int]:
        """Files that were found so, by kind."""
        return self._upkeep.damaged

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return (self.writer,)

    @staticmethod
    def name(entry: Entry) -> str:
        return file_name(entry.keys[-1], entry.handle)

    def touch(self, entry: Entry) -> None:
        """It was found. With the lock."""
        self.index.touch(entry)
        self._journal.touch(entry)

    def submit(self, job: Write | Note) -> bool:
        """Taken, or dropped and counted: the queue is bounded."""
        with self.lock:
            if self._closing or self.queued + job.size > self.most_queued:
                self.counts["dropped_queue_full"] += 1
                self._recent.lost = self._recent.lost or isinstance(job, Note)
                return False
            self.queued += job.size
            self._queue.put(job)
        return True

    async def read(self, entry: Entry, memory: Memory, workers: Executor, then: Transition = lambda _: None) -> Buffer:
        """The tensors of a leased entry, end to end, in a buffer from `memory`. Two hops to the threads of `workers`.

        then: called with it on the thread that read it, which has it at hand.
        Raises Damaged (quarantined by then), OSError (it may be better next time) or MemoryError.
        """
        loop = asyncio.get_running_loop()
        try:
            raw, buffer = await loop.run_in_executor(workers, self._opened, entry, memory, then)
            await wrap(raw, loop=loop, executor=workers).readinto(buffer.data.numpy().data)
        except Damaged as error:
            await loop.run_in_executor(workers, self.put_aside, entry, str(error))
            raise
        except OSError as error:
            self.counts["read_errors"] += 1
            if isinstance(error, FileNotFoundError):
                self._forget(entry)
            raise
        self.counts["read_bytes"] += entry.size
        return buffer

    def _opened(self, entry: Entry, memory: Memory, then: Transition) -> tuple[RunFile, Buffer]:
        expected = Expected(entry.size, entry.run, self.layout)
        buffer = memory.take(self.layout.size(entry.kind, entry.length))
        file = RunFile(self.folder, self.name(entry), expected, self._readers, then=lambda: then(buffer))
        return file, buffer

    def written_by(self, measured: Fixed) -> Fixed:
        """Return the codec of files that are written from now on. measured: what `auto` would choose now."""
        return self._chosen or measured if self.chooser.codec == "auto" else self.chooser.codec

    def choose(self, measured: Fixed) -> None:
        """Settle what `auto` writes: as an earlier start chose, or else as was measured now, which is kept."""
        self.chooser.quicker = self.written_by(measured)
        if self.chooser.codec == "auto" and self._chosen is None:
            self._choice.write(measured)
            self._chosen = measured

    def read_past_cache(self, name: str, expected: Expected, target: memoryview) -> None:
        """A file as `read` reads it, but from the disk itself, and for nobody. Raises Damaged, OSError."""
        RunFile(self.folder, name, expected, self._readers, past_cache=True).readinto(target)

    def figures(self) -> dict[str, Any]:
        with self.lock:
            counted = {name: self.counts[name] for name in COUNTED}
            return {
                **self.index.figures(),
                "dropped_writes": self.counts["dropped_queue_full"] + self.counts["dropped_no_room"],
                **counted,
                "queued_bytes": self.queued,
                "recent_prompts": len(self.recents),
                "codec": self.chooser.chosen,
            }

    @property
    def scanning(self) -> bool:
        """Are there files that have not been looked at yet?"""
        return bool(self._unknown)

    # --- the writer's thread ---

    def _work(self) -> None:
        """Begun again after an exception that nobody foresaw; what it was at is given up by then."""
        if self._journal.stale:
            self._journal.compact()
        self._begun.set()
        while not self._ended:
            if looking := bool(self._unknown) and not self._closing:
                self._look()
            with suppress(Empty):  # files of a lost journal, thousands maybe, do not hold up what is to be written
                self._next(wait=not looking)
        self._journal.append()

    def _look(self) -> None:
        """At one of the files that the journal does not know, and that it is looked at but once."""
        try:
            self._adopt(self._unknown[-1])
            if len(self._unknown) == 1:
                self._evict(0)
        finally:
            self._unknown.pop()

    def _next(self, *, wait: bool) -> None:
        """Raises Empty where there is nothing to be done, and nobody is to wait for it."""
        job = self._queue.get(block=wait)
        if job is None:
            self._ended = True
            return
        try:
            if isinstance(job, Note):
                self._recent.note(job.recent)
            else:
                self._write(job)
        except (OSError, MemoryError) as error:
            self._upkeep.written(error)
        except BaseException:
            self.counts["write_errors"] += 1
            raise
        else:
            self._upkeep.written(None)
        finally:
            self._done(job)

    def _done(self, job: Write | Note) -> None:
        job.done()
        with self.lock:
            self.queued -= job.size

    def _give_up(self) -> None:
        """The writer's thread has died: nothing is taken any more, and nobody waits for what was."""
        with self.lock:
            self._closing = True
        self._begun.set()
        with suppress(Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    self.counts["write_errors"] += 1
                    self._done(job)

    def _write(self, write: Write) -> None:
        run, data = write.run, write.rows.data.numpy().data
        parts = encode(run, self.layout, data, self.chooser.compressor())
        size = sum(map(len, parts))
        if not self._evict(size, run.parent):
            self.counts["dropped_no_room"] += 1
            return
        with self.lock:
            handle = self.index.next_handle()
        entry = entry_of(run, handle, size, self.index.origin)
        try:
            self.folder.write(self.name(entry), parts)
        except OSError:
            # It may have its name already; left there, it would keep out a later one.
            self._upkeep.remove(self.name(entry))
            raise
        with self.lock:
            added = self.index.add(entry)
        if not added:
            self._upkeep.remove(self.name(entry))
            return
        self.counts["written_bytes"] += size
        self._journal.append(index_journal.came(entry))

    def _evict(self, size: int, parent: bytes = b"", *, in_journal: bool = True) -> bool:
        """Make room; True if there is. in_journal: say so there, if it is not to be written anew anyway."""
        with self.lock:
            gone = self.index.make_room(size, parent) if size <= self.index.budget else []
            fits = self.index.fits(size)
        for entry in gone:
            self._upkeep.remove(self.name(entry))
        if gone and in_journal:
            self._journal.append(*map(index_journal.left, gone))
        self._journal.stale = self._journal.stale or (bool(gone) and not in_journal)
        if gone:
            log.info("evicted %d runs from disk: %d bytes for %d more", len(gone), sum(e.size for e in gone), size)
        return fits

    # --- files that the journal does not know ---

    def _adopt(self, name: str) -> None:
        try:
            entry = entry_in(self.folder, name)
        except Newer:
            self.counts["newer"] += 1
        except Outdated:
            self.counts["outdated"] += 1
            self._upkeep.remove(name)
        except Damaged as error:
            self._upkeep.quarantine(name, str(error))
        except OSError:
            self.counts["read_errors"] += 1
        else:
            with self.lock:
                added = self.index.add(entry)
            if added:
                self._journal.append(index_journal.came(entry))
            else:
                self._upkeep.remove(name)

    def put_aside(self, entry: Entry, why: str) -> None:
        """Its file was found damaged, by several readers maybe."""
        if self._forget(entry):
            self._upkeep.quarantine(self.name(entry), why)

    def _forget(self, entry: Entry) -> bool:
        """Its file is no good. The journal will find out at the next start. False if somebody else has said so."""
        with self.lock:
            return self.index.remove(entry)
