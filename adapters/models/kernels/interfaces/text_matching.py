"""The interface of texts that proposals are copied from. The compiled library implements it, for all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from effects.ids import Tokens

MOST_COPIED = 31  # tokens that follow a match and are found with it (texts.h)
END_OF_TEXT = -1


class IndexedText(Protocol):
    """A text that grows at its end, with an index of its positions.

    It keeps what the last search found: the earlier position at which it went on after the tokens that it ends with.
    """

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def matched(self) -> int:
        """The tokens before both positions that agree, at most 64; 0: there are fewer than three."""
        ...

    def copy(self, count: int) -> Tokens:
        """Return up to `count` tokens that followed at the earlier position, at most MOST_COPIED."""
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens of 0 to 2^31 - 1. In an archive, END_OF_TEXT separates one text from the next one."""
        ...

    def read_tail(self, count: int) -> Tokens:
        """Return the last `count` tokens."""
        ...


class TextMatcher(Protocol):
    """Makes texts and searches them."""

    def make_text(self) -> IndexedText: ...

    def match(self, texts: Sequence[tuple[IndexedText, IndexedText | None]]) -> None:
        """Search each text, and its archive, for the longest match of the end of the text.

        Of equally long matches, that counts whose next token is the most frequent one, and of these the newest. The
        text goes before the archive.
        """
        ...
