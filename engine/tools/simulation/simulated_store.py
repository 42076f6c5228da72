"""The real store with its real indexes, on a simulated disk that takes time and keeps nothing but its index."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import define, evolve, field

from adapters.cache_figures import TierFigures
from adapters.sequence_layout import RowSpec, TensorSpec
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.block_keys import TOKEN_BYTES
from adapters.store.disk.disk_tier import MAX_QUEUED_BYTES
from adapters.store.file_description import make_entry
from adapters.store.files.file_format import Layout, Run
from adapters.store.host_tier import HostTier
from adapters.store.kept_answers import NotePrompt
from adapters.store.lease import LeasedPart, Miss
from adapters.store.open_store import RECENT_SHARE, create_index
from adapters.store.recent_prompts import MAX_BYTES, RecentPrompts
from adapters.store.slab_memory import Buffer
from adapters.store.store import Store
from adapters.store.tier import WriteRun
from effects.ids import LeaseId, Tier, Tokens
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed
from effects.restore import RestoreBlocks
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.tally import Tally
from engine.tools.simulation.virtual_clock import Clock, SerialServer

ZERO = torch.zeros(1, dtype=torch.uint8)


def build_simulated_layout(costs: Costs, block_size: int) -> Layout:
    """Return a layout with this many bytes of rows a token, and this many bytes of recurrent state."""
    state = (TensorSpec("state", "U8", (costs.state_bytes,)),) if costs.state_bytes else ()
    return Layout("simulated", block_size, RowSpec(("rows",), 1, costs.token_bytes, "U8"), state=state)


def make_rows(size: int) -> Buffer:
    """Return a buffer that claims to have `size` bytes. It stores a single byte."""
    return Buffer(ZERO.expand(size))


@define(eq=False)
class SimulatedDisk:
    """A simulated disk tier. It changes the index as the disk's writer would, when the time has come.

    It outlives the process, as files do.
    """

    name: ClassVar[Tier] = "disk"
    trouble: ClassVar[str] = ""
    index: BlockIndex
    costs: Costs
    clock: Clock
    tally: Tally
    recent_prompts: RecentPrompts = field(factory=RecentPrompts)
    answers: ClassVar[None] = None
    queued_bytes: int = 0  # bytes that wait to be written
    threads: ClassVar = ()
    damaged_files: ClassVar[Mapping[str, int]] = {}
    counts: Counter[str] = field(factory=Counter[str])
    reader: SerialServer = field(init=False)
    writer: SerialServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = SerialServer(self.clock)
        self.writer = SerialServer(self.clock)
        self.recent_prompts.max_bytes = min(MAX_BYTES, self.index.budget // RECENT_SHARE)

    def touch(self, entry: Entry) -> None:
        self.index.touch(entry)

    @property
    def dropped_writes(self) -> int:
        return sum(self.counts.values())

    def collect_figures(self) -> TierFigures:
        return evolve(self.index.collect_figures(), more={"dropped_writes": self.dropped_writes})

    def close(self) -> bool:
        return True

    def submit(self, job: WriteRun | NotePrompt) -> bool:
        """Queue a job. Notes of prompts are small and always written, so only runs count."""
        if isinstance(job, NotePrompt):
            return True
        if self.queued_bytes + job.size > MAX_QUEUED_BYTES:
            self.counts["dropped_queue_full"] += 1
            return False
        self.queued_bytes += job.size
        # A checkpoint takes as long as rows of equally many bytes.
        tokens = job.size // self.costs.token_bytes
        self.clock.at(self.writer.enter(tokens * self.costs.write), lambda: self.write(job))
        return True

    def write(self, job: WriteRun) -> None:
        size = round(job.size * self.costs.stored) + job.run.length * TOKEN_BYTES + self.costs.file
        if size <= self.index.budget:
            self.index.make_room(size, job.run.parent)
        if self.index.fits(size):
            entry = make_entry(job.run, self.index.allocate_handle(), size, self.index.origin)
            if self.index.add(entry):
                self.tally.add_write(self.clock.now, size, checkpoint=job.run.kind == "state")
        else:
            self.counts["dropped_no_room"] += 1
        self.queued_bytes -= job.size
        job.finish()


@define(eq=False)
class SimulatedStore:
    """The store of a simulated process. disk: the tier that the next process will have too."""

    disk: SimulatedDisk | None
    host_budget: int  # bytes
    shape: Layout
    costs: Costs
    clock: Clock
    store: Store[SimulatedDisk] = field(init=False)
    _read: dict[LeaseId, list[LeasedPart]] = field(factory=dict[LeaseId, "list[LeasedPart]"])

    def __attrs_post_init__(self) -> None:
        host = HostTier(create_index(self.shape, self.host_budget))
        tiers = (host,) if self.disk is None else (host, self.disk)
        self.store = Store(self.shape, tiers, threading.RLock())

    @property
    def is_idle(self) -> bool:
        return self.disk is None or not self.disk.queued_bytes

    def find(self, effect: FindPrefix) -> PrefixFound | PrefixMissed:
        shared = 0
        if effect.prompts_to_compare:
            shared = self.store.count_shared_tokens(effect.prompt, effect.prompts_to_compare, effect.salt)
        found = self.store.find_prefix(effect.prompt, effect.beyond, effect.rows, effect.salt)
        if isinstance(found, Miss):
            return PrefixMissed(found.reason, shared=shared, length=found.length)
        name, lease = found
        return PrefixFound(name, lease.length, lease.tier, shared=shared, checkpoints=lease.checkpoints)

    def release(self, lease: LeaseId) -> None:
        self.store.release(lease)

    def start_load(self, effect: RestoreBlocks) -> int:
        """Begin to read what a restore needs, and return the time when it is read. Runs are always read whole."""
        lease = self.store.get_lease(effect.lease)
        wanted = [part for part in lease.parts if part.start < effect.stop and part.stop > effect.start]
        wanted += [part for part in lease.states if part.stop == effect.stop]
        self._read[effect.lease] = [part for part in wanted if part.tier != self.store.memory_tier.name]
        host = sum(
            self._count_tokens(part, part.stop - part.start)
            for part in wanted
            if part.tier == self.store.memory_tier.name
        )
        done = self.clock.now + host * self.costs.host
        if self._read[effect.lease]:
            assert self.disk is not None
            tokens = sum(self._count_tokens(part, part.entry.length) for part in self._read[effect.lease])
            done = max(done, self.disk.reader.enter(tokens * self.costs.disk))
        return done

    def _count_tokens(self, part: LeasedPart, rows: int) -> int:
        """Return the tokens whose rows take as long to load as this part."""
        return self.costs.state_tokens if part.entry.kind == "state" else rows

    def on_restored(self, effect: RestoreBlocks) -> None:
        """Keep what was read in host memory, if there is room, and release the lease."""
        for part in self._read.pop(effect.lease):
            self.store.promote(part.entry, make_rows(self.shape.compute_size(part.entry.kind, part.entry.length)))
        self.store.release(effect.lease)

    def keep_checkpoint(self, tokens: Tokens, salt: str) -> int:
        """Keep a checkpoint behind these tokens, and return the bytes that were added."""
        if not self.store.lacks_checkpoint(tokens, salt):
            return 0
        size = self.shape.compute_size("state", 0)
        return size * self.store.keep_checkpoint(tokens, make_rows(size), salt)

    def find_missing_runs(self, tokens: Tokens, salt: str) -> list[Run]:
        return self.store.find_missing_runs(tokens, salt=salt)

    def keep_runs(self, runs: list[Run]) -> int:
        """Keep these runs, and return the bytes that were added."""
        saved = 0
        for run in runs:
            size = self.shape.compute_size("rows", run.length)
            if not self.store.keep_run(run, make_rows(size)):
                break
            saved += size
        return saved
