"""The tier in host memory: buffers under an index. What waits to be written is leased, so a budget of 0 keeps that."""

from __future__ import annotations

from attrs import define, field

from adapters.store.block_index import Entry, Index
from adapters.store.slab_memory import Buffer, Memory


@define(eq=False)
class HostTier:
    """With the store's lock. memory: where buffers come from, those of other tiers' runs on their way included."""

    index: Index
    memory: Memory = field(factory=Memory)
    rows: dict[int, Buffer] = field(factory=dict[int, Buffer])  # by handle

    def touch(self, entry: Entry) -> None:
        self.index.touch(entry)

    def add(self, entry: Entry, rows: Buffer) -> bool:
        """False, and nothing changes, if one of its blocks is kept already."""
        if not self.index.add(entry):
            return False
        self.rows[entry.handle] = rows
        return True

    def make_room(self, size: int, parent: bytes = b"") -> bool:
        """True if there is, then. Not for the run that `parent` is in: it stays."""
        for entry in self.index.make_room(size, parent):
            del self.rows[entry.handle]
        return self.index.fits(size)

    def figures(self) -> dict[str, int]:
        return self.index.figures()
