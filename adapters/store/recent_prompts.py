"""The recent prompts that scope `auto` compares with, each kept as what it does not share with an earlier one.

A salt goes before a prompt as tokens that no vocabulary has: prompts share nothing unless they have the same.

In a file they are a header and records as in the journal; the body of one: serial, serial of the earlier prompt (0:
none), tokens shared with it, and the packed tokens after those. What follows a record that does not check is not read.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from adapters.store.block_keys import WIDTH, pack, unpack
from adapters.store.files.append_log import framed, records
from effects.ids import Tokens
from effects.ports import MAX_DIVERGED_TOKENS, Divergence

if TYPE_CHECKING:
    import numpy as np

PREFIX = "recent-"
MAGIC = b"rekindle-recent-1\n"
BODY = struct.Struct("<QQI")
MOST = 256  # prompts
MOST_BYTES = 64 << 20  # of packed tokens
SLACK = 1 << 20  # bytes of a file beyond twice what it says, before it is written anew
MOST_FILE = 2 * MOST_BYTES + 2 * SLACK
TAG = 4  # tokens
CHUNK = 4096  # tokens that are compared at once: most prompts differ soon


@frozen(eq=False)
class Recent:
    """One prompt: the first `shared` tokens of `parent`, then `rest` (packed). parent: a serial; 0 is no prompt."""

    serial: int
    parent: int
    shared: int
    rest: bytes

    @property
    def length(self) -> int:
        return self.shared + len(self.rest) // WIDTH


@define(eq=False)
class Recents:
    """The last `most` prompts, fewer where they take more than `most_bytes`. Safe to use from several threads.

    What two prompts share is compared, and held, once: the time that a comparison takes depends on what is held.
    """

    most: int = MOST
    most_bytes: int = MOST_BYTES
    held: int = 0  # bytes of packed tokens
    _prompts: dict[int, Recent] = field(factory=dict[int, Recent])  # the oldest first; parents before children
    _last: int = 0  # serial
    _lock: threading.RLock = field(factory=threading.RLock)

    def __len__(self) -> int:
        return len(self._prompts)

    def compare(self, prompt: Tokens, window: int) -> int:
        """How many tokens `prompt` begins with as the likest of the last `window` prompts does."""
        if window < 1:
            return 0
        with self._lock:
            return max(list(self._shared(pack(prompt)).values())[-window:], default=0)

    def add(self, prompt: Tokens) -> Recent:
        """It is the most recent one from now on."""
        return self.joins(prompt, 0)[1]

    def joins(self, prompt: Tokens, window: int, salt: str = "") -> tuple[int, Recent, Divergence | None]:
        """`compare`, then `add`, for the price of one; and where it leaves the likest of all."""
        before = tag(salt)
        packed = before + pack(prompt)
        with self._lock:
            found = self._shared(packed)
            likest = max(list(found.values())[-window:], default=0) if window > 0 else 0
            parent = max(found, key=lambda serial: (found[serial], serial), default=0)
            shared = found.get(parent, 0)
            diverged = self._leaves(parent, shared, len(before) // WIDTH) if shared * WIDTH < len(packed) else None
            recent = Recent(self._last + 1, parent if shared else 0, shared, packed[shared * WIDTH :])
            self._keep(recent)
            self.trim()
        return max(0, likest - len(before) // WIDTH), recent, diverged

    def _leaves(self, serial: int, shared: int, before: int) -> Divergence | None:
        """What a prompt of which so many tokens are shared has behind them; None: it ends there. before: the tag's."""
        while serial and shared < self._prompts[serial].shared:
            serial = self._prompts[serial].parent
        if not serial or shared < before:
            return None
        one = self._prompts[serial]
        start = (shared - one.shared) * WIDTH
        following = unpack(one.rest[start : start + MAX_DIVERGED_TOKENS * WIDTH])
        return Divergence(shared - before, following, "none") if following and following[0] >= 0 else None

    def restore(self, recent: Recent) -> bool:
        """As it was added once, `trim` at the end; False if it cannot have been."""
        with self._lock:
            parent = self._prompts.get(recent.parent)
            most = 0 if parent is None else parent.length
            if recent.serial <= self._last or recent.shared > most or (recent.parent and parent is None):
                return False
            self._keep(recent)
        return True

    def all(self) -> list[Recent]:
        """In an order in which they can be restored."""
        with self._lock:
            return list(self._prompts.values())

    def trim(self) -> None:
        """The oldest go first."""
        with self._lock:
            while len(self._prompts) > self.most or (self.held > self.most_bytes and self._prompts):
                self._drop(next(iter(self._prompts.values())))

    def _keep(self, recent: Recent) -> None:
        self._prompts[recent.serial] = recent
        self._last = recent.serial
        self.held += len(recent.rest)

    def _shared(self, packed: bytes) -> dict[int, int]:
        """Tokens that each prompt shares with this one."""
        import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

        mine, found = np.frombuffer(packed, np.int32), {0: 0}
        for serial, recent in self._prompts.items():
            shared = found[recent.parent]
            if shared >= recent.shared:
                shared = recent.shared + common(mine[recent.shared :], np.frombuffer(recent.rest, np.int32))
            found[serial] = shared
        del found[0]
        return found

    def _drop(self, oldest: Recent) -> None:
        """Those that begin as it did take over what they share with it: the first of them holds it for the others."""
        del self._prompts[oldest.serial]
        self.held -= len(oldest.rest)
        heir: Recent | None = None
        for recent in [recent for recent in self._prompts.values() if recent.parent == oldest.serial]:
            parent, shared = (0, 0) if heir is None else (heir.serial, min(heir.shared, recent.shared))
            taken = oldest.rest[shared * WIDTH : recent.shared * WIDTH]
            self._prompts[recent.serial] = evolve(recent, parent=parent, shared=shared, rest=taken + recent.rest)
            self.held += len(taken)
            heir = heir or recent


def tag(salt: str) -> bytes:
    """A digest as tokens, the first of which is below 0."""
    if not salt:
        return b""
    digest = bytearray(blake2b(salt.encode(), digest_size=TAG * WIDTH).digest())
    digest[WIDTH - 1] |= 0x80
    return bytes(digest)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many elements two arrays begin with alike."""
    most = min(len(one), len(other))
    for start in range(0, most, CHUNK):
        stop = min(start + CHUNK, most)
        differ = one[start:stop] != other[start:stop]
        if differ.any():
            return start + int(differ.argmax())
    return most


def record(recent: Recent) -> bytes:
    return framed(BODY.pack(recent.serial, recent.parent, recent.shared) + recent.rest)


def snapshot(recents: Iterable[Recent]) -> Iterator[bytes]:
    """A whole file that says: these."""
    yield MAGIC
    yield from map(record, recents)


def read(raw: bytes, recents: Recents) -> bool:
    """Put what a file says into `recents`. False if it did not end with a record's end."""
    at = len(MAGIC)
    if raw[:at] != MAGIC:
        return False
    for body, end in records(raw, at):
        recent = parse(body)
        if recent is None or not recents.restore(recent):
            break
        at = end
    recents.trim()
    return at == len(raw)


def parse(body: bytes) -> Recent | None:
    if len(body) < BODY.size or (len(body) - BODY.size) % WIDTH:
        return None
    serial, parent, shared = BODY.unpack_from(body)
    return Recent(serial, parent, shared, body[BODY.size :])
