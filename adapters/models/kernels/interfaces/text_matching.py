"""The interface of texts that proposals are copied from. The compiled library implements it, for all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from effects.ids import Tokens

MOST_COPIED = 31  # tokens that follow a match and are found with it (texts.h)
MOST_BRANCH = 7  # tokens of a branch that leaves them
END_OF_TEXT = -1


class Branch(NamedTuple):
    """The second-place continuation of a text. fork: the tokens of the chain that come before it."""

    fork: int
    tokens: Tokens


NO_BRANCH = Branch(0, ())


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
        """Return up to `count` tokens that followed at the earlier position, at most MOST_COPIED.

        They count as proposed: the next search computes `on_branch` by them.
        """
        ...

    @property
    def on_branch(self) -> int:
        """The tokens that had come when the text was searched last and stand on the branch of the match before.

        If that branch was not proposed: 1 if it begins with the first token that differs from the chain.
        """
        ...

    def find_branch(self, chain: int, count: int) -> Branch:
        """Return how else the text could go on, where `chain` copied tokens are proposed: at most `count` tokens.

        They count as proposed, too.

        It is what followed at another earlier position, from the first token that differs from the chain. The
        position with the longest match is taken. Of equally long ones, it is the one with the most frequent next token,
        and then the one that differs first.
        """
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens of 0 to 2^31 - 1. In an archive, END_OF_TEXT separates one text from the next one."""
        ...

    def read_tail(self, count: int) -> Tokens:
        """Return the last `count` tokens."""
        ...


class TextBatch(Protocol):
    """Texts that are searched together, each with the archive that is searched for it."""

    def match_appended(self, appended: Sequence[Sequence[int]]) -> list[int]:
        """Append these tokens to each text, search all texts, and return `IndexedText.matched` of each.

        Nothing else may have been appended to an archive since the batch was made.
        """
        ...


class TextMatcher(Protocol):
    """Makes texts and searches them."""

    def make_text(self) -> IndexedText: ...

    def make_batch(self, texts: Sequence[tuple[IndexedText, IndexedText | None]]) -> TextBatch:
        """Return a batch of these texts with their archives.

        A search looks for the longest match of the end of a text. Of equally long matches, the one with the most
        frequent next token is taken, and of these the newest. The text is preferred to the archive.
        """
        ...
