"""Incremental detokenisation: the pieces of a stream join to what one whole decode of its tokens gives.

A byte-level token is a string of bytes and a text is their concatenation, so the state is an incremental UTF-8 decoder
(invalid bytes become U+FFFD by maximal subparts, as in the Unicode standard and in the `tokenizers` library).
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from attrs import define, field

from adapters.text.tokenizer import Tokenizer


@define(eq=False)
class TextStream:
    """The text of one answer, token by token.

    hidden: tokens that count but have no text (the ones that ended the answer).
    shown: special tokens that have one all the same, as whoever reads the text has to see them.
    """

    tokenizer: Tokenizer
    hidden: Collection[int] = ()
    shown: Collection[int] = ()
    _utf8: codecs.IncrementalDecoder = field(init=False)
    _drops: int = field(init=False)  # spaces that may still be none of the text

    def __attrs_post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops = self.tokenizer.spelling.drops

    def push(self, token: int) -> str:
        """What is certain to follow now."""
        if token in self.hidden or (token in self.tokenizer.special and token not in self.shown):
            return ""
        text = self._utf8.decode(self.tokenizer.piece(token))
        while text and self._drops:
            text, self._drops = (text[1:], self._drops - 1) if text[0] == " " else (text, 0)
        return text

    def finish(self) -> str:
        """U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)
