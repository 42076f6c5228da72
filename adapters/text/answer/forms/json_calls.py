"""Parsers of calls that are JSON objects: between tags (Hermes, Qwen), or without (Llama 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import define

from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.forms.call_form import MAX_NAME, CallForm
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing
from adapters.text.answer.json_reader import JsonReader, repair_json

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")  # members that some models write as well
MAX_NAME_WRITTEN = 6 * MAX_NAME  # with escapes
SCALAR = re.compile(r"[A-Za-z]*")
LETTERS = re.compile(r"[A-Za-z_]*")
BLANKS = re.compile(r"[^\S\n]*")
CLOSERS = re.compile(r"[\s}\],]*")  # after a call, where models write one brace too few or too many


def ignore_text(_: str) -> None:
    pass


@define(eq=False)
class JsonCalls(CallForm):
    """Parses `{"name": ..., "arguments": {...}}` with the members in any order, also inside `{"function": {...}}`."""

    def parse_members(self, whole: bool = False) -> Parsing[tuple[str, str]]:
        """Parse an object after its opening brace. Return the function's name and its arguments, or empty texts.

        This ends after the object, or after the arguments if they were passed on: then the call has begun.
        whole: nothing is passed on.
        """
        incoming = self.incoming
        name = ""
        early = ""
        begun = self.call_count
        yield from incoming.take_matching(SPACE)
        more = not (yield from incoming.take_if_next("}"))
        while more:
            key = yield from self.parse_key()
            if key == "function" and not name and (yield from incoming.take_if_next("{")):
                name, early = yield from self.parse_members(whole)
            elif key in {"name", "function"} and not name:
                name = yield from self.new_reader().read_string(MAX_NAME_WRITTEN)
                if name not in self.tools:
                    raise BrokenCall
            elif key in ARGUMENTS and not early:
                early = yield from self.parse_arguments("" if whole else name)
            elif key in OTHERS:
                yield from self.new_reader().read_string(MAX_NAME_WRITTEN)
            else:
                raise BrokenCall
            if not whole and name and early and self.call_count == begun:
                self.begin_call(name)
                self.add_arguments(early)
            if self.call_count > begun:
                break
            yield from incoming.take_matching(SPACE)
            more = yield from incoming.take_if_next(",")
            yield from incoming.take_matching(SPACE)
            if (yield from incoming.take_if_next("}")):
                break
            if not more:
                raise BrokenCall
        return name, early

    def new_reader(self, schema: Mapping[str, Any] | None = None, writer: JsonWriter | None = None) -> JsonReader:
        """Return a reader of JSON. writer: None means that what is read is not passed on."""
        return JsonReader(self.incoming, writer or JsonWriter(ignore_text), schema or {}, is_enclosed=True)

    def parse_key(self) -> Parsing[str]:
        """Take the key of a member and the colon after it. Raises BrokenCall."""
        incoming = self.incoming
        yield from incoming.take_matching(SPACE)
        if (yield from incoming.peek()) in {'"', "'"}:
            key = yield from self.new_reader().read_string(MAX_NAME_WRITTEN)
        else:
            key = yield from incoming.take_matching(LETTERS, MAX_NAME)
        yield from incoming.take_matching(SPACE)
        if not (yield from incoming.take_if_next(":")):
            raise BrokenCall
        yield from incoming.take_matching(SPACE)
        return key

    def parse_arguments(self, name: str) -> Parsing[str]:
        """Parse arguments. They are passed on as they come if `name` is known, and are returned otherwise."""
        incoming = self.incoming
        parts = list[str]()
        char = yield from incoming.peek()
        if char == "{":
            if name:
                yield from self.new_reader(self.parameters_of(name), self.open_writer(name)).read_value()
            else:
                yield from self.new_reader(writer=JsonWriter(parts.append)).read_value()
            return "".join(parts)
        if char in {'"', "'"}:  # an object that is written as a string
            written = repair_json(json.loads((yield from self.new_reader().read_plain_string())))
            if written is None or not written.lstrip().startswith("{"):
                raise BrokenCall
        elif (yield from incoming.take_matching(SCALAR)) in {"null", "None"}:
            written = "{}"
        else:
            raise BrokenCall
        if name:
            self.begin_call(name)
            self.add_arguments(written)
        return "" if name else written

    def parse_complete_call(self) -> Parsing[None]:
        """Parse a call, and what may follow its arguments. Broken text after the call does not change the call."""
        begun = self.call_count
        try:
            name, early = yield from self.parse_members()
            if self.call_count == begun:
                self.begin_call(name)
                self.add_arguments(early or "{}")
        except BrokenCall:
            if self.call_count == self.ended_count or self.incoming.mark is None:
                raise
            self.incoming.position = self.incoming.mark
        self.end_call()
        self.mark_attempt()
        yield from self.incoming.take_matching(SPACE)
        while (yield from self.incoming.run_lookahead(self.has_another_member())):
            yield from self.has_another_member()
            if (yield from self.parse_key()) not in OTHERS:
                raise BrokenCall
            yield from self.new_reader().read_string(MAX_NAME_WRITTEN)
            yield from self.incoming.take_matching(SPACE)

    def has_another_member(self) -> Parsing[bool]:
        """Does another member follow, in the object of the call or in the object around it?"""
        yield from self.incoming.take_if_next("}")
        yield from self.incoming.take_matching(SPACE)
        if not (yield from self.incoming.take_if_next(",")):
            return False
        yield from self.incoming.take_matching(SPACE)
        return (yield from self.incoming.peek()) not in {"", "{", "}", "]", "<"}


class HermesCalls(JsonCalls):
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen 2.5 and Qwen 3 write it.

    Some models forget the tags. An object without tags is a call if it is complete, has a declared name and arguments,
    and stands alone on its lines or in a fence.
    """

    openers = ("<tool_call>", "```", "{", "[")
    controls = ("<tool_call>", "</tool_call>")
    marks = ("<tool_call>",)
    closers = ("</tool_call>",)

    def can_open(self, opener: str, at_line: bool) -> bool:
        return at_line or opener == "<tool_call>"

    def parse_call(self) -> Parsing[None]:
        if self._opener != "<tool_call>":
            yield from self.parse_untagged(self._opener)
            return
        incoming = self.incoming
        yield from incoming.take_matching(SPACE)
        fenced = yield from self.take_fence()
        yield from incoming.take_if_next("[")
        yield from incoming.take_matching(SPACE)
        if not (yield from incoming.take_if_next("{")):
            raise BrokenCall
        while True:
            yield from self.parse_complete_call()
            self.mark_attempt()
            extra_closers = yield from incoming.take_matching(CLOSERS)
            if self.is_full or not (yield from incoming.take_if_next("{")):
                break
        if fenced and (yield from incoming.take_if_next("```")):
            yield from incoming.take_matching(SPACE)
        if not (yield from incoming.take_if_next("</tool_call>")):
            self.add_text(re.sub(r"\S", "", extra_closers))

    def take_fence(self) -> Parsing[bool]:
        if not (yield from self.incoming.take_if_next("```")):
            return False
        yield from self.incoming.take_matching(LETTERS)
        yield from self.incoming.take_matching(SPACE)
        return True

    def parse_untagged(self, opener: str) -> Parsing[None]:
        """Parse calls without tags. They count only if all of them are complete."""
        incoming = self.incoming
        found = list[tuple[str, str]]()
        fenced = opener == "```"
        listed = opener == "["
        if fenced:
            yield from incoming.take_matching(LETTERS)
            yield from incoming.take_matching(SPACE)
            listed = yield from incoming.take_if_next("[")
        opened = opener == "{"
        while True:
            yield from incoming.take_matching(SPACE)
            if not opened and not (yield from incoming.take_if_next("{")):
                raise BrokenCall
            name, arguments = yield from self.parse_members(whole=True)
            if not name or not arguments:
                raise BrokenCall
            found.append((name, arguments))
            opened = False
            yield from incoming.take_matching(SPACE if fenced or listed else BLANKS)
            char = yield from incoming.peek()
            if not (listed and (yield from incoming.take_if_next(","))) and not (fenced and not listed and char == "{"):
                break
        if listed and not (yield from incoming.take_if_next("]")):
            raise BrokenCall
        if fenced:
            yield from incoming.take_matching(SPACE)
            if not (yield from incoming.take_if_next("```")):
                raise BrokenCall
        yield from incoming.take_matching(BLANKS)
        if (yield from incoming.peek()) not in {"", "\n"}:
            raise BrokenCall
        for name, arguments in found:
            if self.is_full:
                break
            self.begin_call(name)
            self.add_arguments(arguments)
            self.end_call()


class LlamaJsonCalls(JsonCalls):
    """Parses `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`, separated by semicolons."""

    openers = ("<|python_tag|>", "{")
    controls = ("<|python_tag|>",)
    marks = ("<|python_tag|>",)
    closers = ("}",)

    def can_open(self, opener: str, at_line: bool) -> bool:
        return opener != "{" or at_line

    def parse_call(self) -> Parsing[None]:
        incoming = self.incoming
        if self._opener != "{":
            yield from incoming.take_matching(SPACE)
            if not (yield from incoming.take_if_next("{")):
                raise BrokenCall
        yield from self.parse_complete_call()
        yield from incoming.take_if_next("}")
        yield from incoming.take_matching(SPACE)
        yield from incoming.take_if_next(";")
