"""How a vocabulary spells bytes: each as a character (byte-level BPE), or spaces by a sign and rare bytes by number.

The second is SentencePiece's. Its decoder in the `tokenizers` library shows a whole run of bytes as U+FFFD where one of
them is wrong; a stream has shown the first ones by then, so here bytes are what they are, whoever decodes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError

SPACE = "\u2581"
NUMBERED = re.compile("<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes as printable characters (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = byte_alphabet()
NUMBERS = tuple(f"<0x{byte:02X}>" for byte in range(256))


@frozen
class Spelling:
    """drops: spaces that a text begins with and that are no part of it."""

    sentence_piece: bool = False
    drops: int = 0

    def read(self, token: str) -> bytes:
        """The bytes that a token of the vocabulary stands for."""
        if not self.sentence_piece:
            return bytes(BYTES[char] for char in token) if all(char in BYTES for char in token) else token.encode()
        if number := NUMBERED.fullmatch(token):
            return bytes([int(number[1], 16)])
        return token.replace(SPACE, " ").encode()

    def shown(self, text: str) -> str:
        """The text of all tokens of an answer, or of those that it begins with."""
        return text[min(self.drops, len(text) - len(text.lstrip(" "))) :] if self.drops else text


def spelling_of(described: Mapping[str, Any]) -> Spelling:
    """By the decoder of a tokenizer.json. Raises CheckpointError for one that is not served."""
    decoder = described.get("decoder")
    steps = [decoder] if isinstance(decoder, Mapping) else []
    if steps and steps[0].get("type") == "Sequence":
        steps = list(steps[0].get("decoders", ()))
    match [step.get("type") for step in steps]:
        case ["ByteLevel"]:
            return Spelling()
        case ["Replace", "ByteFallback", "Fuse"] if replaces(steps[0]):
            drops = 0
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if replaces(steps[0]) and steps[3].get("content") == " ":
            drops = int(steps[3].get("start", 0))
        case _:
            kinds = "ByteLevel, and SentencePiece's Replace, ByteFallback, Fuse and Strip"
            raise CheckpointError(f"tokenizer.json: its decoder is not served; accepted: {kinds}")
    vocabulary = (described.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, Mapping) or not vocabulary.keys() >= set(NUMBERS):
        raise CheckpointError("tokenizer.json: the decoder reads bytes by number, and the vocabulary lacks some")
    return Spelling(True, drops)


def replaces(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE} and step.get("content") == " "
