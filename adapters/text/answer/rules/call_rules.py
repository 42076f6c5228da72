"""Grammar rules for each form of tool calls: as chat templates write them, and so that the parser reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from attrs import define, field, frozen

from adapters.text.answer.forms.call_tags import GLM, MINIMAX, QWEN, SEED, CallTags
from adapters.text.answer.forms.gemma_calls import CLOSER, OPENER
from adapters.text.answer.rules.argument_grammar import (
    ANY,
    ANY_TEXT,
    PYTHON,
    WORD,
    GeneratedRules,
    exclude_prefix,
    write_json_member,
    write_marked_arguments,
    write_python_arguments,
)
from adapters.text.answer.rules.gemma_grammar import write_gemma_arguments, write_value_rules
from adapters.text.answer.rules.quoted_rules import to_terminal
from adapters.text.answer.rules.tagged_arguments import BREAK, OPTIONAL_BREAK, TaggedArguments
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused
from adapters.text.template import ControlToken

LINE = r"((?s:.*)\n)?[^\S\n]*"  # text that ends with white space at the beginning of a line
MEMBERS = r"arguments|parameters|type|id|function"


@frozen
class CallRules:
    """The rules by which one form of calls is written.

    start, between, end: the texts around calls. between: None means that there is at most one call.
    write_head: returns what opens a call of a name, after the start.
    write_arguments: returns the rule of the rest of a call.
    write_lookalikes: returns an expression for all that the parser would take for a call of these names, with the text
    that may stand before it.
    text_before: the expression for text that may stand before a call.
    wrapper_tokens: control tokens that may stand before and after all calls, or empty texts.
    name_pattern: the names that the form can write.
    extra_rules: rules that the arguments need. write_extra: returns more of them, for these control tokens.
    optional_breaks: between two calls a line break may be missing.
    """

    start: Sequence[str]
    between: Sequence[str] | None
    end: Sequence[str]
    write_head: Callable[[str], str]
    write_arguments: Callable[[FunctionTool, GeneratedRules], str]
    write_lookalikes: Callable[[str], str]
    text_before: str = ANY
    wrapper_tokens: tuple[str, str] = ("", "")
    name_pattern: re.Pattern[str] = field(default=re.compile("(?s:.*)"))
    extra_rules: Sequence[str] = ()
    write_extra: Callable[[Container[str]], Sequence[str]] = lambda _: ()
    optional_breaks: bool = False


def make_json_head(arguments: str) -> Callable[[str], str]:
    return lambda name: f'{{"name": {json.dumps(name)}, "{arguments}": '


def lookalike_json(names: str) -> str:
    """Return an expression for all that the parser may take for the beginning of a call of these names."""
    return rf"""\{{\s*(["']?name["']?\s*:\s*["'](({names})["']|[^"']*\\)|["']?({MEMBERS})["']?\s*:|["'][^"']*\\)"""


def make_wrapped_rules(
    tags: tuple[str, str],
    head: Callable[[str], str],
    arguments: Callable[[FunctionTool, GeneratedRules], str],
    others: Callable[[str], str],
) -> CallRules:
    """Build the rules of calls of which each stands in two tags. others: opens a call of these names without a tag."""
    opened = (tags[0], "\n")
    closed = ("\n", tags[1])

    def seems(names: str) -> str:
        return f"({ANY}{tags[0]}|{others(names)})"

    return CallRules(opened, (*closed, "\n", *opened), closed, head, arguments, seems)


def write_in_tags(tags: CallTags) -> Callable[[FunctionTool, GeneratedRules], str]:
    return lambda tool, rules: TaggedArguments(tags, tool, rules).write()


CALL_RULES: Mapping[str, CallRules] = {
    "hermes": make_wrapped_rules(
        ("<tool_call>", "</tool_call>"),
        make_json_head("arguments"),
        write_json_member,
        lambda names: rf"{LINE}(```[A-Za-z_]*\s*)?(\[\s*)?{lookalike_json(names)}",
    ),
    "qwen-xml": make_wrapped_rules(
        ("<tool_call>", "</tool_call>"),
        lambda name: f"<function={name}>\n",
        write_in_tags(QWEN),
        lambda _: f"{ANY}<function(=| name=)",
    ),
    "seed-xml": make_wrapped_rules(
        ("<seed:tool_call>", "</seed:tool_call>"),
        lambda name: f"<function={name}>\n",
        write_in_tags(SEED),
        lambda _: f"{ANY}<function(=| name=)",
    ),
    "minimax-xml": CallRules(
        ("<minimax:tool_call>", "\n"),
        ("\n",),
        ("\n", "</minimax:tool_call>"),
        lambda name: f'<invoke name="{name}">\n',
        write_in_tags(MINIMAX),
        lambda _: f"{ANY}(<minimax:tool_call>|<invoke name=)",
    ),
    "glm-xml": CallRules(
        ("<tool_call>",),
        ("</tool_call>", "\n", "<tool_call>"),
        ("</tool_call>",),
        lambda name: name,
        write_in_tags(GLM),
        lambda _: f"{ANY}<tool_call>",
        optional_breaks=GLM.optional_breaks,
    ),
    "mistral-json": CallRules(
        ("[TOOL_CALLS]", "["),
        (", ",),
        ("]",),
        make_json_head("arguments"),
        write_json_member,
        lambda _: rf"{ANY}\[TOOL_CALLS\]",
    ),
    "mistral": CallRules(
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        (),
        lambda name: name,
        write_marked_arguments,
        lambda _: rf"{ANY}\[TOOL_CALLS\]",
    ),
    "llama3-json": CallRules(
        (),
        None,
        (),
        make_json_head("parameters"),
        write_json_member,
        lambda names: rf"({LINE}|{ANY}<\|python_tag\|>\s*){lookalike_json(names)}",
        LINE,
        ("<|python_tag|>", ""),
    ),
    "pythonic": CallRules(
        ("[",),
        (", ",),
        ("]",),
        lambda name: f"{name}(",
        write_python_arguments,
        lambda names: rf"({LINE}|{ANY}<\|python_(start|tag)\|>)\[\s*({names})\(",
        LINE,
        ("<|python_start|>", "<|python_end|>"),
        WORD,
        PYTHON,
    ),
    "gemma4": CallRules(
        (OPENER,),
        (CLOSER, OPENER),
        (CLOSER,),
        lambda name: f"call:{name}{{",
        write_gemma_arguments,
        lambda _: f"{ANY}{re.escape(OPENER)}",
        name_pattern=WORD,
        write_extra=write_value_rules,
    ),
}


@define
class CallSection:
    """The rules of all calls of one answer.

    tools: the functions that may be called.
    known_names: the names that the parser would read as calls.
    parallel: there may be several calls.
    controls: the control tokens, by their texts.
    """

    form: CallRules
    tools: Sequence[FunctionTool]
    known_names: Iterable[str]
    parallel: bool
    controls: Mapping[str, ControlToken]
    _made: GeneratedRules = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Keep the tools whose names the form can write. Raises GrammarRefused where there are none."""
        self._made = GeneratedRules(self.controls)
        self.tools = [tool for tool in self.tools if self.form.name_pattern.fullmatch(tool.name)]
        if not self.tools:
            raise GrammarRefused("this model's form of calls has no room for any of their names")

    @property
    def rules(self) -> list[str]:
        """The rule `calls`, and all rules that it needs."""
        written = self.form
        tools = [*enumerate(self.tools)]
        between = f"({self.join_parts(written.between)} call)*" if self.parallel and written.between else ""
        if written.optional_breaks:
            between = between.replace(BREAK, OPTIONAL_BREAK)
        return [
            f"calls: several{self.write_wrapped()}",
            f"several: {self.join_parts(written.start)} call more",
            f"more: {between} {self.join_parts(written.end)}",
            "call: " + " | ".join(f"call{number}" for number, _ in tools),
            *(
                f"call{number}: {self._made.write_text(written.write_head(tool.name))} rest{number}"
                for number, tool in tools
            ),
            *(f"rest{number}: {written.write_arguments(tool, self._made)}" for number, tool in tools),
            *written.extra_rules,
            *written.write_extra(self.controls),
            *self._made.lines,
        ]

    def write_rules_after_text(self) -> list[str]:
        """Return the rule `body`: text and then calls.

        A control token separates them, or else the text may contain nothing that the parser takes for a call.
        """
        written = self.form
        seems = self.form.write_lookalikes("|".join(re.escape(name) for name in self.known_names))
        free = f"FREE: {exclude_prefix(ANY_TEXT, seems)}"
        if written.start and written.start[0] in self.controls:
            return ["body: FREE calls?", free]
        # This rule contains the names of all tools, and every tool's rule needs it. So it exists once, by a name.
        ahead = f"AHEAD: {exclude_prefix(to_terminal(written.text_before), seems)}"
        opened = [
            self._made.add_suffix_rule("AHEAD", "".join(written.start) + written.write_head(tool.name))
            for tool in self.tools
        ]
        ways = [f"{text} rest{number} more" for number, text in enumerate(opened)]
        return [" | ".join(["body: FREE", *ways]) + self.write_wrapped("FREE "), free, ahead]

    def write_wrapped(self, ahead: str = "") -> str:
        """Return the alternative in which control tokens stand around the calls, if the form has such tokens."""
        around = [token for token in self.form.wrapper_tokens if token]
        if not around or not all(token in self.controls for token in around):
            return ""
        before, after = (token and self._made.name_token(token) for token in self.form.wrapper_tokens)
        return f" | {ahead}{before} several {after}"

    def join_parts(self, texts: Iterable[str]) -> str:
        return " ".join(map(self._made.write_text, texts)) or '""'
