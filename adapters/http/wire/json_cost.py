"""How much a JSON text holds, told from its bytes: before parsing it makes a hundred bytes of objects out of each.

Done with numpy in pieces, so the interpreter is not held for longer than a piece takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

PIECE = 1 << 18
QUOTE, SLASH, COMMA = b'"\\,'
OPEN, CLOSE, FOLD = ord("{"), ord("}"), 0x20  # [ and ] differ from them in one bit


@frozen
class Census:
    """Up to some place in a text: arrays and objects, commas outside of strings, and the deepest nesting."""

    containers: int = 0
    commas: int = 0
    depth: int = 0


def censuses(raw: bytes | bytearray) -> Iterator[Census]:
    """After every piece, what there is up to its end. True of a text as far as it is JSON."""
    containers = commas = deepest = level = 0
    inside, escaped = 0, False
    for start in range(0, len(raw), PIECE):
        piece = np.frombuffer(raw, np.uint8, min(PIECE, len(raw) - start), start)
        quotes = piece == QUOTE
        escaped = forget_escaped(quotes, piece == SLASH, escaped)
        within = (np.cumsum(quotes, dtype=np.uint8) & 1) ^ inside
        folded, outside = piece | FOLD, within == 0
        opened, closed = (folded == OPEN) & outside, (folded == CLOSE) & outside
        levels = level + np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int64)
        containers += int(np.count_nonzero(opened))
        commas += int(np.count_nonzero((piece == COMMA) & outside))
        deepest, level, inside = max(deepest, int(levels.max())), int(levels[-1]), int(within[-1])
        yield Census(containers, commas, deepest)


def forget_escaped(quotes: NDArray[np.bool_], slashes: NDArray[np.bool_], escaped: bool) -> bool:
    """Clear the quotes that a backslash stands before. escaped: the first character is; returns whether the next is.

    In a run of backslashes every second one is escaped itself.
    """
    if escaped:
        quotes[0] = slashes[0] = False
    places = np.flatnonzero(slashes)
    if not len(places):
        return False
    order = np.arange(len(places))
    begins = np.diff(places, prepend=-2) != 1
    first = np.maximum.accumulate(np.where(begins, order, 0))
    after = places[(order - first) % 2 == 0] + 1
    quotes[after[after < len(quotes)]] = False
    return bool(after[-1] == len(quotes))
