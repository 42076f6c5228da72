"""Reads runs from a shared store: stored files of a folder several in one call, everything else one run after another.

An event loop calls it. What is read is decoded on threads (`run_decoder.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from attrs import define, field

from adapters.daemon_executor import DaemonExecutor
from adapters.processors import count_processors
from adapters.store.block_index import Entry
from adapters.store.files.codec import DECODERS
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Layout
from adapters.store.files.read_run import RunContent, fill_target
from adapters.store.files.same_thread_executor import SameThreadExecutor
from adapters.store.files.seekable import Damaged
from adapters.store.run_read import ReadResult, ReadSource, RunRead, give_buffer, give_error, list_results
from adapters.store.shared.availability import Availability
from adapters.store.shared.catalogue import Catalogue
from adapters.store.shared.object_client import Folder, ObjectClient, ObjectGone, StoreUnreachable, describe_read_error
from adapters.store.shared.object_names import name_entry
from adapters.store.shared.run_decoder import ReadChain, RunDecoder
from adapters.store.slab_memory import SlabMemory
from adapters.store.stored_reads import fill_memory


@define(eq=False)
class ObjectReader:
    """Reads runs for a shared tier. counts: the tier's."""

    client: ObjectClient
    layout: Layout
    catalogue: Catalogue
    availability: Availability
    counts: Counter[str]
    processors: int = field(factory=count_processors)
    _helpers: DaemonExecutor = field(factory=lambda: DaemonExecutor("shared-reader", DECODERS))
    _same_thread: SameThreadExecutor = field(factory=SameThreadExecutor)
    _callers: int = 0  # that read runs

    async def read(self, take: ReadSource, memory: SlabMemory, workers: Executor) -> None:
        """Read runs as `ReadableTier` describes it."""
        decoder = RunDecoder(self.layout, memory, self.catalogue.note_damaged_entry)
        self._callers += 1
        try:
            while True:
                if self.client.folder is not None and fill_memory(self._callers, self.processors):
                    await self._read_files(self.client.folder, take, decoder)
                    return
                reads = take()
                if not reads:
                    return
                await asyncio.gather(*(self._read_alone(read, decoder, workers) for read in reads))
                self._count(list_results(reads))
        finally:
            self._callers -= 1

    async def _read_files(self, folder: Folder, take: ReadSource, decoder: RunDecoder) -> None:
        """Read stored files, on a thread of the folder's client that takes some after others."""
        chain = ReadChain()
        try:
            await folder.read_files(partial(decoder.read_chain, take, self._name_object, chain))
        except StoreUnreachable as error:
            for read in chain.current:
                give_error(read, error)
            chain.results += list_results(chain.current)
        finally:
            self._count(chain.results)

    def _name_object(self, entry: Entry) -> str:
        return name_entry(self.catalogue.root, entry)

    async def _read_alone(self, read: RunRead, decoder: RunDecoder, workers: Executor) -> None:
        """Read one run with the help of threads, unless others are read."""
        name = self._name_object(read.entry)
        helpers = None if self._callers >= self.processors else self._helpers
        decode = partial(decoder.decode, read, helpers=helpers)
        try:
            await self.client.read_content(name, read.entry.size, workers, decode, partial(give_buffer, read))
        except (Damaged, OSError, MemoryError) as error:
            give_error(read, describe_read_error(error))

    def _count(self, results: Sequence[ReadResult]) -> None:
        """Count reads that are over. One that shows that the store does not work takes the tier away."""
        for entry, error in results:
            if isinstance(error, ObjectGone):
                self.counts["read_errors"] += 1
                self.catalogue.forget(entry)
            elif isinstance(error, StoreUnreachable):
                self.counts["read_errors"] += 1
                self.availability.report_failure(f"reading failed: {error}")
            elif error is None:
                self.counts["read_bytes"] += entry.size

    def read_sample(self, name: str, expected: Expected, target: memoryview) -> None:
        """Read a sample as a run is read. Called on a thread without an event loop. Raises Damaged, OSError."""

        def fill(content: RunContent) -> None:
            fill_target(content, expected, self._helpers, target)

        asyncio.run(self.client.read_content(name, expected.size, self._same_thread, fill, lambda _: None))

    def close(self) -> None:
        self._helpers.shutdown()
