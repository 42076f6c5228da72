"""Simulated replicas keep rows beyond the device: each in its host memory and on its disk, all in one shared tier.

Indexes and eviction are the real ones (`adapters/store/block_index.py`). There are no rows, and moving takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from attrs import define, field, frozen

from adapters.store.block_index import BlockIndex, Entry
from adapters.store.block_keys import TOKEN_BYTES
from effects.ids import Tier
from engine.tools.simulation.fleet.prompt_paths import PromptPath
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.virtual_clock import Clock, SerialServer
from states.routing.route_prices import SHARED_TIER


@frozen
class KeptRun:
    """Consecutive pieces of a path that one entry holds. entry: in the tier that has it."""

    tier: Tier
    entry: Entry
    start: int
    stop: int


@frozen
class PathRun:
    """Consecutive pieces that are kept together. parent: the key before them. length: tokens."""

    start: int
    parent: bytes
    keys: tuple[bytes, ...]
    length: int


@lru_cache(maxsize=1 << 14)
def make_tokens_of(length: int) -> bytes:
    """Return packed tokens that stand for any others of this length."""
    return bytes(length * TOKEN_BYTES)


@define(eq=False)
class SharedStore:
    """The tier that all replicas write to and read from."""

    index: BlockIndex
    written_bytes: int = 0
    read_bytes: int = 0


@define(eq=False)
class ReplicaStore:
    """The tiers of one replica. shared: None where the fleet has no shared tier.

    on_change: called with a tier, and the blocks that it has got and lost. Of the shared tier a replica tells only what
    it has written itself.
    """

    costs: Costs
    clock: Clock
    host: BlockIndex
    disk: BlockIndex
    shared: SharedStore | None
    on_change: Callable[[Tier, Sequence[bytes], Sequence[bytes]], None]
    indexes: dict[Tier, BlockIndex] = field(init=False)  # the quickest tier first
    reader: SerialServer = field(init=False)
    writer: SerialServer = field(init=False)
    network_in: SerialServer = field(init=False)
    network_out: SerialServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = SerialServer(self.clock)
        self.writer = SerialServer(self.clock)
        self.network_in = SerialServer(self.clock)
        self.network_out = SerialServer(self.clock)
        self.indexes = {"host": self.host, "disk": self.disk}
        if self.shared is not None:
            self.indexes[SHARED_TIER] = self.shared.index

    def find_runs(self, path: PromptPath, first: int) -> list[KeptRun]:
        """Return what the tiers have of a prompt from piece `first` on, without a gap."""
        found = list[KeptRun]()
        starts = path.starts
        for number in range(first, path.usable):
            key = path.keys[number]
            holder = next(
                ((tier, entry) for tier, index in self.indexes.items() if (entry := index.get_holder(key)) is not None),
                None,
            )
            if holder is None:
                break
            tier, entry = holder
            if found and found[-1].entry is entry:
                found[-1] = KeptRun(tier, entry, found[-1].start, path.stops[number])
            else:
                found.append(KeptRun(tier, entry, starts[number], path.stops[number]))
        return found

    def touch(self, runs: Sequence[KeptRun]) -> None:
        for run in runs:
            self.indexes[run.tier].touch(run.entry)

    def load_runs(self, runs: Sequence[KeptRun]) -> int:
        """Begin to load runs, and return the time when all are there. Files are read whole."""
        ready = self.clock.now
        for run in runs:
            if run.tier == "host":
                ready += (run.stop - run.start) * self.costs.host
        for run in runs:
            if run.tier == "disk":
                ready = max(ready, self.reader.enter(run.entry.length * self.costs.disk))
            elif run.tier == SHARED_TIER:
                assert self.shared is not None
                self.shared.read_bytes += run.entry.size
                ready = max(ready, self.network_in.enter(run.entry.length * self.costs.shared))
        return ready

    def promote_runs(self, runs: Sequence[KeptRun]) -> None:
        """Keep what was read in host memory, if there is room."""
        for run in runs:
            if run.tier != "host":
                self._add("host", PathRun(run.entry.start, run.entry.parent, run.entry.keys, run.entry.length))

    def keep_path(self, path: PromptPath, on_shared: Callable[[], None] = lambda: None) -> None:
        """Keep a sequence: in host memory now, on disk and in the shared tier when it has been written there.

        on_shared: called when the shared tier has all of it.
        """
        for first, stop in list_missing_runs(path, (self.host, self.disk)):
            run = describe_run(path, first, stop)
            self._add("host", run)
            self.clock.at(self.writer.enter(run.length * self.costs.write), partial(self._write, "disk", run))
        if self.shared is not None:
            for first, stop in list_missing_runs(path, (self.shared.index,)):
                run = describe_run(path, first, stop)
                self.clock.at(
                    self.network_out.enter(run.length * self.costs.share), partial(self._write, SHARED_TIER, run)
                )
        self.clock.at(self.network_out.enter(0), on_shared)

    def _write(self, tier: Tier, run: PathRun) -> None:
        """Put a run into a lower tier, unless another replica was quicker in the shared one."""
        if self._add(tier, run) and self.shared is not None and tier == SHARED_TIER:
            self.shared.written_bytes += run.length * self.costs.token_bytes

    def _add(self, tier: Tier, run: PathRun) -> bool:
        """Add a run to a tier, which may evict others. Return False where it is there already, or does not fit."""
        index = self.indexes[tier]
        size = run.length * self.costs.token_bytes
        if size > index.budget or any(key in index for key in run.keys):
            return False
        gone = [key for entry in index.make_room(size, run.parent) for key in entry.keys]
        entry = Entry(index.allocate_handle(), run.start, run.parent, run.keys, make_tokens_of(run.length), size)
        added = index.fits(size) and index.add(entry)
        if added or gone:
            self.on_change(tier, run.keys if added else (), gone)
        return added


def list_missing_runs(path: PromptPath, indexes: Sequence[BlockIndex]) -> list[tuple[int, int]]:
    """Return the spans of pieces that none of these indexes has."""
    runs = list[tuple[int, int]]()
    for number, key in enumerate(path.keys):
        if any(key in index for index in indexes):
            continue
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def describe_run(path: PromptPath, first: int, stop: int) -> PathRun:
    """Return a span of pieces as one run."""
    start = path.stops[first - 1] if first else 0
    parent = path.keys[first - 1] if first else b"root"
    return PathRun(start, parent, path.keys[first:stop], path.stops[stop - 1] - start)
