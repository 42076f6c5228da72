"""Parses calls as Gemma 4 writes them: `<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`.

Keys are bare. A text stands between two equal marks and has no escapes. All other values are JSON, except that objects
have bare keys and texts have marks. Arguments are passed on as they come.
"""

from __future__ import annotations

import json
import re

from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.forms.call_form import MAX_NAME, CallForm
from adapters.text.answer.incremental_text import MAX_DEPTH, SPACE, BrokenCall, Parsing

MARK = '<|"|>'
OPENER = "<|tool_call>"
CLOSER = "<tool_call|>"
NAME = re.compile(r"[A-Za-z0-9_.\-]*")
BARE = re.compile(r"[^\s,\[\]{}<]*")
KEY = re.compile(r"[^\s:,\[\]{}<]*")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


class GemmaCalls(CallForm):
    """Parses calls between `<|tool_call>` and `<tool_call|>`, of which there may be several."""

    openers = (OPENER,)
    controls = (OPENER, CLOSER, MARK)
    marks = openers
    closers = (CLOSER,)

    def parse_call(self) -> Parsing[None]:
        incoming = self.incoming
        yield from incoming.take_matching(SPACE)
        if not (yield from incoming.take_if_next("call:")):
            raise BrokenCall
        name = yield from incoming.take_matching(NAME, MAX_NAME)
        if name not in self.tools:
            raise BrokenCall
        if (yield from incoming.peek()) != "{":
            raise BrokenCall
        yield from self.parse_object(self.open_writer(name))
        yield from incoming.take_matching(SPACE)
        yield from incoming.take_if_next(CLOSER)

    def parse_value(self, writer: JsonWriter) -> Parsing[None]:
        """Parse one value and pass it on. Raises BrokenCall where there is none."""
        incoming = self.incoming
        yield from incoming.take_matching(SPACE)
        char = yield from incoming.peek()
        if char and char in "{[":
            if writer.depth >= MAX_DEPTH:
                raise BrokenCall
            yield from (self.parse_object(writer) if char == "{" else self.parse_array(writer))
        elif (yield from incoming.take_if_next(MARK)):
            yield from self.parse_text(writer)
        else:
            word = yield from incoming.take_matching(BARE)
            if not word:
                raise BrokenCall
            known = WORDS.get(word, word if NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False))
            writer.write_value(known)

    def parse_text(self, writer: JsonWriter) -> Parsing[None]:
        """Parse a text behind its first mark, up to the next one."""

        def say(text: str) -> None:
            writer.write_value(json.dumps(text, ensure_ascii=False)[1:-1])

        writer.begin_string()
        if not (yield from self.incoming.take_until((MARK,), say)):
            raise BrokenCall
        writer.end_string()

    def parse_object(self, writer: JsonWriter) -> Parsing[None]:
        yield from self.open_container(writer, "{")
        first = True
        while not (yield from self.ends_container(writer, "}", first)):
            key = yield from self.parse_key()
            writer.hold_text(json.dumps(key, ensure_ascii=False) + ": ")
            yield from self.parse_value(writer)
            first = False

    def parse_array(self, writer: JsonWriter) -> Parsing[None]:
        yield from self.open_container(writer, "[")
        first = True
        while not (yield from self.ends_container(writer, "]", first)):
            yield from self.parse_value(writer)
            first = False

    def open_container(self, writer: JsonWriter, bracket: str) -> Parsing[None]:
        yield from self.incoming.take_if_next(bracket)
        writer.open_container(bracket)

    def ends_container(self, writer: JsonWriter, bracket: str, first: bool) -> Parsing[bool]:
        """Take a comma, or the bracket at the end. Return whether the container has ended. Raises BrokenCall."""
        incoming = self.incoming
        yield from incoming.take_matching(SPACE)
        if not first and (yield from incoming.take_if_next(",")):
            writer.hold_comma(", ")
            yield from incoming.take_matching(SPACE)
        elif not first and (yield from incoming.peek()) != bracket:
            raise BrokenCall
        if not (yield from incoming.take_if_next(bracket)):
            return False
        writer.close_container("")
        return True

    def parse_key(self) -> Parsing[str]:
        """Take a key, bare or between marks, and the colon behind it. Raises BrokenCall."""
        incoming = self.incoming
        parts = list[str]()
        if (yield from incoming.take_if_next(MARK)):
            yield from incoming.take_until((MARK,), parts.append)
        else:
            parts.append((yield from incoming.take_matching(KEY, MAX_NAME)))
        yield from incoming.take_matching(SPACE)
        key = "".join(parts)
        if not key or not (yield from incoming.take_if_next(":")):
            raise BrokenCall
        return key
