"""Knows which runs a shared store has: an index of them, brought up to date by listings. Used by the tier's thread.

A listing has names and sizes only. The tokens that a run stands for are in its first frame, so the beginning of each
new object is read once. What does not describe itself as its name does is remembered as damaged and not read again,
until another object has its name. Nothing is removed from the store: a reader that errs must not destroy what others
use. A server that computes such a run anew writes it over the damaged object.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import zstandard
from attrs import define, field

from adapters.store.block_index import BlockIndex, Entry
from adapters.store.block_keys import compute_root
from adapters.store.file_description import make_entry
from adapters.store.files import seekable
from adapters.store.files.file_format import MAX_HEAD_BYTES, FileHead, Newer, Outdated, Run, parse_head
from adapters.store.files.seekable import Damaged
from adapters.store.shared.garbage_policy import StoredRun
from adapters.store.shared.object_client import ObjectClient, ObjectFacts
from adapters.store.shared.object_names import name_entry, name_run, parse_run_name

FIRST_READ = 16 << 10  # bytes that are read of a new object: the first frame of most
USED_S = 600.0  # a run that was used so lately is kept from collectors


@define(eq=False)
class Catalogue:
    """The runs of one identity in a store. The lock is the store's.

    listed: all objects of the identity, as the last listing shows them. hidden: runs that are about to be removed.
    """

    root: bytes
    index: BlockIndex
    lock: threading.RLock
    counts: Counter[str] = field(factory=Counter[str])
    listed: Mapping[str, ObjectFacts] = field(factory=dict[str, ObjectFacts])
    hidden: frozenset[str] = frozenset()
    _entries: dict[str, Entry] = field(factory=dict[str, Entry])  # by name
    _unlisted: set[str] = field(factory=set[str])  # written here since the last listing began
    _damaged: dict[str, str] = field(factory=dict[str, str])  # name -> version
    _newer: set[str] = field(factory=set[str])  # of those: what a newer server wrote, which is not replaced
    _used_s: dict[str, float] = field(factory=dict[str, float])  # name -> time of the last use

    def is_known(self, run: Run) -> bool:
        """Say whether a run need not be written: it is in the store, or about to be removed."""
        name = name_run(self.root, run)
        with self.lock:
            return name in self._entries or name in self.hidden

    def may_be_replaced(self, name: str) -> bool:
        """Return whether the object of this name is damaged or of an older format."""
        return name in self._damaged and name not in self._newer

    def count_held_bytes(self) -> int:
        """Return the bytes of all objects of the identity, those that cannot be used included."""
        return max(self.index.held_bytes, sum(facts.size for facts in self.listed.values()))

    # --- listings ---

    def begin_listing(self) -> None:
        """Prepare for a listing: it may lack what is written from now on."""
        with self.lock:
            self._unlisted = set()

    def take_listing(self, objects: Sequence[ObjectFacts]) -> list[ObjectFacts]:
        """Forget what is gone. Return the new objects, whose beginnings have to be read."""
        listed = {facts.name: facts for facts in objects if parse_run_name(facts.name) is not None}
        with self.lock:
            for name, entry in [*self._entries.items()]:
                is_gone = name not in listed and name not in self._unlisted
                if is_gone or (name in listed and listed[name].size != entry.size):
                    self._drop(name)
                    self.index.evictions += is_gone
            for name, version in [*self._damaged.items()]:
                if name not in listed or listed[name].version != version:
                    del self._damaged[name]
            self._newer &= self._damaged.keys()
            self.listed = listed
            return [facts for facts in listed.values() if self._is_new(facts.name)]

    def _is_new(self, name: str) -> bool:
        return name not in self._entries and name not in self._damaged and name not in self.hidden

    def _drop(self, name: str) -> None:
        self.index.remove(self._entries.pop(name))

    async def read_head(self, client: ObjectClient, facts: ObjectFacts, block_size: int) -> None:
        """Read the beginning of a new object, and add the run to the index.

        What is damaged, or of another version, is counted. Raises StoreUnreachable.
        """
        if not facts.size:  # a store refuses to read a range of nothing
            self.note_damaged(facts, "damaged")
            return
        try:
            raw = await client.read_range(facts.name, 0, min(facts.size, FIRST_READ))
            if (more := measure_first_frame(raw, facts.size)) > len(raw):
                raw = await client.read_range(facts.name, 0, more)
            entry = self._check_head(facts, raw, block_size)
        except FileNotFoundError:
            return  # removed since it was listed
        except (Damaged, Newer, Outdated) as error:
            self.note_damaged(facts, "damaged" if isinstance(error, Damaged) else "other_format")
            if isinstance(error, Newer):
                with self.lock:
                    self._newer.add(facts.name)
        else:
            self.add(facts.name, entry)

    def _check_head(self, facts: ObjectFacts, raw: memoryview, block_size: int) -> Entry:
        named = parse_run_name(facts.name)
        assert named is not None, "listings are filtered by their names"
        head = parse_first_frame(raw)
        if head.run.keys[-1] != named.key or head.run.start != named.start:
            raise Damaged("the object has another run's name")
        if compute_root(head.identity, head.block_size) != self.root or head.block_size != block_size:
            raise Damaged("the object belongs to another identity")
        with self.lock:
            return make_entry(head.run, self.index.allocate_handle(), facts.size, self.root)

    def add(self, name: str, entry: Entry) -> None:
        """Add a run that is in the store, unless it is about to be removed."""
        with self.lock:
            if name not in self._entries and name not in self.hidden:
                self._entries[name] = entry
                self._damaged.pop(name, None)
                self.index.add_overlapping(entry)

    def add_written(self, name: str, entry: Entry, now_s: float) -> None:
        """Add a run that this server has just written. It counts as used."""
        with self.lock:
            self.note_use(name, now_s)
            self._unlisted.add(name)
            self.add(name, entry)

    def note_damaged(self, facts: ObjectFacts, kind: str) -> None:
        """Remember an object that is not what it should be, and stop finding it."""
        with self.lock:
            self.counts[kind] += 1
            self._damaged[facts.name] = facts.version
            self._newer.discard(facts.name)
            if facts.name in self._entries:
                self._drop(facts.name)

    def note_damaged_entry(self, entry: Entry) -> None:
        """Do the same with a run whose content was read."""
        name = name_entry(self.root, entry)
        with self.lock:
            if self._entries.get(name) is entry:
                facts = self.listed.get(name)
                self.counts["damaged"] += 1
                self._damaged[name] = "" if facts is None else facts.version
                self._drop(name)

    def forget(self, entry: Entry) -> None:
        """Stop finding a run whose object is gone."""
        name = name_entry(self.root, entry)
        with self.lock:
            if self._entries.get(name) is entry:
                self._drop(name)

    # --- use, and what collectors have to know ---

    def touch(self, entry: Entry, now_s: float) -> None:
        """Count a lookup that found this entry. Called with the lock."""
        self.index.touch(entry)
        self.note_use(name_entry(self.root, entry), now_s)

    def note_use(self, name: str, now_s: float) -> None:
        """Note that a run is used now, so that collectors keep it for USED_S."""
        self._used_s[name] = now_s

    def hide(self, hidden: frozenset[str]) -> None:
        """Stop finding these runs, and find others again that were hidden before: the next listing brings them."""
        with self.lock:
            self.hidden = hidden
            for name in hidden.intersection(self._entries):
                self._drop(name)

    def collect_used(self, now_s: float) -> Collection[str]:
        """Return the names of runs that are leased, or were used lately. Called with the lock."""
        self._used_s = {name: used_s for name, used_s in self._used_s.items() if now_s - used_s < USED_S}
        leased = {name for name, entry in self._entries.items() if entry.leases}
        return leased.union(self._used_s)

    def describe_runs(self, now_written: float) -> list[StoredRun]:
        """Return all objects of the identity, as a collector weighs them. now_written: the store's time of now."""
        with self.lock:
            names = {key: name for name, entry in self._entries.items() for key in entry.keys}
            found = list[StoredRun]()
            for name, facts in self.listed.items():
                entry = self._entries.get(name)
                parent = "" if entry is None else names.get(entry.parent, "")
                # A checkpoint lies behind its block, so it counts as later than the run that holds the block.
                start = 0 if entry is None else entry.start + (entry.kind == "state")
                age_s = max(0.0, now_written - facts.written.timestamp())
                found.append(StoredRun(name, facts.size, age_s, "" if parent == name else parent, start))
            return found


def measure_first_frame(raw: memoryview, size: int) -> int:
    """Return the most bytes that the first frame of an object may have. Raises Damaged."""
    content = parse_content_size(raw)
    return min(size, seekable.compute_bound(content))


def parse_content_size(raw: memoryview) -> int:
    """Return the uncompressed bytes of the first frame. Raises Damaged."""
    try:
        content = zstandard.get_frame_parameters(raw).content_size
    except zstandard.ZstdError as error:
        raise Damaged("it does not begin with a frame") from error
    if not 0 < content <= MAX_HEAD_BYTES:
        raise Damaged("the header is too long")
    return int(content)


def parse_first_frame(raw: memoryview) -> FileHead:
    """Return the description in the first frame. Raises Damaged, Newer or Outdated.

    The frame's end is not known, so its checksum is not compared. The keys are: they are digests of what it says.
    """
    content = bytearray(parse_content_size(raw))
    seekable.decompress_beginning(raw, memoryview(content))
    return parse_head(content)
