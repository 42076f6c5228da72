"""Indexes the blocks that a tier keeps, in runs that were saved together, and chooses the runs to evict.

There is no clock. Age counts turns, one for each run that was added or found, so a clock that jumps changes nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import define, field

from adapters.cache_figures import TierFigures
from adapters.store.block_keys import TOKEN_BYTES
from adapters.store.files.file_format import Kind, Run


@define(eq=False)
class Entry:
    """A run of consecutive blocks of one sequence, or a checkpoint of positional state. One entry is one file on disk.

    parent: the key of the block before the run. keys: those of its blocks. tokens: packed. handle: the number of the
    entry; a tier never uses it twice, so a later run with the same keys is not mistaken for this one.

    A checkpoint has the key that `derive_checkpoint_key` makes of the block that ends at its position. That block is
    its parent, and the tokens are those of that block.
    """

    handle: int
    start: int  # tokens before the run
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: bytes = field(repr=False)
    size: int  # bytes that it takes of the tier
    origin: bytes = b""  # the root of its identity; entries of other identities are evicted first
    hits: int = 0
    last_turn: int = 0  # the turn (`BlockIndex.turn`) in which it was added or last found
    leases: int = 0
    children: int = 0  # runs that continue one of our blocks
    kind: Kind = "rows"
    since: int = 0  # of a checkpoint: the position of the checkpoint before it

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def saved_tokens(self) -> int:
        """The tokens that would have to be computed without this entry."""
        return self.stop - self.since if self.kind == "state" else self.length

    @property
    def run(self) -> Run:
        return Run(self.start, self.parent, self.keys, self.tokens, self.kind, self.since)


@define
class BlockIndex:
    """The entries of one tier, of at most `budget` bytes together. Not thread-safe: callers hold the store's lock.

    turn: counts additions and hits, and so takes the place of a clock. evictions: entries that had to go for others.
    """

    budget: int
    block_size: int
    origin: bytes = b""  # the root of the identity that is served
    entries: dict[int, Entry] = field(factory=dict[int, Entry])
    held_bytes: int = 0
    turn: int = 0
    evictions: int = 0
    _blocks: dict[bytes, Entry] = field(factory=dict[bytes, Entry])
    # block key -> further runs that have the block too; only `add_overlapping` makes any
    _spares: dict[bytes, list[Entry]] = field(factory=dict[bytes, "list[Entry]"])
    _continued: Counter[bytes] = field(factory=Counter[bytes])  # block key -> how many runs have it as their parent
    # Block key -> the last run of rows that was added behind it.
    _latest: dict[bytes, Entry] = field(factory=dict[bytes, Entry])

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def find_block(self, key: bytes, tokens: bytes) -> Entry | None:
        """Return the entry that keeps the block `key`, if the block stands for exactly these (packed) tokens."""
        entry = self._blocks.get(key)
        if entry is None:
            return None
        block = entry.keys.index(key)
        step = self.block_size * TOKEN_BYTES
        return entry if entry.tokens[block * step : (block + 1) * step] == tokens else None

    def get_holder(self, key: bytes) -> Entry | None:
        """Return the entry that keeps the block `key`. Its tokens are not compared."""
        return self._blocks.get(key)

    def get_continuations(self, key: bytes) -> list[bytes]:
        """Return the packed tokens that follow the block `key`: in the last run added behind it, and in its own run."""
        latest = self._latest.get(key)
        entry = self._blocks.get(key)
        found = [] if latest is None else [latest.tokens]
        if entry is not None and key != entry.keys[-1]:
            found.append(entry.tokens[(entry.keys.index(key) + 1) * self.block_size * TOKEN_BYTES :])
        return found

    def allocate_handle(self) -> int:
        """Return a number for a new entry. It is the next turn, so it is greater than all before it."""
        self.turn += 1
        return self.turn

    def add(self, entry: Entry) -> bool:
        """Add an entry. Return False, and change nothing, if one of its blocks is kept already."""
        if not entry.keys or entry.handle in self.entries or not self._blocks.keys().isdisjoint(entry.keys):
            return False
        self.turn = max(self.turn, entry.handle, entry.last_turn)
        continued = self._continued
        parent = entry.parent
        leaf = continued.keys().isdisjoint(entry.keys)
        entry.children = 0 if leaf else sum(continued[key] for key in entry.keys)
        continued[parent] = continued.get(parent, 0) + 1
        if (before := self._blocks.get(parent)) is not None:
            before.children += 1
        self._blocks.update(dict.fromkeys(entry.keys, entry))
        if entry.kind == "rows":
            self._latest[parent] = entry
        self.entries[entry.handle] = entry
        self.held_bytes += entry.size
        return True

    def add_overlapping(self, entry: Entry) -> None:
        """Add an entry although others may keep some of its blocks, as where several servers save at the same time.

        Such blocks are found in the entry that came first, and in the next one when that is removed.
        """
        others = {key: holder for key in entry.keys if (holder := self._blocks.pop(key, None)) is not None}
        is_added = self.add(entry)
        assert is_added, "a new handle, and blocks that no other entry has at the moment"
        for key, holder in others.items():
            self._blocks[key] = holder
            self._spares.setdefault(key, []).append(entry)

    def add_all(self, entries: Sequence[Entry]) -> list[Entry]:
        """Add all entries to an empty index in a third of the time that `add` takes. Return those that were added."""
        blocks = {key: entry for entry in entries for key in entry.keys}
        taken = {entry.handle: entry for entry in entries if entry.keys}
        if self.entries or len(taken) < len(entries) or len(blocks) < sum(len(entry.keys) for entry in entries):
            return [entry for entry in entries if self.add(entry)]
        self.entries = taken
        self._blocks = blocks
        self._continued = Counter(entry.parent for entry in entries)
        self._latest = {entry.parent: entry for entry in entries if entry.kind == "rows"}
        for parent, count in self._continued.items():
            if (before := blocks.get(parent)) is not None:
                before.children += count
        self.turn = max((max(entry.handle, entry.last_turn) for entry in entries), default=self.turn)
        self.held_bytes = sum(entry.size for entry in entries)
        return [*entries]

    def remove(self, entry: Entry) -> bool:
        """Remove an entry. Return False if it is gone already."""
        if self.entries.get(entry.handle) is not entry:
            return False
        del self.entries[entry.handle]
        self.held_bytes -= entry.size
        for key in entry.keys:
            self._remove_block(key, entry)
        if self._latest.get(entry.parent) is entry:
            del self._latest[entry.parent]
        self._continued[entry.parent] -= 1
        if not self._continued[entry.parent]:
            del self._continued[entry.parent]
        if (before := self._blocks.get(entry.parent)) is not None:
            before.children -= 1
        return True

    def _remove_block(self, key: bytes, entry: Entry) -> None:
        spares = self._spares.get(key, [])
        if self._blocks[key] is not entry:
            spares.remove(entry)
        elif spares:
            self._blocks[key] = spares.pop(0)
        else:
            del self._blocks[key]
        if not spares:
            self._spares.pop(key, None)

    def iterate_keys(self) -> Iterator[bytes]:
        """Yield the keys of all blocks that are kept."""
        return iter(self._blocks)

    def touch(self, entry: Entry) -> None:
        """Count a hit of this entry, which makes it young again."""
        self.turn += 1
        entry.last_turn = self.turn
        entry.hits = entry.hits + 1

    def compute_score(self, entry: Entry) -> tuple[bool, float]:
        """Return what the entry is worth: saved tokens per byte, divided by its age. The least is evicted first.

        Entries of another identity come before all others. A hit makes an entry young again, but the number of hits
        does not count: an agent's sequence is found at every turn, and never again when the agent is done. To count
        hits cost 2 % of the hits on agents' logs (benchmarks.agent_logs).

        An entry without bytes counts as one byte: a simulated checkpoint has none if its size is unknown.
        """
        age = self.turn - entry.last_turn
        return entry.origin == self.origin, entry.saved_tokens / (max(1, entry.size) * (1 + age))

    def make_room(self, size: int, parent: bytes = b"") -> list[Entry]:
        """Evict until `size` more bytes fit. Only leaves without leases are evicted, and never the run that holds
        `parent`.

        It may end before they fit; `fits` says whether they do.
        """
        gone = list[Entry]()
        if self.fits(size):
            return gone
        heap = [(*self.compute_score(entry), entry.handle) for entry in self._iterate_leaves(parent)]
        heapq.heapify(heap)
        while not self.fits(size) and heap:
            entry = self.entries[heapq.heappop(heap)[-1]]
            self.remove(entry)
            gone.append(entry)
            before = self._blocks.get(entry.parent)
            if before is not None and self._is_evictable(before, parent):
                heapq.heappush(heap, (*self.compute_score(before), before.handle))
        self.evictions += len(gone)
        return gone

    def collect_figures(self) -> TierFigures:
        """Return the figures of the index, to which a tier adds its own."""
        return TierFigures(self.held_bytes, self.budget, len(self), self.evictions)

    def fits(self, size: int) -> bool:
        """Return whether so many more bytes stay within the budget."""
        return self.held_bytes + size <= self.budget

    def _iterate_leaves(self, parent: bytes) -> Iterator[Entry]:
        return (entry for entry in self.entries.values() if self._is_evictable(entry, parent))

    @staticmethod
    def _is_evictable(entry: Entry, parent: bytes) -> bool:
        return not entry.children and not entry.leases and parent not in entry.keys
