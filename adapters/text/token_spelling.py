"""The two ways in which vocabularies spell bytes.

Byte-level BPE writes each byte as one character. SentencePiece writes a space as a sign, and rare bytes by number.

The decoder of the `tokenizers` library shows a whole run of SentencePiece bytes as U+FFFD if one of them is wrong. A
stream has already sent the first ones by then. So here each byte is decoded by itself, in streams and elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from adapters.checkpoint.byte_alphabet import BYTES
from adapters.checkpoint.checkpoint_error import CheckpointError

SPACE = "\u2581"
NUMBERED = re.compile("<0x([0-9A-F]{2})>")


NUMBERS = tuple(f"<0x{byte:02X}>" for byte in range(256))


@frozen
class Spelling:
    """The spelling of a vocabulary. leading_spaces: this many spaces at the beginning are not part of a text."""

    sentence_piece: bool = False
    leading_spaces: int = 0

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that a token of the vocabulary stands for."""
        if not self.sentence_piece:
            return bytes(BYTES[char] for char in token) if all(char in BYTES for char in token) else token.encode()
        if number := NUMBERED.fullmatch(token):
            return bytes([int(number[1], 16)])
        return token.replace(SPACE, " ").encode()

    def strip_leading_spaces(self, text: str) -> str:
        """Remove the leading spaces that are not part of a text."""
        return text[min(self.leading_spaces, len(text) - len(text.lstrip(" "))) :] if self.leading_spaces else text


def read_spelling(described: Mapping[str, Any]) -> Spelling:
    """Return the spelling, by the decoder of a tokenizer.json. Raises CheckpointError for an unsupported decoder."""
    decoder = described.get("decoder")
    steps = [decoder] if isinstance(decoder, Mapping) else []
    if steps and steps[0].get("type") == "Sequence":
        steps = list(steps[0].get("decoders", ()))
    match [step.get("type") for step in steps]:
        case ["ByteLevel"]:
            return Spelling()
        case ["Replace", "ByteFallback", "Fuse"] if restores_spaces(steps[0]):
            drops = 0
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if (
            restores_spaces(steps[0]) and steps[3].get("content") == " "
        ):
            drops = int(steps[3].get("start", 0))
        case _:
            kinds = "ByteLevel, and SentencePiece's Replace, ByteFallback, Fuse and Strip"
            raise CheckpointError(f"tokenizer.json: its decoder is not served; accepted: {kinds}")
    vocabulary = (described.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, Mapping) or not vocabulary.keys() >= set(NUMBERS):
        raise CheckpointError("tokenizer.json: the decoder reads bytes by number, and the vocabulary lacks some")
    return Spelling(True, drops)


def restores_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE} and step.get("content") == " "
