"""Incremental detokenisation: the pieces of a stream join to what one whole decode of its tokens gives.

A byte-level token is a string of bytes and a text is their concatenation, so the state is an incremental UTF-8 decoder
(invalid bytes become U+FFFD by maximal subparts, as in the Unicode standard and in the `tokenizers` library) and, with
stop strings, an Aho-Corasick automaton over the decoded characters. Its depth is how much of the text could be the
beginning of a stop string: just that many characters are held back. Every character is looked at once.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from attrs import define, field

from adapters.text.tokenizer import Tokenizer


@define(eq=False)
class TextStream:
    """The text of one answer, token by token.

    hidden: tokens that count but have no text (the ones that ended the answer).
    shown: special tokens that have one all the same, as whoever reads the text has to see them.
    stops: whichever is complete first ends the text before it, the longest if several are complete at once; so where
    the text ends does not depend on how it was cut into tokens.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    hidden: Collection[int] = ()
    shown: Collection[int] = ()
    stopped: str | None = field(default=None, init=False)  # the stop string that was found
    _utf8: codecs.IncrementalDecoder = field(init=False)
    _finder: StopFinder | None = field(init=False)
    _held: str = field(default="", init=False)  # may be the beginning of a stop string
    _drops: int = field(init=False)  # spaces that may still be none of the text

    def __attrs_post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._finder = StopFinder.build(self.stops) if self.stops else None
        self._drops = self.tokenizer.spelling.drops

    def push(self, token: int) -> str:
        """What is certain to follow now. After it, `stopped` tells whether this token completed a stop string."""
        if token in self.hidden or (token in self.tokenizer.special and token not in self.shown):
            return ""
        text = self._utf8.decode(self.tokenizer.piece(token))
        while text and self._drops:
            text, self._drops = (text[1:], self._drops - 1) if text[0] == " " else (text, 0)
        return self._pass(text)

    def finish(self) -> str:
        """The rest of the text: what was held back, and U+FFFD for a character that was never completed."""
        tail = self._pass(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return tail if self.stopped is not None else tail + rest

    def _pass(self, text: str) -> str:
        if self._finder is None:
            return text
        if self.stopped is not None or not text:
            return ""
        open_text = self._held + text
        end, self.stopped = self._finder.search(text)
        if self.stopped is not None:
            keep = len(self._held) + end - len(self.stopped)
            self._held = ""
            return open_text[:keep]
        keep = len(open_text) - self._finder.depth
        self._held = open_text[keep:]
        return open_text[:keep]


@define(eq=False)
class StopFinder:
    """Aho and Corasick 1975: all stop strings at once, one step a character (amortised)."""

    nexts: list[dict[str, int]]
    fails: list[int]
    depths: list[int]
    found: list[str | None]  # the longest stop string that ends at this node
    node: int = 0

    @property
    def depth(self) -> int:
        """Length of the longest end of the text so far that begins a stop string."""
        return self.depths[self.node]

    @staticmethod
    def build(stops: Sequence[str]) -> StopFinder:
        finder = StopFinder([{}], [0], [0], [None])
        for stop in stops:
            finder._insert(stop)
        queue = deque(finder.nexts[0].values())
        while queue:
            node = queue.popleft()
            for char, child in finder.nexts[node].items():
                finder.fails[child] = finder._step(finder.fails[node], char)
                # a node's own stop string is longer than any that ends at its failure link
                finder.found[child] = finder.found[child] or finder.found[finder.fails[child]]
                queue.append(child)
        return finder

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.nexts[node]:
                self.nexts[node][char] = len(self.nexts)
                self.nexts.append({})
                self.fails.append(0)
                self.depths.append(self.depths[node] + 1)
                self.found.append(None)
            node = self.nexts[node][char]
        self.found[node] = stop

    def _step(self, node: int, char: str) -> int:
        while node and char not in self.nexts[node]:
            node = self.fails[node]
        return self.nexts[node].get(char, 0)

    def search(self, text: str) -> tuple[int, str | None]:
        """Read on; stop at the first stop string: (characters read, what was found)."""
        for place, char in enumerate(text, 1):
            self.node = self._step(self.node, char)
            if self.found[self.node] is not None:
                return place, self.found[self.node]
        return len(text), None
