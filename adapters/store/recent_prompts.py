"""The recent prompts that scope `auto` compares with.

Prompts of one client begin alike. So a prompt is kept as a tree node: a reference to an earlier prompt (its parent),
the number of tokens that both begin with, and the tokens after those. Each prompt has a serial number.

A prompt with a salt is kept with SALT_TOKENS tokens before it that stand for the salt and that no vocabulary has. So
prompts of different salts have nothing in common.

A file of prompts is a header and one record for each, framed as in the journal. The body of a record is: serial, serial
of the parent (0: none), tokens shared with the parent, and the packed tokens after those. What follows a damaged record
is not read.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from adapters.store.block_keys import TOKEN_BYTES, pack_tokens, unpack_tokens
from adapters.store.files.append_log import frame_record, parse_records
from effects.ids import Tokens
from effects.ports import MAX_DIVERGED_TOKENS, Divergence

if TYPE_CHECKING:
    import numpy as np

ANY_MAGIC = b"rekindle-recent-"  # of every version
MAGIC = ANY_MAGIC + b"1\n"
MAGIC_BYTES = len(MAGIC)
BODY = struct.Struct("<QQI")
MAX_PROMPTS = 256  # prompts
MAX_BYTES = 64 << 20  # of packed tokens
# A file is written anew if it is longer than twice the prompts that are remembered, and this many bytes.
SLACK = 1 << 20
MAX_FILE_BYTES = 2 * MAX_BYTES + 2 * SLACK
SALT_TOKENS = 4  # tokens
CHUNK = 4096  # tokens that are compared at once: most prompts differ soon


@frozen(eq=False)
class RecentPrompt:
    """One prompt: the first `shared` tokens of `parent`, then `rest` (packed). parent: a serial; 0 is no prompt."""

    serial: int
    parent: int
    shared: int
    rest: bytes

    @property
    def length(self) -> int:
        return self.shared + len(self.rest) // TOKEN_BYTES


@define(eq=False)
class RecentPrompts:
    """The last `max_prompts` prompts, or fewer if they take more than `max_bytes`. Safe to use from several threads.

    Tokens that prompts have in common are held once, and compared once with a new prompt.
    """

    max_prompts: int = MAX_PROMPTS
    max_bytes: int = MAX_BYTES
    held_bytes: int = 0  # bytes of packed tokens
    # The oldest first; parents before children.
    _prompts: dict[int, RecentPrompt] = field(factory=dict[int, RecentPrompt])
    _last: int = 0  # serial
    _lock: threading.RLock = field(factory=threading.RLock)

    def __len__(self) -> int:
        return len(self._prompts)

    def longest_match(self, prompt: Tokens, count: int) -> int:
        """Return the longest common beginning, in tokens, of the prompt and any of the last `count` prompts."""
        if count < 1:
            return 0
        with self._lock:
            return max(list(self._count_shared_tokens(pack_tokens(prompt)).values())[-count:], default=0)

    def add(self, prompt: Tokens) -> RecentPrompt:
        """Add a prompt as the most recent one."""
        return self.add_and_compare(prompt, 0)[1]

    def add_and_compare(
        self, prompt: Tokens, count: int, salt: str = ""
    ) -> tuple[int, RecentPrompt, Divergence | None]:
        """Add a prompt, and compare it with the others.

        The first result is how many tokens it has in common with the most similar of the last `count` prompts. The
        second one is the prompt as it was added. The third one is where it diverges from the most similar of all.
        """
        before = encode_salt(salt)
        packed = before + pack_tokens(prompt)
        with self._lock:
            found = self._count_shared_tokens(packed)
            longest = max(list(found.values())[-count:], default=0) if count > 0 else 0
            parent = max(found, key=lambda serial: (found[serial], serial), default=0)
            shared = found.get(parent, 0)
            diverged = (
                self._find_divergence(parent, shared, len(before) // TOKEN_BYTES)
                if shared * TOKEN_BYTES < len(packed)
                else None
            )
            recent = RecentPrompt(self._last + 1, parent if shared else 0, shared, packed[shared * TOKEN_BYTES :])
            self._keep(recent)
            self.trim()
        return max(0, longest - len(before) // TOKEN_BYTES), recent, diverged

    def add_apart(self, tokens: Tokens, salt: str) -> RecentPrompt:
        """Add tokens as the most recent prompt without comparing them: they are held whole."""
        with self._lock:
            recent = RecentPrompt(self._last + 1, 0, 0, encode_salt(salt) + pack_tokens(tokens))
            self._keep(recent)
            self.trim()
        return recent

    def _find_divergence(self, serial: int, shared: int, before: int) -> Divergence | None:
        """Return what prompt `serial` has behind its first `shared` tokens.

        None if it ends there. before: tokens of the salt.
        """
        while serial and shared < self._prompts[serial].shared:
            serial = self._prompts[serial].parent
        if not serial or shared < before:
            return None
        recent_prompt = self._prompts[serial]
        start = (shared - recent_prompt.shared) * TOKEN_BYTES
        following = unpack_tokens(recent_prompt.rest[start : start + MAX_DIVERGED_TOKENS * TOKEN_BYTES])
        return Divergence(shared - before, following, "none") if following and following[0] >= 0 else None

    def restore(self, recent: RecentPrompt) -> bool:
        """Add a prompt as it was stored; the caller trims at the end. Return False if it cannot have been stored so."""
        with self._lock:
            parent = self._prompts.get(recent.parent)
            most = 0 if parent is None else parent.length
            if recent.serial <= self._last or recent.shared > most or (recent.parent and parent is None):
                return False
            self._keep(recent)
        return True

    def list_prompts(self) -> list[RecentPrompt]:
        """Return all prompts in an order in which they can be restored."""
        with self._lock:
            return list(self._prompts.values())

    def trim(self) -> None:
        """Remove the oldest prompts beyond the limits."""
        with self._lock:
            while len(self._prompts) > self.max_prompts or (self.held_bytes > self.max_bytes and self._prompts):
                self._drop(next(iter(self._prompts.values())))

    def _keep(self, recent: RecentPrompt) -> None:
        self._prompts[recent.serial] = recent
        self._last = recent.serial
        self.held_bytes += len(recent.rest)

    def _count_shared_tokens(self, packed: bytes) -> dict[int, int]:
        """Return how many tokens each prompt shares with this one."""
        import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

        mine = np.frombuffer(packed, np.int32)
        found = {0: 0}
        for serial, recent in self._prompts.items():
            shared = found[recent.parent]
            if shared >= recent.shared:
                shared = recent.shared + count_common(mine[recent.shared :], np.frombuffer(recent.rest, np.int32))
            found[serial] = shared
        del found[0]
        return found

    def _drop(self, oldest: RecentPrompt) -> None:
        """Remove the oldest prompt. Its first child gets the shared tokens and becomes the others' parent."""
        del self._prompts[oldest.serial]
        self.held_bytes -= len(oldest.rest)
        heir: RecentPrompt | None = None
        for recent in [recent for recent in self._prompts.values() if recent.parent == oldest.serial]:
            parent, shared = (0, 0) if heir is None else (heir.serial, min(heir.shared, recent.shared))
            taken = oldest.rest[shared * TOKEN_BYTES : recent.shared * TOKEN_BYTES]
            self._prompts[recent.serial] = evolve(recent, parent=parent, shared=shared, rest=taken + recent.rest)
            self.held_bytes += len(taken)
            heir = heir or recent


def split_salt(packed: bytes) -> tuple[bytes, bytes]:
    """Return the digest of the salt (`encode_salt`) of a packed prompt, and the rest."""
    size = SALT_TOKENS * TOKEN_BYTES
    has_salt = len(packed) >= size and packed[TOKEN_BYTES - 1] & 0x80
    return (packed[:size], packed[size:]) if has_salt else (b"", packed)


def encode_salt(salt: str) -> bytes:
    """Return a digest of the salt as tokens. The first one is below 0, so no vocabulary has it."""
    if not salt:
        return b""
    digest = bytearray(blake2b(salt.encode(), digest_size=SALT_TOKENS * TOKEN_BYTES).digest())
    digest[TOKEN_BYTES - 1] |= 0x80
    return bytes(digest)


def count_common(first: np.ndarray, second: np.ndarray) -> int:
    """Count the equal elements that two arrays begin with."""
    most = min(len(first), len(second))
    for start in range(0, most, CHUNK):
        stop = min(start + CHUNK, most)
        differ = first[start:stop] != second[start:stop]
        if differ.any():
            return start + int(differ.argmax())
    return most


def encode_prompt(recent: RecentPrompt) -> bytes:
    """Return the record of a prompt."""
    return frame_record(BODY.pack(recent.serial, recent.parent, recent.shared) + recent.rest)


def encode_snapshot(recents: Iterable[RecentPrompt]) -> Iterator[bytes]:
    """Return a whole file with these prompts."""
    yield MAGIC
    yield from map(encode_prompt, recents)


def is_newer(raw: bytes) -> bool:
    """Return whether a newer version has written this file of prompts. There is none before the present one."""
    return raw.startswith(ANY_MAGIC) and not raw.startswith(MAGIC)


def restore_prompts(raw: bytes, recents: RecentPrompts) -> bool:
    """Add the prompts of a file to `recents`. Return False if the file did not end with a whole record."""
    at = len(MAGIC)
    if raw[:at] != MAGIC:
        return False
    for body, end in parse_records(raw, at):
        recent = parse_prompt(body)
        if recent is None or not recents.restore(recent):
            break
        at = end
    recents.trim()
    return at == len(raw)


def parse_prompt(body: bytes) -> RecentPrompt | None:
    """Return the prompt of a record; None if its length is impossible."""
    if len(body) < BODY.size or (len(body) - BODY.size) % TOKEN_BYTES:
        return None
    serial, parent, shared = BODY.unpack_from(body)
    return RecentPrompt(serial, parent, shared, body[BODY.size :])
