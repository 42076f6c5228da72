"""Host memory and disk as one store: the longest kept prefix over both, leased until its rows are restored."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from attrs import asdict, define, evolve, field, frozen

from adapters.store.block_index import Entry
from adapters.store.block_keys import WIDTH, Path, chain, checkpoint_key, pack
from adapters.store.file_description import entry_of
from adapters.store.files.file_format import Kind, Layout, Run
from adapters.store.host_tier import HostTier
from adapters.store.lease import Lease, Miss, Part
from adapters.store.nearest_sequence import nearest
from adapters.store.recent_prompts import Recents
from adapters.store.slab_memory import Buffer, Memory
from adapters.store.tier import LowerTier, Note, StateCheckpoint, Tier, Write
from adapters.watched_thread import WatchedThread
from effects.ids import LeaseId, Span, Tokens
from effects.ports import Divergence

D = TypeVar("D", bound=LowerTier)
log = logging.getLogger("rekindle.store")

RUN_BYTES = 4 << 20  # of rows that are saved together: one file, one entry
MOST_STATES = 4  # checkpoints of one lease: more of them differ too little for anybody to choose between
AHEAD = 6  # runs that are on their way at once: one reader alone leaves a disk idle between its reads


@frozen
class Restored:
    """All restores so far."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


def set_already() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@define(eq=False)
class Store(Generic[D]):
    """Thread-safe: found on the event loop, saved on the device lane, written by the lower tier's thread.

    disk: None where nothing may be written. recents: those that survive a restart, where any do.
    """

    layout: Layout
    host: HostTier
    disk: D | None
    lock: threading.RLock
    run_bytes: int = RUN_BYTES
    recents: Recents = field(init=False)
    tiers: Mapping[StateCheckpoint, Tier] = field(init=False)  # the quickest first
    hits: Counter[str] = field(factory=Counter[str])
    misses: Counter[str] = field(factory=Counter[str])
    restores: dict[str, Restored] = field(factory=dict[str, Restored])  # by place
    ready: threading.Event = field(factory=set_already)  # the memory has been prepared
    dropped_rows: int = 0  # of snapshots, that there was no memory or no time for
    _leases: dict[LeaseId, Lease] = field(factory=dict[LeaseId, Lease])
    _last: int = 0
    _waiting: set[int] = field(factory=set[int])  # handles of host entries that are to be written

    def __attrs_post_init__(self) -> None:
        self.recents = Recents() if self.disk is None else self.disk.recents
        self.tiers = {"host": self.host} if self.disk is None else {"host": self.host, "disk": self.disk}

    @property
    def memory(self) -> Memory:
        """For what is taken in, or read."""
        return self.host.memory

    def path(self, tokens: Tokens, kind: Kind = "rows", salt: str = "") -> Path:
        block_size = self.layout.block_size
        packed = pack(tokens[: len(tokens) // block_size * block_size])
        return Path(chain(self.layout.root(kind, salt), packed, block_size), packed, salt)

    # --- looking up ---

    def find(self, prompt: Tokens, beyond: int, rows: int = 0, salt: str = "") -> tuple[LeaseId, Lease] | Miss:
        """The longest kept prefix that can be continued, leased, if it is longer than `beyond`; otherwise why not.

        rows: that are there, of a target with positional state, so that they need not be kept.
        """
        path = self.path(prompt[:-1], salt=salt)
        with self.lock:
            lease = self._continued(path, beyond, rows)
            lease = evolve(lease, diverged=self._diverged(path, lease))
            if lease.length <= beyond:
                reason = self._reason(path, lease)
                self.misses[reason.partition(":")[0]] += 1
                return Miss(reason, lease.length, lease.diverged)
            self._last += 1
            for part in lease.all:
                part.entry.leases += 1
                self.tiers[part.place].touch(part.entry)
            self._leases[LeaseId(self._last)] = lease
            self.hits[lease.place] += 1
            return LeaseId(self._last), lease

    def joins(self, prompt: Tokens, window: int, salt: str = "") -> int:
        """What the prompt shares with the likest of the last `window` prompts, of which it is one from now on."""
        return self.compare(prompt, window, salt)[0]

    def compare(self, prompt: Tokens, window: int, salt: str) -> tuple[int, Divergence | None]:
        """The same, and where it leaves the likest of all that are remembered."""
        shared, recent, diverged = self.recents.joins(prompt, window, salt)
        if self.disk is not None:
            self.disk.submit(Note(recent))
        return shared, diverged

    def lease(self, name: LeaseId) -> Lease:
        return self._leases[name]

    def release(self, name: LeaseId) -> None:
        with self.lock:
            for part in self._leases.pop(name).all:
                part.entry.leases -= 1
            self.host.make_room(0)

    def _continued(self, path: Path, beyond: int, rows: int) -> Lease:
        """Not leased yet. Of no tokens, where nothing is kept, or where a checkpoint is missing."""
        if not self.layout.state:
            parts = self._parts(path)
            length = parts[-1].stop if parts else 0
            return Lease(tuple(parts), length, self._draft(path, length))
        parts = self._parts(path, rows // self.layout.block_size)
        found = list[Part]()
        for state in self._checkpoints(path, parts[-1].stop if parts else rows):
            found.append(state)
            if state.stop <= beyond or len(found) == MOST_STATES:
                break
        length = found[0].stop if found else 0
        parts = [evolve(part, stop=min(part.stop, length)) for part in parts if part.start < length]
        states = tuple(state for state in reversed(found) if state.stop > beyond)
        return Lease(tuple(parts), length, self._draft(path, length), states)

    def _checkpoints(self, path: Path, length: int) -> Iterator[Part]:
        """Those within the first `length` tokens, the last one first."""
        for stop in range(length, 0, -self.layout.block_size):
            if (found := self._where(*self._state_key(path, stop))) is not None:
                yield Part(*found, stop - self.layout.block_size, stop)

    def _state_key(self, path: Path, stop: int) -> tuple[bytes, bytes]:
        """(key, packed tokens of the block) of the checkpoint at `stop`."""
        block_size = self.layout.block_size
        return checkpoint_key(path.keys[stop // block_size - 1]), path.packed[
            (stop - block_size) * WIDTH : stop * WIDTH
        ]

    def _draft(self, path: Path, length: int) -> tuple[Part, ...]:
        """The draft's rows up to `length`, without a gap before it."""
        if self.layout.draft is None or not length:
            return ()
        packed, parts = path.packed[: length * WIDTH], list[Part]()
        keys = chain(self.layout.root("draft", path.salt), packed, self.layout.block_size)
        for number in reversed(range(len(keys))):
            part = self._part(Path(keys, packed, path.salt), number)
            if part is None:
                break
            if parts and parts[-1].entry is part.entry:
                part = Part(part.place, part.entry, part.start, parts.pop().stop)
            parts.append(part)
        return tuple(reversed(parts))

    def _parts(self, path: Path, first: int = 0) -> list[Part]:
        """From this block on, until one is missing; host memory is asked first."""
        parts = list[Part]()
        for number in range(first, len(path.keys)):
            part = self._part(path, number)
            if part is None:
                break
            if parts and parts[-1].entry is part.entry:
                part = Part(part.place, part.entry, parts.pop().start, part.stop)
            parts.append(part)
        return parts

    def _part(self, path: Path, number: int) -> Part | None:
        """One block."""
        start, stop = number * self.layout.block_size, (number + 1) * self.layout.block_size
        found = self._where(path.keys[number], path.packed[start * WIDTH : stop * WIDTH])
        return None if found is None else Part(*found, start, stop)

    def _where(self, key: bytes, tokens: bytes) -> tuple[StateCheckpoint, Entry] | None:
        for place, tier in self.tiers.items():
            if (entry := tier.index.get(key, tokens)) is not None:
                return place, entry
        return None

    def _reason(self, path: Path, lease: Lease) -> str:
        if not path.keys:
            return "too_short"
        if not any(tier.index.entries for tier in self.tiers.values()):
            return "empty_store"
        kept = self._kept(path, lease)
        return f"no_checkpoint:{lease.length}" if kept > lease.length else f"diverged_at:{kept}"

    def _diverged(self, path: Path, lease: Lease) -> Divergence | None:
        """From what is kept; None where all whole blocks are there."""
        if lease.length * WIDTH >= len(path.packed) or (kept := self._kept(path, lease)) * WIDTH >= len(path.packed):
            return None
        key = path.keys[kept // self.layout.block_size - 1] if kept else self.layout.root("rows", path.salt)
        indices = {place: tier.index for place, tier in self.tiers.items()}
        return nearest(indices, key, kept, path.packed[kept * WIDTH :])

    def _kept(self, path: Path, lease: Lease) -> int:
        """Tokens whose rows are there, with a state behind them or without."""
        rows = self._parts(path) if self.layout.state else lease.parts
        return rows[-1].stop if rows else 0

    # --- keeping ---

    def gaps(self, tokens: Tokens, kind: Kind = "rows", start: int = 0, salt: str = "") -> list[Run]:
        """Which rows of a sequence, from `start` on, no tier has, in runs of a size to be saved; those that only wait
        to be asked for again, because the queue was full, are queued on the way.
        """
        path, block_size = self.path(tokens, kind, salt), self.layout.block_size
        most = max(1, self.run_bytes // self.layout.size(kind, block_size))
        spans = list[Span]()
        with self.lock:
            for number in range(-(-start // block_size), len(path.keys)):
                key = path.keys[number]
                if self._has(key):
                    self._write_again(key)
                elif spans and spans[-1][1] == number and number - spans[-1][0] < most:
                    spans[-1] = (spans[-1][0], number + 1)
                else:
                    spans.append((number, number + 1))
        return [self._run(path, span, kind) for span in spans]

    def _run(self, path: Path, blocks: Span, kind: Kind) -> Run:
        first, stop = blocks
        block_size, step = self.layout.block_size, self.layout.block_size * WIDTH
        parent = path.keys[first - 1] if first else self.layout.root(kind, path.salt)
        return Run(first * block_size, parent, path.keys[first:stop], path.packed[first * step : stop * step], kind)

    def keep(self, run: Run, rows: Buffer) -> bool:
        """Take in one of the `gaps`, or a checkpoint. False if there was room nowhere."""
        with self.lock:
            entry = self._entry(run)
            entry.leases += 1
            if not self.host.add(entry, rows):
                return run.keys[-1] in self.host.index  # somebody else brought it in meanwhile
            queued = self._write(entry)
            entry.leases -= 1
            self.host.make_room(0, run.parent)
            return queued or entry.handle in self.host.rows

    def lacks_checkpoint(self, tokens: Tokens, salt: str = "") -> bool:
        """Has no tier the state behind `tokens` (whole blocks)? One that only waits to be written is queued."""
        path = self.path(tokens, salt=salt)
        with self.lock:
            key, _ = self._state_key(path, len(tokens))
            if not self._has(key):
                return True
            self._write_again(key)
            return False

    def keep_checkpoint(self, tokens: Tokens, state: Buffer, salt: str = "") -> bool:
        """Take in the state behind `tokens` (whole blocks). False if there was room nowhere."""
        path, stop = self.path(tokens, salt=salt), len(tokens)
        key, packed = self._state_key(path, stop)
        with self.lock:
            before = next(self._checkpoints(path, stop - self.layout.block_size), None)
            since = 0 if before is None else before.stop
            run = Run(stop - self.layout.block_size, path.keys[-1], (key,), packed, "state", since)
            return self.keep(run, state)

    def promote(self, source: Entry, rows: Buffer) -> None:
        """Rows that came from disk stay in host memory too, if they find room."""
        with self.lock:
            entry = self._entry(source.run)
            if entry.size <= self.host.index.budget and self.host.make_room(entry.size, source.parent):
                self.host.add(entry, rows)

    def _entry(self, run: Run) -> Entry:
        size, index = self.layout.size(run.kind, run.length), self.host.index
        return entry_of(run, index.next_handle(), size, index.origin)

    def _has(self, key: bytes) -> bool:
        return any(key in tier.index for tier in self.tiers.values())

    def _write(self, entry: Entry) -> bool:
        if self.disk is None:
            return False
        if not self.disk.submit(Write(entry.run, self.host.rows[entry.handle], partial(self._written, entry))):
            return False
        entry.leases += 1
        self._waiting.add(entry.handle)
        return True

    def _written(self, entry: Entry) -> None:
        with self.lock:
            self._waiting.discard(entry.handle)
            entry.leases -= 1
            self.host.make_room(0)

    def _write_again(self, key: bytes) -> None:
        """If the queue was full when it was kept."""
        entry = self.host.index.holding(key)
        if self.disk is None or entry is None or entry.handle in self._waiting or entry.keys[-1] in self.disk.index:
            return
        self._write(entry)

    # --- the rest ---

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """Whose troubles /health tells. What they do not do any more costs hits only."""
        return () if self.disk is None else self.disk.threads

    @property
    def damaged(self) -> Mapping[str, int]:
        """Files that were found damaged, by kind."""
        return {} if self.disk is None else dict(self.disk.damaged)

    def close(self) -> bool:
        return self.disk is None or self.disk.close()

    def restored(self, place: StateCheckpoint, size: int, seconds: float) -> None:
        """A restore brought so many bytes."""
        with self.lock:
            before = self.restores.get(place, Restored())
            self.restores[place] = Restored(before.count + 1, before.bytes + size, before.seconds + seconds)

    def figures(self) -> Mapping[str, Any]:
        """What /props shows as `full_cache`; at its top what is on disk, where there is a disk tier."""
        with self.lock:
            nothing = {"bytes": 0, "budget": 0, "entries": 0, "evictions": 0, "quarantined": 0}
            return {
                "disk_policy": "off" if self.disk is None else "full",
                **(nothing if self.disk is None else self.disk.figures()),
                "host": self.host.figures(),
                "hits": dict(self.hits),
                "misses": dict(self.misses),
                "restores": {place: asdict(restored) for place, restored in self.restores.items()},
                "leases": len(self._leases),
                "dropped_rows": self.dropped_rows,
                "recent": len(self.recents),  # prompts that scope `auto` compares with
            }
