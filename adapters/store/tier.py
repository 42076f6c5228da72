"""Interfaces of the tiers that a `Store` consists of, and of the jobs that it gives to the lower ones.

A store has a tuple of tiers, the quickest first. The first one is host memory (`host_tier.py`): snapshots are copied
into it. Every other one is a *lower tier*: it is given copies to write in the background, and rows are read back from
it. The disk (`disk_tier.py`) is one, and so is the disk of the simulation. A tier has a name, by which leases, metrics
and `Rates` refer to it. Another lower tier is one module that implements `ReadableTier`, and one line in
`open_store.py` that puts it into the tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Protocol

from attrs import frozen

from adapters.cache_figures import TierFigures
from adapters.store.block_index import BlockIndex, Entry
from adapters.store.files.file_format import Run
from adapters.store.kept_answers import KeptAnswers, NotePrompt
from adapters.store.recent_prompts import RecentPrompts
from adapters.store.run_read import ReadSource, RunRead, get_buffer, take_once
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.watched_thread import WatchedThread
from effects.ids import Tier


@frozen(eq=False)
class WriteRun:
    """A job for a lower tier: write this run.

    finish: called once the run has been written or given up, `rows` let go of, and the job counted off.
    """

    run: Run
    rows: Buffer
    finish: Callable[[], None]

    @property
    def size(self) -> int:
        return self.rows.data.nbytes


class StoreTier(Protocol):
    """A tier as lookups need it. Every method is called with the store's lock, which also guards the index."""

    @property
    def name(self) -> Tier: ...

    @property
    def index(self) -> BlockIndex: ...

    def touch(self, entry: Entry) -> None:
        """Count a lookup that found this entry."""
        ...

    def collect_figures(self) -> TierFigures:
        """Return the figures of this tier at this moment."""
        ...


class LowerTier(StoreTier, Protocol):
    """A tier that is written in the background."""

    @property
    def recent_prompts(self) -> RecentPrompts:
        """The prompts that it brought back when it was opened. The store uses those of its first lower tier."""
        ...

    @property
    def answers(self) -> KeptAnswers | None:
        """The answers that it keeps for a later server to copy from; None: it keeps none."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Bytes of jobs that are not finished yet."""
        ...

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """Threads whose failures /health reports. When one has died, less is found; nothing wrong is served."""
        ...

    @property
    def damaged_files(self) -> Mapping[str, int]:
        """The number of files that were found damaged, by kind."""
        ...

    @property
    def trouble(self) -> str:
        """The reason why nothing is found in the tier now, in one line; empty where it can be used."""
        ...

    def close(self) -> bool:
        """Write what is queued. Return False where that takes too long."""
        ...

    def submit(self, job: WriteRun | NotePrompt) -> bool:
        """Queue a job. Return False where the queue has no room: the job is dropped and counted."""
        ...


class Upkeep(Protocol):
    """Work between two tiers on a thread of its own."""

    @property
    def thread(self) -> WatchedThread: ...

    def start(self) -> None: ...

    def close(self) -> None:
        """End the work. May be called again, and before `start`."""
        ...


class ReadableTier(LowerTier, Protocol):
    """A lower tier whose rows can be read back; a simulated one keeps none."""

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of runs that are best read by one call of `read`; 0 where that is one run."""
        ...

    async def read(self, take: ReadSource, memory: SlabMemory, workers: Executor) -> None:
        """Read runs of leased entries into buffers from `memory`: what `take` returns, until it returns nothing.

        `take` may be called on the thread, of `workers` or of the tier, that reads. `RunRead.then` is called on the
        thread that has read the run. When `take` is called again, and at the end, each run has a buffer or an error. If
        one fails, that does not concern the others.
        """
        ...


async def read_run(tier: ReadableTier, entry: Entry, memory: SlabMemory, workers: Executor) -> Buffer:
    """Return the tensors of one leased entry. Raises Damaged, OSError or MemoryError."""
    read = RunRead(entry)
    await tier.read(take_once(read), memory, workers)
    return get_buffer(read)
