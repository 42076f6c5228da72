"""How each form of calls is written, as rules of a grammar: as templates write it, and so that its reader reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from attrs import define, field, frozen

from adapters.text.answer.argument_grammar import (
    ANY,
    ANY_TEXT,
    PYTHON,
    WORD,
    Rules,
    json_arguments,
    python_arguments,
    without,
    xml_arguments,
)
from adapters.text.answer.quoted_rules import expression
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused

LINE = r"((?s:.*)\n)?[^\S\n]*"  # up to where nothing but white space stands in a line
MEMBERS = r"arguments|parameters|type|id|function"


@frozen
class CallRules:
    """start, between, end: what stands around calls; between: None, and there is one call at most.

    head: what opens a call of a name, behind the start.  arguments: the rest of a call.
    seems: what its reader would take for a call of these names, and all that may stand before it.
    ahead: that alone, where it is a call.  around: tokens that may stand around calls, where they are tokens.
    """

    start: Sequence[str]
    between: Sequence[str] | None
    end: Sequence[str]
    head: Callable[[str], str]
    arguments: Callable[[FunctionTool, Rules], str]
    seems: Callable[[str], str]
    ahead: str = ANY
    around: tuple[str, str] = ("", "")
    named: re.Pattern[str] = field(default=re.compile("(?s:.*)"))
    needs: Sequence[str] = ()  # rules that its arguments are made of


def json_head(arguments: str) -> Callable[[str], str]:
    return lambda name: f'{{"name": {json.dumps(name)}, "{arguments}": '


def json_object(names: str) -> str:
    """What a reader may take for the beginning of a call of these names, with quotes of either kind or none."""
    return rf"""\{{\s*(["']?name["']?\s*:\s*["'](({names})["']|[^"']*\\)|["']?({MEMBERS})["']?\s*:|["'][^"']*\\)"""


def in_tags(
    head: Callable[[str], str],
    arguments: Callable[[FunctionTool, Rules], str],
    others: Callable[[str], str],
) -> CallRules:
    """others: what opens a call of these names without the tag."""
    opened, closed = ("<tool_call>", "\n"), ("\n", "</tool_call>")

    def seems(names: str) -> str:
        return f"({ANY}<tool_call>|{others(names)})"

    return CallRules(opened, (*closed, "\n", *opened), closed, head, arguments, seems)


CALL_RULES: Mapping[str, CallRules] = {
    "hermes": in_tags(
        json_head("arguments"),
        json_arguments,
        lambda names: rf"{LINE}(```[A-Za-z_]*\s*)?(\[\s*)?{json_object(names)}",
    ),
    "qwen-xml": in_tags(
        lambda name: f"<function={name}>\n",
        xml_arguments,
        lambda _: f"{ANY}<function(=| name=)",
    ),
    "llama3-json": CallRules(
        (),
        None,
        (),
        json_head("parameters"),
        json_arguments,
        lambda names: rf"({LINE}|{ANY}<\|python_tag\|>\s*){json_object(names)}",
        LINE,
        ("<|python_tag|>", ""),
    ),
    "pythonic": CallRules(
        ("[",),
        (", ",),
        ("]",),
        lambda name: f"{name}(",
        python_arguments,
        lambda names: rf"({LINE}|{ANY}<\|python_(start|tag)\|>)\[\s*({names})\(",
        LINE,
        ("<|python_start|>", "<|python_end|>"),
        WORD,
        PYTHON,
    ),
}


@define
class Calls:
    """written: how.  tools: those that may be called.  known: the names of all that the reader would read a call of.

    parallel: may there be several?  controls: what the tokenizer knows as tokens of their own.
    """

    written: CallRules
    tools: Sequence[FunctionTool]
    known: Iterable[str]
    parallel: bool
    controls: Container[str]
    _made: Rules = field(factory=Rules, init=False)

    def __attrs_post_init__(self) -> None:
        """Raises GrammarRefused."""
        self.tools = [tool for tool in self.tools if self.written.named.fullmatch(tool.name)]
        if not self.tools:
            raise GrammarRefused("this model's form of calls has no room for any of their names")

    @property
    def rules(self) -> list[str]:
        """`calls`, and what they are made of."""
        written, tools = self.written, [*enumerate(self.tools)]
        between = f"({self.parts(written.between)} call)*" if self.parallel and written.between else ""
        return [
            f"calls: several{self.wrapped()}",
            f"several: {self.parts(written.start)} call more",
            f"more: {between} {self.parts(written.end)}",
            "call: " + " | ".join(f"call{number}" for number, _ in tools),
            *(f"call{number}: {json.dumps(written.head(tool.name))} rest{number}" for number, tool in tools),
            *(f"rest{number}: {written.arguments(tool, self._made)}" for number, tool in tools),
            *written.needs,
            *self._made.lines,
        ]

    def behind_text(self) -> list[str]:
        """`body`: text, and calls behind it: told from it by a token of their own, or by all that opens a call."""
        written, seems = self.written, self.written.seems("|".join(re.escape(name) for name in self.known))
        free = f"FREE: {without(ANY_TEXT, seems)}"
        if written.start and written.start[0] in self.controls:
            return ["body: FREE calls?", free]
        # once, by a name: it has the names of all tools in it, and every tool's rule needs it
        ahead = f"AHEAD: {without(expression(written.ahead), seems)}"
        opened = [self._made.until("AHEAD", "".join(written.start) + written.head(tool.name)) for tool in self.tools]
        ways = [f"{text} rest{number} more" for number, text in enumerate(opened)]
        return [" | ".join(["body: FREE", *ways]) + self.wrapped("FREE "), free, ahead]

    def wrapped(self, ahead: str = "") -> str:
        """One more way: between tokens that may stand around calls."""
        around = [token for token in self.written.around if token]
        if not around or not all(token in self.controls for token in around):
            return ""
        before, after = self.written.around
        return f" | {ahead}{before} several {after}"

    def parts(self, texts: Iterable[str]) -> str:
        return " ".join(tag(text, self.controls) for text in texts) or '""'


def tag(text: str, controls: Container[str]) -> str:
    return text if text in controls else json.dumps(text)
