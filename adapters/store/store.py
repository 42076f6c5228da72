"""Host memory and disk as one store: the longest kept prefix over both, leased until its rows are restored."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from attrs import define, field, frozen
from torch import Tensor

from adapters.store.blocks import WIDTH, chain, pack, root
from adapters.store.codec import Mean
from adapters.store.disk import Disk, Write
from adapters.store.format import Layout, Run
from adapters.store.index import Entry, Index
from effects.ids import LeaseId, Span, Tokens

log = logging.getLogger("rekindle.store")

RUN_BYTES = 8 << 20  # of rows that are saved together: one file, one entry
Place = Literal["host", "disk"]


@frozen(eq=False)
class Part:
    """Rows `[start, stop)` of a sequence, in one entry."""

    place: Place
    entry: Entry
    start: int
    stop: int


@frozen(eq=False)
class Lease:
    """Its entries stay until it is released."""

    parts: tuple[Part, ...]
    length: int  # tokens

    @property
    def place(self) -> Place:
        """Where most of it is."""
        host = sum(part.stop - part.start for part in self.parts if part.place == "host")
        return "host" if 2 * host >= self.length else "disk"


@frozen(eq=False)
class Path:
    """A sequence's whole blocks: their keys and their packed tokens."""

    keys: tuple[bytes, ...]
    packed: bytes


@define(eq=False)
class Store:
    """Thread-safe: found on the event loop, saved on the device lane, written by the disk's thread.

    host: its entries' rows are in `rows`. While a run waits to be written it is leased, so a budget of 0 keeps exactly
    those. disk: None where nothing may be written.
    """

    layout: Layout
    host: Index
    disk: Disk | None
    lock: threading.RLock
    min_tokens: int = 0  # sequences shorter than this are not kept
    rows: dict[int, Mapping[str, Tensor]] = field(factory=dict[int, "Mapping[str, Tensor]"])
    hits: Counter[str] = field(factory=Counter[str])
    misses: Counter[str] = field(factory=Counter[str])
    load_ns: dict[Place, Mean] = field(factory=lambda: {"host": Mean(), "disk": Mean()})  # a token
    _leases: dict[LeaseId, Lease] = field(factory=dict[LeaseId, Lease])
    _last: int = 0
    _waiting: set[int] = field(factory=set[int])  # handles of host entries that are to be written

    def path(self, tokens: Tokens) -> Path:
        grain = self.layout.grain
        packed = pack(tokens[: len(tokens) // grain * grain])
        return Path(chain(root(self.layout.identity, grain), packed, grain), packed)

    # --- looking up ---

    def find(self, prompt: Tokens, beyond: int) -> tuple[LeaseId, Lease] | str:
        """The longest kept prefix, leased, if it is longer than `beyond`; otherwise why not."""
        path = self.path(prompt[:-1])
        with self.lock:
            parts = self._parts(path)
            length = parts[-1].stop if parts else 0
            if length <= beyond:
                reason = self._reason(path, length)
                self.misses[reason.partition(":")[0]] += 1
                return reason
            self._last += 1
            lease = Lease(tuple(parts), length)
            for part in parts:
                part.entry.leases += 1
                self._touch(part)
            self._leases[LeaseId(self._last)] = lease
            self.hits[lease.place] += 1
            return LeaseId(self._last), lease

    def lease(self, name: LeaseId) -> Lease:
        return self._leases[name]

    def release(self, name: LeaseId) -> None:
        with self.lock:
            for part in self._leases.pop(name).parts:
                part.entry.leases -= 1
            self._trim_host(0)

    def _parts(self, path: Path) -> list[Part]:
        """From the first block on, until one is missing; host memory is asked first."""
        parts, grain = list[Part](), self.layout.grain
        for number, key in enumerate(path.keys):
            tokens = path.packed[number * grain * WIDTH : (number + 1) * grain * WIDTH]
            place, entry = self._where(key, tokens)
            if entry is None:
                break
            start, stop = number * grain, (number + 1) * grain
            if parts and parts[-1].entry is entry:
                start = parts.pop().start
            parts.append(Part(place, entry, start, stop))
        return parts

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

    def _reason(self, path: Path, length: int) -> str:
        if not path.keys:
            return "too_short"
        if not self.host.entries and (self.disk is None or not self.disk.index.entries):
            return "empty_store"
        return f"diverged_at:{length}"

    # --- keeping ---

    def gaps(self, tokens: Tokens) -> list[Span]:
        """Which rows of a sequence no tier has, in runs of a size to be saved; those that only wait to be asked
        for again, because the queue was full, are queued on the way.
        """
        if len(tokens) < self.min_tokens:
            return []
        path, grain = self.path(tokens), self.layout.grain
        most = max(1, RUN_BYTES // (grain * self.layout.token_bytes))
        spans = list[Span]()
        with self.lock:
            self._write_again(path)
            for number, key in enumerate(path.keys):
                start = number * grain
                if key in self.host or (self.disk is not None and key in self.disk.index):
                    continue
                if spans and spans[-1][1] == start and start - spans[-1][0] < most * grain:
                    start = spans.pop()[0]
                spans.append((start, (number + 1) * grain))
        return spans

    def keep(self, tokens: Tokens, start: int, rows: Mapping[str, Tensor]) -> bool:
        """Take in the rows from `start` to the end of `tokens`. False if there was room nowhere."""
        path, block = self.path(tokens), start // self.layout.grain
        parent = path.keys[block - 1] if block else root(self.layout.identity, self.layout.grain)
        run = Run(start, parent, path.keys[block:], path.packed[start * WIDTH :])
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

    def promote(self, source: Entry, rows: Mapping[str, Tensor]) -> None:
        """Rows that came from disk stay in host memory too, if they find room."""
        run = Run(source.start, source.parent, source.keys, source.tokens)
        with self.lock:
            entry = self._entry(run)
            if entry.size > self.host.budget:
                return
            self._trim_host(entry.size, run.parent)
            if self.host.fits(entry.size) and self.host.add(entry):
                self.rows[entry.handle] = rows

    def _entry(self, run: Run) -> Entry:
        handle, size = self.host.next_handle(), run.length * self.layout.token_bytes
        return Entry(handle, run.start, run.parent, run.keys, run.tokens, size, self.host.origin, used=handle)

    def _write(self, entry: Entry) -> bool:
        if self.disk is None:
            return False
        run = Run(entry.start, entry.parent, entry.keys, entry.tokens)
        if not self.disk.submit(Write(run, self.rows[entry.handle], entry.size, partial(self._written, entry))):
            return False
        entry.leases += 1
        self._waiting.add(entry.handle)
        return True

    def _written(self, entry: Entry) -> None:
        with self.lock:
            self._waiting.discard(entry.handle)
            entry.leases -= 1
            self._trim_host(0)

    def _write_again(self, path: Path) -> None:
        if self.disk is None:
            return
        for part in self._parts(path):
            entry = part.entry
            if part.place == "host" and entry.handle not in self._waiting and entry.keys[-1] not in self.disk.index:
                self._write(entry)

    def _trim_host(self, size: int, parent: bytes = b"") -> None:
        for entry in self.host.make_room(size, parent):
            del self.rows[entry.handle]

    # --- the rest ---

    def close(self) -> bool:
        return self.disk is None or self.disk.close()

    def figures(self) -> Mapping[str, Any]:
        """What /props shows as `full_cache`."""
        with self.lock:
            disk = {} if self.disk is None else dict(self.disk.figures())
            host = {"bytes": self.host.held, "budget": self.host.budget, "entries": len(self.host)}
            return {
                "disk_policy": "off" if self.disk is None else "full",
                **disk,
                "host": {**host, "evictions": self.host.evictions},
                "hits": dict(self.hits),
                "misses": dict(self.misses),
                "leases": len(self._leases),
            }
