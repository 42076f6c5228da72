"""Measure from a JSON text's bytes how many objects it would become, before it is parsed.

Parsing makes up to a hundred bytes of objects out of one byte of text, so `read_body.py` measures large bodies first.
numpy does it piece by piece, so the interpreter is never held for longer than one piece takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

PIECE = 1 << 18
QUOTE, SLASH, COMMA = b'"\\,'
OPEN = ord("{")
CLOSE = ord("}")
FOLD = 0x20  # the one bit in which [ and ] differ from { and }


@frozen
class JsonCost:
    """The contents of a text up to some position: arrays and objects, commas outside of strings, and the deepest
    nesting.
    """

    containers: int = 0
    commas: int = 0
    depth: int = 0


def measure_json(raw: bytes | bytearray) -> Iterator[JsonCost]:
    """Yield after every piece what the text holds up to the piece's end. The figures are right for as much of the text
    as is JSON.
    """
    containers = commas = deepest = level = 0
    inside = 0
    escaped = False
    for start in range(0, len(raw), PIECE):
        piece = np.frombuffer(raw, np.uint8, min(PIECE, len(raw) - start), start)
        quotes = piece == QUOTE
        escaped = clear_escaped_quotes(quotes, piece == SLASH, escaped)
        within = (np.cumsum(quotes, dtype=np.uint8) & 1) ^ inside
        folded = piece | FOLD
        outside = within == 0
        opened = (folded == OPEN) & outside
        closed = (folded == CLOSE) & outside
        levels = level + np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int64)
        containers += int(np.count_nonzero(opened))
        commas += int(np.count_nonzero((piece == COMMA) & outside))
        deepest = max(deepest, int(levels.max()))
        level = int(levels[-1])
        inside = int(within[-1])
        yield JsonCost(containers, commas, deepest)


def clear_escaped_quotes(quotes: NDArray[np.bool_], slashes: NDArray[np.bool_], escaped: bool) -> bool:
    """Clear, in place, the quotes that a backslash escapes. In a run of backslashes, every second one is escaped
    itself.

    escaped: whether the first character of the piece is escaped. Returns whether the first character of the next piece
    is.
    """
    if escaped:
        quotes[0] = slashes[0] = False
    offsets = np.flatnonzero(slashes)
    if not len(offsets):
        return False
    order = np.arange(len(offsets))
    begins = np.diff(offsets, prepend=-2) != 1
    first = np.maximum.accumulate(np.where(begins, order, 0))
    after = offsets[(order - first) % 2 == 0] + 1
    quotes[after[after < len(quotes)]] = False
    return bool(after[-1] == len(quotes))
