"""The disk tier: an index of files, one thread that writes them behind everybody's back, and readers."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from attrs import define, field, frozen
from torch import Tensor

from adapters.store import journal, seekable
from adapters.store.blocks import root
from adapters.store.codec import Chooser
from adapters.store.folder import LOCK, TEMPORARY, Folder
from adapters.store.format import (
    MOST_HEAD,
    Layout,
    Newer,
    Run,
    encode,
    file_name,
    head,
    parse_head,
    parse_name,
)
from adapters.store.index import Entry, Index
from adapters.store.reading import read_rows
from adapters.store.seekable import Damaged

log = logging.getLogger("rekindle.store")

QUARANTINE = "damaged-"
MOST_QUARANTINED = 8  # files that are kept for people to look at
MOST_QUEUED = 1 << 30  # bytes that may wait to be written
SLACK = 4096  # journal records beyond what its entries need, before it is written anew


@frozen(eq=False)
class Write:
    """A run on its way to disk. done: it has been written, or given up."""

    run: Run
    rows: Mapping[str, Tensor]
    size: int  # bytes of the rows
    done: Callable[[], None]


@define(eq=False)
class Disk:
    """Opened by `start`; `lock` guards the index, which readers and the writer share with the rest of the store."""

    folder: Folder
    layout: Layout
    index: Index
    lock: threading.RLock
    chooser: Chooser
    counts: Counter[str] = field(factory=Counter[str])
    queued: int = 0
    _queue: SimpleQueue[Write | None] = field(factory=SimpleQueue)
    _thread: threading.Thread | None = None
    _closing: bool = False
    _unknown: list[str] = field(factory=list[str])
    _touched: dict[int, Entry] = field(factory=dict[int, Entry])
    _records: int = 0
    _failing: bool = False

    # --- start and end ---

    def start(self) -> None:
        """The journal's entries are there at once; files that it does not know are read by the writer's thread."""
        listing = dict(self.folder.names())
        with no_collection():
            self._load(listing)
        self._evict(0)
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._thread.start()

    def _load(self, listing: dict[str, int]) -> None:
        kept = self._read_journal(listing.pop(journal.NAME, 0))
        listing.pop(LOCK, None)
        for name in [name for name in listing if name.startswith(TEMPORARY)]:
            self._remove(name)
            del listing[name]
        for entry in kept.entries.values():
            name = self.name(entry)
            if listing.get(name) == entry.size and self.index.add(entry):
                del listing[name]
        self._unknown = [name for name in listing if parse_name(name) is not None]
        self._records = kept.records
        if not kept.whole or len(kept.entries) != len(self.index):
            self._compact()

    def close(self, timeout_s: float = 10) -> bool:
        """Write what is queued, then let the folder go. False if that took longer; the lock goes with the process."""
        self._closing = True
        self._queue.put(None)
        assert self._thread is not None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
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

    def submit(self, write: Write) -> bool:
        """Taken, or dropped and counted: the queue is bounded."""
        with self.lock:
            if self._closing or self.queued + write.size > MOST_QUEUED:
                self.counts["dropped_queue_full"] += 1
                return False
            self.queued += write.size
            self._queue.put(write)
        return True

    async def read(self, entry: Entry) -> Tensor:
        """The rows of a leased entry. Raises Damaged (quarantined by then) or OSError (it may be better next time)."""
        run = Run(entry.start, entry.parent, entry.keys, entry.tokens)
        try:
            return await read_rows(self.folder, self.name(entry), entry.size, run, self.layout)
        except Damaged as error:
            self._forget(entry)
            self._quarantine(self.name(entry), str(error))
            raise
        except FileNotFoundError:
            self._forget(entry)
            raise
        except OSError:
            self.counts["read_errors"] += 1
            raise

    def figures(self) -> Mapping[str, Any]:
        return {
            "bytes": self.index.held,
            "budget": self.index.budget,
            "entries": len(self.index),
            "evictions": self.index.evictions,
            "quarantined": self.counts["quarantined"],
            "dropped_writes": self.counts["dropped_queue_full"] + self.counts["dropped_no_room"],
            "write_errors": self.counts["write_errors"],
            "read_errors": self.counts["read_errors"],
            "written_bytes": self.counts["written_bytes"],
            "queued_bytes": self.queued,
            "codec": self.chooser.chosen or self.chooser.codec,
        }

    @property
    def scanning(self) -> bool:
        """Are there files that have not been looked at yet?"""
        return bool(self._unknown)

    # --- the writer's thread ---

    def _work(self) -> None:
        while self._unknown and not self._closing:
            self._adopt(self._unknown[-1])
            self._unknown.pop()
        self._evict(0)
        while (write := self._queue.get()) is not None:
            try:
                self._write(write)
                self._failed(None)
            except (OSError, MemoryError, RuntimeError) as error:  # a tensor that finds no memory is a RuntimeError
                self._failed(error)
            finally:
                with self.lock:
                    self.queued -= write.size
                write.done()
            del write
        self._journal()

    def _write(self, write: Write) -> None:
        run, data = write.run, self.layout.flat(write.rows).numpy().data
        parts = encode(head(run, self.layout), data, self.chooser.pick(data[: 2 << 20]))
        size = sum(map(len, parts))
        if not self._evict(size, run.parent):
            self.counts["dropped_no_room"] += 1
            return
        with self.lock:
            handle = self.index.next_handle()
        origin = self.index.origin
        entry = Entry(handle, run.start, run.parent, run.keys, run.tokens, size, origin, used=handle)
        self.folder.write(self.name(entry), parts)
        with self.lock:
            added = self.index.add(entry)
        if not added:
            self._remove(self.name(entry))
            return
        self.counts["written_bytes"] += size
        self._journal(journal.came(entry))

    def _evict(self, size: int, parent: bytes = b"") -> bool:
        """Make room; True if there is."""
        with self.lock:
            gone = self.index.make_room(size, parent) if size <= self.index.budget else []
            fits = self.index.fits(size)
        for entry in gone:
            self._remove(self.name(entry))
        if gone:
            self._journal(*map(journal.left, gone))
            log.info("evicted %d runs from disk: %d bytes for %d more", len(gone), sum(e.size for e in gone), size)
        return fits

    def _failed(self, error: OSError | MemoryError | RuntimeError | None) -> None:
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
            run, identity, grain = read_head(descriptor, size)
        finally:
            os.close(descriptor)
        key, handle = named
        if run.keys[-1] != key:
            raise Damaged("the file has another run's name")
        origin = root(identity, grain)
        return Entry(handle, run.start, run.parent, run.keys, run.tokens, size, origin, used=handle)

    # --- small things ---

    def _read_journal(self, size: int) -> journal.Kept:
        if not size:
            return journal.Kept({}, whole=False, records=0)
        try:
            descriptor = self.folder.opener(journal.NAME)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
                return journal.read(file.read())
        except OSError:
            self.counts["read_errors"] += 1
            return journal.Kept({}, whole=False, records=0)

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
            with suppress(OSError):
                self._append(raw)

    def _append(self, raw: bytes) -> None:
        descriptor = self.folder.open_append(journal.NAME)
        try:
            self.folder.append(descriptor, raw)
        finally:
            self.folder.shut(descriptor)

    def _compact(self) -> None:
        with self.lock:
            parts = list(journal.snapshot(self.index.entries.values()))
        with suppress(OSError):
            self.folder.write(journal.NAME, [b"".join(parts)])
            self._records = len(parts) - 1

    def _forget(self, entry: Entry) -> None:
        """Its file is no good. The journal will find out at the next start."""
        with self.lock:
            self.index.remove(entry)

    def _quarantine(self, name: str, why: str) -> None:
        self.counts["quarantined"] += 1
        log.warning("a damaged cache file is put aside: %s: %s", name, why)
        try:
            self.folder.rename(name, QUARANTINE + name)
            self._trim_quarantine()
        except OSError:
            self._remove(name)

    def _trim_quarantine(self) -> None:
        with suppress(OSError):
            aside = sorted(name for name, _ in self.folder.names() if name.startswith(QUARANTINE))
            for name in aside[:-MOST_QUARANTINED]:
                self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self.folder.remove(name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Many objects are made at once and none of them is garbage: looking for some took half of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def read_head(descriptor: int, size: int) -> tuple[Run, str, int]:
    """(run, identity, grain) of an open file of ours, nothing else of it read. Raises Damaged, Newer, OSError."""
    foot = seekable.FOOT.size
    if size < foot:
        raise Damaged("the file is too short")
    count = seekable.frame_count(os.pread(descriptor, foot, size - foot))
    length = seekable.table_size(count)
    if count < 2 or length > size:
        raise Damaged("the seek table is longer than the file")
    frames = seekable.parse_table(os.pread(descriptor, length, size - length), size)
    packed, content = frames[0]
    if content > MOST_HEAD:
        raise Damaged("the header is too long")
    raw = bytearray(content)
    seekable.decompress(os.pread(descriptor, packed, 0), memoryview(raw))
    return parse_head(raw)
