"""The disk tier: one file for each run, an index of them, one thread that writes, and threads that read.

Files are found through the index, never by listing the folder. The index is in memory; a journal of additions,
removals and hits brings it back at the next start. A lost journal costs time only: its files are read.

One thread, the writer, owns everything that changes in the folder. It takes jobs from a bounded queue. It compresses a
run, makes room for it, writes it under a temporary name, makes it durable and renames it. Only then it adds the run to
the index and to the journal. So a kill at any point leaves whole files, and temporary ones that the next start removes.
The writer has an event loop of its own and makes all system calls itself (`SameThreadExecutor`).

A read checks all of a file: size, sums of blocks, and that the head is what we would write. A file that fails is
quarantined and leaves the index: a miss, never wrong rows. What cannot be written is counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import ClassVar

from attrs import define, evolve, field

from adapters.cache_figures import TierFigures
from adapters.store import index_journal
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.disk.codec_choice import CodecChoiceFile
from adapters.store.disk.file_names import classify_name
from adapters.store.disk.folder_upkeep import FolderUpkeep
from adapters.store.disk.index_journal_file import JournalFile
from adapters.store.disk.recent_prompts_file import RecentPromptsFile
from adapters.store.disk.run_file_reader import RunFileReader
from adapters.store.file_description import make_entry, pause_garbage_collection, read_entry
from adapters.store.files.codec import CodecChooser
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import MAX_HANDLE, Layout, Newer, Outdated, encode_run, format_name, parse_name
from adapters.store.files.private_folder import LOCK, PrivateFolder
from adapters.store.files.read_run import RunFile
from adapters.store.files.same_thread_executor import SameThreadExecutor
from adapters.store.files.seekable import Damaged
from adapters.store.kept_answers import ANSWER_SHARE, MAX_ANSWER_BYTES, KeptAnswers, NotePrompt
from adapters.store.recent_prompts import RecentPrompts
from adapters.store.run_read import BATCH_BYTES, ReadSource
from adapters.store.slab_memory import SlabMemory
from adapters.store.tier import WriteRun
from adapters.watched_thread import WatchedThread
from effects.ids import Tier

log = logging.getLogger("rekindle.store")

COUNTED = ("quarantined", "outdated", "newer", "rebuilt", "write_errors", "read_errors", "written_bytes", "read_bytes")
MAX_WRITER_RESTARTS = 16  # what fails more often does not get better by beginning again
MAX_QUEUED_BYTES = 1 << 30  # bytes that may wait to be written, beyond what memory holds anyway


@define(eq=False)
class DiskTier:
    """The tier, opened by `start`. Its lock is the store's, and guards the index and the size of the queue."""

    name: ClassVar[Tier] = "disk"
    trouble: ClassVar[str] = ""
    folder: PrivateFolder
    layout: Layout
    index: BlockIndex
    lock: threading.RLock
    chooser: CodecChooser
    recent_prompts: RecentPrompts = field(factory=RecentPrompts)
    max_queued_bytes: int = MAX_QUEUED_BYTES
    queued_bytes: int = 0
    _queue: SimpleQueue[WriteRun | NotePrompt | None] = field(factory=SimpleQueue)
    _reader: RunFileReader = field(init=False)
    writer: WatchedThread = field(init=False)
    _same_thread: SameThreadExecutor = field(factory=SameThreadExecutor)
    _event_loop: asyncio.Runner = field(factory=asyncio.Runner)  # of the writer's thread
    _closing: bool = False  # no more jobs are accepted
    _journal_ready: threading.Event = field(factory=threading.Event)  # the journal is complete, or cannot be written
    _is_stopped: bool = False  # the writer has taken the job that ends it
    _unindexed_names: list[str] = field(factory=list[str])
    _upkeep: FolderUpkeep = field(init=False)
    _journal: JournalFile = field(init=False)
    answers: KeptAnswers = field(init=False)
    _lists: Mapping[bool, RecentPromptsFile] = field(init=False)  # by `NotePrompt.is_answer`
    codec_choice: CodecChoiceFile = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.writer = WatchedThread("store-writer", self._run_writer, died=self._give_up, restarts=MAX_WRITER_RESTARTS)
        self._reader = RunFileReader(self.folder, self.layout, self.quarantine, self._count_read)
        self._upkeep = FolderUpkeep(self.folder, self.lock)
        self._journal = JournalFile(self.index, self._upkeep)
        self.answers = KeptAnswers(self.submit, min(MAX_ANSWER_BYTES, self.index.budget // ANSWER_SHARE))
        place = self.index.origin, self._upkeep
        self._lists = {
            False: RecentPromptsFile(self.recent_prompts, *place),
            True: RecentPromptsFile(self.answers.records, *place, "answers", "answers to copy from"),
        }
        self.codec_choice = CodecChoiceFile(self._upkeep, self.chooser)

    # --- start and end ---

    def start(self) -> None:
        """Load the journal's entries and start the writer, which reads the files that it does not name."""
        began = time.perf_counter()
        with pause_garbage_collection():
            self._load_index(dict(self.folder.list_names()))
        self._evict(0, in_journal=False)
        self.writer.start()
        self._journal_ready.wait()
        if self.index.entries:
            log.info("found %d cache entries on disk in %.0f ms", len(self.index), 1e3 * (time.perf_counter() - began))

    def _load_index(self, listing: dict[str, int]) -> None:
        kept = self._journal.read(listing)
        listing.pop(LOCK, None)
        self.codec_choice.read(listing)
        there = [entry for entry in kept.entries.values() if listing.get(self.get_file_name(entry)) == entry.size]
        for entry in self.index.add_all(there):
            del listing[self.get_file_name(entry)]  # what is left of the listing is not in the index
        for prompts_file in self._lists.values():
            prompts_file.load(listing)
        self.answers.note_restored()
        for name in [name for name in listing if classify_name(name) == "temporary"]:
            self._upkeep.remove(name)
            del listing[name]
        self._unindexed_names = [name for name in listing if classify_name(name) == "run"]
        numbers = (named[1] for name in self._unindexed_names if (named := parse_name(name)) and named[1] <= MAX_HANDLE)
        self.index.turn = max(self.index.turn, *numbers, 0)  # so that no new file gets a name of theirs
        self._upkeep.register_quarantined(listing)
        self._journal.needs_rewrite = not kept.whole or len(kept.entries) != len(self.index)

    def close(self, timeout_s: float = 10) -> bool:
        """Write what is queued, then release the folder. Return False if that takes too long. May be called again."""
        with self.lock:
            if not self._closing:
                self._queue.put(None)
            self._closing = True
        self.writer.join(timeout_s)
        if self.writer.is_alive():
            return False
        self._reader.close()
        self.folder.close()
        return True

    # --- from any thread ---

    @property
    def batch_bytes(self) -> int:
        return BATCH_BYTES

    @property
    def damaged_files(self) -> Mapping[str, int]:
        return self._upkeep.damaged_files

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return (self.writer,)

    @staticmethod
    def get_file_name(entry: Entry) -> str:
        return format_name(entry.keys[-1], entry.handle)

    def touch(self, entry: Entry) -> None:
        """Count a lookup that found this entry. Called with the lock."""
        self.index.touch(entry)
        self._journal.touch(entry)

    def submit(self, job: WriteRun | NotePrompt) -> bool:
        """Queue a job. Return False where the queue is full: the job is dropped and counted."""
        with self.lock:
            if self._closing or self.queued_bytes + job.size > self.max_queued_bytes:
                self._upkeep.counts["dropped_queue_full"] += 1
                if isinstance(job, NotePrompt):
                    self._lists[job.is_answer].has_lost_prompt = True
                return False
            self.queued_bytes += job.size
            self._queue.put(job)
        return True

    async def read(self, take: ReadSource, memory: SlabMemory, workers: Executor) -> None:
        """Read runs as `ReadableTier` describes it. A damaged file is quarantined by then."""
        await self._reader.read(take, memory, workers)

    def _count_read(self, entry: Entry, error: Exception | None) -> None:
        if error is None:
            self._upkeep.counts["read_bytes"] += entry.size
        elif isinstance(error, OSError):
            self._upkeep.counts["read_errors"] += 1
            if isinstance(error, FileNotFoundError):
                self._forget(entry)

    def read_past_cache(self, name: str, expected: Expected, target: memoryview) -> None:
        """Read a file from the disk itself, not from the page cache: for measurements. Raises Damaged, OSError."""
        RunFile(self.folder, name, expected, self._reader.helpers, past_cache=True).readinto(target)

    def collect_figures(self) -> TierFigures:
        with self.lock:
            own = {
                "dropped_writes": self._upkeep.counts["dropped_queue_full"] + self._upkeep.counts["dropped_no_room"],
                **{name: self._upkeep.counts[name] for name in COUNTED},
                "queued_bytes": self.queued_bytes,
                "recent_prompts": len(self.recent_prompts),
                "kept_answers": len(self.answers.records),
                "codec": self.chooser.choice,
            }
            return evolve(self.index.collect_figures(), more=own)

    @property
    def has_unindexed_files(self) -> bool:
        """True if there are files that the journal does not name and that have not been read yet."""
        return bool(self._unindexed_names)

    # --- the writer's thread ---

    def _run_writer(self) -> None:
        """Do all jobs. Called again after an unforeseen exception; the job that raised it is finished by then."""
        self._event_loop.run(self._process_jobs())
        self._event_loop.close()

    async def _process_jobs(self) -> None:
        """Alternate between unindexed files, which may be thousands, and jobs, which must not wait for all of them."""
        if self._journal.needs_rewrite:
            self._journal.compact()
        self._journal_ready.set()
        while not self._is_stopped:
            if is_indexing := bool(self._unindexed_names) and not self._closing:
                self._index_next_file()
            with suppress(Empty):
                await self._process_job(wait=not is_indexing)
        self._journal.append()

    def _index_next_file(self) -> None:
        """Read one of the files that the journal does not name; none is read twice, whatever is wrong with it."""
        try:
            self._adopt_file(self._unindexed_names[-1])
            if len(self._unindexed_names) == 1:
                self._evict(0)
        finally:
            self._unindexed_names.pop()

    async def _process_job(self, *, wait: bool) -> None:
        """Do the next job, of which the last one ends the loop. Raises Empty where none waits."""
        job = self._queue.get(block=wait)  # nothing else runs on this loop, so it may block
        if job is None:
            self._is_stopped = True
            return
        size = job.size
        finish = job.finish
        try:
            await self._carry_out(job)
        finally:  # the memory of the job is free before the store hears that it is written
            del job
            self._finish_job(size, finish)

    async def _carry_out(self, job: WriteRun | NotePrompt) -> None:
        try:
            if isinstance(job, NotePrompt):
                self._lists[job.is_answer].write_prompt(job.recent)
            else:
                await self._write_run(job)
        except (OSError, MemoryError) as error:
            self._upkeep.report_write(error)
        except BaseException:
            self._upkeep.counts["write_errors"] += 1
            raise
        else:
            self._upkeep.report_write(None)

    def _finish_job(self, size: int, finish: Callable[[], None]) -> None:
        """Count a job off and say that it is over. Both are seen at once by every thread that takes the lock."""
        with self.lock:
            self.queued_bytes -= size
            finish()

    def _give_up(self) -> None:
        """Accept no more jobs and finish those that are queued: the writer's thread has failed too often."""
        with self.lock:
            self._closing = True
        self._journal_ready.set()
        self._event_loop.close()
        with suppress(Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    self._upkeep.counts["write_errors"] += 1
                    self._finish_job(job.size, job.finish)

    async def _write_run(self, write: WriteRun) -> None:
        run = write.run
        parts = encode_run(run, self.layout, write.rows.data.numpy().data, self.chooser.create_compressor())
        size = sum(map(len, parts))
        if not self._evict(size, run.parent):
            self._upkeep.counts["dropped_no_room"] += 1
            return
        with self.lock:
            handle = self.index.allocate_handle()
        entry = make_entry(run, handle, size, self.index.origin)
        name = self.get_file_name(entry)
        try:
            await self.folder.write_async(name, parts, self._same_thread)
        except OSError:
            # The file may have its name already, and would keep out a later one of the same run.
            self._upkeep.remove(name)
            raise
        if self._add_entry(entry, name):
            self._upkeep.counts["written_bytes"] += size

    def _add_entry(self, entry: Entry, name: str) -> bool:
        """Add the entry of a file to index and journal. If its rows are there already, remove the file: False."""
        with self.lock:
            added = self.index.add(entry)
        if added:
            self._journal.append(index_journal.encode_addition(entry))
        else:
            self._upkeep.remove(name)
        return added

    def _evict(self, size: int, parent: bytes = b"", *, in_journal: bool = True) -> bool:
        """Evict until `size` bytes fit; say whether they do. in_journal: record it there."""
        with self.lock:
            gone = self.index.make_room(size, parent) if size <= self.index.budget else []
            fits = self.index.fits(size)
        for entry in gone:
            self._upkeep.remove(self.get_file_name(entry))
        if gone and in_journal:
            self._journal.append(*map(index_journal.encode_removal, gone))
        self._journal.needs_rewrite = self._journal.needs_rewrite or (bool(gone) and not in_journal)
        if gone:
            log.info("evicted %d entries from disk, %d bytes for %d", len(gone), sum(e.size for e in gone), size)
        return fits

    def _adopt_file(self, name: str) -> None:
        try:
            entry = read_entry(self.folder, name)
        except (Newer, Outdated, Damaged, OSError) as error:
            self._upkeep.dispose_unreadable(name, error)
            return
        self._add_entry(entry, name)

    def quarantine(self, entry: Entry, why: str) -> None:
        """Move a damaged file aside, once, even where several readers report it."""
        if self._forget(entry):
            self._upkeep.quarantine(self.get_file_name(entry), why)

    def _forget(self, entry: Entry) -> bool:
        """Remove an entry whose file cannot be used. Return False if it is gone already. The journal is not changed."""
        with self.lock:
            return self.index.remove(entry)
