"""The keys of JSON that is being written, so that none comes twice in one object.

A grammar cannot say that: which keys may follow depends on all that came before. Where a schema lists the properties of
an object, the grammar has each of them once. An object that is open for others (`{"type": "object"}`, say) needs this:
the text of an answer is followed byte by byte, and a token that would end a key which its object has already is taken
out of the mask.

Two spellings of one key (`"a"` and `"\\u0061"`) count as two. What is no JSON is not followed: text begins anew behind
every control token (a tag that opens a call, the end of reasoning), and counts where it begins with a bracket.

Used on the device's lane, for answers whose grammar has JSON in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from attrs import define, evolve, field, frozen

StateCheckpoint: TypeAlias = Literal["before", "lost", "value", "key", "text", "other"]
SPACE = b" \t\r\n"
OPENING, CLOSING = b"{[", b"}]"
QUOTE, BACKSLASH, COMMA = b'"'[0], b"\\"[0], b","[0]


@frozen
class JsonPlace:
    """How far a text has come. objects: the keys of each container that is open, None for an array.

    place: `before` anything; in a `key`, with its bytes so far; in a `text` that is a value; where a `value` is due;
    or `other`: between parts, where the next text in an object is a key. `lost`: that is no JSON, or not any more.
    """

    place: StateCheckpoint = "before"
    objects: tuple[frozenset[bytes] | None, ...] = ()
    written: bytes = b""
    escaped: bool = False
    twice: bool = False  # the last byte ended a key that was there

    def after(self, text: bytes) -> JsonPlace:
        found = self
        for byte in text:
            found = found.after_byte(byte)
            if found.twice or found.place == "lost":
                break
        return found

    def after_byte(self, byte: int) -> JsonPlace:
        if self.place in {"key", "text"}:
            return self.in_text(byte)
        if self.place == "lost" or byte in SPACE:
            return self
        if byte in OPENING:
            in_object = byte == OPENING[0]
            opened = frozenset[bytes]() if in_object else None
            return JsonPlace("other" if in_object else "value", (*self.objects, opened))
        return self.inside(byte) if self.objects else JsonPlace("lost")

    def inside(self, byte: int) -> JsonPlace:
        """Of a container, between its texts."""
        in_object = self.objects[-1] is not None
        if byte in CLOSING:
            closed = self.objects[:-1]
            return JsonPlace("other" if closed else "before", closed)
        if byte == QUOTE:
            return JsonPlace("key" if in_object and self.place == "other" else "text", self.objects)
        # a comma, a colon, or part of a number or a name
        return JsonPlace("other" if in_object and byte == COMMA else "value", self.objects)

    def in_text(self, byte: int) -> JsonPlace:
        is_key = self.place == "key"
        if self.escaped or byte != QUOTE:
            escaped = byte == BACKSLASH and not self.escaped
            if not is_key and escaped == self.escaped:
                return self
            return JsonPlace(self.place, self.objects, self.written + bytes((byte,)) if is_key else b"", escaped)
        keys = self.objects[-1]
        if not is_key or keys is None:
            return JsonPlace("value", self.objects)
        return JsonPlace("value", (*self.objects[:-1], keys | {self.written}), twice=self.written in keys)


@define(eq=False)
class QuotedTokens:
    """The tokens of a vocabulary that have a quotation mark in them. controls: tokens that are no text."""

    pieces: Callable[[int], bytes]
    size: int
    controls: frozenset[int]
    _by_bytes: list[tuple[bytes, int]] = field(init=False)
    _several: list[tuple[bytes, int]] = field(init=False)  # with two of them at least

    def __attrs_post_init__(self) -> None:
        texts = ((self.pieces(token), token) for token in range(self.size) if token not in self.controls)
        self._by_bytes = sorted((text, token) for text, token in texts if QUOTE in text)
        self._several = [one for one in self._by_bytes if one[0].count(b'"') > 1]

    def place(self, tokens: Iterable[int], start: JsonPlace) -> JsonPlace:
        """Where a text is after these tokens."""
        found = start
        for token in tokens:
            found = evolve(found, twice=False) if found.twice else found
            found = JsonPlace() if token in self.controls else found.after(self.pieces(token))
        return found

    def forbidden(self, place: JsonPlace) -> list[int]:
        """Those that would end a key which its object has already."""
        ends = [key + b'"' for keys in place.objects for key in keys or ()]
        if not ends or place.place == "lost":
            return []
        found = list[int]()
        if place.place == "key":
            for key in place.objects[-1] or ():
                if key.startswith(place.written):
                    found += self._beginning(key[len(place.written) :] + b'"')
        # what goes from here to the end of another key has two quotation marks: few tokens, of which fewer end a key
        likely = ((text, token) for text, token in self._several if any(end in text for end in ends))
        return found + [token for text, token in likely if place.after(text).twice]

    def _beginning(self, text: bytes) -> list[int]:
        at, found = bisect_left(self._by_bytes, (text, -1)), list[int]()
        while at < len(self._by_bytes) and self._by_bytes[at][0].startswith(text):
            found.append(self._by_bytes[at][1])
            at += 1
        return found
