"""The journal in its folder: read at the start, appended to as runs come and go, written anew when it has grown."""

from __future__ import annotations

import errno
from contextlib import suppress

from attrs import define, field

from adapters.store import journal
from adapters.store.index import Entry, Index
from adapters.store.names import what
from adapters.store.upkeep import Upkeep

SLACK = 4096  # records beyond what its entries need, before it is written anew


@define(eq=False)
class JournalFile:
    """All but `touch` on the writer's thread. What cannot be written is made up for at the next start.

    stale: it has to be written anew.
    """

    index: Index
    upkeep: Upkeep
    stale: bool = False
    _records: int = 0
    _touched: dict[int, Entry] = field(factory=dict[int, Entry])

    def touch(self, entry: Entry) -> None:
        """It was found, which the next records say too. With the lock."""
        self._touched[entry.handle] = entry

    def read(self, listing: dict[str, int]) -> journal.Replayed:
        """Raises OSError for somebody else's file of that name: there is nothing of ours in the folder."""
        there, size = journal.NAME in listing, listing.pop(journal.NAME, 0)
        beginning = self.upkeep.read_small(journal.NAME, journal.LOOK) if size else b""
        ours = not beginning or journal.may_be_ours(beginning)  # what cannot be read just now is not somebody else's
        if not ours and not any(what(name) == "run" for name in listing):
            raise OSError(errno.EEXIST, f"there is a file named {journal.NAME} that is not ours")
        readable = bool(beginning) and ours and size <= journal.MOST
        kept = journal.read(self.upkeep.read_small(journal.NAME) if readable else b"")
        if there and not kept.whole:
            self.upkeep.rebuilt("journal", f"the journal, {kept.records} records of which could be read")
        self._records = kept.records
        return kept

    def append(self, *records: bytes) -> None:
        """And what was found meanwhile."""
        with self.upkeep.lock:
            touched, self._touched = self._touched, {}
            touches = [journal.found(entry) for entry in touched.values() if entry.handle in self.index.entries]
        self._records += len(records) + len(touches)
        if self._records > 2 * len(self.index) + SLACK:
            self.compact()
            return
        if raw := b"".join((*records, *touches)):
            try:
                self.upkeep.folder.extend(journal.NAME, raw)
            except FileNotFoundError:  # it could not be written before; records without a beginning would be nobody's
                self.compact()
            except OSError:
                return

    def compact(self) -> None:
        with self.upkeep.lock:
            parts = list(journal.snapshot(self.index.entries.values()))
        with suppress(OSError):
            self.upkeep.folder.write(journal.NAME, [b"".join(parts)])
            self._records, self.stale = len(parts) - 1, False
