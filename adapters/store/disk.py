"""The disk tier: an index of files, one thread that writes them behind everybody's back, and readers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from aiofiles.threadpool import wrap
from attrs import define, field, frozen

from adapters.store import journal, recent
from adapters.store.codec import DECODERS, Chooser
from adapters.store.described import entry_named, entry_of, no_collection, read_head
from adapters.store.folder import LOCK, Folder
from adapters.store.format import (
    MOST_HANDLE,
    Layout,
    Newer,
    Outdated,
    Run,
    encode,
    file_name,
    parse_name,
)
from adapters.store.index import Entry, Index
from adapters.store.memory import Buffer, Memory
from adapters.store.names import QUARANTINE, what
from adapters.store.reading import Expected, RunFile
from adapters.store.recent import Recent, Recents
from adapters.store.seekable import Damaged
from adapters.watched import Watched

log = logging.getLogger("rekindle.store")

COUNTED = (
    *("quarantined", "outdated", "newer", "rebuilt", "write_errors", "read_errors"),
    *("written_bytes", "read_bytes"),
)
KINDS = ("run", "journal", "recent")  # of files, as they are labelled where damage is counted
MOST_QUARANTINED = 8  # files that are kept for people to look at
RESTARTS = 16  # of the writer's thread: what fails more often does not get better by beginning again
MOST_QUEUED = 1 << 30  # bytes that may wait to be written, beyond what memory holds anyway
MOST_RECENT_FILES = 8  # of other identities
SLACK = 4096  # journal records beyond what its entries need, before it is written anew

Then: TypeAlias = Callable[[Buffer], object]


@frozen(eq=False)
class Write:
    """A run on its way to disk. done: it has been written, or given up."""

    run: Run
    rows: Buffer
    done: Callable[[], None]

    @property
    def size(self) -> int:
        return self.rows.data.nbytes


@frozen(eq=False)
class Note:
    """A recent prompt on its way to disk."""

    recent: Recent

    @property
    def size(self) -> int:
        return len(self.recent.rest)

    def done(self) -> None:
        """Nobody waits."""


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
    counts: Counter[str] = field(factory=Counter[str])
    damaged: Counter[str] = field(factory=lambda: Counter(dict.fromkeys(KINDS, 0)))  # files that were found so
    queued: int = 0
    _queue: SimpleQueue[Write | Note | None] = field(factory=SimpleQueue)
    _readers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(DECODERS, "store-reader"))
    writer: Watched = field(init=False)
    _files: asyncio.Runner = field(init=False)  # of the writer's thread, which waits for each call
    _closing: bool = False  # nothing more is taken
    _begun: threading.Event = field(factory=threading.Event)  # the journal is whole, or cannot be written
    _ended: bool = False  # the writer's thread has been told so
    _unknown: list[str] = field(factory=list[str])
    _aside: dict[str, None] = field(factory=dict[str, None])  # names of what is quarantined, the first to go first
    _stale: bool = False  # the journal has to be written anew
    _touched: dict[int, Entry] = field(factory=dict[int, Entry])
    _records: int = 0
    _recent_bytes: int = 0  # of their file
    _recent_last: int = 0  # the last one in it
    _recent_lost: bool = False  # one that later ones may begin with is not in it
    _failing: bool = False

    def __attrs_post_init__(self) -> None:
        self.writer = Watched("store-writer", self._work, died=self._give_up, restarts=RESTARTS)

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
        kept = self._read_journal(listing)
        listing.pop(LOCK, None)
        for entry in kept.entries.values():
            name = self.name(entry)
            if listing.get(name) == entry.size and self.index.add(entry):
                del listing[name]  # known, and not looked at: what follows is about the others
        self._load_recents(listing)
        for name in [name for name in listing if what(name) == "temporary"]:
            self._remove(name)
            del listing[name]
        self._unknown = [name for name in listing if what(name) == "run"]
        numbers = (named[1] for name in self._unknown if (named := parse_name(name)) and named[1] <= MOST_HANDLE)
        self.index.turn = max(self.index.turn, *numbers, 0)  # what is written before they are read is called otherwise
        self._aside = dict.fromkeys(sorted(name for name in listing if what(name) == "aside"))
        self._records = kept.records
        self._stale = not kept.whole or len(kept.entries) != len(self.index)

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

    @staticmethod
    def name(entry: Entry) -> str:
        return file_name(entry.keys[-1], entry.handle)

    def touch(self, entry: Entry) -> None:
        """It was found. With the lock."""
        self.index.touch(entry)
        self._touched[entry.handle] = entry

    def submit(self, job: Write | Note) -> bool:
        """Taken, or dropped and counted: the queue is bounded."""
        with self.lock:
            if self._closing or self.queued + job.size > self.most_queued:
                self.counts["dropped_queue_full"] += 1
                self._recent_lost = self._recent_lost or isinstance(job, Note)
                return False
            self.queued += job.size
            self._queue.put(job)
        return True

    async def read(self, entry: Entry, memory: Memory, workers: Executor, then: Then = lambda _: None) -> Buffer:
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

    def _opened(self, entry: Entry, memory: Memory, then: Then) -> tuple[RunFile, Buffer]:
        expected = Expected(entry.size, entry.run, self.layout)
        buffer = memory.take(self.layout.size(entry.kind, entry.length))
        file = RunFile(self.folder, self.name(entry), expected, self._readers, then=lambda: then(buffer))
        return file, buffer

    def read_past_cache(self, name: str, expected: Expected, target: memoryview) -> None:
        """A file as `read` reads it, but from the disk itself, and for nobody. Raises Damaged, OSError."""
        RunFile(self.folder, name, expected, self._readers, past_cache=True).readinto(target)

    def figures(self) -> dict[str, Any]:
        with self.lock:
            counted = {name: self.counts[name] for name in COUNTED}
            return {
                "bytes": self.index.held,
                "budget": self.index.budget,
                "entries": len(self.index),
                "evictions": self.index.evictions,
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
        with asyncio.Runner() as self._files:
            self._files.get_loop().set_default_executor(ThreadPoolExecutor(1, "store-files"))
            if self._stale:
                self._compact()
            self._begun.set()
            while not self._ended:
                if looking := bool(self._unknown) and not self._closing:
                    self._look()
                with suppress(Empty):  # files of a lost journal, thousands maybe, do not hold up what is to be written
                    self._next(wait=not looking)
            self._journal()

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
                self._note(job)
            else:
                self._write(job)
        except (OSError, MemoryError) as error:
            self._failed(error)
        except BaseException:
            self.counts["write_errors"] += 1
            raise
        else:
            self._failed(None)
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

    def _wait(self, work: Coroutine[Any, Any, Any]) -> None:
        """For something that is done to a file."""
        self._files.run(work)

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
            self._wait(self.folder.write(self.name(entry), parts))
        except OSError:
            self._remove(self.name(entry))  # it may have its name already; left there, it would keep out a later one
            raise
        with self.lock:
            added = self.index.add(entry)
        if not added:
            self._remove(self.name(entry))
            return
        self.counts["written_bytes"] += size
        self._journal(journal.came(entry))

    def _evict(self, size: int, parent: bytes = b"", *, in_journal: bool = True) -> bool:
        """Make room; True if there is. in_journal: say so there, if it is not to be written anew anyway."""
        with self.lock:
            gone = self.index.make_room(size, parent) if size <= self.index.budget else []
            fits = self.index.fits(size)
        for entry in gone:
            self._remove(self.name(entry))
        if gone and in_journal:
            self._journal(*map(journal.left, gone))
        self._stale = self._stale or (bool(gone) and not in_journal)
        if gone:
            log.info("evicted %d runs from disk: %d bytes for %d more", len(gone), sum(e.size for e in gone), size)
        return fits

    def _failed(self, error: OSError | MemoryError | None) -> None:
        """One line when it starts, one when it is over."""
        if error is not None:
            self.counts["write_errors"] += 1
            if not self._failing:
                log.warning("the prefix cache cannot be written (%s); requests go on", error)
        elif self._failing:
            log.info("the prefix cache is written again")
        self._failing = error is not None

    # --- files that the journal does not know ---

    def _adopt(self, name: str) -> None:
        try:
            entry = self._inspect(name)
        except Newer:
            self.counts["newer"] += 1
        except Outdated:
            self.counts["outdated"] += 1
            self._remove(name)
        except Damaged as error:
            self._quarantine(name, str(error))
        except OSError:
            self.counts["read_errors"] += 1
        else:
            with self.lock:
                added = self.index.add(entry)
            if added:
                self._journal(journal.came(entry))
            else:
                self._remove(name)

    def _inspect(self, name: str) -> Entry:
        """What a file says of itself, from its seek table and its first frame."""
        named = parse_name(name)
        assert named is not None
        descriptor = self.folder.opener(name)
        try:
            size = os.fstat(descriptor).st_size
            said = read_head(descriptor, size)
        finally:
            os.close(descriptor)
        return entry_named(named, said, size)

    # --- recent prompts ---

    @property
    def _recent_name(self) -> str:
        return recent.PREFIX + self.index.origin.hex()

    def _load_recents(self, listing: dict[str, int]) -> None:
        """Ours; of those of other identities, a few are left there."""
        others = sorted(name for name in listing if what(name) == "recent" and name != self._recent_name)
        for name in others[MOST_RECENT_FILES:]:
            self._remove(name)
        for name in others:
            del listing[name]
        if self._recent_name not in listing:
            return
        self._recent_bytes = listing.pop(self._recent_name)
        most = 2 * self.recents.most_bytes + 2 * recent.SLACK
        raw = self._read_small(self._recent_name) if 0 < self._recent_bytes <= most else b""
        if not recent.read(raw, self.recents):
            self._recent_bytes = 0  # it is written anew with the next one
            self._rebuilt("recent", f"the list of recent prompts, {len(self.recents)} of which could be read")

    def _note(self, note: Note) -> None:
        """Should it fail half way, all of them are written anew with the next one."""
        if note.recent.serial <= self._recent_last:
            return  # they were, meanwhile
        before, self._recent_bytes, kept = self._recent_bytes, 0, [note.recent]
        lost, self._recent_lost = self._recent_lost, False
        if before and not lost and before <= 2 * self.recents.held + recent.SLACK:
            raw = recent.record(note.recent)
            self._wait(self.folder.extend(self._recent_name, raw))
            self._recent_bytes = before + len(raw)
        else:
            kept = self.recents.all() or kept
            raw = b"".join(recent.snapshot(kept))
            self._wait(self.folder.write(self._recent_name, [raw]))
            self._recent_bytes = len(raw)
        self._recent_last = kept[-1].serial

    # --- small things ---

    def _read_journal(self, listing: dict[str, int]) -> journal.Kept:
        """Raises OSError for somebody else's file of that name: there is nothing of ours in the folder."""
        there, size = journal.NAME in listing, listing.pop(journal.NAME, 0)
        beginning = self._read_small(journal.NAME, journal.LOOK) if size else b""
        ours = not beginning or journal.may_be_ours(beginning)  # what cannot be read just now is not somebody else's
        if not ours and not any(what(name) == "run" for name in listing):
            raise OSError(errno.EEXIST, f"there is a file named {journal.NAME} that is not ours")
        readable = bool(beginning) and ours and size <= journal.MOST
        kept = journal.read(self._read_small(journal.NAME) if readable else b"")
        if there and not kept.whole:
            self._rebuilt("journal", f"the journal, {kept.records} records of which could be read")
        return kept

    def _rebuilt(self, kind: str, which: str) -> None:
        self.counts["rebuilt"] += 1
        self.damaged[kind] += 1
        log.warning("torn or damaged, and written anew: %s", which)

    def _read_small(self, name: str, most: int = -1) -> bytes:
        """Nothing, where reading fails. most: bytes of it."""
        try:
            descriptor = self.folder.opener(name)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
                return file.read(most)
        except OSError:
            self.counts["read_errors"] += 1
            return b""

    def _journal(self, *records: bytes) -> None:
        """Append, and what was found meanwhile too. What cannot be written is made up for at the next start."""
        with self.lock:
            touched, self._touched = self._touched, {}
            touches = [journal.found(entry) for entry in touched.values() if entry.handle in self.index.entries]
        self._records += len(records) + len(touches)
        if self._records > 2 * len(self.index) + SLACK:
            self._compact()
            return
        if raw := b"".join((*records, *touches)):
            try:
                self._wait(self.folder.extend(journal.NAME, raw))
            except FileNotFoundError:  # it could not be written before; records without a beginning would be nobody's
                self._compact()
            except OSError:
                return

    def _compact(self) -> None:
        with self.lock:
            parts = list(journal.snapshot(self.index.entries.values()))
        with suppress(OSError):
            self._wait(self.folder.write(journal.NAME, [b"".join(parts)]))
            self._records, self._stale = len(parts) - 1, False

    def put_aside(self, entry: Entry, why: str) -> None:
        """Its file was found damaged, by several readers maybe."""
        if self._forget(entry):
            self._quarantine(self.name(entry), why)

    def _forget(self, entry: Entry) -> bool:
        """Its file is no good. The journal will find out at the next start. False if somebody else has said so."""
        with self.lock:
            return self.index.remove(entry)

    def _quarantine(self, name: str, why: str) -> None:
        """The last few are kept for a look."""
        self.counts["quarantined"] += 1
        self.damaged["run"] += 1
        log.warning("a damaged cache file is put aside: %s: %s", name, why)
        aside = QUARANTINE + name
        try:
            self.folder.rename(name, aside)
        except OSError:
            self._remove(name)
            return
        with self.lock:
            self._aside.pop(aside, None)
            self._aside[aside] = None
            gone = list(self._aside)[:-MOST_QUARANTINED]
            for one in gone:
                del self._aside[one]
        for one in gone:
            self._remove(one)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self.folder.remove(name)
