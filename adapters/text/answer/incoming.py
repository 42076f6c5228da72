"""Text that comes in pieces of any size, for parsers that read it as if it were all there.

A parser is a generator: where it needs more text it yields, and goes on when there is some. What it decides rests on
the text and never on where the text was cut, so any cut gives the same answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from attrs import define

T = TypeVar("T")
Parsing: TypeAlias = Generator[None, None, T]

PLAIN = re.compile(r'[^"\\]*')
BARE = re.compile(r"[\s0-9A-Za-z+\-.,:]*")  # what JSON has outside its strings, brackets aside
CLOSING = {"{": "}", "[": "]"}
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

    def until(self, words: Sequence[str], say: Callable[[str], None]) -> Parsing[str]:
        """Says what comes before the first of these words, as soon as that is certain, and takes the word.

        At the end it gives "".

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
                self.at, said = len(self.text), self.rest
                if said:
                    say(said)
                return ""

    def json_string(self, most: int | None = None) -> Parsing[str]:
        """Takes a JSON string, and gives it as it was written. BrokenCall: there is none, or it does not end."""
        if not (yield from self.follows('"')):
            raise BrokenCall
        parts, size = ['"'], 0
        while True:
            parts.append((yield from self.matched(PLAIN, most)))
            size += len(parts[-1])
            if most is not None and size > most:
                raise BrokenCall
            char = yield from self.peek()
            if not char:
                raise BrokenCall
            self.at += 1
            parts.append(char)
            if char == '"':
                return "".join(parts)
            if not (yield from self.peek()):
                raise BrokenCall
            parts.append(self.text[self.at])
            self.at += 1

    def json_container(self, say: Callable[[str], None]) -> Parsing[None]:
        """Takes a JSON object or array, and says it as it was written while it comes.

        It is delimited, not checked: brackets and strings must be in order. BrokenCall, with all that was taken said:
        they are not, or it does not end.
        """
        open_: list[str] = []
        while True:
            char = yield from self.peek()
            if char == '"':
                yield from self._string_as_it_comes(say)
            elif char in CLOSING and char and len(open_) < MAX_DEPTH:
                open_.append(CLOSING[char])
                self.at += 1
                say(char)
            elif open_ and char == open_[-1]:
                open_.pop()
                self.at += 1
                say(char)
            else:
                bare = yield from self.matched(BARE)
                if not bare:
                    raise BrokenCall
                say(bare)
            if not open_:
                return

    def _string_as_it_comes(self, say: Callable[[str], None]) -> Parsing[None]:
        self.at += 1
        said = '"'
        while (char := (yield from self.peek())) and char != '"':
            if char == "\\":
                self.at += 1
                escaped = yield from self.peek()
                said += char + escaped
                self.at += len(escaped)
            else:
                found = PLAIN.match(self.text, self.at)
                assert found is not None
                self.at = found.end()
                said += found[0]
            say(said)
            said = ""
        say(said + char)
        self.at += len(char)
        if not char:
            raise BrokenCall


def held(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of a text that may be the beginning of one of these words."""
    most = min(len(text), max(map(len, words)) - 1)
    for size in range(most, 0, -1):
        if any(word.startswith(text[-size:]) for word in words):
            return size
    return 0


def string_value(written: str) -> str:
    """A JSON string's value. Raises BrokenCall."""
    try:
        value: str = json.loads(written, strict=False)
        value.encode()  # a lone surrogate could not be sent on
    except ValueError:
        raise BrokenCall from None
    return value
