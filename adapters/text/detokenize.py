"""Incremental detokenisation: the joined pieces of a stream are the same text as one decode of all its tokens.

A byte-level token is a string of bytes, and a text is their concatenation. So the only state is an incremental UTF-8
decoder. Invalid bytes become U+FFFD by maximal subparts, as in the Unicode standard and in the `tokenizers` library.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from attrs import define, field

from adapters.text.tokenizer import Tokenizer


@define(eq=False)
class TextStream:
    """The text of one answer, token by token.

    hidden_tokens: tokens that count but have no text, namely those that end the answer.
    shown_special_tokens: special tokens that are written out, because the parser of the answer must see them.
    """

    tokenizer: Tokenizer
    hidden_tokens: Collection[int] = ()
    shown_special_tokens: Collection[int] = ()
    _utf8: codecs.IncrementalDecoder = field(init=False)
    _spaces_to_drop: int = field(init=False)  # leading spaces that are still to be removed, if they come

    def __attrs_post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_drop = self.tokenizer.spelling.leading_spaces

    def push(self, token: int) -> str:
        """Take a token and return the text that is complete now."""
        if token in self.hidden_tokens or (token in self.tokenizer.special and token not in self.shown_special_tokens):
            return ""
        text = self._utf8.decode(self.tokenizer.token_bytes(token))
        while text and self._spaces_to_drop:
            if text[0] == " ":
                text = text[1:]
                self._spaces_to_drop -= 1
            else:
                self._spaces_to_drop = 0
        return text

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the last character was not completed, or nothing."""
        return self._utf8.decode(b"", final=True)
