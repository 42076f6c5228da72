"""Arguments in rules of a grammar: those that a schema has room for, as each form of calls writes them.

JSON is the library's to hold (`%json`). What a schema says of bare text is made an expression here. What cannot be is
refused, as the library does: nothing is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field

from adapters.text.answer.input_rules import bare_rules, bare_terminal, quoted_input
from adapters.text.answer.quoted_rules import expression
from adapters.text.answer.schema_types import MOST_READ, property_of, resolved, types_of
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused, json_grammar
from effects.grammar import Grammar

ANY = "(?s:.*)"
ANY_TEXT = f"/{ANY}/"
DEFINITIONS = ("$defs", "definitions")
SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
OF_TEXT = {"type", "pattern", "minLength", "maxLength"}
# Where a value in tags ends for who reads it (`XmlCalls.ends_value`): no value has that in it.
TAGS = rf"{ANY}(</parameter>\s*(</function>|</tool_call>)|<parameter(=| name=))"
XML_KEY = re.compile(r"[^<>\s]{1,128}")
WORD = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
# Python's literals, by the JSON types that they are read as; strings with the escapes that both languages have.
LITERALS: Mapping[str, str] = {
    "string": "STRING",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": "BOOLEAN",
    "null": "NOTHING",
    "array": "listed",
    "object": "mapped",
}
PYTHON = (
    r"""STRING: /"([^"\\\x00-\x1f]|\\["'\\nrtbf])*"|'([^'\\\x00-\x1f]|\\["'\\nrtbf])*'/""",
    "INTEGER: /-?(0|[1-9][0-9]{0,18})/",
    "NUMBER: /-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
    'BOOLEAN: "True" | "False" | "true" | "false"',
    'NOTHING: "None" | "null"',
    "COMMA: /, ?/",
    "COLON: /: ?/",
    'listed: "[" (literal (COMMA literal)*)? "]"',
    'mapped: "{" (STRING COLON literal (COMMA STRING COLON literal)*)? "}"',
    "literal: " + " | ".join(LITERALS.values()),
)


@define
class Rules:
    """Those that are made on the way: each once, by a name of its own."""

    _made: dict[str, str] = field(factory=dict, init=False)  # names, by what stands behind them

    def until(self, terminal: str, suffix: str) -> str:
        """The name of: text of a terminal, up to where this first follows."""
        return self._named(f"[suffix={json.dumps(suffix)}]: {terminal}")

    def named(self, rule: str) -> str:
        return self._named(f": {rule}")

    def value(self, terminal: str) -> str:
        """In tags."""
        return self.until(without(terminal, TAGS), "\n</parameter>")

    def _named(self, rule: str) -> str:
        return self._made.setdefault(rule, f"made{len(self._made)}")

    @property
    def lines(self) -> list[str]:
        return [name + rule for rule, name in self._made.items()]


def without(terminal: str, never: str) -> str:
    """never: what no such text begins with."""
    return f"{terminal} & ~{expression(f'({never}){ANY}')}"


def content(form: Grammar) -> str:
    """A part of a rule."""
    return f"%json {form.source}" if form.kind == "json_schema" else expression(form.source)


def json_arguments(tool: FunctionTool, _: Rules) -> str:
    """They keep to their schema where the tool is to be held to it, and the input of a custom tool to its grammar."""
    if tool.input_grammar is not None:
        return f'"{{\\"input\\": \\"" {quoted_input(tool.input_grammar)} "\\"}}}}"'
    held = json_grammar(tool.parameters if tool.strict and tool.parameters else {"type": "object"})
    return f'{content(held)} "}}"'


def xml_arguments(tool: FunctionTool, rules: Rules) -> str:
    """Parameters in the schema's order, those that it requires in any case."""
    if tool.input_grammar is not None:
        alone = bare_terminal(tool.input_grammar)
        held = f"{bare_rules(tool.input_grammar)} {CLOSED}" if alone is None else rules.value(alone)
        return rf'"<parameter=input>\n" {held} {NEXT} "</function>"'
    schema, parts = tool.parameters or {}, list[str]()
    for key, needed in arguments(tool, XML_KEY):
        part = f"{json.dumps(f'<parameter={key}>' + chr(10))} {xml_value(tool, property_of(schema, key), rules)} {NEXT}"
        parts.append(part if needed else f"({part})?")
    if not parts and schema.get("additionalProperties") is not False:
        value = xml_value(tool, schema.get("additionalProperties"), rules)
        parts.append(rf'("<parameter=" /[^<>\s]{{1,128}}/ ">\n" {value} {NEXT})*')
    return " ".join([*parts, '"</function>"'])


NEXT, CLOSED = r'"\n"', r'"\n</parameter>"'


def xml_value(tool: FunctionTool, schema: object, rules: Rules) -> str:
    """With the tag behind it. Who reads it takes it for text wherever it may be text."""
    root = tool.parameters or {}
    types = types_of(schema, root)
    if types and "string" not in types and (tool.strict or types <= set(LITERALS)):
        return f"{typed(tool, schema, types)} {CLOSED}"
    if tool.strict:
        return f"({' | '.join(dict.fromkeys(texts(schema, root, rules)))})"
    allowed = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(allowed, list) and allowed and all(isinstance(one, str) for one in allowed):
        return f"({' | '.join(constants(allowed))})"
    return rules.value(ANY_TEXT)


def texts(schema: object, root: Mapping[str, Any], rules: Rules) -> Iterator[str]:
    """What a schema has room for, `null` among it. Raises GrammarRefused."""
    waiting = [schema]
    for one in waiting:
        if one is None or one is True:
            yield rules.value(ANY_TEXT)
            continue
        if len(waiting) > MOST_READ or not isinstance(one, Mapping):
            raise GrammarRefused("a value that this model writes as bare text has a schema of too many parts, or none")
        said = set(one) - SAYS_NOTHING
        alone = next((word for word in ("$ref", "anyOf", "oneOf", "enum", "const") if word in said), None)
        refuse_others(said - ({alone, "type"} if alone else OF_TEXT))
        match alone:
            case "$ref":
                waiting.append(resolved(str(one["$ref"]), root))
            case "anyOf" | "oneOf":
                waiting += (each for each in listed(one, alone) if maybe_text(types_of(each, root)))
            case "enum" | "const":
                yield from constants(listed(one, "enum") if alone == "enum" else [one["const"]])
            case _:
                types = types_of(one, root)
                if "null" in types:
                    yield from constants([None])
                if not types or "string" in types:
                    yield rules.value(terminal(one))


def maybe_text(types: Collection[str]) -> bool:
    return not types or "string" in types or "null" in types


def listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Raises GrammarRefused."""
    found = schema[keyword]
    if not isinstance(found, list) or len(found) > MOST_READ:
        raise GrammarRefused(f"{json.dumps(keyword)} must be an array of at most {MOST_READ}")
    return found


def constants(values: Iterable[object]) -> list[str]:
    """Others than these cannot be told from text."""
    words = ("null" if one is None else one for one in values if one is None or isinstance(one, str))
    return [f"{json.dumps(word)} {CLOSED}" for word in words]


def terminal(schema: Mapping[str, Any]) -> str:
    """Of a string."""
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength", ""), schema.get("pattern")
    held = [] if pattern is None else [expression(searched(str(pattern)))]
    if least or most != "":
        held.append(expression(f"(?s:.{{{least},{most}}})"))
    return " & ".join(held) or ANY_TEXT


def searched(pattern: str) -> str:
    """For whole texts. Anchors elsewhere than at its ends are left in it, and refused by who compiles it."""
    ahead, behind = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    if "|" in pattern and (ahead or behind):  # they may be of its first and last branch
        return pattern
    return f"{'' if ahead else ANY}({pattern[ahead : len(pattern) - behind]}){'' if behind else ANY}"


def python_arguments(tool: FunctionTool, rules: Rules) -> str:
    """`key=value` in the schema's order, those that it requires in any case."""
    if tool.input_grammar is not None:
        return f'"input=\\"" {quoted_input(tool.input_grammar)} "\\")"'
    schema = tool.parameters or {}
    found = [
        (f"{json.dumps(key + '=')} ({python_value(tool, property_of(schema, key))})", needed)
        for key, needed in arguments(tool, WORD)
    ]
    if not found and schema.get("additionalProperties") is not False:
        one = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" ({python_value(tool, schema.get("additionalProperties"))})'
        return f'({one} (COMMA {one})*)? ")"'
    behind, ways = '")"', ['")"']  # what may follow a key; and by which of them it may begin, or by none
    for part, needed in reversed(found):
        ways = [f"{part} {behind}"] if needed else [f"{part} {behind}", *ways]
        behind = rules.named(f"COMMA {part} {behind}" if needed else f"(COMMA {part})? {behind}")
    return f"({' | '.join(ways)})"


def python_value(tool: FunctionTool, schema: object) -> str:
    """JSON is read as Python's literals are, but for the names of its constants, and those are both read."""
    types = types_of(schema, tool.parameters or {})
    if tool.strict and isinstance(schema, Mapping):
        held = typed(tool, schema, types)
        plain = types == {"boolean"} and not {"enum", "const", "$ref"} & set(schema)
        return f"{held} | BOOLEAN" if plain else held
    return " | ".join(LITERALS[one] for one in sorted(types) if one in LITERALS) or "literal"


def typed(tool: FunctionTool, schema: object, types: Collection[str]) -> str:
    """As JSON: all that a schema says where the tool is to be held to it, else what type it is."""
    if not tool.strict or not isinstance(schema, Mapping):
        return content(json_grammar({"type": sorted(types)}))
    root = tool.parameters or {}
    return content(json_grammar({**{word: root[word] for word in DEFINITIONS if word in root}, **schema}))


def arguments(tool: FunctionTool, name: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """The keys of a tool's schema, and whether they are required; name: what a form can call one."""
    schema = tool.parameters or {}
    named, needed = schema.get("properties"), schema.get("required")
    keys = list(named) if isinstance(named, Mapping) else []
    required = set(map(str, needed)) if isinstance(needed, list) else set[str]()
    if tool.strict:
        refuse_misshapen(schema)
        refuse_others(set(schema) - SAYS_NOTHING - OF_ARGUMENTS)
        if lost := sorted(required - {key for key in keys if name.fullmatch(key)}):
            raise GrammarRefused(f"this model's form of calls has no room for the required {json.dumps(lost[0])}")
    return ((key, key in required) for key in keys if name.fullmatch(key))


def refuse_misshapen(schema: Mapping[str, Any]) -> None:
    """What says of arguments that they are no object, or nothing that can be read: JSON's compiler never sees it."""
    kind, named, needed = schema.get("type", "object"), schema.get("properties", {}), schema.get("required", [])
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarRefused(f'the type of arguments must be "object", not {json.dumps(kind)[:80]}')
    if not isinstance(named, Mapping) or not all(one is True or isinstance(one, Mapping) for one in named.values()):
        raise GrammarRefused("the properties of arguments must be an object of schemas")
    if not isinstance(needed, list) or not all(isinstance(key, str) for key in needed):
        raise GrammarRefused("the required arguments must be an array of texts")


def refuse_others(keywords: Collection[str]) -> None:
    if keywords:
        named = ", ".join(map(json.dumps, sorted(map(str, keywords))))
        raise GrammarRefused(f"Unimplemented keys: {named} of arguments that this model writes outside of JSON")
