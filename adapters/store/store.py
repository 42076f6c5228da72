"""The prefix cache beyond the device: leases kept prefixes and takes in new rows, over an ordered tuple of tiers.

The problem: a prompt often begins as an earlier one did, after its slot was given to another request or the process
was restarted. Rows that were computed once are kept outside the device, so that they are loaded and not computed.

How it works. Rows are kept in *runs* of consecutive blocks: some MiB, one entry of an index, one file on disk. The
tiers are a tuple, the quickest first. The first one is host memory; the others are lower tiers (`tier.py`).

* Look-up (`find_prefix`): `prefix_search.py` finds the longest prefix over all tiers. Its entries are *leased*, which
  means that no tier evicts them, until the caller releases the lease.
* Keeping (`find_missing_runs`, then `keep_run` for each): a run is taken into host memory and queued for every lower
  tier that lacks it. Its entry in host memory is leased until each of them has written it or given it up.
* Promotion (`promote`): rows that were read from a lower tier stay in host memory, if eviction can make room there.

Invariants, all of them under `lock`, which the tiers share:

* An entry is evicted only when it is not leased and no kept run continues it.
* `HostTier.rows` has a buffer for exactly the entries of its index.
* A run that is queued for a tier is in `_queued_writes` until the tier calls `WriteRun.finish`, once.

Example: prompts ABCD and ABEF, of four blocks each. The first leaves one run ABCD. The second finds AB in it, leases
the entry, restores two blocks, computes EF, and keeps them as a run whose parent is B.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Generic, TypeVar

from attrs import define, evolve, field

from adapters.cache_figures import RestoreTotals, StoreFigures
from adapters.store.block_index import Entry
from adapters.store.block_keys import TOKEN_BYTES, SequenceBlocks
from adapters.store.file_description import make_entry
from adapters.store.files.file_format import Kind, Layout, Run
from adapters.store.host_tier import HostTier
from adapters.store.kept_answers import KeptAnswers, NotePrompt
from adapters.store.lease import Lease, Miss
from adapters.store.prefix_search import PrefixSearch
from adapters.store.recent_prompts import RecentPrompts
from adapters.store.slab_memory import Buffer, SlabMemory
from adapters.store.tier import LowerTier, StoreTier, Upkeep, WriteRun
from adapters.watched_thread import WatchedThread
from effects.ids import LeaseId, Span, Tier, Tokens
from effects.ports import Divergence

D = TypeVar("D", bound=LowerTier)
T = TypeVar("T")

RUN_BYTES = 4 << 20  # rows that are saved together: one file, one entry
# Runs of one restore that are read at once. A single reader leaves a disk idle between its reads. With six, two cores
# had nothing to decode while the last of eight runs was read: 8 ms of 44.
RUNS_IN_FLIGHT = 8


def create_set_event() -> threading.Event:
    """Return an event that is set already."""
    event = threading.Event()
    event.set()
    return event


@define(eq=False)
class Store(Generic[D]):
    """The kept runs of one layout. Any thread may call it: the event loop finds, savers keep, tiers' threads finish.

    tiers: host memory, then the lower tiers, the quickest first. memory_ready: set when host memory is prepared.
    upkeep: background work on the tiers, which ends before they are closed.
    """

    layout: Layout
    tiers: tuple[HostTier, *tuple[D, ...]]
    lock: threading.RLock
    run_bytes: int = RUN_BYTES
    recent_prompts: RecentPrompts = field(init=False)
    hits: Counter[str] = field(factory=Counter[str])
    misses: Counter[str] = field(factory=Counter[str])
    restores: dict[str, RestoreTotals] = field(factory=dict[str, RestoreTotals])  # by tier
    memory_ready: threading.Event = field(factory=create_set_event)
    upkeep: Upkeep | None = None
    dropped_rows: int = 0  # rows of the target that snapshots did not keep, for lack of memory or time
    dropped_draft_rows: int = 0  # the same of its draft; a draft in another process may also have lost them
    _search: PrefixSearch = field(init=False)
    _by_name: Mapping[Tier, StoreTier] = field(init=False)
    _leases: dict[LeaseId, Lease] = field(factory=dict[LeaseId, Lease])
    _last_lease: int = 0
    _queued_writes: set[tuple[Tier, int]] = field(factory=set["tuple[Tier, int]"])  # (tier, handle in host memory)

    def __attrs_post_init__(self) -> None:
        self.recent_prompts = self.lower_tiers[0].recent_prompts if self.lower_tiers else RecentPrompts()
        self._search = PrefixSearch(self.layout, self.tiers)
        self._by_name = {tier.name: tier for tier in self.tiers}
        assert len(self._by_name) == len(self.tiers), "two tiers of one name"

    @property
    def memory_tier(self) -> HostTier:
        return self.tiers[0]

    @property
    def lower_tiers(self) -> tuple[D, ...]:
        return self.tiers[1:]

    @property
    def memory(self) -> SlabMemory:
        """The memory for buffers that runs are copied or read into."""
        return self.memory_tier.memory

    def get_lower_tier(self, name: Tier) -> D | None:
        """Return the tier that rows of this one have to be read from; None for host memory, which holds them."""
        return next((tier for tier in self.lower_tiers if tier.name == name), None)

    @property
    def answers(self) -> KeptAnswers | None:
        """The answers that outlive this server, for later ones to be copied from; None: no tier keeps any."""
        return self.lower_tiers[0].answers if self.lower_tiers else None

    def find_tier(self, kind: type[T]) -> T | None:
        """Return the lower tier of this class, if the store has one: for what only that class can do."""
        return next((tier for tier in self.lower_tiers if isinstance(tier, kind)), None)

    # --- looking up ---

    def find_prefix(self, prompt: Tokens, beyond: int, rows: int = 0, salt: str = "") -> tuple[LeaseId, Lease] | Miss:
        """Lease the longest kept prefix that can be continued, if it is longer than `beyond`; else say why not.

        rows: rows that the slot has, of a target with positional state, so that they need not be kept.
        """
        path = self._search.hash_blocks(prompt[:-1], salt=salt)
        with self.lock:
            lease = self._search.find_continuable(path, beyond, rows)
            lease = evolve(lease, diverged=self._search.find_divergence(path, lease))
            if lease.length <= beyond:
                reason = self._search.explain_miss(path, lease)
                self.misses[reason.partition(":")[0]] += 1
                return Miss(reason, lease.length, lease.diverged)
            self._last_lease += 1
            name = LeaseId(self._last_lease)
            for part in lease.all_parts:
                part.entry.leases += 1
                self._by_name[part.tier].touch(part.entry)
            self._leases[name] = lease
            self.hits[lease.tier] += 1
            return name, lease

    def count_shared_tokens(self, prompt: Tokens, count: int, salt: str = "") -> int:
        """Return how many tokens the prompt shares with the most similar of the last `count` prompts, and add it."""
        return self.compare_recent(prompt, count, salt)[0]

    def compare_recent(self, prompt: Tokens, count: int, salt: str) -> tuple[int, Divergence | None]:
        """Do the same; also return where the prompt leaves the most similar of all remembered prompts."""
        shared, recent, diverged = self.recent_prompts.add_and_compare(prompt, count, salt)
        for tier in self.lower_tiers[:1]:  # the one whose list of prompts this is
            tier.submit(NotePrompt(recent, self.memory.wake_waiters))
        return shared, diverged

    def count_restorable_tokens(self, prompt: Tokens, tier: Tier, salt: str = "") -> int:
        """Return how many tokens of a prompt could be restored from one tier alone. Nothing is counted or leased."""
        search = PrefixSearch(self.layout, (self._by_name[tier],))
        path = search.hash_blocks(prompt[:-1], salt=salt)
        with self.lock:
            return search.find_continuable(path, 0, 0).length

    def get_lease(self, name: LeaseId) -> Lease:
        return self._leases[name]

    def release(self, name: LeaseId) -> None:
        with self.lock:
            for part in self._leases.pop(name).all_parts:
                part.entry.leases -= 1
            self.memory_tier.make_room(0)

    # --- keeping ---

    def find_missing_runs(self, tokens: Tokens, kind: Kind = "rows", start: int = 0, salt: str = "") -> list[Run]:
        """Return the runs to save: rows from `start` on that no tier has, of at most `run_bytes` each.

        Blocks of host memory that a lower tier lacks, because its queue was full, are queued again on the way.
        """
        path = self._search.hash_blocks(tokens, kind, salt)
        block_size = self.layout.block_size
        most_blocks = max(1, self.run_bytes // self.layout.compute_size(kind, block_size))
        spans = list[Span]()
        with self.lock:
            for number in range(-(-start // block_size), len(path.keys)):
                key = path.keys[number]
                if self._search.has_block(key):
                    self._retry_write(key)
                elif spans and spans[-1][1] == number and number - spans[-1][0] < most_blocks:
                    spans[-1] = (spans[-1][0], number + 1)
                else:
                    spans.append((number, number + 1))
        return [self._make_run(path, span, kind) for span in spans]

    def _make_run(self, path: SequenceBlocks, blocks: Span, kind: Kind) -> Run:
        first, stop = blocks
        block_size = self.layout.block_size
        block_bytes = block_size * TOKEN_BYTES
        parent = path.keys[first - 1] if first else self.layout.compute_root(kind, path.salt)
        tokens = path.packed[first * block_bytes : stop * block_bytes]
        return Run(first * block_size, parent, path.keys[first:stop], tokens, kind)

    def keep_run(self, run: Run, rows: Buffer) -> bool:
        """Take in one of the missing runs, or a checkpoint. Return False if no tier had room for it."""
        with self.lock:
            entry = self._make_entry(run)
            entry.leases += 1  # so that it is not evicted before it is queued
            if not self.memory_tier.add_run(entry, rows):
                return run.keys[-1] in self.memory_tier.index  # another snapshot has brought it in meanwhile
            is_queued = self._queue_write(entry)
            entry.leases -= 1
            self.memory_tier.make_room(0, run.parent)
            return is_queued or entry.handle in self.memory_tier.rows

    def lacks_checkpoint(self, tokens: Tokens, salt: str = "") -> bool:
        """Say whether no tier has the state behind `tokens` (whole blocks).

        One that host memory holds and a lower tier lacks is queued again.
        """
        path = self._search.hash_blocks(tokens, salt=salt)
        with self.lock:
            key, _ = self._search.get_checkpoint_key(path, len(tokens))
            if not self._search.has_block(key):
                return True
            self._retry_write(key)
            return False

    def keep_checkpoint(self, tokens: Tokens, state: Buffer, salt: str = "") -> bool:
        """Take in the state behind `tokens` (whole blocks). Return False if no tier had room for it."""
        path = self._search.hash_blocks(tokens, salt=salt)
        start = len(tokens) - self.layout.block_size
        key, packed = self._search.get_checkpoint_key(path, len(tokens))
        with self.lock:
            before = next(self._search.iterate_checkpoints(path, start), None)
            since = 0 if before is None else before.stop
            return self.keep_run(Run(start, path.keys[-1], (key,), packed, "state", since), state)

    def promote(self, source: Entry, rows: Buffer) -> None:
        """Keep rows that were read from a lower tier in host memory too, if they find room there."""
        with self.lock:
            entry = self._make_entry(source.run)
            fits = entry.size <= self.memory_tier.index.budget
            if fits and self.memory_tier.make_room(entry.size, source.parent):
                self.memory_tier.add_run(entry, rows)

    def _make_entry(self, run: Run) -> Entry:
        index = self.memory_tier.index
        size = self.layout.compute_size(run.kind, run.length)
        return make_entry(run, index.allocate_handle(), size, index.origin)

    def _queue_write(self, entry: Entry) -> bool:
        """Queue a run for each lower tier that lacks it. Return whether any of them has it or will write it."""
        is_taken = False
        for tier in self.lower_tiers:
            write = (tier.name, entry.handle)
            if entry.keys[-1] in tier.index or write in self._queued_writes:
                is_taken = True
                continue
            rows = self.memory_tier.rows[entry.handle]
            if tier.submit(WriteRun(entry.run, rows, partial(self._finish_write, tier.name, entry))):
                entry.leases += 1
                self._queued_writes.add(write)
                is_taken = True
        return is_taken

    def _finish_write(self, tier: Tier, entry: Entry) -> None:
        """Let go of a run that the tier has written or given up, and wake the threads that wait for memory.

        Called on the tier's thread, when the tier has let go of the run's rows and has counted it off.
        """
        with self.lock:
            self._queued_writes.discard((tier, entry.handle))
            entry.leases -= 1
            self.memory_tier.make_room(0)
        self.memory.wake_waiters()

    def _retry_write(self, key: bytes) -> None:
        """Queue a run again, if host memory still holds it and a lower tier lacks it because its queue was full."""
        entry = self.memory_tier.index.get_holder(key)
        if entry is not None:
            self._queue_write(entry)

    # --- state and figures ---

    @property
    def queued_bytes(self) -> int:
        """Bytes that lower tiers still have to write."""
        return sum(tier.queued_bytes for tier in self.lower_tiers)

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """Threads whose failures /health reports. When one has died, less is found; nothing wrong is served."""
        own = () if self.upkeep is None else (self.upkeep.thread,)
        return (*own, *(thread for tier in self.lower_tiers for thread in tier.threads))

    @property
    def troubles(self) -> Mapping[str, str]:
        """The tiers in which nothing is found now, with the reason."""
        return {tier.name: tier.trouble for tier in self.lower_tiers if tier.trouble}

    def list_block_keys(self) -> Mapping[Tier, tuple[bytes, ...]]:
        """Return the keys of all blocks that each tier has now."""
        with self.lock:
            return {tier.name: tuple(tier.index.iterate_keys()) for tier in self.tiers}

    @property
    def damaged_files(self) -> Mapping[str, int]:
        """The number of files that were found damaged, by kind."""
        found = Counter[str]()
        for tier in self.lower_tiers:
            found.update(tier.damaged_files)
        return dict(found)

    def close(self) -> bool:
        """Write what is queued. Return False where a tier needs too long for it."""
        if self.upkeep is not None:
            self.upkeep.close()
        closed = [tier.close() for tier in self.lower_tiers]  # every one, whatever the others return
        return all(closed)

    def count_restore(self, tier: Tier, size: int, seconds: float) -> None:
        """Add a restore of `size` bytes, most of which came from this tier, to the totals."""
        with self.lock:
            before = self.restores.get(tier, RestoreTotals())
            self.restores[tier] = RestoreTotals(before.count + 1, before.bytes + size, before.seconds + seconds)

    def collect_figures(self) -> StoreFigures:
        """Return the figures of this moment."""
        with self.lock:
            return StoreFigures(
                tiers={tier.name: tier.collect_figures() for tier in self.tiers},
                hits=dict(self.hits),
                misses=dict(self.misses),
                restores=dict(self.restores),
                leases=len(self._leases),
                dropped_rows=self.dropped_rows,
                dropped_draft_rows=self.dropped_draft_rows,
                recent=len(self.recent_prompts),
            )
