"""What blocks are called: keys chained over everything before them, so that one key stands for a whole prefix."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from attrs import frozen

KEY = 16  # bytes of a key
WIDTH = 4  # bytes of a packed token id


@frozen(eq=False)
class Path:
    """A sequence's whole blocks: their keys and their packed tokens."""

    keys: tuple[bytes, ...]
    packed: bytes
    salt: str  # nothing is shared with sequences of another


def root(identity: str, block_size: int, salt: str = "") -> bytes:
    """The parent of every first block: two identities, two block sizes or two salts share no key."""
    return blake2b(f"rekindle kv\0{identity}\0{block_size}{salted(salt)}".encode(), digest_size=KEY).digest()


def draft_root(identity: str, draft: str, block_size: int, salt: str = "") -> bytes:
    """The parent of the first block of a draft's rows: they stand for the same tokens, and go with one draft only."""
    named = f"rekindle draft\0{identity}\0{draft}\0{block_size}{salted(salt)}"
    return blake2b(named.encode(), digest_size=KEY).digest()


def salted(salt: str) -> str:
    """What a root is called by besides; nothing without a salt."""
    return f"\0{salt}" if salt else ""


def checkpoint_key(key: bytes) -> bytes:
    """What the checkpoint behind the block `key` is called."""
    return blake2b(b"rekindle checkpoint", digest_size=KEY, key=key).digest()


def pack(tokens: Sequence[int]) -> bytes:
    """int32, little-endian."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> tuple[int, ...]:
    tokens = array("i", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def chain(parent: bytes, packed: bytes, block_size: int) -> tuple[bytes, ...]:
    """The key of each whole block of `packed`, the first one's parent being `parent`."""
    keys, step = list[bytes](), block_size * WIDTH
    for start in range(0, len(packed) // step * step, step):
        parent = blake2b(packed[start : start + step], digest_size=KEY, key=parent).digest()
        keys.append(parent)
    return tuple(keys)
