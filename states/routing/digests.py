"""Digests: messages in which a replica says what it holds, and the rules by which a router believes them.

Problem. A router has to know which blocks each replica holds. Telling all of them every time is too much, and messages
may be lost, repeated or overtaken by others.

Idea. A replica numbers its digests. A digest is either whole, or it says what has changed since the one before it. A
router applies a change only if it has applied the digest before it. After a gap it keeps what it knew, which is stale,
and waits for a whole digest. `DigestWriter.list_recent` has the last digests together, so that a router that misses a
message or two needs no whole one.

Invariant: when the number that a reader has applied is the last one that the writer has used, the reader knows exactly
what the writer was given at that time (`tests/states/routing/test_digests.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field, frozen

from effects.ids import Tier
from states.rates import Rates

MOST_KEYS = 1 << 14  # keys that a replica tells of each tier: a million tokens in blocks of 64, and 256 KiB
RECENT_DIGESTS = 8  # digests in one message, so that a reader may miss seven messages in a row
MOST_RECENT_KEYS = 1 << 13  # keys in all of those; earlier digests are left out beyond it
WHOLE_EVERY = 8  # digests from one whole one to the next


@frozen
class LoadReport:
    """The load of a replica, and how long things take there. Times are in nanoseconds; 0: unknown."""

    wait_ns: int = 0  # until a request that came now would begin to be computed
    slots: int = 1  # sequences that it serves at once
    answer_ns: int = 0  # from the first token of an answer to its last, on average
    rates: Rates = field(factory=Rates)


@frozen
class TierChange:
    """The blocks that a tier has got and lost since the digest before. In a whole digest, all that it has."""

    tier: Tier
    added: frozenset[bytes]
    removed: frozenset[bytes] = frozenset()


@frozen
class ReplicaDigest:
    """One message of a replica. epoch: of its process, greater after each restart. number: from 1 in each epoch."""

    epoch: int
    number: int
    whole: bool
    changes: tuple[TierChange, ...]
    load: LoadReport = field(factory=LoadReport)

    @property
    def key_count(self) -> int:
        """The number of keys that the digest carries."""
        return sum(len(change.added) + len(change.removed) for change in self.changes)


@define
class DigestWriter:
    """Writes the digests of one replica.

    The caller notes each change (`note_change`), or all that the replica holds (`set_held`), and then calls `write`.

    whole_every: every so many digests, one is whole. most_keys: the most keys of one tier that a digest names.
    """

    epoch: int
    whole_every: int = WHOLE_EVERY
    most_keys: int = MOST_KEYS
    number: int = 0
    _held: dict[Tier, set[bytes]] = field(factory=dict[Tier, "set[bytes]"])
    _added: dict[Tier, set[bytes]] = field(factory=dict[Tier, "set[bytes]"])  # since the last digest
    _removed: dict[Tier, set[bytes]] = field(factory=dict[Tier, "set[bytes]"])
    _recent: list[ReplicaDigest] = field(factory=list[ReplicaDigest])

    def note_change(self, tier: Tier, added: Iterable[bytes], removed: Iterable[bytes] = ()) -> None:
        """Note that a tier has got and lost blocks. Of a tier that is full, further blocks are left out."""
        held = self._held.setdefault(tier, set())
        newly = self._added.setdefault(tier, set())
        gone = self._removed.setdefault(tier, set())
        for key in removed:
            if key in held:
                held.remove(key)
                if key in newly:
                    newly.remove(key)
                else:
                    gone.add(key)
        for key in added:
            if key not in held and len(held) < self.most_keys:
                held.add(key)
                if key in gone:
                    gone.remove(key)
                else:
                    newly.add(key)

    def set_held(self, held: Mapping[Tier, Sequence[bytes]]) -> None:
        """Note all that is held, the most useful keys of each tier first. A tier that is not named holds nothing."""
        for tier in [*held, *(tier for tier in self._held if tier not in held)]:
            now = set(held.get(tier, ())[: self.most_keys])
            before = self._held.get(tier, set())
            self.note_change(tier, now - before, before - now)

    def write(self, load: LoadReport) -> ReplicaDigest:
        """Return the next digest."""
        self.number += 1
        whole = self.number % self.whole_every == 1 or self.whole_every == 1
        added = self._held if whole else self._added
        removed = {} if whole else self._removed
        changes = tuple(
            TierChange(tier, frozenset(added.get(tier, ())), frozenset(removed.get(tier, ())))
            for tier in sorted(added.keys() | removed.keys())
            if added.get(tier) or removed.get(tier)
        )
        self._added = {}
        self._removed = {}
        digest = ReplicaDigest(self.epoch, self.number, whole, changes, load)
        self._recent = [*self._recent, digest][-RECENT_DIGESTS:]
        return digest

    def list_recent(self) -> tuple[ReplicaDigest, ...]:
        """Return the last digests in order, the newest always. Earlier ones only as far as their keys are few.

        Digests before a whole one are of no use, so they are left out.
        """
        chosen = list[ReplicaDigest]()
        keys = 0
        for digest in reversed(self._recent):
            keys += digest.key_count
            if chosen and keys > MOST_RECENT_KEYS:
                break
            chosen.append(digest)
            if digest.whole:
                break
        return tuple(reversed(chosen))


@define
class DigestReader:
    """The last of one replica's digests that a router has applied. number = 0: none of this epoch."""

    epoch: int = -1
    number: int = 0
    _newest: int = 0  # the greatest number that was seen in this epoch

    def accept(self, digest: ReplicaDigest) -> bool:
        """Note a digest, and return whether the caller should apply it.

        A change is applied if the digest before it was applied. A whole digest is applied unless a newer digest has
        come already. Everything else is repeated, late, or follows a gap, and is not applied. A digest of a later
        epoch says that the replica was restarted: all earlier knowledge is void until a whole digest comes (`is_void`).
        """
        if digest.epoch < self.epoch or digest.number < 1:
            return False
        if digest.epoch > self.epoch:
            self.epoch = digest.epoch
            self.number = 0
            self._newest = 0
        newest = self._newest
        self._newest = max(newest, digest.number)
        follows = digest.number > newest if self.number == newest else digest.number >= newest
        applies = (digest.whole and follows) or 0 < self.number == digest.number - 1
        if applies:
            self.number = digest.number
        return applies

    @property
    def is_void(self) -> bool:
        """Return whether nothing of this epoch was applied."""
        return not self.number

    @property
    def has_gap(self) -> bool:
        """Return whether a digest was missed, so that what is known is stale."""
        return self.number < self._newest


def select_keys(runs: Sequence[tuple[int, bytes, Sequence[bytes]]], most: int) -> list[bytes]:
    """Return at most `most` keys of these runs, of the youngest runs first.

    A key is of use only together with the keys before it in its prompt. So each run comes after the runs that it
    continues, if they are held, whatever their age.

    runs: (age, parent, keys) of each. The parent is the last key of the run that it continues. Keys of a run are in the
    order of the prompt.
    """
    chosen = list[bytes]()
    by_last = {key: number for number, (_, _, keys) in enumerate(runs) for key in keys}
    taken = set[int]()
    for number in sorted(range(len(runs)), key=lambda number: runs[number][0]):
        chain = list[int]()
        here: int | None = number
        while here is not None and here not in taken:
            taken.add(here)
            chain.append(here)
            here = by_last.get(runs[here][1])
        for link in reversed(chain):
            chosen += runs[link][2]
        if len(chosen) >= most:
            break
    return chosen[:most]
