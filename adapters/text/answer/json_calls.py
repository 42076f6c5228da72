"""Calls that are JSON objects: Hermes' and Qwen's between tags, Llama 3's bare."""

from __future__ import annotations

import re
from typing import ClassVar

from attrs import define

from adapters.text.answer.form import MAX_NAME, SPACE, CallForm
from adapters.text.answer.incoming import BrokenCall, Parsing, string_value

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")  # strings that some models write beside them
SCALAR = re.compile(r"[A-Za-z]*")
BRACES = re.compile(r"[\s}]*")


@define(eq=False)
class JsonCalls(CallForm):
    """`{"name": ..., "arguments": {...}}`, the members in any order."""

    declared: ClassVar[bool] = False  # is it only a call if there is such a function?

    def object(self) -> Parsing[None]:
        """Behind its opening brace, until its arguments are complete, or its end if it has none."""
        incoming, name, early, begun = self.incoming, "", "", self.calls
        yield from incoming.matched(SPACE)
        more = not (yield from incoming.follows("}"))
        while more:
            key = yield from self.key()
            if key == "name" and not name:
                name = string_value((yield from incoming.json_string(MAX_NAME)))
                if self.declared and name not in self.tools:
                    raise BrokenCall
            elif key in ARGUMENTS and not early:
                early = yield from self.value(name)
            elif key in OTHERS:
                yield from incoming.json_string(MAX_NAME)
            else:
                raise BrokenCall
            if name and early:
                self.begin(name)
                self.arguments(early)
            if self.calls > begun:
                return
            yield from incoming.matched(SPACE)
            more = yield from incoming.follows(",")
            if not more and not (yield from incoming.follows("}")):
                raise BrokenCall
        self.begin(name)
        self.arguments("{}")

    def key(self) -> Parsing[str]:
        incoming = self.incoming
        yield from incoming.matched(SPACE)
        key = string_value((yield from incoming.json_string(MAX_NAME)))
        yield from incoming.matched(SPACE)
        if not (yield from incoming.follows(":")):
            raise BrokenCall
        yield from incoming.matched(SPACE)
        return key

    def complete(self) -> Parsing[None]:
        """A call, and what may follow its arguments in the object. From now on what is broken does not change it."""
        try:
            yield from self.object()
        except BrokenCall:
            if self.calls == self.ended:
                raise
        self.end()
        self.attempt()
        yield from self.incoming.matched(SPACE)
        while (yield from self.incoming.follows(",")):
            if (yield from self.key()) not in OTHERS:
                raise BrokenCall
            yield from self.incoming.json_string(MAX_NAME)
            yield from self.incoming.matched(SPACE)

    def value(self, name: str) -> Parsing[str]:
        """Arguments: said as they come if it is known whose they are, and given otherwise."""
        incoming, parts = self.incoming, list[str]()
        say = self.arguments if name else parts.append
        char = yield from incoming.peek()
        if char == "{":
            if name:
                self.begin(name)
            yield from incoming.json_container(say)
            return "".join(parts)
        if char == '"':  # an object written out as a string
            written = string_value((yield from incoming.json_string()))
            if not written.lstrip().startswith("{"):
                raise BrokenCall
        elif (yield from incoming.matched(SCALAR)) == "null":
            written = "{}"
        else:
            raise BrokenCall
        if name:
            self.begin(name)
            self.arguments(written)
        return "" if name else written


class HermesCalls(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3."""

    openers = ("<tool_call>",)
    controls = ("<tool_call>", "</tool_call>")

    def call(self) -> Parsing[None]:
        incoming = self.incoming
        yield from incoming.matched(SPACE)
        if not (yield from incoming.follows("{")):
            raise BrokenCall
        yield from self.complete()
        spare = yield from incoming.matched(BRACES)  # models write one brace too few or too many
        if not (yield from incoming.follows("</tool_call>")):
            self.text(spare.replace("}", "", 1))


class LlamaJsonCalls(JsonCalls):
    """`{"name": ..., "parameters": {...}}` by itself, or behind `<|python_tag|>`; several with semicolons between."""

    openers = ("<|python_tag|>", "{")
    controls = ("<|python_tag|>",)
    declared = True

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
