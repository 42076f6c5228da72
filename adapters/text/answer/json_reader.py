"""Reads JSON as models write it, and passes on valid JSON while it comes.

Valid JSON is passed on as it was written. What has only one meaning is repaired: raw line breaks in strings, escapes
that JSON does not have, single quotes, keys without quotes, Python's `True`, `False` and `None`, trailing commas, and
quotes inside a string. A quote ends a string only if what follows it may follow a value: in `"say "hi" to him"}` only
the last one does. Everything else is `BrokenCall`, and whoever reads decides what becomes of it.

A library such as `json-repair` reads a whole text and guesses what is missing. This reader sees a text in pieces, says
each piece once, and must leave what it cannot understand as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from attrs import define

from adapters.text.answer.certain_json import CLOSING, JsonWriter
from adapters.text.answer.incremental_text import MAX_DEPTH, SPACE, BrokenCall, Incoming, Parsing
from adapters.text.answer.schema_types import properties_of, property_of, types_of

PLAIN = re.compile(r"[^\"'\\<\x00-\x1f]+")
BARE = re.compile(r"[A-Za-z0-9+\-._]*")
BARE_KEY = re.compile(r"[A-Za-z0-9_$\-]*")
NUMBER = re.compile(r"([+-]?)(0|[1-9]\d*|(?=\.\d))(?:\.(\d*))?([eE][+-]?\d+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
ESCAPES = frozenset('"\\/bfnrt')
VALUE_STARTS = frozenset("\"'[{-0123456789tfnTFN")
BEHIND_ARGUMENTS = frozenset(",<]}`;{")  # what may follow them in the object of their call
END_TAG = "</tool_call>"


@define(eq=False)
class JsonReader:
    """schema: of the outermost object, for the types of its values.

    enclosed: the value stands in the object of a call, whose end or another member follows it.
    """

    incoming: Incoming
    writer: JsonWriter
    schema: Mapping[str, Any]
    enclosed: bool = False

    def value(self, types: frozenset[str] = frozenset()) -> Parsing[None]:
        """Takes one value. BrokenCall: it is none, or it does not end."""
        char = yield from self.incoming.peek()
        if char in CLOSING and char:
            if self.writer.depth >= MAX_DEPTH:
                raise BrokenCall
            yield from (self._object() if char == "{" else self._array())
        elif char and char in "\"'":
            yield from self.string()
        else:
            word = yield from self.incoming.matched(BARE)
            self.writer.value(scalar(word, types))

    def _object(self) -> Parsing[None]:
        incoming, writer, first = self.incoming, self.writer, True
        outermost = writer.depth == 0
        incoming.at += 1
        writer.open_container("{")
        while True:
            space = yield from incoming.matched(SPACE)
            if not first and (yield from incoming.follows(",")):
                behind = yield from incoming.matched(SPACE)
                writer.comma(f"{space},{behind}")
                space = ""
            elif not first and (char := (yield from incoming.peek())) != "}":
                if not char or char not in "\"'":
                    raise BrokenCall
                writer.comma(", ")  # it is missing
                space = ""
            if (yield from incoming.peek()) == "}":
                incoming.at += 1
                writer.close_container(space)
                return
            writer.hold(space)
            written = yield from self.key()
            before = yield from incoming.matched(SPACE)
            if not (yield from incoming.follows(":")):
                raise BrokenCall
            behind = yield from incoming.matched(SPACE)
            writer.hold(f"{written}{before}:{behind}")
            types = (
                types_of(property_of(self.schema, json.loads(written)), self.schema) if outermost else frozenset[str]()
            )
            yield from self.value(types)
            first = False

    def _array(self) -> Parsing[None]:
        incoming, writer, first = self.incoming, self.writer, True
        incoming.at += 1
        writer.open_container("[")
        while True:
            space = yield from incoming.matched(SPACE)
            if not first and (yield from incoming.follows(",")):
                behind = yield from incoming.matched(SPACE)
                writer.comma(f"{space},{behind}")
                space = ""
            elif not first and (yield from incoming.peek()) != "]":
                raise BrokenCall
            if (yield from incoming.peek()) == "]":
                incoming.at += 1
                writer.close_container(space)
                return
            writer.hold(space)
            yield from self.value()
            first = False

    def key(self) -> Parsing[str]:
        """Takes a key, in quotes of either kind or in none, and gives it as JSON."""
        char = yield from self.incoming.peek()
        if char and char in "\"'":
            return (yield from self.plain_string())
        bare = yield from self.incoming.matched(BARE_KEY)
        if not bare:
            raise BrokenCall
        return json.dumps(bare)

    def text(self, most: int) -> Parsing[str]:
        """Takes a string, and gives its value. BrokenCall: beyond `most` characters."""
        value: str = json.loads((yield from self.plain_string(most)))
        return value

    def plain_string(self, most: int | None = None) -> Parsing[str]:
        """Takes a string up to its first quote, and gives it as JSON."""
        parts, size = list[str](), 0

        def take(text: str) -> None:
            nonlocal size
            parts.append(text)
            size += len(text)
            if most is not None and size > most + 2:
                raise BrokenCall

        yield from JsonReader(self.incoming, JsonWriter(take), {}).string(strict=True)
        return "".join(parts)

    def string(self, strict: bool = False) -> Parsing[None]:
        """Takes a string, and passes it on while it comes. strict: the first quote ends it."""
        incoming, writer = self.incoming, self.writer
        quote = yield from incoming.peek()
        if not quote or quote not in "\"'":
            raise BrokenCall
        incoming.at += 1
        writer.begin_string()
        while True:
            char = yield from incoming.peek()
            if not char:
                raise BrokenCall
            if found := PLAIN.match(incoming.text, incoming.at):
                incoming.at = found.end()
                writer.value(found[0])
                continue
            if char == "\\":
                yield from self._escape()
            elif char == quote and (strict or (yield from incoming.look(self._ends_string()))):
                incoming.at += 1
                writer.end_string()
                return
            elif char == "<" and not strict and (yield from incoming.look(self._ends_call())):
                raise BrokenCall
            else:
                incoming.at += 1
                writer.value(char if char in "'<" else json.dumps(char)[1:-1])

    def _escape(self) -> Parsing[None]:
        incoming = self.incoming
        written = yield from incoming.ahead(2)
        if written[1:] == "u":
            written = yield from incoming.ahead(6)
            if len(written) < 6 and re.fullmatch(r"\\u[0-9a-fA-F]*", written):
                self._cut_off()
            yield from self._code(written)
            return
        if len(written) < 2:
            self._cut_off()
        if written[1] in ESCAPES or written[1] == "'":
            incoming.at += 2
            self.writer.value("'" if written[1] == "'" else written)
        else:  # JSON has no such escape: the backslash is one
            incoming.at += 1
            self.writer.value("\\\\")

    def _cut_off(self) -> NoReturn:
        """All text ends in an escape, of which nothing is left."""
        self.incoming.at = len(self.incoming.text)
        self.writer.say("")
        raise BrokenCall

    def _code(self, written: str) -> Parsing[None]:
        """`\\u` and four digits. Half of a surrogate pair becomes U+FFFD."""
        incoming = self.incoming
        if not re.fullmatch(r"\\u[0-9a-fA-F]{4}", written):
            incoming.at += 1
            self.writer.value("\\\\")
            return
        number = ord(json.loads(f'"{written}"'))
        if 0xD800 <= number < 0xDC00:
            pair = yield from incoming.ahead(12)
            if re.fullmatch(r"\\u[0-9a-fA-F]{4}\\u[dD][c-fC-F][0-9a-fA-F]{2}", pair):
                written, number = pair, 0
        incoming.at += len(written)
        self.writer.value("\\ufffd" if 0xD800 <= number < 0xE000 else written)

    # -- what follows, looked at and not taken

    def _ends_string(self) -> Parsing[bool]:
        """Does the quote that comes next end the string? Then what follows it may follow a value."""
        incoming, closers = self.incoming, [one for one in self.writer.closers if one != '"']
        incoming.at += 1
        yield from incoming.matched(SPACE)
        while (char := (yield from incoming.peek())) and char in "]}" and closers:
            closers.pop()
            incoming.at += 1
            yield from incoming.matched(SPACE)
        if not char:
            return True
        if not closers:
            return not self.enclosed or char in BEHIND_ARGUMENTS
        return (yield from self._goes_on_behind_string(char, closers))

    def _goes_on_behind_string(self, char: str, closers: Sequence[str]) -> Parsing[bool]:
        """Does this character go on with the container, or does the end of the call break it off?"""
        incoming = self.incoming
        if char == "<":
            return (yield from incoming.follows(END_TAG))
        if char in "\"'" and len(closers) == 1:  # a comma is missing, if a declared member follows
            key = yield from self._is_key()
            return json.loads(key) in properties_of(self.schema) if key else False
        if char == ",":
            incoming.at += 1
            yield from incoming.matched(SPACE)
            char = yield from incoming.peek()
            if char and char not in "]}":
                return char in VALUE_STARTS if closers[-1] == "]" else (yield from self._is_key()) is not None
        return not char or char in "]}"

    def _is_key(self) -> Parsing[str | None]:
        """The key that comes next; None: it is none. What the end of all text cuts off may have become one."""
        try:
            key = yield from self.key()
        except BrokenCall:
            return "" if self.incoming.ended and self.incoming.at == len(self.incoming.text) else None
        yield from self.incoming.matched(SPACE)
        return key if (yield from self.incoming.peek()) in {":", ""} else None

    def _ends_call(self) -> Parsing[bool]:
        """Does the end of the call come next, in a string that was never closed? Then it or another call ends all."""
        incoming = self.incoming
        if not (yield from incoming.follows(END_TAG)):
            return False
        yield from incoming.matched(SPACE)
        return not (yield from incoming.peek()) or (yield from incoming.follows("<tool_call>"))


def scalar(word: str, types: frozenset[str] = frozenset()) -> str:
    """A number or a constant in JSON. types: of the schema; an integer has no fraction. Raises BrokenCall."""
    if word in WORDS:
        return WORDS[word]
    found = NUMBER.fullmatch(word)
    if found is None:
        raise BrokenCall
    sign, whole, fraction, exponent = found.groups()
    whole = ("-" if sign == "-" else "") + (whole or "0")
    if fraction is not None and not fraction.strip("0") and exponent is None and is_integer_only(types):
        return whole
    return whole + ("" if fraction is None else f".{fraction or 0}") + (exponent or "")


def is_integer_only(types: frozenset[str]) -> bool:
    return "integer" in types and "number" not in types


def repaired(text: str) -> str | None:
    """A whole text as JSON; None where it is no JSON and does not become some without a guess."""
    parts = list[str]()
    incoming = Incoming(text, ended=True)
    reader = JsonReader(incoming, JsonWriter(parts.append), {})
    try:
        finish(reader.value())
        json.loads("".join(parts), parse_constant=refuse_constant)
    except (BrokenCall, ValueError, RecursionError):
        return None
    return None if incoming.rest.strip() else "".join(parts)


def finish(parsing: Parsing[None]) -> None:
    """Runs a parsing whose text is all there."""
    for _ in parsing:
        raise AssertionError("it waits for text that will not come")


def refuse_constant(name: str) -> None:
    raise ValueError(name)
