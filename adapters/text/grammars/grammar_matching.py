"""One answer's way through its grammar: which tokens may follow, on the device's lane."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from attrs import define, field
from llguidance import LLMatcher
from numpy.typing import NDArray

from adapters.text.grammars.json_keys import JsonPlace, QuotedTokens
from effects.ids import Tokens

# `   2 | x: "a" %json {...}`, and the line below it that points into it
QUOTED = re.compile(r"\s*[0-9]+ \| | {8,}\^+\s*$")


@define(eq=False)
class GrammarMatching:
    """One answer's way through its grammar (`adapters.device.sampling.grammar_mask.Matching`).

    _base stands behind the answer so far, _ahead behind `_path` after that: a step's rows are asked for one after the
    other along what is agreed to, so each mask is one token away from the last one.
    """

    _base: LLMatcher
    _ends: frozenset[int]
    _size: int
    _path: Tokens = ()
    _ahead: LLMatcher | None = None
    quoted: QuotedTokens | None = None
    _place: JsonPlace = field(factory=JsonPlace, init=False)  # behind the answer so far
    _place_ahead: JsonPlace = field(factory=JsonPlace, init=False)  # behind `_path` after that

    def mask(self, path: Tokens) -> NDArray[np.uint8] | str:
        found = np.zeros(4 * -(-self._size // 32), dtype=np.uint8)
        if path and path[-1] in self._ends:
            found.fill(255)  # nothing is asked there
            return found
        matcher = self._at(path)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(found.ctypes.data, len(found))
        if matcher.is_error():
            return one_line(matcher.get_error())
        if not found.any():
            return "the grammar has no continuation"
        return found if self.quoted is None else self._without_second_keys(found, self.quoted, path)

    def _without_second_keys(self, mask: NDArray[np.uint8], quoted: QuotedTokens, path: Tokens) -> NDArray[np.uint8]:
        """Where nothing else may follow, a key does come twice: that is no dead end."""
        tokens = quoted.forbidden(self._place_ahead if path else self._place)
        if not tokens:
            return mask
        less = mask.copy()
        for token in tokens:
            less[token // 8] &= ~(1 << token % 8) & 0xFF
        return less if less.any() else mask

    def count_allowed(self, path: Tokens) -> int:
        """An end token counts wherever it stands: whether it may is the mask's to say."""
        end = next((at for at, token in enumerate(path) if token in self._ends), len(path))
        count = self._base.validate_tokens(list(path[:end]))
        return min(len(path), count + 1) if count == end else count

    def append(self, tokens: Sequence[int]) -> None:
        said = tuple(token for token in tokens if token not in self._ends)
        if self.quoted is not None:
            self._place = self.quoted.place(said, self._place)
        if self._ahead is not None and self._path == said[: len(self._path)]:
            self._base, said = self._ahead, said[len(self._path) :]
        self._path, self._ahead = (), None
        self._base.consume_tokens(list(said))

    def _at(self, path: Tokens) -> LLMatcher:
        if not path:
            return self._base
        if self._ahead is None or self._path != path[: len(self._path)]:
            self._path, self._ahead, self._place_ahead = (), self._base.deep_copy(), self._place
        self._ahead.consume_tokens(list(path[len(self._path) :]))
        if self.quoted is not None:
            self._place_ahead = self.quoted.place(path[len(self._path) :], self._place_ahead)
        self._path = path
        return self._ahead


def one_line(message: str) -> str:
    """What the library says, without the lines of the grammar that it quotes: most of it was written here."""
    lines = [line for line in message.replace("<non-verbose/>", "").splitlines() if not QUOTED.match(line)]
    return " ".join(" ".join(lines).split())[:300]
