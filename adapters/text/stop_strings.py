"""Finds stop strings in the text of an answer, but not in its reasoning or in the arguments of its calls.

An Aho-Corasick automaton reads the text. Its depth is the length of the longest end of the text that may begin a stop
string. Exactly that many characters are held back. Every character is read once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from attrs import define, field

from adapters.text.answer.answer_pieces import AnswerPiece, TextPiece


@define(eq=False)
class StopStrings:
    """Passes on the pieces of an answer up to the first stop string.

    The stop string that is complete first ends the answer before it. If several are complete at the same character, the
    longest counts. So the end of the answer does not depend on how it was cut into tokens. A stop string does not
    continue after a call or reasoning.
    """

    stops: Sequence[str] = ()
    found_stop: str | None = field(default=None, init=False)  # the stop string that was found
    _finder: StopFinder | None = field(init=False)
    _held_text: str = field(default="", init=False)  # text that may be the beginning of a stop string

    def __attrs_post_init__(self) -> None:
        self._finder = StopFinder.build(self.stops) if self.stops else None

    def push(self, pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
        """Take pieces and return those that are certain now. `found_stop` is set once a stop string is complete."""
        if self._finder is None:
            return list(pieces)
        said = list[AnswerPiece]()
        for piece in pieces:
            if self.found_stop is not None:
                break
            if isinstance(piece, TextPiece):
                said += self._to_pieces(self._filter(self._finder, piece.text))
            else:
                said += [*self.finish(), piece]
                self._finder.node = 0
        return said

    def finish(self) -> list[AnswerPiece]:
        """Return the text that was held back."""
        rest = self._held_text
        self._held_text = ""
        return self._to_pieces(rest)

    @staticmethod
    def _to_pieces(text: str) -> list[AnswerPiece]:
        return [TextPiece(text)] if text else []

    def _filter(self, finder: StopFinder, text: str) -> str:
        """Return the text that is certain to come before any stop string. The rest is held back."""
        open_text = self._held_text + text
        end, self.found_stop = finder.search(text)
        if self.found_stop is not None:
            keep = len(self._held_text) + end - len(self.found_stop)
            self._held_text = ""
            return open_text[:keep]
        keep = len(open_text) - finder.depth
        self._held_text = open_text[keep:]
        return open_text[:keep]


@define(eq=False)
class StopFinder:
    """Finds all stop strings at once, with one step per character, amortised (Aho and Corasick 1975)."""

    children: list[dict[str, int]]
    failure_links: list[int]
    depths: list[int]
    stops_at: list[str | None]  # the longest stop string that ends at this node
    node: int = 0

    @property
    def depth(self) -> int:
        """Length of the longest end of the text so far that begins a stop string."""
        return self.depths[self.node]

    @staticmethod
    def build(stops: Sequence[str]) -> StopFinder:
        """Build the automaton of some stop strings."""
        finder = StopFinder([{}], [0], [0], [None])
        for stop in stops:
            finder._insert(stop)
        queue = deque(finder.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in finder.children[node].items():
                finder.failure_links[child] = finder._step(finder.failure_links[node], char)
                # A node's own stop string is longer than any that ends at its failure link.
                finder.stops_at[child] = finder.stops_at[child] or finder.stops_at[finder.failure_links[child]]
                queue.append(child)
        return finder

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self.children[node]:
                self.children[node][char] = len(self.children)
                self.children.append({})
                self.failure_links.append(0)
                self.depths.append(self.depths[node] + 1)
                self.stops_at.append(None)
            node = self.children[node][char]
        self.stops_at[node] = stop

    def _step(self, node: int, char: str) -> int:
        while node and char not in self.children[node]:
            node = self.failure_links[node]
        return self.children[node].get(char, 0)

    def search(self, text: str) -> tuple[int, str | None]:
        """Read `text` up to the first stop string. Return the number of characters read, and the stop string."""
        for index, char in enumerate(text, 1):
            self.node = self._step(self.node, char)
            if self.stops_at[self.node] is not None:
                return index, self.stops_at[self.node]
        return len(text), None
