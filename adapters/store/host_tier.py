"""The tier in host memory: buffers and their index. With a budget of 0 it holds only rows that wait to be written."""

from __future__ import annotations

from typing import ClassVar

from attrs import define, field

from adapters.cache_figures import TierFigures
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.slab_memory import Buffer, SlabMemory
from effects.ids import Tier


@define(eq=False)
class HostTier:
    """The tier, used with the store's lock. memory: for its buffers, and for the buffers that lower tiers read into."""

    name: ClassVar[Tier] = "host"
    index: BlockIndex
    memory: SlabMemory = field(factory=SlabMemory)
    rows: dict[int, Buffer] = field(factory=dict[int, Buffer])  # by handle

    def touch(self, entry: Entry) -> None:
        self.index.touch(entry)

    def add_run(self, entry: Entry, rows: Buffer) -> bool:
        """Take in the rows of an entry. Return False, and change nothing, if one of its blocks is kept already."""
        if not self.index.add(entry):
            return False
        self.rows[entry.handle] = rows
        return True

    def make_room(self, size: int, parent: bytes = b"") -> bool:
        """Evict until `size` bytes fit, but not the run that `parent` is in. Return whether they fit."""
        for entry in self.index.make_room(size, parent):
            del self.rows[entry.handle]
        return self.index.fits(size)

    def collect_figures(self) -> TierFigures:
        return self.index.collect_figures()
