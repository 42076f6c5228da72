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
    """The text is not the call that it seemed to begin."""


@define(eq=False)
class IncomingText:
    """The text of an answer while it comes.

    text, position: the text from `position` on has come and is not taken yet.
    ended: no more text will come.
    mark: the position to go back to if a call turns out to be broken.
    """

    text: str = ""
    position: int = 0
    ended: bool = False
    mark: int | None = None

    def push(self, text: str) -> None:
        kept = self.position if self.mark is None else self.mark
        self.text = self.text[kept:] + text
        self.position = self.position - kept
        self.mark = None if self.mark is None else 0

    @property
    def rest(self) -> str:
        return self.text[self.position :]

    def wait_for_more(self) -> Parsing[bool]:
        """Wait until more text has come. Return False if none will come."""
        have = len(self.text) - self.position
        while not self.ended:
            yield
            if len(self.text) - self.position > have:
                return True
        return False

    def peek(self) -> Parsing[str]:
        """Return the next character without taking it, or the empty text at the end."""
        while self.position == len(self.text):
            if not (yield from self.wait_for_more()):
                return ""
        return self.text[self.position]

    def take_if_next(self, word: str) -> Parsing[bool]:
        """Take `word` if it comes next. Return whether it does."""
        while not self.text.startswith(word, self.position):
            if not word.startswith(self.rest) or not (yield from self.wait_for_more()):
                return False
        self.position += len(word)
        return True

    def take_matching(self, pattern: re.Pattern[str], most: int | None = None) -> Parsing[str]:
        """Take and return the longest text that matches. Raises BrokenCall if it has more than `most` characters.

        pattern: must match every beginning of a text that it matches.
        """
        taken = ""
        while (yield from self.peek()):
            found = pattern.match(self.text, self.position)
            assert found is not None
            self.position = found.end()
            taken += found[0]
            if most is not None and len(taken) > most:
                raise BrokenCall
            if self.position < len(self.text):
                break
        return taken

    def take_until(self, words: Sequence[str], say: Callable[[str], None], cut: int | None = None) -> Parsing[str]:
        """Take the text before the first of these words, and the word. Return the word, or "" at the end of all text.

        say: gets the text before the word, as soon as it is certain.
        cut: the beginning of a word at the end of all text is not passed on if it has at least this many characters.

        No word may begin with another one.
        """
        wanted = re.compile("|".join(map(re.escape, words)))
        while True:
            found = wanted.search(self.text, self.position)
            stop = found.start() if found else len(self.text) - partial_match_length(self.rest, words)
            if stop > self.position:
                said = self.text[self.position : stop]
                self.position = stop
                say(said)
            if found:
                self.position = found.end()
                return found[0]
            if not (yield from self.wait_for_more()):
                if cut is not None and len(self.text) - self.position >= cut:
                    return ""
                said = self.rest
                self.position = len(self.text)
                if said:
                    say(said)
                return ""

    def peek_many(self, size: int) -> Parsing[str]:
        """Return the next `size` characters without taking them. There are fewer only at the end."""
        while len(self.text) - self.position < size:
            if not (yield from self.wait_for_more()):
                break
        return self.text[self.position : self.position + size]

    def run_lookahead(self, parsing: Parsing[T]) -> Parsing[T]:
        """Run a parser and return its result, then go back to where it began."""
        marked = self.mark
        self.mark = self.position if self.mark is None else self.mark
        distance = self.position - self.mark
        found = yield from parsing
        assert self.mark is not None
        self.position = self.mark + distance
        if marked is None:
            self.mark = None
        return found


def partial_match_length(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may be the beginning of one of these words."""
    most = min(len(text), max(map(len, words)) - 1)
    for size in range(most, 0, -1):
        if any(word.startswith(text[-size:]) for word in words):
            return size
    return 0
