"""Computes keys of blocks: each is chained over everything before it, so that one key stands for a whole prefix."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from attrs import frozen

KEY_BYTES = 16  # bytes of a key
TOKEN_BYTES = 4  # bytes of a packed token id


@frozen(eq=False)
class SequenceBlocks:
    """A sequence's whole blocks: their keys and their packed tokens."""

    keys: tuple[bytes, ...]
    packed: bytes
    salt: str  # sequences with different salts share nothing


def compute_root(identity: str, block_size: int, salt: str = "") -> bytes:
    """Return the parent of every first block. Two identities, two block sizes or two salts share no key."""
    return blake2b(f"rekindle kv\0{identity}\0{block_size}{format_salt(salt)}".encode(), digest_size=KEY_BYTES).digest()


def compute_draft_root(identity: str, draft: str, block_size: int, salt: str = "") -> bytes:
    """Return the parent of the first block of a draft's rows.

    The rows stand for the same tokens, but belong to one draft.
    """
    named = f"rekindle draft\0{identity}\0{draft}\0{block_size}{format_salt(salt)}"
    return blake2b(named.encode(), digest_size=KEY_BYTES).digest()


def format_salt(salt: str) -> str:
    """Return the suffix that a salt adds to a root's name; empty without a salt."""
    return f"\0{salt}" if salt else ""


def derive_checkpoint_key(key: bytes) -> bytes:
    """Return the key of the checkpoint behind the block `key`."""
    return blake2b(b"rekindle checkpoint", digest_size=KEY_BYTES, key=key).digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as int32, little-endian."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Return the tokens that `pack_tokens` has packed."""
    tokens = array("i", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)


def chain_keys(parent: bytes, packed: bytes, block_size: int) -> tuple[bytes, ...]:
    """Return the key of each whole block of `packed`. parent: the parent of the first one."""
    keys = list[bytes]()
    step = block_size * TOKEN_BYTES
    for start in range(0, len(packed) // step * step, step):
        parent = blake2b(packed[start : start + step], digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)
    return tuple(keys)
