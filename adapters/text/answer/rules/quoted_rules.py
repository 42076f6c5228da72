"""Turns grammar rules for a text into rules for that text inside a JSON string.

The problem: a custom tool's grammar describes its input. Most models write calls as JSON, so they generate that input
with escaped quotation marks, backslashes and control characters. The grammar library can do this for JSON schemas, but
not for rules in Lark.

The idea: every terminal is rewritten. A character that JSON escapes becomes its escape. A class of characters becomes
the rest of the class, or the escapes of the characters that JSON escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from adapters.text.grammars.grammar import MAX_SOURCE_CHARS, GrammarRefused

ESCAPED = (*map(chr, range(32)), '"', "\\")  # characters that JSON escapes
PLAIN = (*(char for char in map(chr, range(32, 128)) if char not in ESCAPED), "é", "中", "😀")
UNESCAPED = r'[^"\\\x00-\x1f]'
COMMON = {  # terminals of Lark's own library that have such characters in them
    "LF": r'"\n"',
    "CR": r'"\r"',
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"(\\.|[^"\\\n])*"/',
}
STRING = r'"(?:\\.|[^"\\\n])*"'
LARK = re.compile(
    rf"(?P<range>{STRING}\s*\.\.\s*{STRING})|(?P<text>{STRING}i?)|(?P<comment>//[^\n]*|\#[^\n]*)"
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)"
    r"|(?P<import>%import\s+common\.(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?)|(?P<nested>%(?:json|lark|regex)\b)",
)
ATOM = re.compile(
    r"(?P<unicode>\\[pP](?:\{[^}]*\}|.))|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))"
    r"|(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<group>\(\?(?::|P?<\w+>)?)|(?P<char>.)",
    re.DOTALL,
)
GROUPS = re.compile(r"\(\?(?::|P?<\w+>)")
ANCHORS = (r"\b", r"\B", r"\A", r"\Z", r"\z")
SET_OPERATORS = ("[", "&&", "--", "~~", "||")  # within classes
META = frozenset("()|*+?{}^$")


def quote_rules(source: str) -> str:
    """Return Lark's rules for what JSON makes of a text that keeps to these. Raises GrammarRefused."""
    found: list[str] = []
    at = 0
    for match in LARK.finditer(source):
        found += [source[at : match.start()], quote_part(match)]
        at = match.end()
    return "".join([*found, source[at:]])


def quote_part(match: re.Match[str]) -> str:
    """Return one token of the rules, rewritten for a JSON string. Raises GrammarRefused."""
    whole = match[0]
    match match.lastgroup if match.lastgroup not in ("name", "alias") else "import":
        case "text":
            return quote_literal(whole)
        case "range":
            first, last = (re.escape(parse_literal(literal)) for literal in re.findall(STRING, whole))
            return to_terminal(quote_expression(f"[{first}-{last}]"))
        case "regex":
            body, _, flags = whole[1:].rpartition("/")
            quoted = quote_expression(body, flags)
            if quoted not in (body, f"(?i:{body})"):
                raise GrammarRefused(f"{whole[:60]} cannot be separated from what follows it inside a JSON string")
            return to_terminal(quoted)
        case "import":
            known = COMMON.get(match["name"])
            return whole if known is None else f"{match['alias'] or match['name']}: {quote_rules(known)}"
        case "nested":
            raise GrammarRefused(f"{whole} is not supported in a custom tool's grammar where calls are JSON")
    return whole


def parse_literal(literal: str) -> str:
    """Return the text of a literal of Lark's."""
    try:
        return str(json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal)))
    except ValueError:
        raise GrammarRefused(f"{literal[:60]} is not a literal") from None


def quote_literal(literal: str) -> str:
    """Return a literal of Lark's for what JSON makes of its text. Raises GrammarRefused."""
    flag = "i" if literal.endswith("i") else ""
    text = parse_literal(literal.removesuffix("i"))
    if flag and any(char in ESCAPED for char in text):
        raise GrammarRefused(f"{literal[:60]} cannot be escaped where case does not matter")
    return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False) + flag


def to_terminal(source: str) -> str:
    """Return an expression as a terminal."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], source, flags=re.DOTALL)
    return f"/{escaped}/"


def quote_expression(source: str, flags: str = "") -> str:
    """Return an expression for what JSON makes of a text that this one matches."""
    if set(flags) - set("islu"):
        raise GrammarRefused(f"the flags {flags!r} of an expression are not supported in a custom tool's grammar")
    how = (re.IGNORECASE if "i" in flags else 0) | (re.DOTALL if "s" in flags else 0)
    parts: list[str] = []
    size = 0
    for atom in iterate_quoted_atoms(source, how):
        parts.append(atom)
        size += len(atom)
        if size > MAX_SOURCE_CHARS:
            raise GrammarRefused(f"has more than {MAX_SOURCE_CHARS} characters inside a JSON string")
    body = "".join(parts)
    return f"(?i:{body})" if "i" in flags else body


def iterate_quoted_atoms(source: str, flags: int) -> Iterator[str]:
    """Yield the atoms of an expression, rewritten for a JSON string. Raises GrammarRefused."""
    for match in ATOM.finditer(source):
        atom = match[0]
        kind = match.lastgroup
        if kind == "unicode" and re.fullmatch(r"\\p\{?[LN].*", atom):
            yield atom  # letters and digits: none is escaped
        elif kind == "unicode" or atom == "[" or (kind == "group" and not GROUPS.fullmatch(atom)):
            raise GrammarRefused(f"{atom[:60]} is not supported in a custom tool's expression")
        elif kind == "group" or atom in META or (kind == "char" and atom != "." and atom not in ESCAPED):
            yield atom
        elif atom == r"\/":
            yield "/"
        else:
            yield quote_class(atom, flags)


def quote_class(atom: str, flags: int) -> str:
    """Return an expression for all characters that an atom stands for, as JSON writes them."""
    inner = re.sub(r"\\.", "", atom[1:], flags=re.DOTALL)
    if atom in ANCHORS or any(operator in inner for operator in SET_OPERATORS):
        raise GrammarRefused(f"{atom[:60]} is not supported in a custom tool's expression")
    try:
        known = re.compile(re.escape(atom) if len(atom) == 1 and atom != "." else atom, flags)
    except re.error as error:
        raise GrammarRefused(f"{atom[:60]} is no expression: {error}") from None
    escapes = join_escapes([json.dumps(char)[2:-1] for char in ESCAPED if known.fullmatch(char)])
    if not escapes:
        return atom
    if any(map(known.fullmatch, PLAIN)):
        rest = UNESCAPED if atom == "." else f"[{atom}&&{UNESCAPED}]"
        escapes.insert(0, rest)
    return f"(?:{'|'.join(escapes)})"


def join_escapes(escapes: Sequence[str]) -> list[str]:
    """Return expressions for escapes: of one character, and of a number such as `u001f`; without the backslash."""
    found: list[str] = []
    if short := "".join(re.escape(escape) for escape in escapes if len(escape) == 1):
        found.append(rf"\\[{short}]" if len(escapes) > 1 else rf"\\{short}")
    numbers = {half: "".join(escape[-1] for escape in escapes if escape.startswith(f"u00{half}")) for half in "01"}
    return found + [rf"\\u00{half}[{digits}]" for half, digits in numbers.items() if digits]
