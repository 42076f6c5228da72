"""The characters by which byte-level vocabularies write bytes (Radford et al. 2019, GPT-2)."""

from __future__ import annotations


def build_byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character of byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES = build_byte_alphabet()
CHARACTERS = {byte: character for character, byte in BYTES.items()}
