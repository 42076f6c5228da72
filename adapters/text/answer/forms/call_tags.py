"""The tags of forms of calls whose arguments stand in tags: how they are parsed, and how grammar rules write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

from attrs import field, frozen

QUOTED = re.compile(r"""\s*(["']?)(.*?)\1\s*""", re.DOTALL)


@frozen(slots=False)
class CallTags:
    """The tags of one form. No tag begins with another one.

    wrapper: what may stand before a function's tag. It is empty if nothing may.
    functions: what opens a function's tag, before its name.
    parameters: what opens the tag of a parameter, before its key.
    closers: what closes a parameter, a function, and the wrapper if there is one.
    pads_values: one line break at the beginning and one at the end of a value belong to the tags.
    key_ends: the tags behind the key, if the tag of a parameter does not hold it.
    write_key: returns what opens the value of a key, or what names the key, if `value_tag` opens the value.
    optional_breaks: some templates write a line break between two tags, and others write none. A template of another
    form always writes one behind a parameter.
    end: what a template writes behind the last parameter, before the end of the call.
    """

    wrapper: str
    functions: tuple[str, ...]
    parameters: tuple[str, ...]
    closers: tuple[str, ...]
    pads_values: bool = field(kw_only=True, default=False)
    key_ends: tuple[str, ...] = field(kw_only=True, default=())
    write_key: Callable[[str], str] = field(kw_only=True)
    value_tag: str = field(kw_only=True, default="")
    optional_breaks: bool = field(kw_only=True, default=False)
    end: str = field(kw_only=True, default="")

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.wrapper, *self.functions) if self.wrapper else self.functions

    @property
    def call_closers(self) -> tuple[str, ...]:
        """The closers of a function and of the wrapper, each of which closes a call."""
        return self.closers[1:]

    @property
    def value_end(self) -> str:
        return ("\n" if self.pads_values else "") + self.closers[0]

    @cached_property
    def cut_tag(self) -> re.Pattern[str]:
        """The expression for a tag that all text ends in."""
        parameters, functions = ("|".join(map(re.escape, tags)) for tags in (self.parameters, self.functions))
        following = ""
        for tag in reversed(self.key_ends):
            following = match_beginning(tag, rf"\s*{following}")
        return re.compile(rf"({parameters})[^<>\n]*{following}|({functions})[^<>\n]{{0,128}}")

    @cached_property
    def value_never(self) -> str:
        """The expression for what a generated value does not contain: what the parser would end it at."""
        closers, parameters = ("|".join(map(re.escape, tags)) for tags in (self.call_closers, self.parameters))
        return rf"(?s:.*)({re.escape(self.closers[0])}\s*({closers})|({parameters}))"


def match_beginning(text: str, following: str) -> str:
    """Return an expression for every beginning of a text, and for the whole text with `following` after it."""
    found = following
    for char in reversed(text):
        found = f"(?:{re.escape(char)}{found})?"
    return found


QWEN = CallTags(
    "<tool_call>",
    ("<function=", "<function name="),
    ("<parameter=", "<parameter name="),
    ("</parameter>", "</function>", "</tool_call>"),
    pads_values=True,
    write_key=lambda key: f"<parameter={key}>\n",
    end="</function>",
)
SEED = CallTags(
    "<seed:tool_call>",
    ("<function=", "<function name="),
    ("<parameter=", "<parameter name="),
    ("</parameter>", "</function>", "</seed:tool_call>"),
    write_key=lambda key: f"<parameter={key}>",
    end="</function>",
)
MINIMAX = CallTags(
    "<minimax:tool_call>",
    ("<invoke name=",),
    ("<parameter name=",),
    ("</parameter>", "</invoke>", "</minimax:tool_call>"),
    write_key=lambda key: f'<parameter name="{key}">',
    end="</invoke>",
)
# The name of a function follows the outermost tag, and keys and values have tags of their own.
GLM = CallTags(
    "",
    ("<tool_call>",),
    ("<arg_key>",),
    ("</arg_value>", "</tool_call>"),
    key_ends=("</arg_key>", "<arg_value>"),
    write_key=lambda key: f"<arg_key>{key}</arg_key>",
    value_tag="<arg_value>",
    optional_breaks=True,
)


def unquote(text: str) -> str:
    """Return the name or the key in a tag, without white space and quotes around it."""
    found = QUOTED.fullmatch(text)
    return text.strip() if found is None else found[2]
