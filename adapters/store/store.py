"""Host memory and disk as one store: the longest kept prefix over both, leased until its rows are restored."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal

from attrs import Factory, asdict, define, evolve, field, frozen

from adapters.store.blocks import WIDTH, chain, checkpoint_key, pack
from adapters.store.described import entry_of
from adapters.store.disk import Disk, Note, Write
from adapters.store.format import Kind, Layout, Run
from adapters.store.index import Entry, Index
from adapters.store.memory import Buffer, Memory
from adapters.store.recent import Recents
from adapters.watched import Watched
from effects.ids import LeaseId, Span, Tokens

log = logging.getLogger("rekindle.store")

RUN_BYTES = 4 << 20  # of rows that are saved together: one file, one entry
AHEAD = 6  # runs that are on their way at once: one reader alone leaves a disk idle between its reads
Place = Literal["host", "disk"]


@frozen(eq=False)
class Part:
    """Rows `[start, stop)` of a sequence, in one entry. A checkpoint's are those of its block."""

    place: Place
    entry: Entry
    start: int
    stop: int


@frozen(eq=False)
class Lease:
    """Its entries stay until it is released.

    parts: the target's rows. draft: those of the draft, which end where the target's end and may begin later. state:
    the checkpoint at `length`, for a target that needs one.
    """

    parts: tuple[Part, ...]
    length: int  # tokens
    draft: tuple[Part, ...] = ()
    state: Part | None = None

    @property
    def place(self) -> Place:
        """Where most of it is."""
        host = sum(part.stop - part.start for part in self.parts if part.place == "host")
        return "host" if 2 * host >= self.length else "disk"

    @property
    def all(self) -> tuple[Part, ...]:
        return (*self.parts, *self.draft, *(() if self.state is None else (self.state,)))


@frozen
class Miss:
    """Nothing beyond what was known already. reason: machine-readable. length: tokens that are kept all the same."""

    reason: str
    length: int = 0


@frozen
class Restored:
    """All restores so far."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@frozen(eq=False)
class Path:
    """A sequence's whole blocks: their keys and their packed tokens."""

    keys: tuple[bytes, ...]
    packed: bytes


def set_already() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def recents_of(disk: Disk | None) -> Recents:
    """Those that survive a restart, where there are any."""
    return Recents() if disk is None else disk.recents


@define(eq=False)
class Store:
    """Thread-safe: found on the event loop, saved on the device lane, written by the disk's thread.

    host: its entries' tensors are in `rows`. While a run waits to be written it is leased, so a budget of 0 keeps
    exactly those. disk: None where nothing may be written.
    """

    layout: Layout
    host: Index
    disk: Disk | None
    lock: threading.RLock
    memory: Memory = field(factory=Memory)
    run_bytes: int = RUN_BYTES
    recents: Recents = field(default=Factory(lambda self: recents_of(self.disk), takes_self=True))
    rows: dict[int, Buffer] = field(factory=dict[int, Buffer])
    hits: Counter[str] = field(factory=Counter[str])
    misses: Counter[str] = field(factory=Counter[str])
    restores: dict[str, Restored] = field(factory=dict[str, Restored])  # by place
    ready: threading.Event = field(factory=set_already)  # the memory has been prepared
    _leases: dict[LeaseId, Lease] = field(factory=dict[LeaseId, Lease])
    _last: int = 0
    _waiting: set[int] = field(factory=set[int])  # handles of host entries that are to be written

    def path(self, tokens: Tokens, kind: Kind = "rows") -> Path:
        block_size = self.layout.block_size
        packed = pack(tokens[: len(tokens) // block_size * block_size])
        return Path(chain(self.layout.root(kind), packed, block_size), packed)

    # --- looking up ---

    def find(self, prompt: Tokens, beyond: int) -> tuple[LeaseId, Lease] | Miss:
        """The longest kept prefix that can be continued, leased, if it is longer than `beyond`; otherwise why not."""
        path = self.path(prompt[:-1])
        with self.lock:
            lease = self._continued(path)
            if lease.length <= beyond:
                reason = self._reason(path, lease)
                self.misses[reason.partition(":")[0]] += 1
                return Miss(reason, lease.length)
            self._last += 1
            for part in lease.all:
                part.entry.leases += 1
                self._touch(part)
            self._leases[LeaseId(self._last)] = lease
            self.hits[lease.place] += 1
            return LeaseId(self._last), lease

    def joins(self, prompt: Tokens, window: int) -> int:
        """What the prompt shares with the likest of the last `window` prompts, of which it is one from now on."""
        shared, recent = self.recents.joins(prompt, window)
        if self.disk is not None:
            self.disk.submit(Note(recent))
        return shared

    def lease(self, name: LeaseId) -> Lease:
        return self._leases[name]

    async def read(self, part: Part, workers: Executor, then: Callable[[Buffer], object]) -> Buffer:
        """The whole entry's tensors, end to end. Of a leased part; see `Disk.read`, which calls `then`."""
        if part.place == "host" or self.disk is None:
            return self.rows[part.entry.handle]
        return await self.disk.read(part.entry, self.memory, workers, then)

    def release(self, name: LeaseId) -> None:
        with self.lock:
            for part in self._leases.pop(name).all:
                part.entry.leases -= 1
            self._trim_host(0)

    def _continued(self, path: Path) -> Lease:
        """Not leased yet. Of no tokens, where nothing is kept, or where a checkpoint is missing."""
        parts, state = self._parts(path), None
        length = parts[-1].stop if parts else 0
        if self.layout.state:
            state = self._checkpoint(path, length)
            length = 0 if state is None else state.stop
            parts = [evolve(part, stop=min(part.stop, length)) for part in parts if part.start < length]
        return Lease(tuple(parts), length, self._draft(path, length), state)

    def _checkpoint(self, path: Path, length: int) -> Part | None:
        """The last one within the first `length` tokens."""
        for stop in range(length, 0, -self.layout.block_size):
            place, entry = self._where(*self._state_key(path, stop))
            if entry is not None:
                return Part(place, entry, stop - self.layout.block_size, stop)
        return None

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
        keys = chain(self.layout.root("draft"), packed, self.layout.block_size)
        for number in reversed(range(len(keys))):
            part = self._part(Path(keys, packed), number)
            if part is None:
                break
            if parts and parts[-1].entry is part.entry:
                part = evolve(parts.pop(), start=part.start)
            parts.append(part)
        return tuple(reversed(parts))

    def _parts(self, path: Path) -> list[Part]:
        """From the first block on, until one is missing; host memory is asked first."""
        parts = list[Part]()
        for number in range(len(path.keys)):
            part = self._part(path, number)
            if part is None:
                break
            if parts and parts[-1].entry is part.entry:
                part = evolve(parts.pop(), stop=part.stop)
            parts.append(part)
        return parts

    def _part(self, path: Path, number: int) -> Part | None:
        """One block."""
        start, stop = number * self.layout.block_size, (number + 1) * self.layout.block_size
        place, entry = self._where(path.keys[number], path.packed[start * WIDTH : stop * WIDTH])
        return None if entry is None else Part(place, entry, start, stop)

    def _where(self, key: bytes, tokens: bytes) -> tuple[Place, Entry | None]:
        entry = self.host.get(key, tokens)
        if entry is not None or self.disk is None:
            return "host", entry
        return "disk", self.disk.index.get(key, tokens)

    def _touch(self, part: Part) -> None:
        if part.place == "host":
            self.host.touch(part.entry)
        elif self.disk is not None:
            self.disk.touch(part.entry)

    def _reason(self, path: Path, lease: Lease) -> str:
        if not path.keys:
            return "too_short"
        if not self.host.entries and (self.disk is None or not self.disk.index.entries):
            return "empty_store"
        rows = self._parts(path) if self.layout.state else lease.parts
        kept = rows[-1].stop if rows else 0
        return f"no_checkpoint:{lease.length}" if kept > lease.length else f"diverged_at:{kept}"

    # --- keeping ---

    def gaps(self, tokens: Tokens, kind: Kind = "rows", start: int = 0) -> list[Run]:
        """Which rows of a sequence, from `start` on, no tier has, in runs of a size to be saved; those that only wait
        to be asked for again, because the queue was full, are queued on the way.
        """
        path, block_size = self.path(tokens, kind), self.layout.block_size
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
        parent = path.keys[first - 1] if first else self.layout.root(kind)
        return Run(first * block_size, parent, path.keys[first:stop], path.packed[first * step : stop * step], kind)

    def keep(self, run: Run, rows: Buffer) -> bool:
        """Take in one of the `gaps`, or a checkpoint. False if there was room nowhere."""
        with self.lock:
            entry = self._entry(run)
            entry.leases += 1
            if not self.host.add(entry):
                return run.keys[-1] in self.host  # somebody else brought it in meanwhile
            self.rows[entry.handle] = rows
            queued = self._write(entry)
            entry.leases -= 1
            self._trim_host(0, run.parent)
            return queued or entry.handle in self.rows

    def lacks_checkpoint(self, tokens: Tokens) -> bool:
        """Has no tier the state behind `tokens` (whole blocks)? One that only waits to be written is queued."""
        path = self.path(tokens)
        with self.lock:
            key, _ = self._state_key(path, len(tokens))
            if not self._has(key):
                return True
            self._write_again(key)
            return False

    def keep_checkpoint(self, tokens: Tokens, state: Buffer) -> bool:
        """Take in the state behind `tokens` (whole blocks). False if there was room nowhere."""
        path, stop = self.path(tokens), len(tokens)
        key, packed = self._state_key(path, stop)
        with self.lock:
            before = self._checkpoint(path, stop - self.layout.block_size)
            since = 0 if before is None else before.stop
            run = Run(stop - self.layout.block_size, path.keys[-1], (key,), packed, "state", since)
            return self.keep(run, state)

    def promote(self, source: Entry, rows: Buffer) -> None:
        """Rows that came from disk stay in host memory too, if they find room."""
        with self.lock:
            entry = self._entry(source.run)
            if entry.size > self.host.budget:
                return
            self._trim_host(entry.size, source.parent)
            if self.host.fits(entry.size) and self.host.add(entry):
                self.rows[entry.handle] = rows

    def _entry(self, run: Run) -> Entry:
        return entry_of(run, self.host.next_handle(), self.layout.size(run.kind, run.length), self.host.origin)

    def _has(self, key: bytes) -> bool:
        return key in self.host or (self.disk is not None and key in self.disk.index)

    def _write(self, entry: Entry) -> bool:
        if self.disk is None:
            return False
        if not self.disk.submit(Write(entry.run, self.rows[entry.handle], partial(self._written, entry))):
            return False
        entry.leases += 1
        self._waiting.add(entry.handle)
        return True

    def _written(self, entry: Entry) -> None:
        with self.lock:
            self._waiting.discard(entry.handle)
            entry.leases -= 1
            self._trim_host(0)

    def _write_again(self, key: bytes) -> None:
        """If the queue was full when it was kept."""
        entry = self.host.holding(key)
        if self.disk is None or entry is None or entry.handle in self._waiting or entry.keys[-1] in self.disk.index:
            return
        self._write(entry)

    def _trim_host(self, size: int, parent: bytes = b"") -> None:
        for entry in self.host.make_room(size, parent):
            del self.rows[entry.handle]

    # --- the rest ---

    @property
    def threads(self) -> tuple[Watched, ...]:
        """Whose troubles /health tells. What they do not do any more costs hits only."""
        return () if self.disk is None else (self.disk.writer,)

    @property
    def damaged(self) -> Mapping[str, int]:
        """Files that were found damaged, by kind."""
        return {} if self.disk is None else dict(self.disk.damaged)

    def close(self) -> bool:
        return self.disk is None or self.disk.close()

    def restored(self, place: Place, size: int, seconds: float) -> None:
        """A restore brought so many bytes."""
        with self.lock:
            before = self.restores.get(place, Restored())
            self.restores[place] = Restored(before.count + 1, before.bytes + size, before.seconds + seconds)

    def figures(self) -> Mapping[str, Any]:
        """What /props shows as `full_cache`; at its top what is on disk, where there is a disk tier."""
        with self.lock:
            nothing = {"bytes": 0, "budget": 0, "entries": 0, "evictions": 0, "quarantined": 0}
            host = {"bytes": self.host.held, "budget": self.host.budget, "entries": len(self.host)}
            return {
                "disk_policy": "off" if self.disk is None else "full",
                **(nothing if self.disk is None else self.disk.figures()),
                "host": {**host, "evictions": self.host.evictions},
                "hits": dict(self.hits),
                "misses": dict(self.misses),
                "restores": {place: asdict(restored) for place, restored in self.restores.items()},
                "leases": len(self._leases),
                "recent": len(self.recents),  # prompts that scope `auto` compares with
            }
