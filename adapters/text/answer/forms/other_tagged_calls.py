"""Parsers of calls in tags of Seed-OSS, MiniMax-M2 and GLM."""

from __future__ import annotations

from attrs import define

from adapters.text.answer.forms.call_form import MAX_NAME
from adapters.text.answer.forms.call_tags import GLM, MINIMAX, SEED
from adapters.text.answer.forms.xml_calls import INSIDE, XmlCalls
from adapters.text.answer.incremental_text import SPACE, BrokenCall, Parsing


@define(eq=False)
class SeedCalls(XmlCalls):
    """Parses `<seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>`."""

    tags = SEED
    controls = ("<seed:tool_call>", "</seed:tool_call>")


@define(eq=False)
class MiniMaxCalls(XmlCalls):
    """Parses `<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>...`."""

    tags = MINIMAX
    controls = ("<minimax:tool_call>", "</minimax:tool_call>")


@define(eq=False)
class GlmCalls(XmlCalls):
    """Parses `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    tags = GLM
    controls = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def take_function_name(self) -> Parsing[str]:
        """Take the name behind the tag. It may stand on a line of its own."""
        yield from self.incoming.take_matching(SPACE, MAX_NAME)
        name = (yield from self.incoming.take_matching(INSIDE, MAX_NAME)).strip()
        if name not in self.tools:
            raise BrokenCall
        return name

    def take_parameter(self) -> Parsing[str | None]:
        """Take the tags around a key and the tag before its value. Return the key, or None where there are none.

        The tag behind a declared key may be missing.
        """
        incoming = self.incoming
        if not (yield from incoming.take_if_next(self.tags.parameters[0])):
            return None
        yield from incoming.take_matching(SPACE)
        key = (yield from incoming.take_matching(INSIDE)).strip()
        yield from incoming.take_matching(SPACE)
        closed = yield from incoming.take_if_next("</arg_key>")
        if not key or not (closed or self.may_follow(key)):
            return None
        yield from incoming.take_matching(SPACE)
        return key if (yield from incoming.take_if_next("<arg_value>")) else None
