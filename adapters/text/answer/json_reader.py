"""Reads JSON as models write it, and passes on valid JSON while it comes.

Valid JSON is passed on as it was written. An error that has only one meaning is repaired: raw line breaks in strings,
escapes that JSON does not have, single quotes, keys without quotes, Python's `True`, `False` and `None`, trailing
commas, and quotes inside a string. A quote ends a string only if the text after it may follow a value: in
`"say "hi" to him"}` only the last quote does. Everything else raises `BrokenCall`, and the caller handles it.

A library such as `json-repair` reads a whole text and guesses what is missing. This reader sees a text in pieces and
passes on each piece once. It must not change what it cannot understand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from attrs import define

from adapters.text.answer.certain_json import CLOSING, JsonWriter
from adapters.text.answer.incremental_text import MAX_DEPTH, SPACE, BrokenCall, IncomingText, Parsing
from adapters.text.answer.schema_types import collect_types, declared_properties, find_property, name_type

PLAIN = re.compile(r"[^\"'\\<\x00-\x1f]+")
BARE = re.compile(r"[A-Za-z0-9+\-._]*")
BARE_KEY = re.compile(r"[A-Za-z0-9_$\-]*")
NUMBER = re.compile(r"([+-]?)(0|[1-9]\d*|(?=\.\d))(?:\.(\d*))?([eE][+-]?\d+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
ESCAPES = frozenset('"\\/bfnrt')
VALUE_STARTS = frozenset("\"'[{-0123456789tfnTFN")
BEHIND_ARGUMENTS = frozenset(",<]}`;{")  # what may follow arguments in the object of their call
END_TAG = "</tool_call>"


@define(eq=False)
class JsonReader:
    """Reads one value as it comes, and writes it as valid JSON.

    schema: of the outermost object, for the types of its values.
    is_enclosed: the value stands in the object of a call, whose end or another member follows it.
    """

    incoming: IncomingText
    writer: JsonWriter
    schema: Mapping[str, Any]
    is_enclosed: bool = False

    def read_value(self, types: frozenset[str] = frozenset()) -> Parsing[None]:
        """Take one value. Raises BrokenCall where there is none, or where it does not end."""
        char = yield from self.incoming.peek()
        if char in CLOSING and char:
            if self.writer.depth >= MAX_DEPTH:
                raise BrokenCall
            yield from (self._stream_object() if char == "{" else self._stream_array())
        elif char and char in "\"'":
            yield from self.stream_string()
        else:
            word = yield from self.incoming.take_matching(BARE)
            self.writer.write_value(repair_scalar(word, types))

    def _stream_object(self) -> Parsing[None]:
        """Take an object and pass it on while it comes."""
        incoming = self.incoming
        writer = self.writer
        first = True
        outermost = writer.depth == 0
        incoming.position += 1
        writer.open_container("{")
        while True:
            space = yield from incoming.take_matching(SPACE)
            if not first and (yield from incoming.take_if_next(",")):
                space_after = yield from incoming.take_matching(SPACE)
                writer.hold_comma(f"{space},{space_after}")
                space = ""
            elif not first and (char := (yield from incoming.peek())) != "}":
                if not char or char not in "\"'":
                    raise BrokenCall
                writer.hold_comma(", ")  # the model has left out the comma
                space = ""
            if (yield from incoming.peek()) == "}":
                incoming.position += 1
                writer.close_container(space)
                return
            writer.hold_text(space)
            written = yield from self.read_key()
            before = yield from incoming.take_matching(SPACE)
            if not (yield from incoming.take_if_next(":")):
                raise BrokenCall
            space_after = yield from incoming.take_matching(SPACE)
            writer.hold_text(f"{written}{before}:{space_after}")
            types = (
                collect_types(find_property(self.schema, json.loads(written)), self.schema)
                if outermost
                else frozenset[str]()
            )
            yield from self.read_value(types)
            first = False

    def _stream_array(self) -> Parsing[None]:
        """Take an array and pass it on while it comes."""
        incoming = self.incoming
        writer = self.writer
        first = True
        incoming.position += 1
        writer.open_container("[")
        while True:
            space = yield from incoming.take_matching(SPACE)
            if not first and (yield from incoming.take_if_next(",")):
                space_after = yield from incoming.take_matching(SPACE)
                writer.hold_comma(f"{space},{space_after}")
                space = ""
            elif not first and (yield from incoming.peek()) != "]":
                raise BrokenCall
            if (yield from incoming.peek()) == "]":
                incoming.position += 1
                writer.close_container(space)
                return
            writer.hold_text(space)
            yield from self.read_value()
            first = False

    def read_key(self) -> Parsing[str]:
        """Take a key, with single, double or no quotes, and return it as JSON."""
        char = yield from self.incoming.peek()
        if char and char in "\"'":
            return (yield from self.read_plain_string())
        bare = yield from self.incoming.take_matching(BARE_KEY)
        if not bare:
            raise BrokenCall
        return json.dumps(bare)

    def read_string(self, most: int) -> Parsing[str]:
        """Take a string and return its value. Raises BrokenCall beyond `most` characters."""
        value: str = json.loads((yield from self.read_plain_string(most)))
        return value

    def read_plain_string(self, most: int | None = None) -> Parsing[str]:
        """Take a string up to its first quote and return it as JSON."""
        parts = list[str]()
        size = 0

        def take(text: str) -> None:
            nonlocal size
            parts.append(text)
            size += len(text)
            if most is not None and size > most + 2:
                raise BrokenCall

        yield from JsonReader(self.incoming, JsonWriter(take), {}).stream_string(strict=True)
        return "".join(parts)

    def stream_string(self, strict: bool = False) -> Parsing[None]:
        """Take a string and pass it on while it comes. strict: the first quote ends it."""
        incoming = self.incoming
        writer = self.writer
        quote = yield from incoming.peek()
        if not quote or quote not in "\"'":
            raise BrokenCall
        incoming.position += 1
        writer.begin_string()
        while True:
            char = yield from incoming.peek()
            if not char:
                raise BrokenCall
            if found := PLAIN.match(incoming.text, incoming.position):
                incoming.position = found.end()
                writer.write_value(found[0])
                continue
            if char == "\\":
                yield from self._stream_escape()
            elif char == quote and (strict or (yield from incoming.run_lookahead(self._ends_string()))):
                incoming.position += 1
                writer.end_string()
                return
            elif char == "<" and not strict and (yield from incoming.run_lookahead(self._ends_call())):
                raise BrokenCall
            else:
                incoming.position += 1
                writer.write_value(char if char in "'<" else json.dumps(char)[1:-1])

    def _stream_escape(self) -> Parsing[None]:
        """Take an escape and pass it on, repaired if JSON does not have it."""
        incoming = self.incoming
        written = yield from incoming.peek_many(2)
        if written[1:] == "u":
            written = yield from incoming.peek_many(6)
            if len(written) < 6 and re.fullmatch(r"\\u[0-9a-fA-F]*", written):
                self._cut_off()
            yield from self._stream_unicode_escape(written)
            return
        if len(written) < 2:
            self._cut_off()
        if written[1] in ESCAPES or written[1] == "'":
            incoming.position += 2
            self.writer.write_value("'" if written[1] == "'" else written)
        else:  # JSON has no such escape, so the backslash stands for itself
            incoming.position += 1
            self.writer.write_value("\\\\")

    def _cut_off(self) -> NoReturn:
        """Drop an escape that the end of all text cuts off. Raises BrokenCall."""
        self.incoming.position = len(self.incoming.text)
        self.writer.emit("")
        raise BrokenCall

    def _stream_unicode_escape(self, written: str) -> Parsing[None]:
        """Take `\\u` and four digits. Half of a surrogate pair becomes U+FFFD."""
        incoming = self.incoming
        if not re.fullmatch(r"\\u[0-9a-fA-F]{4}", written):
            incoming.position += 1
            self.writer.write_value("\\\\")
            return
        number = ord(json.loads(f'"{written}"'))
        if 0xD800 <= number < 0xDC00:
            pair = yield from incoming.peek_many(12)
            if re.fullmatch(r"\\u[0-9a-fA-F]{4}\\u[dD][c-fC-F][0-9a-fA-F]{2}", pair):
                written = pair
                number = 0
        incoming.position += len(written)
        self.writer.write_value("\\ufffd" if 0xD800 <= number < 0xE000 else written)

    # -- lookahead: nothing is taken

    def _ends_string(self) -> Parsing[bool]:
        """Does the next quote end the string? It does if the text after it may follow a value."""
        incoming = self.incoming
        closers = [closer for closer in self.writer.all_closers if closer != '"']
        incoming.position += 1
        yield from incoming.take_matching(SPACE)
        while (char := (yield from incoming.peek())) and char in "]}" and closers:
            closers.pop()
            incoming.position += 1
            yield from incoming.take_matching(SPACE)
        if not char:
            return True
        if not closers:
            return not self.is_enclosed or char in BEHIND_ARGUMENTS
        return (yield from self._goes_on_behind_string(char, closers))

    def _goes_on_behind_string(self, char: str, closers: Sequence[str]) -> Parsing[bool]:
        """Does this character continue the container, or does the end of the call break the container off?"""
        incoming = self.incoming
        if char == "<":
            return (yield from incoming.take_if_next(END_TAG))
        if char in "\"'" and len(closers) == 1:  # a comma may be missing before a declared member
            key = yield from self._is_key()
            return json.loads(key) in declared_properties(self.schema) if key else False
        if char == ",":
            incoming.position += 1
            yield from incoming.take_matching(SPACE)
            char = yield from incoming.peek()
            if char and char not in "]}":
                return char in VALUE_STARTS if closers[-1] == "]" else (yield from self._is_key()) is not None
        return not char or char in "]}"

    def _is_key(self) -> Parsing[str | None]:
        """Return the next key, or None where there is none. A text that is cut off by the end may be a key."""
        try:
            key = yield from self.read_key()
        except BrokenCall:
            return "" if self.incoming.ended and self.incoming.position == len(self.incoming.text) else None
        yield from self.incoming.take_matching(SPACE)
        return key if (yield from self.incoming.peek()) in {":", ""} else None

    def _ends_call(self) -> Parsing[bool]:
        """Does the end of the call come next, in a string that was not closed?

        It does if all text ends there, or if another call follows.
        """
        incoming = self.incoming
        if not (yield from incoming.take_if_next(END_TAG)):
            return False
        yield from incoming.take_matching(SPACE)
        return not (yield from incoming.peek()) or (yield from incoming.take_if_next("<tool_call>"))


def repair_scalar(word: str, types: frozenset[str] = frozenset()) -> str:
    """Return a number or a constant as JSON. Raises BrokenCall.

    types: the types that the schema allows. Where only integers are allowed, a fraction of zero is dropped.
    """
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


def repair_json(text: str) -> str | None:
    """Return a whole text as JSON. None: it is not JSON, and repairing it would need a guess."""
    parts = list[str]()
    incoming = IncomingText(text, ended=True)
    reader = JsonReader(incoming, JsonWriter(parts.append), {})
    try:
        run_to_end(reader.read_value())
        json.loads("".join(parts), parse_constant=refuse_constant)
    except (BrokenCall, ValueError, RecursionError):
        return None
    return None if incoming.rest.strip() else "".join(parts)


def to_json_value(text: str, types: frozenset[str]) -> str:
    """Return the text as a JSON value of one of these types, or else as a JSON string."""
    written = repair_json(text.strip())
    if written is None:
        return json.dumps(text, ensure_ascii=False)
    value = json.loads(written)
    kind = name_type(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    if kind == "number" and is_integer_only(types) and value.is_integer():
        written = str(int(value))
        fits = True
    if kind == "string" or not fits or ("string" in types and kind != "null"):
        return json.dumps(text, ensure_ascii=False)
    return written


def run_to_end(parsing: Parsing[None]) -> None:
    """Run a parser whose text is complete."""
    for _ in parsing:
        raise AssertionError("it waits for text that will not come")


def refuse_constant(name: str) -> None:
    raise ValueError(name)
