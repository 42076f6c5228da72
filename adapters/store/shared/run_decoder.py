"""Decodes runs of a shared store on a thread: several stored files of a folder together, or one run frame by frame."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from attrs import define, field, frozen

from adapters.store.block_index import Entry
from adapters.store.files.expected import Expected
from adapters.store.files.file_format import Layout
from adapters.store.files.read_run import RunContent, fill_target
from adapters.store.files.seekable import Damaged
from adapters.store.run_read import ReadResult, ReadSource, RunRead, give_buffer, give_error, list_results
from adapters.store.shared.folder_client import FolderFile
from adapters.store.shared.object_client import ReadLimit, describe_read_error
from adapters.store.shared.object_names import name_entry
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.stored_reads import ReadSoFar, read_stored

log = logging.getLogger("rekindle.store")


@define(eq=False)
class ReadChain:
    """The reads of a thread that reads one batch after another.

    current: the runs that are being read. results: of those before.
    """

    current: Sequence[RunRead] = ()
    results: list[ReadResult] = field(factory=list["ReadResult"])


@frozen(eq=False)
class RunDecoder:
    """The parts that a thread needs to decode runs.

    note_damaged: called with the entry of an object that is not what it should be.
    """

    layout: Layout
    memory: SlabMemory
    note_damaged: Callable[[Entry], object]

    def decode(self, read: RunRead, content: RunContent, helpers: Executor | None) -> Buffer:
        """Return the run's tensors in a buffer, read frame by frame. helpers: threads that help; None for none.

        Raises Damaged, OSError or MemoryError.
        """
        entry = read.entry
        buffer = self.memory.allocate(self.layout.compute_size(entry.kind, entry.length))
        try:
            fill_target(content, Expected(entry.size, entry.run, self.layout), helpers, buffer.data.numpy().data)
        except Damaged as error:
            log.warning("a damaged object in the shared store is not used: %s: %s", name_entry(b"", entry), error)
            self.note_damaged(entry)
            raise
        return buffer

    def read_chain(
        self,
        take: ReadSource,
        name_object: Callable[[Entry], str],
        chain: ReadChain,
        locate: Callable[[str], str],
        limit: ReadLimit,
    ) -> None:
        """Read files until `take` returns no more. Called on a thread that may be left behind.

        name_object: returns the name of an entry's object. locate: returns the path of a name.
        """
        while True:
            limit.claim()
            reads = take()
            if not reads:
                return
            chain.current = reads
            limit.begin(sum(read.entry.size for read in reads))
            self.read_files(reads, [locate(name_object(read.entry)) for read in reads], limit.claim)
            chain.results += list_results(reads)
            chain.current = ()

    def read_files(self, reads: Sequence[RunRead], paths: Sequence[str], claim: Callable[[], None]) -> None:
        """Read runs from files, in one call of the library as far as that is possible, and end the reads.

        claim: called before that; raises StoreUnreachable if the caller has given up.
        """
        found = read_stored(reads, paths, self.layout, self.memory)
        ended = [
            self._read_again(*read) if read[2] is None else read[2] for read in zip(reads, paths, found, strict=True)
        ]
        claim()
        for read, result in zip(reads, ended, strict=True):
            if isinstance(result, Exception):
                give_error(read, result)
            else:
                give_buffer(read, result)

    def _read_again(self, read: RunRead, path: str, _: ReadSoFar) -> Buffer | Exception:
        """Read a file that is compressed, or is not what it should be."""
        file = FolderFile(path)
        try:
            return self.decode(read, file, None)
        except (Damaged, OSError, MemoryError) as error:
            return describe_read_error(error)
        finally:
            file.close()
