"""Calls that are JSON objects: Hermes' and Qwen's between tags, Llama 3's bare."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import define

from adapters.text.answer.call_form import MAX_NAME, CallForm
from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing
from adapters.text.answer.json_reader import JsonReader, repaired

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")  # that some models write beside them
MAX_NAME_WRITTEN = 6 * MAX_NAME  # with escapes
SCALAR = re.compile(r"[A-Za-z]*")
LETTERS = re.compile(r"[A-Za-z_]*")
BLANKS = re.compile(r"[^\S\n]*")
CLOSERS = re.compile(r"[\s}\],]*")  # behind a call: models write one brace too few or too many


def discard(_: str) -> None:
    pass


@define(eq=False)
class JsonCalls(CallForm):
    """`{"name": ..., "arguments": {...}}`, the members in any order, also as `{"function": {...}}`."""

    def members(self, whole: bool = False) -> Parsing[tuple[str, str]]:
        """Behind the opening brace: the function's name, and its arguments; "" where there are none.

        It ends with the object, or with the arguments if they have been passed on: then the call has begun.
        whole: nothing is passed on.
        """
        incoming, name, early, begun = self.incoming, "", "", self.calls
        yield from incoming.matched(SPACE)
        more = not (yield from incoming.follows("}"))
        while more:
            key = yield from self.key()
            if key == "function" and not name and (yield from incoming.follows("{")):
                name, early = yield from self.members(whole)
            elif key in {"name", "function"} and not name:
                name = yield from self.reader().text(MAX_NAME_WRITTEN)
                if name not in self.tools:
                    raise BrokenCall
            elif key in ARGUMENTS and not early:
                early = yield from self.value("" if whole else name)
            elif key in OTHERS:
                yield from self.reader().text(MAX_NAME_WRITTEN)
            else:
                raise BrokenCall
            if not whole and name and early and self.calls == begun:
                self.begin(name)
                self.arguments(early)
            if self.calls > begun:
                break
            yield from incoming.matched(SPACE)
            more = yield from incoming.follows(",")
            yield from incoming.matched(SPACE)
            if (yield from incoming.follows("}")):
                break
            if not more:
                raise BrokenCall
        return name, early

    def reader(self, schema: Mapping[str, Any] | None = None, writer: JsonWriter | None = None) -> JsonReader:
        """writer: None: what is read is not passed on."""
        return JsonReader(self.incoming, writer or JsonWriter(discard), schema or {}, enclosed=True)

    def key(self) -> Parsing[str]:
        incoming = self.incoming
        yield from incoming.matched(SPACE)
        if (yield from incoming.peek()) in {'"', "'"}:
            key = yield from self.reader().text(MAX_NAME_WRITTEN)
        else:
            key = yield from incoming.matched(LETTERS, MAX_NAME)
        yield from incoming.matched(SPACE)
        if not (yield from incoming.follows(":")):
            raise BrokenCall
        yield from incoming.matched(SPACE)
        return key

    def value(self, name: str) -> Parsing[str]:
        """Arguments: said as they come if it is known whose they are, and given otherwise."""
        incoming, parts = self.incoming, list[str]()
        char = yield from incoming.peek()
        if char == "{":
            if name:
                yield from self.reader(self.schema(name), self.stream(name)).value()
            else:
                yield from self.reader(writer=JsonWriter(parts.append)).value()
            return "".join(parts)
        if char in {'"', "'"}:  # an object written out as a string
            written = repaired(json.loads((yield from self.reader().plain_string())))
            if written is None or not written.lstrip().startswith("{"):
                raise BrokenCall
        elif (yield from incoming.matched(SCALAR)) in {"null", "None"}:
            written = "{}"
        else:
            raise BrokenCall
        if name:
            self.begin(name)
            self.arguments(written)
        return "" if name else written

    def complete(self) -> Parsing[None]:
        """A call, and what may follow its arguments in the object. From now on what is broken does not change it."""
        begun = self.calls
        try:
            name, early = yield from self.members()
            if self.calls == begun:
                self.begin(name)
                self.arguments(early or "{}")
        except BrokenCall:
            if self.calls == self.ended or self.incoming.mark is None:
                raise
            self.incoming.at = self.incoming.mark
        self.end()
        self.attempt()
        yield from self.incoming.matched(SPACE)
        while (yield from self.incoming.look(self.another_member())):
            yield from self.another_member()
            if (yield from self.key()) not in OTHERS:
                raise BrokenCall
            yield from self.reader().text(MAX_NAME_WRITTEN)
            yield from self.incoming.matched(SPACE)

    def another_member(self) -> Parsing[bool]:
        """In the object of the call, or in the one around it."""
        yield from self.incoming.follows("}")
        yield from self.incoming.matched(SPACE)
        if not (yield from self.incoming.follows(",")):
            return False
        yield from self.incoming.matched(SPACE)
        return (yield from self.incoming.peek()) not in {"", "{", "}", "]", "<"}


class HermesCalls(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3.

    Some models forget the tags. An object without them is a call if it is complete, has a declared name and arguments,
    and stands alone on its lines or in a fence.
    """

    openers = ("<tool_call>", "```", "{", "[")
    controls = ("<tool_call>", "</tool_call>")
    marks = ("<tool_call>",)
    closers = ("</tool_call>",)

    def opens(self, opener: str, at_line: bool) -> bool:
        return at_line or opener == "<tool_call>"

    def call(self) -> Parsing[None]:
        if self._opener != "<tool_call>":
            yield from self.bare(self._opener)
            return
        incoming = self.incoming
        yield from incoming.matched(SPACE)
        fenced = yield from self.fence()
        yield from incoming.follows("[")
        yield from incoming.matched(SPACE)
        if not (yield from incoming.follows("{")):
            raise BrokenCall
        while True:
            yield from self.complete()
            self.attempt()
            spare = yield from incoming.matched(CLOSERS)
            if self.full or not (yield from incoming.follows("{")):
                break
        if fenced and (yield from incoming.follows("```")):
            yield from incoming.matched(SPACE)
        if not (yield from incoming.follows("</tool_call>")):
            self.text(re.sub(r"\S", "", spare))

    def fence(self) -> Parsing[bool]:
        if not (yield from self.incoming.follows("```")):
            return False
        yield from self.incoming.matched(LETTERS)
        yield from self.incoming.matched(SPACE)
        return True

    def bare(self, opener: str) -> Parsing[None]:
        """Without tags: all or nothing."""
        incoming, found = self.incoming, list[tuple[str, str]]()
        fenced, listed = opener == "```", opener == "["
        if fenced:
            yield from incoming.matched(LETTERS)
            yield from incoming.matched(SPACE)
            listed = yield from incoming.follows("[")
        opened = opener == "{"
        while True:
            yield from incoming.matched(SPACE)
            if not opened and not (yield from incoming.follows("{")):
                raise BrokenCall
            name, arguments = yield from self.members(whole=True)
            if not name or not arguments:
                raise BrokenCall
            found.append((name, arguments))
            opened = False
            yield from incoming.matched(SPACE if fenced or listed else BLANKS)
            char = yield from incoming.peek()
            if not (listed and (yield from incoming.follows(","))) and not (fenced and not listed and char == "{"):
                break
        if listed and not (yield from incoming.follows("]")):
            raise BrokenCall
        if fenced:
            yield from incoming.matched(SPACE)
            if not (yield from incoming.follows("```")):
                raise BrokenCall
        yield from incoming.matched(BLANKS)
        if (yield from incoming.peek()) not in {"", "\n"}:
            raise BrokenCall
        for name, arguments in found:
            if self.full:
                break
            self.begin(name)
            self.arguments(arguments)
            self.end()


class LlamaJsonCalls(JsonCalls):
    """`{"name": ..., "parameters": {...}}` by itself, or behind `<|python_tag|>`; several with semicolons between."""

    openers = ("<|python_tag|>", "{")
    controls = ("<|python_tag|>",)
    marks = ("<|python_tag|>",)
    closers = ("}",)

    def opens(self, opener: str, at_line: bool) -> bool:
        return opener != "{" or at_line

    def call(self) -> Parsing[None]:
        incoming = self.incoming
        if self._opener != "{":
            yield from incoming.matched(SPACE)
            if not (yield from incoming.follows("{")):
                raise BrokenCall
        yield from self.complete()
        yield from incoming.follows("}")
        yield from incoming.matched(SPACE)
        yield from incoming.follows(";")
