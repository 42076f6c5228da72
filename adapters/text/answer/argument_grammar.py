"""Grammar rules for the arguments of calls: every argument that a schema allows, as each form of calls writes it.

The grammar library handles JSON itself (`%json`). What a schema says about bare text becomes an expression here. A
keyword that cannot be expressed is refused, as the library does: no keyword is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field

from adapters.text.answer.input_rules import bare_rules, bare_terminal, quoted_input
from adapters.text.answer.quoted_rules import to_terminal
from adapters.text.answer.schema_types import MAX_SCHEMAS_READ, collect_types, find_property, resolve_reference
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused, build_json_grammar
from effects.grammar import Grammar

ANY = "(?s:.*)"
ANY_TEXT = f"/{ANY}/"
DEFINITIONS = ("$defs", "definitions")
SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
OF_TEXT = {"type", "pattern", "minLength", "maxLength"}
# The text at which the parser ends a value in tags (`XmlCalls.ends_value`). No generated value contains it.
TAGS = rf"{ANY}(</parameter>\s*(</function>|</tool_call>)|<parameter(=| name=))"
XML_KEY = re.compile(r"[^<>\s]{1,128}")
WORD = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
# The rules of Python's literals, by the JSON types as which they are read. Strings have the escapes of both languages.
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
class GeneratedRules:
    """The rules that are generated while others are written. Each has a name, and equal rules exist once."""

    _made: dict[str, str] = field(factory=dict, init=False)  # the names, by the rules

    def add_suffix_rule(self, terminal: str, suffix: str) -> str:
        """Return the name of a rule: text of a terminal, up to the first occurrence of `suffix`."""
        return self._add(f"[suffix={json.dumps(suffix)}]: {terminal}")

    def add_rule(self, rule: str) -> str:
        return self._add(f": {rule}")

    def add_tagged_value(self, terminal: str) -> str:
        """Return the name of a rule for a value in tags, with its closing tag."""
        return self.add_suffix_rule(exclude_prefix(terminal, TAGS), "\n</parameter>")

    def _add(self, rule: str) -> str:
        return self._made.setdefault(rule, f"made{len(self._made)}")

    @property
    def lines(self) -> list[str]:
        return [name + rule for rule, name in self._made.items()]


def exclude_prefix(terminal: str, never: str) -> str:
    """Return the terminal without all texts that begin with the expression `never`."""
    return f"{terminal} & ~{to_terminal(f'({never}){ANY}')}"


def format_content(form: Grammar) -> str:
    """Return the part of a rule that matches a form."""
    return f"%json {form.source}" if form.kind == "json_schema" else to_terminal(form.source)


def write_json_arguments(tool: FunctionTool, _: GeneratedRules) -> str:
    """Return the rule of arguments as JSON.

    They keep to the tool's schema if it is strict. The input of a custom tool keeps to its grammar.
    """
    if tool.input_grammar is not None:
        return f'"{{\\"input\\": \\"" {quoted_input(tool.input_grammar)} "\\"}}}}"'
    held = build_json_grammar(tool.parameters if tool.strict and tool.parameters else {"type": "object"})
    return f'{format_content(held)} "}}"'


def write_xml_arguments(tool: FunctionTool, rules: GeneratedRules) -> str:
    """Return the rule of arguments in tags: parameters in the order of the schema, of which some are required."""
    if tool.input_grammar is not None:
        alone = bare_terminal(tool.input_grammar)
        held = f"{bare_rules(tool.input_grammar)} {CLOSED}" if alone is None else rules.add_tagged_value(alone)
        return rf'"<parameter=input>\n" {held} {NEXT} "</function>"'
    schema = tool.parameters or {}
    parts = list[str]()
    for key, needed in iterate_arguments(tool, XML_KEY):
        value = write_xml_value(tool, find_property(schema, key), rules)
        part = f"{json.dumps(f'<parameter={key}>' + chr(10))} {value} {NEXT}"
        parts.append(part if needed else f"({part})?")
    if not parts and schema.get("additionalProperties") is not False:
        value = write_xml_value(tool, schema.get("additionalProperties"), rules)
        parts.append(rf'("<parameter=" /[^<>\s]{{1,128}}/ ">\n" {value} {NEXT})*')
    return " ".join([*parts, '"</function>"'])


NEXT = r'"\n"'
CLOSED = r'"\n</parameter>"'


def write_xml_value(tool: FunctionTool, schema: object, rules: GeneratedRules) -> str:
    """Return the rule of a value in tags, with its closing tag. A value that may be text is parsed as text."""
    root = tool.parameters or {}
    types = collect_types(schema, root)
    if types and "string" not in types and (tool.strict or types <= set(LITERALS)):
        return f"{write_json_value(tool, schema, types)} {CLOSED}"
    if tool.strict:
        return f"({' | '.join(dict.fromkeys(iterate_text_values(schema, root, rules)))})"
    allowed = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(allowed, list) and allowed and all(isinstance(one, str) for one in allowed):
        return f"({' | '.join(write_constants(allowed))})"
    return rules.add_tagged_value(ANY_TEXT)


def iterate_text_values(schema: object, root: Mapping[str, Any], rules: GeneratedRules) -> Iterator[str]:
    """Yield the rules of all texts that a schema allows, `null` included. Raises GrammarRefused."""
    waiting = [schema]
    for one in waiting:
        if one is None or one is True:
            yield rules.add_tagged_value(ANY_TEXT)
            continue
        if len(waiting) > MAX_SCHEMAS_READ or not isinstance(one, Mapping):
            raise GrammarRefused("a value that this model writes as bare text has a schema of too many parts, or none")
        said = set(one) - SAYS_NOTHING
        alone = next((word for word in ("$ref", "anyOf", "oneOf", "enum", "const") if word in said), None)
        refuse_unknown_keywords(said - ({alone, "type"} if alone else OF_TEXT))
        match alone:
            case "$ref":
                waiting.append(resolve_reference(str(one["$ref"]), root))
            case "anyOf" | "oneOf":
                waiting += (each for each in read_options(one, alone) if may_be_text(collect_types(each, root)))
            case "enum" | "const":
                yield from write_constants(read_options(one, "enum") if alone == "enum" else [one["const"]])
            case _:
                types = collect_types(one, root)
                if "null" in types:
                    yield from write_constants([None])
                if not types or "string" in types:
                    yield rules.add_tagged_value(write_string_terminal(one))


def may_be_text(types: Collection[str]) -> bool:
    return not types or "string" in types or "null" in types


def read_options(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the list that a keyword holds. Raises GrammarRefused."""
    found = schema[keyword]
    if not isinstance(found, list) or len(found) > MAX_SCHEMAS_READ:
        raise GrammarRefused(f"{json.dumps(keyword)} must be an array of at most {MAX_SCHEMAS_READ}")
    return found


def write_constants(values: Iterable[object]) -> list[str]:
    """Return the rules of constants. Only texts and null are possible: others would look like text."""
    words = ("null" if one is None else one for one in values if one is None or isinstance(one, str))
    return [f"{json.dumps(word)} {CLOSED}" for word in words]


def write_string_terminal(schema: Mapping[str, Any]) -> str:
    """Return the terminal of a string with these limits and this pattern."""
    least = schema.get("minLength", 0)
    most = schema.get("maxLength", "")
    pattern = schema.get("pattern")
    held = [] if pattern is None else [to_terminal(unanchor_pattern(str(pattern)))]
    if least or most != "":
        held.append(to_terminal(f"(?s:.{{{least},{most}}})"))
    return " & ".join(held) or ANY_TEXT


def unanchor_pattern(pattern: str) -> str:
    """Return an expression for whole texts from a pattern that is searched for.

    Anchors elsewhere than at the ends stay in it. The compiler refuses them.
    """
    ahead = pattern.startswith("^")
    behind = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    if "|" in pattern and (ahead or behind):  # the anchors may belong to the first and the last branch only
        return pattern
    return f"{'' if ahead else ANY}({pattern[ahead : len(pattern) - behind]}){'' if behind else ANY}"


def write_python_arguments(tool: FunctionTool, rules: GeneratedRules) -> str:
    """Return the rule of `key=value` arguments, in the order of the schema, of which some are required."""
    if tool.input_grammar is not None:
        return f'"input=\\"" {quoted_input(tool.input_grammar)} "\\")"'
    schema = tool.parameters or {}
    found = [
        (f"{json.dumps(key + '=')} ({write_python_value(tool, find_property(schema, key))})", needed)
        for key, needed in iterate_arguments(tool, WORD)
    ]
    if not found and schema.get("additionalProperties") is not False:
        one = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" ({write_python_value(tool, schema.get("additionalProperties"))})'
        return f'({one} (COMMA {one})*)? ")"'
    behind = '")"'  # what may follow an argument
    ways = ['")"']  # the arguments with which the list may begin, or its end
    for part, needed in reversed(found):
        ways = [f"{part} {behind}"] if needed else [f"{part} {behind}", *ways]
        behind = rules.add_rule(f"COMMA {part} {behind}" if needed else f"(COMMA {part})? {behind}")
    return f"({' | '.join(ways)})"


def write_python_value(tool: FunctionTool, schema: object) -> str:
    """Return the rule of a value as a Python literal. The parser also accepts JSON, with its names of constants."""
    types = collect_types(schema, tool.parameters or {})
    if tool.strict and isinstance(schema, Mapping):
        held = write_json_value(tool, schema, types)
        plain = types == {"boolean"} and not {"enum", "const", "$ref"} & set(schema)
        return f"{held} | BOOLEAN" if plain else held
    return " | ".join(LITERALS[one] for one in sorted(types) if one in LITERALS) or "literal"


def write_json_value(tool: FunctionTool, schema: object, types: Collection[str]) -> str:
    """Return the rule of a value as JSON: by the whole schema if the tool is strict, or else only by its types."""
    if not tool.strict or not isinstance(schema, Mapping):
        return format_content(build_json_grammar({"type": sorted(types)}))
    root = tool.parameters or {}
    return format_content(build_json_grammar({**{word: root[word] for word in DEFINITIONS if word in root}, **schema}))


def iterate_arguments(tool: FunctionTool, name: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Return the keys of a tool's schema, and whether they are required. name: the keys that the form can write."""
    schema = tool.parameters or {}
    named = schema.get("properties")
    needed = schema.get("required")
    keys = list(named) if isinstance(named, Mapping) else []
    required = set(map(str, needed)) if isinstance(needed, list) else set[str]()
    if tool.strict:
        refuse_malformed(schema)
        refuse_unknown_keywords(set(schema) - SAYS_NOTHING - OF_ARGUMENTS)
        if lost := sorted(required - {key for key in keys if name.fullmatch(key)}):
            raise GrammarRefused(f"this model's form of calls has no room for the required {json.dumps(lost[0])}")
    return ((key, key in required) for key in keys if name.fullmatch(key))


def refuse_malformed(schema: Mapping[str, Any]) -> None:
    """Raise GrammarRefused for a malformed schema of arguments. The compiler of JSON schemas never sees this level."""
    kind = schema.get("type", "object")
    named = schema.get("properties", {})
    needed = schema.get("required", [])
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarRefused(f'the type of arguments must be "object", not {json.dumps(kind)[:80]}')
    if not isinstance(named, Mapping) or not all(one is True or isinstance(one, Mapping) for one in named.values()):
        raise GrammarRefused("the properties of arguments must be an object of schemas")
    if not isinstance(needed, list) or not all(isinstance(key, str) for key in needed):
        raise GrammarRefused("the required arguments must be an array of texts")


def refuse_unknown_keywords(keywords: Collection[str]) -> None:
    if keywords:
        named = ", ".join(map(json.dumps, sorted(map(str, keywords))))
        raise GrammarRefused(f"Unimplemented keys: {named} of arguments that this model writes outside of JSON")
