"""Parses calls as Mistral's models write them: `[TOOL_CALLS]name[ARGS]{...}`, or `[TOOL_CALLS][{"name": ...}]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import define, evolve, field

from adapters.text.answer.certain_json import JsonWriter
from adapters.text.answer.forms.call_form import MAX_NAME
from adapters.text.answer.forms.json_calls import JsonCalls
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing
from adapters.text.answer.json_reader import JsonReader

NAME = re.compile(r"[^\[\]{}\s]*")
OPENER = "[TOOL_CALLS]"


@define(eq=False)
class MistralCalls(JsonCalls):
    """Parses calls of which each has an opener of its own, or a list of calls behind one opener."""

    openers = (OPENER,)
    controls: ClassVar[tuple[str, ...]] = (OPENER, "[CALL_ID]", "[ARGS]")
    marks = (OPENER,)
    closers: ClassVar[tuple[str, ...]] = (OPENER,)
    _is_listed: bool = field(default=False, init=False)  # the current call is an object with a name and arguments

    def parse_call(self) -> Parsing[None]:
        yield from self.incoming.take_matching(SPACE)
        self._is_listed = yield from self.incoming.take_if_next("[")
        if self._is_listed:
            yield from self.parse_list()
        else:
            yield from self.parse_named_call()

    def new_reader(self, schema: Mapping[str, Any] | None = None, writer: JsonWriter | None = None) -> JsonReader:
        """Return a reader of JSON. Text may follow the arguments of a call that is not in a list."""
        return evolve(super().new_reader(schema, writer), is_enclosed=self._is_listed)

    def parse_named_call(self) -> Parsing[None]:
        """Parse a name, an id that may follow it, and the arguments. Without arguments all of it becomes text."""
        incoming = self.incoming
        name = yield from incoming.take_matching(NAME, MAX_NAME)
        yield from incoming.take_matching(SPACE)
        if name not in self.tools:
            raise BrokenCall
        if (yield from incoming.take_if_next("[CALL_ID]")):
            yield from incoming.take_matching(NAME, MAX_NAME)
        yield from incoming.take_if_next("[ARGS]")
        yield from incoming.take_matching(SPACE)
        yield from self.parse_arguments(name)  # with a name, they begin the call
        self.end_call()

    def parse_list(self) -> Parsing[None]:
        """Parse calls up to the bracket behind them. A broken one becomes text, and so does all that follows it."""
        incoming = self.incoming
        more = True
        while more:
            yield from incoming.take_matching(SPACE)
            if not (yield from incoming.take_if_next("{")):
                raise BrokenCall
            yield from self.parse_complete_call()
            yield from incoming.take_if_next("}")
            yield from incoming.take_matching(SPACE)
            more = yield from incoming.take_if_next(",")
            if more:
                self.mark_attempt(",")
        yield from incoming.take_if_next("]")


class MistralJsonCalls(MistralCalls):
    """Parses the same. Templates of older models (Mistral 7B, Nemo, Small 3.1) write the list."""

    controls = (OPENER,)
    closers = ("}]",)
