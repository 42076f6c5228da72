"""Turns rules in Lark that are not recursive into one regular expression.

The grammar library cuts a text into lexemes without backtracking. Inside a JSON string this fails. In `a.py\\n` the
backslash may belong to the name or begin the line break, and the library has decided before the `n` comes. An
expression has no lexemes. Nearly all grammars of agents' tools are not recursive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from adapters.text.answer.rules.quoted_rules import STRING, parse_literal
from adapters.text.grammars.grammar import MAX_SOURCE_CHARS

# Takes an expression and its flags, and returns an expression: the same one, or one for the text inside a JSON string.
ExpressionWriter: TypeAlias = Callable[[str, str], str]
TOKEN = re.compile(
    rf"(?P<range>{STRING}\s*\.\.\s*{STRING})|(?P<text>{STRING}i?)|(?P<comment>//[^\n]*|\#[^\n]*)"
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<alias>->\s*\w+)"
    r"|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\})|(?P<import>%import\s+common\.\w+(?:\s*->\s*\w+)?)"
    r"|(?P<line>\n)|(?P<space>[^\S\n]+)|(?P<name>[?!]?\w+)|(?P<mark>[()\[\]|?*+:])"
)
MAX_RULE_DEPTH = 64  # rules within rules
MARKS = {"(": "(?:", "[": "(?:", "]": ")?"}
COMMON: Mapping[str, str] = {  # of Lark's own library
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "LETTER": "[A-Za-z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"',
}


@frozen
class Token:
    """One token of the rules."""

    kind: str
    text: str


class NotRegularError(Exception):
    """A rule is recursive, or the rules say something that an expression cannot say."""


def apply_flags(source: str, flags: str) -> str:
    return f"(?{flags}:{source})" if (flags := flags.replace("l", "").replace("u", "")) else source


def build_expression(source: str, written: ExpressionWriter) -> str | None:
    """Return an expression for all texts that the rules allow. None: there is no such one. Raises GrammarRefused."""
    try:
        return Rulebook(read_definitions(source), written).write_rule("start")
    except NotRegularError:
        return None


def iterate_tokens(source: str) -> Iterator[Token]:
    """Yield the tokens of rules in Lark. Raises NotRegularError for unknown ones."""
    at = 0
    while at < len(source):
        found = TOKEN.match(source, at)
        if found is None or found.lastgroup is None:
            raise NotRegularError
        at = found.end()
        if found.lastgroup not in ("comment", "space"):
            yield Token(found.lastgroup, found[0])


def read_definitions(source: str) -> Mapping[str, Sequence[Token]]:
    """Return the tokens of each rule, by its name."""
    found: dict[str, list[Token]] = {}
    body: list[Token] = []
    listed = [*iterate_tokens(re.sub(r"(?m)^(\s*[?!]?\w+)\.\d+(\s*:)", r"\1\2", source))]
    first = True
    for index, token in enumerate(listed):
        next_text = listed[index + 1].text if index + 1 < len(listed) else ""
        if token.kind == "import":
            name, _, alias = token.text.removeprefix("%import").strip().removeprefix("common.").partition("->")
            if name.strip() not in COMMON:
                raise NotRegularError
            found[alias.strip() or name.strip()] = [Token("regex", f"/{COMMON[name.strip()]}/")]
        elif first and token.kind == "name" and next_text == ":":
            body = found.setdefault(token.text.lstrip("?!"), [])
        elif token.kind not in ("line", "alias") and not (token.text == ":" and not body):
            body.append(token)
        first = token.kind in ("line", "import")
    return found


@define
class Rulebook:
    """Rules by their names, and the expressions that have been made of them."""

    rules: Mapping[str, Sequence[Token]]
    write: ExpressionWriter
    made: dict[str, str] = field(factory=dict)
    open: set[str] = field(factory=set)

    def write_rule(self, name: str) -> str:
        """Return the expression of a rule. Raises NotRegularError for a recursive rule."""
        if name in self.made:
            return self.made[name]
        if name in self.open or name not in self.rules or len(self.open) > MAX_RULE_DEPTH:
            raise NotRegularError
        self.open.add(name)
        parts: list[str] = []
        size = 0
        for token in self.rules[name]:
            parts.append(self.write_part(token))
            size += len(parts[-1])
            if size > MAX_SOURCE_CHARS:
                raise NotRegularError
        self.open.remove(name)
        self.made[name] = "".join(parts)
        return self.made[name]

    def write_part(self, token: Token) -> str:
        """Return the expression of one token of a rule. Raises NotRegularError."""
        match token.kind:
            case "text":
                flags = "i" if token.text.endswith("i") else ""
                return f"(?:{self.write(re.escape(parse_literal(token.text.removesuffix('i'))), flags)})"
            case "range":
                first, last = (re.escape(parse_literal(literal)) for literal in re.findall(STRING, token.text))
                return f"(?:{self.write(f'[{first}-{last}]', '')})"
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                return f"(?:{self.write(body, flags)})"
            case "name":
                return f"(?:{self.write_rule(token.text)})"
            case "count":
                return "{" + ",".join(re.findall(r"\d+", token.text.replace("..", ","))) + close_count(token.text)
            case "mark" if token.text != ":":
                return MARKS.get(token.text, token.text)
        raise NotRegularError


def close_count(count: str) -> str:
    """Return the end of a repetition: `{3,}` has no upper limit."""
    return ",}" if re.search(r",\s*\}$", count) else "}"
