"""Matches one answer against its grammar and says which tokens may follow. Used on the device thread."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from attrs import define, field
from llguidance import LLMatcher
from numpy.typing import NDArray

from adapters.text.grammars.json_keys import JsonPosition, QuotedTokens
from effects.ids import Tokens

# A line such as `   2 | x: "a" %json {...}`, and the line below it that points into it.
QUOTED_GRAMMAR_LINE = re.compile(r"\s*[0-9]+ \| | {8,}\^+\s*$")


@define(eq=False)
class GrammarMatching:
    """The position of one answer in its grammar. Implements `adapters.device.sampling.grammar_mask.Matching`.

    _base: the matcher after the answer so far.
    _ahead: the matcher after the answer and then `_path`. The rows of one step are asked for in order along the
    accepted tokens, so each mask is only one token further than the mask before.
    """

    _base: LLMatcher
    _ends: frozenset[int]
    _size: int
    _path: Tokens = ()
    _ahead: LLMatcher | None = None
    quoted_tokens: QuotedTokens | None = None
    _position: JsonPosition = field(factory=JsonPosition, init=False)  # after the answer so far
    _position_ahead: JsonPosition = field(factory=JsonPosition, init=False)  # after the answer and then `_path`

    def mask(self, path: Tokens) -> NDArray[np.uint8] | str:
        """Return the allowed tokens after `path`, one bit per token, or an error message."""
        found = np.zeros(4 * -(-self._size // 32), dtype=np.uint8)
        if path and path[-1] in self._ends:
            found.fill(255)  # the answer has ended, so any token may follow
            return found
        matcher = self._matcher_at(path)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(found.ctypes.data, len(found))
        if matcher.is_error():
            return to_one_line(matcher.get_error())
        if not found.any():
            return "the grammar has no continuation"
        return found if self.quoted_tokens is None else self._mask_repeated_keys(found, self.quoted_tokens, path)

    def _mask_repeated_keys(self, mask: NDArray[np.uint8], quoted: QuotedTokens, path: Tokens) -> NDArray[np.uint8]:
        """Remove tokens that would repeat a key. The mask stays as it is if no other token may follow."""
        tokens = quoted.find_forbidden(self._position_ahead if path else self._position)
        if not tokens:
            return mask
        less = mask.copy()
        for token in tokens:
            less[token // 8] &= ~(1 << token % 8) & 0xFF
        return less if less.any() else mask

    def count_allowed(self, path: Tokens) -> int:
        """Return how many tokens of `path` keep to the grammar. An end token counts; the mask says if it may come.

        A draft may propose an id beyond the tokenizer's, since vocabularies are padded. It keeps to no grammar, and the
        library must not see it: the matcher would fail from then on.
        """
        end = next((at for at, token in enumerate(path) if token in self._ends or token >= self._size), len(path))
        count = self._base.validate_tokens(list(path[:end]))
        return count + 1 if count == end and end < len(path) and path[end] in self._ends else count

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the answer by tokens."""
        said = tuple(token for token in tokens if token not in self._ends)
        if self.quoted_tokens is not None:
            self._position = self.quoted_tokens.advance(said, self._position)
        if self._ahead is not None and self._path == said[: len(self._path)]:
            self._base = self._ahead
            said = said[len(self._path) :]
        self._path = ()
        self._ahead = None
        self._base.consume_tokens(list(said))

    def _matcher_at(self, path: Tokens) -> LLMatcher:
        """Return the matcher after `path`. The last one is reused where `path` continues it."""
        if not path:
            return self._base
        if self._ahead is None or self._path != path[: len(self._path)]:
            self._path = ()
            self._ahead = self._base.deep_copy()
            self._position_ahead = self._position
        self._ahead.consume_tokens(list(path[len(self._path) :]))
        if self.quoted_tokens is not None:
            self._position_ahead = self.quoted_tokens.advance(path[len(self._path) :], self._position_ahead)
        self._path = path
        return self._ahead


def to_one_line(message: str) -> str:
    """Return the library's message in one line, without the lines of the grammar that it quotes."""
    lines = [line for line in message.replace("<non-verbose/>", "").splitlines() if not QUOTED_GRAMMAR_LINE.match(line)]
    return " ".join(" ".join(lines).split())[:300]
