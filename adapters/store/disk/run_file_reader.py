"""Reads runs from the folder of the disk tier.

Where many runs are read at once, stored files in the page cache are read several in one call (`stored_reads.py`). All
other files are read one after another by `RunFile`, past the page cache, with threads that decode meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from aiofiles.threadpool import wrap
from attrs import define, field

from adapters.processors import count_processors
from adapters.store.block_index import Entry
from adapters.store.files.codec import DECODERS
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Layout, format_name
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.read_run import RunFile
from adapters.store.files.seekable import Damaged
from adapters.store.run_read import ReadResult, ReadSource, RunRead, give_buffer, give_error, list_results
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.stored_reads import fill_memory, read_stored


@define(eq=False)
class RunFileReader:
    """Reads runs for a disk tier.

    quarantine: called on a thread with the entry of a damaged file and the reason. count: called on the event loop with
    each entry that was read, and its error.
    """

    folder: PrivateFolder
    layout: Layout
    quarantine: Callable[[Entry, str], object]
    count: Callable[[Entry, Exception | None], object]
    processors: int = field(factory=count_processors)
    helpers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(DECODERS, "store-reader"))
    _callers: int = 0  # that read runs

    async def read(self, take: ReadSource, memory: SlabMemory, workers: Executor) -> None:
        """Read runs as `ReadableTier` describes it."""
        loop = asyncio.get_running_loop()
        self._callers += 1
        try:
            while True:
                if fill_memory(self._callers, self.processors):
                    results, left = await loop.run_in_executor(workers, self._read_chain, take, memory)
                    self._count(results)
                else:
                    left = take()
                if not left:
                    return
                for read in left:
                    await self._read_alone(read, memory, workers)
                self._count(list_results(left))
        finally:
            self._callers -= 1

    def _count(self, results: Sequence[ReadResult]) -> None:
        for result in results:
            self.count(*result)

    def _read_chain(self, take: ReadSource, memory: SlabMemory) -> tuple[list[ReadResult], Sequence[RunRead]]:
        """Read what lies in the page cache as stored files, some after others. Called on a thread.

        Return the results, and the first runs that cannot be read so.
        """
        results = list[ReadResult]()
        while reads := take():
            left = self._read_together(reads, memory)
            results += list_results([read for read in reads if read not in left])
            if left:
                return results, left
        return results, ()

    def _read_together(self, reads: Sequence[RunRead], memory: SlabMemory) -> Sequence[RunRead]:
        """Read files together, and return the reads of those that cannot be read so."""
        names = [format_name(read.entry.keys[-1], read.entry.handle) for read in reads]
        found = read_stored(reads, names, self.layout, memory, self.folder.descriptor, only_cached=True)
        for read, result in zip(reads, found, strict=True):
            if isinstance(result, MemoryError):
                give_error(read, result)
            elif result is not None:
                give_buffer(read, result)
        return [read for read, result in zip(reads, found, strict=True) if result is None]

    async def _read_alone(self, read: RunRead, memory: SlabMemory, workers: Executor) -> None:
        """Read one file, in two hops to `workers`."""
        loop = asyncio.get_running_loop()
        try:
            raw, buffer = await loop.run_in_executor(workers, self._open_run, read, memory)
            await wrap(raw, loop=loop, executor=workers).readinto(buffer.data.numpy().data)
        except Damaged as error:
            await loop.run_in_executor(workers, self.quarantine, read.entry, str(error))
            give_error(read, error)
        except (OSError, MemoryError) as error:
            give_error(read, error)

    def _open_run(self, read: RunRead, memory: SlabMemory) -> tuple[RunFile, Buffer]:
        entry = read.entry
        expected = Expected(entry.size, entry.run, self.layout)
        buffer = memory.allocate(self.layout.compute_size(entry.kind, entry.length))
        name = format_name(entry.keys[-1], entry.handle)
        return RunFile(self.folder, name, expected, self.helpers, then=lambda: give_buffer(read, buffer)), buffer

    def close(self) -> None:
        self.helpers.shutdown()
