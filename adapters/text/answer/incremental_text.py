"""Text that comes in pieces of any size, for parsers that read it as if it were all there.

A parser is a generator: where it needs more text it yields, and goes on when there is some. What it decides rests on
the text and never on where the text was cut, so any cut gives the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from attrs import define

T = TypeVar("T")
Parsing: TypeAlias = Generator[None, None, T]

SPACE = re.compile(r"\s*")
MAX_DEPTH = 64


class BrokenCall(Exception):
    """This is not what it seemed to begin."""


@define(eq=False)
class Incoming:
    """text: what has come and is not taken yet, from `at` on.  ended: no more will come.

    mark: where to go back to if something turns out to be broken.
    """

    text: str = ""
    at: int = 0
    ended: bool = False
    mark: int | None = None

    def push(self, text: str) -> None:
        kept = self.at if self.mark is None else self.mark
        self.text, self.at = self.text[kept:] + text, self.at - kept
        self.mark = None if self.mark is None else 0

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def more(self) -> Parsing[bool]:
        """Waits until more has come; False: nothing will."""
        have = len(self.text) - self.at
        while not self.ended:
            yield
            if len(self.text) - self.at > have:
                return True
        return False

    def peek(self) -> Parsing[str]:
        """The next character; "" at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def follows(self, word: str) -> Parsing[bool]:
        """Is that what comes next? Then it is taken."""
        while not self.text.startswith(word, self.at):
            if not word.startswith(self.rest) or not (yield from self.more()):
                return False
        self.at += len(word)
        return True

    def matched(self, pattern: re.Pattern[str], most: int | None = None) -> Parsing[str]:
        """Takes all that is of a kind: every beginning of it matches `pattern`. BrokenCall: beyond `most`."""
        taken = ""
        while (yield from self.peek()):
            found = pattern.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            taken += found[0]
            if most is not None and len(taken) > most:
                raise BrokenCall
            if self.at < len(self.text):
                break
        return taken

    def until(self, words: Sequence[str], say: Callable[[str], None], cut: int | None = None) -> Parsing[str]:
        """Says what comes before the first of these words, as soon as that is certain, and takes the word.

        At the end it gives "". cut: the beginning of a word at the end is not said if it has so many characters.

        No word may begin with another one.
        """
        wanted = re.compile("|".join(map(re.escape, words)))
        while True:
            found = wanted.search(self.text, self.at)
            stop = found.start() if found else len(self.text) - held(self.rest, words)
            if stop > self.at:
                self.at, said = stop, self.text[self.at : stop]
                say(said)
            if found:
                self.at = found.end()
                return found[0]
            if not (yield from self.more()):
                if cut is not None and len(self.text) - self.at >= cut:
                    return ""
                self.at, said = len(self.text), self.rest
                if said:
                    say(said)
                return ""

    def ahead(self, size: int) -> Parsing[str]:
        """The next characters, which are not taken; fewer than `size` only at the end."""
        while len(self.text) - self.at < size:
            if not (yield from self.more()):
                break
        return self.text[self.at : self.at + size]

    def look(self, parsing: Parsing[T]) -> Parsing[T]:
        """Runs a parsing and gives what it gives; what it took comes again."""
        marked, self.mark = self.mark, self.at if self.mark is None else self.mark
        behind = self.at - self.mark
        found = yield from parsing
        assert self.mark is not None
        self.at = self.mark + behind
        if marked is None:
            self.mark = None
        return found


def held(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of a text that may be the beginning of one of these words."""
    most = min(len(text), max(map(len, words)) - 1)
    for size in range(most, 0, -1):
        if any(word.startswith(text[-size:]) for word in words):
            return size
    return 0
