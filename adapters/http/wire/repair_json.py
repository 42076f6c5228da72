"""Repair JSON bodies that clients would send again for ever: half surrogate pairs, and inputs of calls that are nested
too deep.

A model can write both into a call, and an agent sends its history again with every request. A 400 would therefore end
the session for good. Repairs work on the bytes before they are parsed, and only if parsing has found a fault. They
leave everything else as it is, byte for byte.
"""

from __future__ import annotations

import json
import re

HALF_CHARACTER = "half-character"
DEEP_NESTING = "deep-nesting"
HISTORY = (b'"messages"', b'"input"')  # keys of a body beneath which nesting is repaired
# The level of a tool_use block's input: body, messages, message, content, block, input.
CALL_LEVEL = 6
REPLACEMENT = rb"\ufffd"
# Every escape of a text from left to right, so that `\\ud83d`, a backslash and letters, is not taken for a surrogate.
ESCAPE = re.compile(rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|.)", re.DOTALL)
LOW_HALF = re.compile(rb"u[dD][c-fC-F][0-9a-fA-F]{2}")
# Texts and brackets. A text that never ends is taken to the end at once: the time is linear in any bytes.
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def replace_surrogate_halves(raw: bytes | bytearray) -> bytes | None:
    """Return the body with U+FFFD for each half of a surrogate pair. Return None if there is none."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return None
    parts = list[bytes]()
    at = 0
    for found in ESCAPE.finditer(raw):
        start, stop = found.span()
        if stop - start == 2:
            low = LOW_HALF.match(raw, start + 1)
            if low is None:
                continue
            stop = low.end()
        elif stop - start != 6:
            continue  # a whole pair
        parts += (bytes(raw[at:start]), REPLACEMENT)
        at = stop
    return b"".join((*parts, bytes(raw[at:]))) if parts else None


def flatten_deep_values(raw: bytes | bytearray, most: int) -> bytes | None:
    """Return the body with values of its history as JSON text, where they are nested beyond `most` levels.

    The value is the whole input of a tool_use block, or what is as deep in other parts of the history. Return None if
    there is no such value.
    """
    parts = list[bytes]()
    at = 0
    level = deepest = start = 0
    key = b""
    for found in TOKEN.finditer(raw):
        token = found[0]
        if token in (b"{", b"["):
            level += 1
            deepest = max(deepest, level)
            if level == CALL_LEVEL:
                start = found.start()
                deepest = level
        elif token in (b"}", b"]"):
            if level == CALL_LEVEL and deepest > most and key in HISTORY:
                try:
                    text = json.dumps(raw[start : found.end()].decode()).encode()
                except UnicodeDecodeError:
                    return None
                parts += (bytes(raw[at:start]), text)
                at = found.end()
            level -= 1
        elif level == 1:
            key = token
    return b"".join((*parts, bytes(raw[at:]))) if parts else None
