"""Stop strings, looked for in what an answer says: not in its reasoning, and not in the arguments of its calls.

An Aho-Corasick automaton reads the characters of the text. Its depth is how much of the text could be the beginning of
a stop string: just that many characters are held back. Every character is looked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from attrs import define, field

from adapters.text.answer.answer_pieces import AnswerPiece, TextPiece


@define(eq=False)
class StopStrings:
    """What an answer says, up to a stop string.

    stops: whichever is complete first ends the answer before it, the longest if several are complete at once; so where
    the answer ends does not depend on how it was cut into tokens. No stop string goes on behind a call or reasoning.
    """

    stops: Sequence[str] = ()
    stopped: str | None = field(default=None, init=False)  # the stop string that was found
    _finder: StopFinder | None = field(init=False)
    _held: str = field(default="", init=False)  # may be the beginning of a stop string

    def __attrs_post_init__(self) -> None:
        self._finder = StopFinder.build(self.stops) if self.stops else None

    def push(self, pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
        """What is certain to be said now. After it, `stopped` tells whether a stop string was completed."""
        if self._finder is None:
            return list(pieces)
        said = list[AnswerPiece]()
        for piece in pieces:
            if self.stopped is not None:
                break
            if isinstance(piece, TextPiece):
                said += self._said(self._pass(self._finder, piece.text))
            else:
                said += [*self.finish(), piece]
                self._finder.node = 0
        return said

    def finish(self) -> list[AnswerPiece]:
        """What was held back."""
        rest, self._held = self._held, ""
        return self._said(rest)

    @staticmethod
    def _said(text: str) -> list[AnswerPiece]:
        return [TextPiece(text)] if text else []

    def _pass(self, finder: StopFinder, text: str) -> str:
        open_text = self._held + text
        end, self.stopped = finder.search(text)
        if self.stopped is not None:
            keep = len(self._held) + end - len(self.stopped)
            self._held = ""
            return open_text[:keep]
        keep = len(open_text) - finder.depth
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
