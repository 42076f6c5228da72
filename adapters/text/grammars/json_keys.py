"""Follows the keys of JSON while it is generated, so that no key comes twice in one object.

The problem: a grammar cannot express this, since the allowed keys depend on all keys before. Where a schema lists the
properties of an object, the grammar has each of them once. An open object, such as `{"type": "object"}`, needs more.

The idea: the text of the answer is followed byte by byte. A token is removed from the mask if it would end a key that
its object has already.

Limits: two spellings of one key (`"a"` and `"\\u0061"`) count as two keys. Text that is not JSON is not followed. After
every control token (a tag that opens a call, or the end of reasoning) a new text begins. It is followed if it begins
with a bracket.

Used on the device thread, for answers whose grammar contains JSON.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from attrs import define, evolve, field, frozen

JsonState: TypeAlias = Literal["before", "lost", "value", "key", "text", "other"]
SPACE = b" \t\r\n"
OPENING = b"{["
CLOSING = b"}]"
QUOTE = b'"'[0]
BACKSLASH = b"\\"[0]
COMMA = b","[0]


@frozen
class JsonPosition:
    """A position in a JSON text.

    state: one of
      `before`: nothing has come yet;
      `key`: inside a key, whose bytes so far are `key_bytes`;
      `text`: inside a string that is a value;
      `value`: a value is due;
      `other`: between two parts, so that the next string in an object is a key;
      `lost`: the text is not JSON.
    open_containers: the keys of each open object, outermost first, or None for an array.
    escaped: the last byte was a backslash that escapes the next byte.
    """

    state: JsonState = "before"
    open_containers: tuple[frozenset[bytes] | None, ...] = ()
    key_bytes: bytes = b""
    escaped: bool = False
    is_repeated_key: bool = False  # the last byte ended a key that its object had already

    def advance(self, text: bytes) -> JsonPosition:
        found = self
        for byte in text:
            found = found.advance_byte(byte)
            if found.is_repeated_key or found.state == "lost":
                break
        return found

    def advance_byte(self, byte: int) -> JsonPosition:
        """Return the position after one more byte."""
        if self.state in {"key", "text"}:
            return self.advance_in_text(byte)
        if self.state == "lost" or byte in SPACE:
            return self
        if byte in OPENING:
            in_object = byte == OPENING[0]
            opened = frozenset[bytes]() if in_object else None
            return JsonPosition("other" if in_object else "value", (*self.open_containers, opened))
        return self.advance_in_container(byte) if self.open_containers else JsonPosition("lost")

    def advance_in_container(self, byte: int) -> JsonPosition:
        """Return the position after a byte between the strings of a container."""
        in_object = self.open_containers[-1] is not None
        if byte in CLOSING:
            closed = self.open_containers[:-1]
            return JsonPosition("other" if closed else "before", closed)
        if byte == QUOTE:
            return JsonPosition("key" if in_object and self.state == "other" else "text", self.open_containers)
        # A comma, a colon, or part of a number or a constant.
        return JsonPosition("other" if in_object and byte == COMMA else "value", self.open_containers)

    def advance_in_text(self, byte: int) -> JsonPosition:
        """Return the position after a byte inside a key or a string."""
        is_key = self.state == "key"
        if self.escaped or byte != QUOTE:
            escaped = byte == BACKSLASH and not self.escaped
            if not is_key and escaped == self.escaped:
                return self
            return JsonPosition(
                self.state, self.open_containers, self.key_bytes + bytes((byte,)) if is_key else b"", escaped
            )
        keys = self.open_containers[-1]
        if not is_key or keys is None:
            return JsonPosition("value", self.open_containers)
        return JsonPosition(
            "value", (*self.open_containers[:-1], keys | {self.key_bytes}), is_repeated_key=self.key_bytes in keys
        )


@define(eq=False)
class QuotedTokens:
    """The tokens of a vocabulary that contain a quotation mark.

    pieces: returns the bytes of a token. size: number of tokens. controls: tokens that are not text.
    """

    pieces: Callable[[int], bytes]
    size: int
    controls: frozenset[int]
    _by_bytes: list[tuple[bytes, int]] = field(init=False)
    _with_two_quotes: list[tuple[bytes, int]] = field(init=False)  # tokens with at least two quotation marks

    def __attrs_post_init__(self) -> None:
        texts = ((self.pieces(token), token) for token in range(self.size) if token not in self.controls)
        self._by_bytes = sorted((text, token) for text, token in texts if QUOTE in text)
        self._with_two_quotes = [token_text for token_text in self._by_bytes if token_text[0].count(b'"') > 1]

    def advance(self, tokens: Iterable[int], start: JsonPosition) -> JsonPosition:
        """Return the position of a text after these tokens."""
        found = start
        for token in tokens:
            found = evolve(found, is_repeated_key=False) if found.is_repeated_key else found
            found = JsonPosition() if token in self.controls else found.advance(self.pieces(token))
        return found

    def find_forbidden(self, position: JsonPosition) -> list[int]:
        """Return the tokens that would end a key which its object has already."""
        ends = [key + b'"' for keys in position.open_containers for key in keys or ()]
        if not ends or position.state == "lost":
            return []
        found = list[int]()
        if position.state == "key":
            for key in position.open_containers[-1] or ():
                if key.startswith(position.key_bytes):
                    found += self._tokens_starting_with(key[len(position.key_bytes) :] + b'"')
        # A token that reaches from here to the end of another key has two quotation marks. Few tokens have that, and
        # fewer of them end a key.
        likely = ((text, token) for text, token in self._with_two_quotes if any(end in text for end in ends))
        return found + [token for text, token in likely if position.advance(text).is_repeated_key]

    def _tokens_starting_with(self, text: bytes) -> list[int]:
        at = bisect_left(self._by_bytes, (text, -1))
        found = list[int]()
        while at < len(self._by_bytes) and self._by_bytes[at][0].startswith(text):
            found.append(self._by_bytes[at][1])
            at += 1
        return found
