"""Writes runs into a shared store, behind the requests: a bounded queue, some threads that encode, several uploads.

The rows of a job are let go of as soon as they are encoded: on a GPU they lie in pinned memory, which snapshots need,
and a store may be far slower than they are. From then on only the file waits, in ordinary memory. Both count against
one limit. The stored file of a run in a folder is written from where its rows are, and not encoded before. What finds
no room, or what the store refuses, is dropped and counted; it is written when a later snapshot finds that the store
lacks it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from attrs import define, field

from adapters.processors import count_processors
from adapters.store.file_description import make_entry
from adapters.store.files.codec import CodecChooser
from adapters.store.files.file_format import Layout, Run, encode_run
from adapters.store.files.stored_file import RowsToWrite, can_write_rows
from adapters.store.shared.catalogue import Catalogue
from adapters.store.shared.object_client import Folder, ObjectClient, ObjectExists, StoreUnreachable
from adapters.store.shared.object_names import name_run
from adapters.store.shared.publish_policy import SharedLimits, find_drop_reason, has_room
from adapters.store.shared.thread_calls import start_call
from adapters.store.slab_memory import Buffer
from adapters.store.tier import WriteRun

UPLOADS = 4  # objects that are written at once
ENCODERS = max(1, min(UPLOADS, count_processors() // 4))  # the other cores serve requests
TASKS = UPLOADS + ENCODERS  # so that as many are encoded meanwhile


@define(eq=False)
class WriteWatch:
    """Jobs for which a caller waits. left: the numbers of those that are neither written nor given up."""

    left: set[int]
    done: Future[None] = field(factory=Future[None])


@define(eq=False)
class LentRows:
    """The rows of a job, which the store keeps for it. size: in bytes; 0 once the job is finished."""

    rows: Buffer | None
    size: int
    finish: Callable[[], None] | None


def write_from_rows(run: Run, layout: Layout, held: LentRows, temporary: str, path: str, *, replace: bool) -> int:
    """Write a file from where the rows are, and return its size. Called on a thread, which may be left behind.

    Raises OSError.
    """
    rows = held.rows  # kept until the thread has read them, also if the caller gives up
    if rows is None:
        raise StoreUnreachable("the caller has not waited for it")
    return RowsToWrite(run, layout, rows.data.data_ptr()).write(temporary, path, replace=replace)


@define(eq=False)
class Publisher:
    """The queue, and the tasks that empty it on the tier's event loop. The lock is the store's.

    report_failure: called with the reason when the store fails. clock: seconds, as the catalogue counts uses.
    """

    client: ObjectClient
    layout: Layout
    catalogue: Catalogue
    chooser: CodecChooser
    limits: SharedLimits
    report_failure: Callable[[str], object]
    clock: Callable[[], float]
    counts: Counter[str]
    queued_bytes: int = 0  # rows that are not encoded yet
    uploading_bytes: int = 0  # files that are not written yet
    _queue: deque[tuple[int, WriteRun]] = field(factory=deque["tuple[int, WriteRun]"])  # with the number of the job
    _last_job: int = 0
    _open_jobs: set[int] = field(factory=set[int])  # queued, being encoded or being written
    _watches: list[WriteWatch] = field(factory=list[WriteWatch])
    _encoder: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(ENCODERS, "shared-encoder"))

    @property
    def lock(self) -> threading.RLock:
        return self.catalogue.lock

    @property
    def is_idle(self) -> bool:
        return not (self.queued_bytes or self.uploading_bytes)

    def submit(self, job: WriteRun, *, usable: bool) -> bool:
        """Queue a job; any thread may call this. Return False if it is refused.

        A job is refused if the store is not usable, or if too many bytes wait already. `counts` says how many were
        refused for each reason (`find_drop_reason`).
        """
        with self.lock:
            waiting = self.queued_bytes + self.uploading_bytes
            reason = find_drop_reason(self.limits, job.size, waiting, usable=usable)
            if reason:
                self.counts[f"dropped_{reason}"] += 1
                return False
            self.queued_bytes += job.size
            self._last_job += 1
            self._open_jobs.add(self._last_job)
            self._queue.append((self._last_job, job))
        return True

    def watch_writes(self) -> Future[None]:
        """Return a future that is done when all jobs that are open now have been written or given up."""
        with self.lock:
            watch = WriteWatch(set(self._open_jobs))
            if watch.left:
                self._watches.append(watch)
            else:
                watch.done.set_result(None)
        return watch.done

    def _count_off(self, number: int) -> None:
        """Note that a job is over, and finish the watches that waited for it last."""
        with self.lock:
            self._open_jobs.discard(number)
            for watch in self._watches:
                watch.left.discard(number)
            finished = [watch for watch in self._watches if not watch.left]
            self._watches = [watch for watch in self._watches if watch.left]
        for watch in finished:
            if watch.done.set_running_or_notify_cancel():
                watch.done.set_result(None)

    async def empty_queue(self, uploads: asyncio.Semaphore) -> None:
        """Write what is queued. Several tasks may do so at once.

        uploads: how many of them write at once. In a folder all do, because a part of them sums rows meanwhile.
        """
        while self._queue:
            number, job = self._queue.popleft()
            held = LentRows(job.rows, job.size, job.finish)
            run = job.run
            del job
            size = 0
            try:
                if not self._is_wanted(run, held.size):
                    pass
                elif (folder := self._find_folder(held.size)) is not None:
                    await self._upload(run, partial(self._write_rows, folder, run, held))
                else:
                    parts = await start_call(self._encoder, partial(self._make_file, run, held))
                    size = sum(map(len, parts))
                    self._let_go(held, size)
                    async with uploads:
                        await self._upload(run, partial(self._write_parts, parts))
                    del parts
            except MemoryError:
                self.counts["write_errors"] += 1
            finally:
                self._let_go(held, -size)
                self._count_off(number)

    def _let_go(self, held: LentRows, file_bytes: int) -> None:
        """Finish a job whose rows are not needed any more, unless that was done before.

        file_bytes: by which the files that wait have grown at the same moment.
        """
        held.rows = None
        with self.lock:
            self.uploading_bytes += file_bytes
            self.queued_bytes -= held.size
            held.size = 0
            finish = held.finish
            held.finish = None
            if finish is not None:
                finish()

    def _is_wanted(self, run: Run, size: int) -> bool:
        if not has_room(self.limits, size, self.catalogue.count_held_bytes()):
            self.counts["dropped_no_room"] += 1
            return False
        return not self.catalogue.is_known(run)

    def _make_file(self, run: Run, held: LentRows) -> list[bytes]:
        rows = held.rows
        if rows is None:  # the file is no longer wanted
            return []
        return encode_run(run, self.layout, rows.data.numpy().data, self.chooser.create_compressor())

    async def _write_parts(self, parts: list[bytes], name: str, replace: bool) -> int:
        await self.client.write_object(name, parts, replace=replace)
        return sum(map(len, parts))

    def _find_folder(self, size: int) -> Folder | None:
        """Return the folder to which rows of this size are written from where they are, if the store is one."""
        folder = self.client.folder
        return folder if folder and self.chooser.choice == "store" and can_write_rows(size) else None

    async def _write_rows(self, folder: Folder, run: Run, held: LentRows, name: str, replace: bool) -> int:
        write = partial(write_from_rows, run, self.layout, held, replace=replace)
        return await folder.write_file(name, held.size, write)

    async def _upload(self, run: Run, write: Callable[[str, bool], Awaitable[int]]) -> None:
        """Write a run. write: gets its name, and whether it replaces an object; returns its bytes."""
        name = name_run(self.catalogue.root, run)
        try:
            size = await write(name, self.catalogue.may_be_replaced(name))
        except ObjectExists:
            self.counts["already_there"] += 1  # the next listing brings it, with its size
        except StoreUnreachable as error:
            self.counts["write_errors"] += 1
            self.report_failure(f"writing failed: {error}")
        else:
            self.counts["written_bytes"] += size
            self.counts["written"] += 1
            with self.lock:
                entry = make_entry(run, self.catalogue.index.allocate_handle(), size, self.catalogue.root)
                self.catalogue.add_written(name, entry, self.clock())

    def give_up(self) -> None:
        """Finish all jobs without writing them: the tier's thread has ended."""
        with self.lock:
            while self._queue:
                number, job = self._queue.popleft()
                self.counts["write_errors"] += 1
                self.queued_bytes -= job.size
                job.finish()
                self._count_off(number)

    def close(self) -> None:
        self._encoder.shutdown()
