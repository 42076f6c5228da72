"""Tokens as bytes, for comparing sequences: comparing 8,000 tokens as a tuple takes some twenty times as long."""

from __future__ import annotations

from array import array

from effects.ids import Tokens

PACKED_BYTES = 8  # bytes of a token; a redacted trace has tokens of 40 bits


def pack_tokens(tokens: Tokens) -> bytes:
    """Return tokens as bytes of equal width, in this machine's order of bytes."""
    return array("q", tokens).tobytes()


def unpack_tokens(packed: bytes) -> Tokens:
    """Return the tokens that `pack_tokens` has packed."""
    return tuple(array("q", packed))
