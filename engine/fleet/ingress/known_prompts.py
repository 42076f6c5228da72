"""The block keys of conversations that this ingress has read before, so that their next requests need no reading.

Problem. Reading a prompt means rendering and tokenizing it, which a replica does again. It takes 2 ms for a few words,
and 10 ms for 6,000 tokens, on two cores of an AMD EPYC. Meanwhile the request waits.

Idea. An agent sends its whole conversation again with each request, and a few messages more. Only the part that was
sent before can be held by a replica. So the keys of the earlier request are enough to choose one. Messages are
recognised by a chain of digests: that of a message includes those before it, and everything in the body that shapes a
prompt. Keys that are wrong or missing cost time, and change no answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from attrs import define, evolve, field, frozen

from engine.fleet.router.route_keys import RouteKeys

MOST_KEYS: Final = 1 << 18  # keys that are remembered: 15 MB, for 16 million tokens in blocks of 64
LEAST_KNOWN_PERCENT: Final = 75  # of a body's bytes; if less of a conversation is known, it is read
DIGEST_BYTES: Final = 16
TURN_FIELDS: Final = ("messages", "input")  # lists that grow from one request of a conversation to the next
# Fields that neither the prompt nor the session (`prompt_cache_key`) of a request depends on. Numbers are left out as
# well: they limit or vary the answer.
OTHER_FIELDS: Final = frozenset({"stream", "stream_options", "metadata", "user"})


@frozen
class ConversationDigests:
    """Digests of a body: one for its head, and one for each of its turns with everything before it.

    The head is what shapes the prompt besides the turns, such as tools. sizes: bytes of the JSON up to the same turn,
    the head among them.
    """

    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def from_body(body: Mapping[str, Any], about: str) -> ConversationDigests:
        """Return the digests of a body. about: what else the prompt depends on, such as the model's identity."""
        name = next((name for name in TURN_FIELDS if isinstance(body.get(name), list)), "")
        shaping = {key: value for key, value in body.items() if key != name and shapes_prompt(key, value)}
        head = msgspec.json.encode([about, name, shaping])
        digests = [hash_part(head, b"")]
        sizes = [len(head)]
        for turn in body[name] if name else ():
            part = msgspec.json.encode(turn)
            digests.append(hash_part(part, digests[-1]))
            sizes.append(sizes[-1] + len(part))
        return ConversationDigests(tuple(digests), tuple(sizes))


@frozen
class KnownPrompt:
    """The keys that are known of a prompt. is_whole: exactly this prompt was read."""

    route: RouteKeys
    is_whole: bool


@define(eq=False)
class KnownPrompts:
    """The prompts that were read, by the digest of their conversation. Those that were used least lately go first."""

    most_keys: int = MOST_KEYS
    _read: OrderedDict[bytes, tuple[RouteKeys, int]] = field(factory=OrderedDict, init=False)  # keys, bytes of turns
    _keys: int = field(default=0, init=False)

    def find(self, conversation: ConversationDigests) -> KnownPrompt | None:
        """Return what is known of a conversation; None if less than LEAST_KNOWN_PERCENT of its bytes are known.

        If only its first turns are known, `RouteKeys.tokens` is estimated for the whole prompt by the bytes.
        """
        whole = conversation.sizes[-1]
        for digest, size in zip(reversed(conversation.digests), reversed(conversation.sizes), strict=True):
            if 100 * size < LEAST_KNOWN_PERCENT * whole:
                return None
            if digest in self._read:
                self._read.move_to_end(digest)
                route, read = self._read[digest]
                if size == whole:
                    return KnownPrompt(route, is_whole=True)
                return KnownPrompt(evolve(route, tokens=route.tokens * whole // read), is_whole=False)
        return None

    def note(self, conversation: ConversationDigests, route: RouteKeys) -> None:
        """Remember a prompt that was read. It takes the place of the earlier prompt that it continues."""
        for digest in reversed(conversation.digests):
            if digest in self._read:
                self._forget(digest)
                break
        self._read[conversation.digests[-1]] = (route, conversation.sizes[-1])
        self._keys += 1 + len(route.keys)
        while self._keys > self.most_keys:
            self._forget(next(iter(self._read)))

    def _forget(self, digest: bytes) -> None:
        route, _ = self._read.pop(digest)
        self._keys -= 1 + len(route.keys)


def shapes_prompt(name: str, value: Any) -> bool:
    """Return whether a field of a body may change the prompt."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return name not in OTHER_FIELDS and not is_number


def hash_part(part: bytes, before: bytes) -> bytes:
    return hashlib.blake2b(part, digest_size=DIGEST_BYTES, key=before).digest()
