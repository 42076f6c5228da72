"""Keeps the journal in its folder: read at the start, appended to as runs come and go, rewritten when it has grown."""

from __future__ import annotations

import errno
from contextlib import suppress

from attrs import define, field

from adapters.store import index_journal
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.disk.file_names import classify_name
from adapters.store.disk.folder_upkeep import FolderUpkeep

SLACK = 4096  # records beyond what its entries need, before it is written anew


@define(eq=False)
class JournalFile:
    """The journal's file. All methods except `touch` are called on the writer's thread.

    A record that cannot be written is recovered at the next start. needs_rewrite: the file has to be written anew.
    """

    index: BlockIndex
    upkeep: FolderUpkeep
    needs_rewrite: bool = False
    _records: int = 0
    _touched: dict[int, Entry] = field(factory=dict[int, Entry])

    def touch(self, entry: Entry) -> None:
        """Note a hit, which the next write records. Called with the store's lock."""
        self._touched[entry.handle] = entry

    def read(self, listing: dict[str, int]) -> index_journal.JournalContents:
        """Read the journal. Raises OSError for a foreign file of that name in a folder without runs."""
        there = index_journal.NAME in listing
        size = listing.pop(index_journal.NAME, 0)
        beginning = self.upkeep.read_small(index_journal.NAME, index_journal.MAGIC_BYTES) if size else b""
        ours = not beginning or index_journal.may_be_journal(
            beginning
        )  # one that cannot be read just now counts as ours
        if not ours and not any(classify_name(name) == "run" for name in listing):
            raise OSError(errno.EEXIST, f"there is a file named {index_journal.NAME} that is not ours")
        readable = bool(beginning) and ours and size <= index_journal.MAX_BYTES
        kept = index_journal.parse_journal(self.upkeep.read_small(index_journal.NAME) if readable else b"")
        if there and not kept.whole:
            self.upkeep.report_rebuilt("journal", f"the journal, {kept.records} records of which could be read")
        self._records = kept.records
        return kept

    def append(self, *records: bytes) -> None:
        """Append records, and the hits that were noted since the last write."""
        with self.upkeep.lock:
            touched = self._touched
            self._touched = {}
            touches = [
                index_journal.encode_hit(entry) for entry in touched.values() if entry.handle in self.index.entries
            ]
        self._records += len(records) + len(touches)
        if self._records > 2 * len(self.index) + SLACK:
            self.compact()
            return
        if raw := b"".join((*records, *touches)):
            try:
                self.upkeep.folder.extend_file(index_journal.NAME, raw)
            except FileNotFoundError:
                # Earlier writes failed. A journal without its beginning could not be read, so all of it is written.
                self.compact()
            except OSError:
                return

    def compact(self) -> None:
        """Write the journal anew, with one record for each entry. After a failure the old one stays."""
        with self.upkeep.lock:
            parts = list(index_journal.encode_snapshot(self.index.entries.values()))
        with suppress(OSError):
            self.upkeep.folder.write_file(index_journal.NAME, [b"".join(parts)])
            self._records = len(parts) - 1
            self.needs_rewrite = False
