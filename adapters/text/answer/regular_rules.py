"""Rules in Lark that call themselves nowhere, as one expression.

The grammar library cuts a text into lexemes without going back. Inside a JSON string that fails: in `a.py\\n` the
backslash could belong to the name or begin the line break, and it is too late once the `n` comes. An expression has no
lexemes. The grammars of agents' tools are nearly all of this kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from adapters.text.answer.quoted_rules import STRING, plain
from adapters.text.grammars.grammar import MOST_SOURCE

# An expression and its flags in, an expression out: as it is, or for what JSON makes of the text.
Written: TypeAlias = Callable[[str, str], str]
TOKEN = re.compile(
    rf"(?P<range>{STRING}\s*\.\.\s*{STRING})|(?P<text>{STRING}i?)|(?P<comment>//[^\n]*|\#[^\n]*)"
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<alias>->\s*\w+)"
    r"|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\})|(?P<import>%import\s+common\.\w+(?:\s*->\s*\w+)?)"
    r"|(?P<line>\n)|(?P<space>[^\S\n]+)|(?P<name>[?!]?\w+)|(?P<mark>[()\[\]|?*+:])"
)
DEEPEST = 64  # rules within rules
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
    kind: str
    text: str


class NotRegularError(Exception):
    """A rule leads to itself, or the rules say something that an expression cannot."""


def bare(source: str, flags: str) -> str:
    return f"(?{flags}:{source})" if (flags := flags.replace("l", "").replace("u", "")) else source


def regular_expression(source: str, written: Written) -> str | None:
    """Return an expression for all that the rules have room for; None where none can say it. Raises GrammarRefused."""
    try:
        return Rulebook(definitions(source), written).expression("start")
    except NotRegularError:
        return None


def tokens_of(source: str) -> Iterator[Token]:
    at = 0
    while at < len(source):
        found = TOKEN.match(source, at)
        if found is None or found.lastgroup is None:
            raise NotRegularError
        at = found.end()
        if found.lastgroup not in ("comment", "space"):
            yield Token(found.lastgroup, found[0])


def definitions(source: str) -> Mapping[str, Sequence[Token]]:
    """Return what stands behind the name of each rule."""
    found: dict[str, list[Token]] = {}
    body: list[Token] = []
    listed = [*tokens_of(re.sub(r"(?m)^(\s*[?!]?\w+)\.\d+(\s*:)", r"\1\2", source))]
    first = True
    for place, token in enumerate(listed):
        behind = listed[place + 1].text if place + 1 < len(listed) else ""
        if token.kind == "import":
            name, _, alias = token.text.removeprefix("%import").strip().removeprefix("common.").partition("->")
            if name.strip() not in COMMON:
                raise NotRegularError
            found[alias.strip() or name.strip()] = [Token("regex", f"/{COMMON[name.strip()]}/")]
        elif first and token.kind == "name" and behind == ":":
            body = found.setdefault(token.text.lstrip("?!"), [])
        elif token.kind not in ("line", "alias") and not (token.text == ":" and not body):
            body.append(token)
        first = token.kind in ("line", "import")
    return found


@define
class Rulebook:
    """Rules by their names, and the expressions that have been made of them."""

    rules: Mapping[str, Sequence[Token]]
    written: Written
    made: dict[str, str] = field(factory=dict)
    open: set[str] = field(factory=set)

    def expression(self, name: str) -> str:
        if name in self.made:
            return self.made[name]
        if name in self.open or name not in self.rules or len(self.open) > DEEPEST:
            raise NotRegularError
        self.open.add(name)
        parts: list[str] = []
        size = 0
        for token in self.rules[name]:
            parts.append(self.part(token))
            size += len(parts[-1])
            if size > MOST_SOURCE:
                raise NotRegularError
        self.open.remove(name)
        self.made[name] = "".join(parts)
        return self.made[name]

    def part(self, token: Token) -> str:
        match token.kind:
            case "text":
                flags = "i" if token.text.endswith("i") else ""
                return f"(?:{self.written(re.escape(plain(token.text.removesuffix('i'))), flags)})"
            case "range":
                first, last = (re.escape(plain(one)) for one in re.findall(STRING, token.text))
                return f"(?:{self.written(f'[{first}-{last}]', '')})"
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                return f"(?:{self.written(body, flags)})"
            case "name":
                return f"(?:{self.expression(token.text)})"
            case "count":
                return "{" + ",".join(re.findall(r"\d+", token.text.replace("..", ","))) + closing(token.text)
            case "mark" if token.text != ":":
                return MARKS.get(token.text, token.text)
        raise NotRegularError


def closing(count: str) -> str:
    """`{3,}` has no upper end."""
    return ",}" if re.search(r",\s*\}$", count) else "}"
