"""Grammar rules for the arguments of calls: every argument that a schema allows, as each form of calls writes it.

The grammar library handles JSON itself (`%json`). What a schema says about bare text becomes an expression here. A
keyword that cannot be expressed is refused, as the library does: no keyword is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from adapters.text.answer.rules.input_rules import quoted_input
from adapters.text.answer.rules.quoted_rules import to_terminal
from adapters.text.answer.schema_types import MAX_SCHEMAS_READ, collect_types, find_property
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused, build_json_grammar
from adapters.text.template import ControlToken
from effects.grammar import Grammar

ANY = "(?s:.*)"
ANY_TEXT = f"/{ANY}/"
DEFINITIONS = ("$defs", "definitions")
SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"}
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
OF_TEXT = {"type", "pattern", "minLength", "maxLength"}
WORD = re.compile(r"[A-Za-z0-9_.\-]{1,128}")  # a key that bare text can have
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # of an argument that the schema does not name
CALL_ID = "/[A-Za-z0-9]{9}/"  # Mistral's
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
NUMBERS = (
    "INTEGER: /-?(0|[1-9][0-9]{0,18})/",
    "NUMBER: /-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
)
PYTHON = (
    r"""STRING: /"([^"\\\x00-\x1f]|\\["'\\nrtbf])*"|'([^'\\\x00-\x1f]|\\["'\\nrtbf])*'/""",
    *NUMBERS,
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
    """The rules that are generated while others are written. Each has a name, and equal rules exist once.

    controls: the control tokens, by their texts.
    """

    controls: Mapping[str, ControlToken] = field(factory=dict)
    _made: dict[str, str] = field(factory=dict, init=False)  # the names, by the rules

    def write_text(self, text: str) -> str:
        """Return the part of a rule that matches a text. Control tokens in it are meant as such."""
        names = [name for name in self.controls if name in text]
        if not names:
            return json.dumps(text)
        longest_first = sorted(names, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return " ".join(self.name_token(part) if part in self.controls else json.dumps(part) for part in parts if part)

    def name_token(self, name: str) -> str:
        """Return a control token as the grammar library calls it: by its text if that stands in angle brackets."""
        return name if name.startswith("<") and name.endswith(">") else f"<[{self.controls[name].id}]>"

    def add_suffix_rule(self, terminal: str, suffix: str) -> str:
        """Return the name of a rule: text of a terminal, up to the first occurrence of `suffix`."""
        return self._add(f"[suffix={json.dumps(suffix)}]: {terminal}")

    def add_terminal(self, terminal: str) -> str:
        """Return the name of a terminal."""
        return self._made.setdefault(f": {terminal}", f"MADE{len(self._made)}")

    def add_rule(self, rule: str) -> str:
        return self._add(f": {rule}")

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
        return f'"{{\\"input\\": \\"" {quoted_input(tool.input_grammar)} "\\"}}"'
    return format_content(
        build_json_grammar(tool.parameters if tool.strict and tool.parameters else {"type": "object"})
    )


def write_json_member(tool: FunctionTool, rules: GeneratedRules) -> str:
    """Return the rule of arguments as the last member of a JSON object, with the end of that object."""
    return f'{write_json_arguments(tool, rules)} "}}"'


def write_marked_arguments(tool: FunctionTool, rules: GeneratedRules) -> str:
    """Return the rule of arguments as JSON behind Mistral's mark. The id of the call may stand before it."""
    named = f"({rules.write_text('[CALL_ID]')} {CALL_ID})? " if "[CALL_ID]" in rules.controls else ""
    return f"{named}{rules.write_text('[ARGS]')} {write_json_arguments(tool, rules)}"


def may_be_text(types: Collection[str]) -> bool:
    return not types or "string" in types or "null" in types


def read_options(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the list that a keyword holds. Raises GrammarRefused."""
    found = schema[keyword]
    if not isinstance(found, list) or len(found) > MAX_SCHEMAS_READ:
        raise GrammarRefused(f"{json.dumps(keyword)} must be an array of at most {MAX_SCHEMAS_READ}")
    return found


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
    starts_at_anchor = pattern.startswith("^")
    ends_at_anchor = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    if "|" in pattern and (
        starts_at_anchor or ends_at_anchor
    ):  # the anchors may belong to the first and the last branch only
        return pattern
    inner = pattern[starts_at_anchor : len(pattern) - ends_at_anchor]
    return f"{'' if starts_at_anchor else ANY}({inner}){'' if ends_at_anchor else ANY}"


def write_python_arguments(tool: FunctionTool, rules: GeneratedRules) -> str:
    """Return the rule of `key=value` arguments, in the order of the schema, of which some are required."""
    if tool.input_grammar is not None:
        return f'"input=\\"" {quoted_input(tool.input_grammar)} "\\")"'
    return write_keyed_arguments(tool, rules, KeyedForm("=", "COMMA", '")"', write_python_value))


@frozen
class KeyedForm:
    """The way in which a form of calls writes arguments with bare keys. comma, end: as rules.

    write_value: returns the rule of a value. It gets the tool, and the value's schema if there is one.
    """

    sign: str  # between a key and its value
    comma: str
    end: str
    write_value: Callable[[FunctionTool, object], str]


def write_keyed_arguments(tool: FunctionTool, rules: GeneratedRules, form: KeyedForm) -> str:
    """Return the rule of arguments with bare keys, in the order of the schema, of which some are required.

    If the schema names no arguments, any may follow that it does not forbid.
    """
    schema = tool.parameters or {}
    found = [
        (f"{json.dumps(key + form.sign)} ({form.write_value(tool, find_property(schema, key))})", needed)
        for key, needed in iterate_arguments(tool, WORD)
    ]
    if not found and schema.get("additionalProperties") is not False:
        value = form.write_value(tool, schema.get("additionalProperties"))
        pair = f"{ANY_KEY} {json.dumps(form.sign)} ({value})"
        return f"({pair} ({form.comma} {pair})*)? {form.end}"
    return write_ordered_arguments(found, rules, comma=form.comma, end=form.end)


def write_ordered_arguments(found: Sequence[tuple[str, bool]], rules: GeneratedRules, *, comma: str, end: str) -> str:
    """Return the rule of arguments in this order, with commas between them.

    found: the rule of each argument, and whether it is required. comma, end: how these two are written.
    """
    following = end  # what may follow an argument
    ways = [end]  # the arguments with which the list may begin, or its end
    for part, needed in reversed(found):
        ways = [f"{part} {following}"] if needed else [f"{part} {following}", *ways]
        following = rules.add_rule(f"{comma} {part} {following}" if needed else f"({comma} {part})? {following}")
    return f"({' | '.join(ways)})"


def write_python_value(tool: FunctionTool, schema: object) -> str:
    """Return the rule of a value as a Python literal. The parser also accepts JSON, with its names of constants."""
    types = collect_types(schema, tool.parameters or {})
    if tool.strict and isinstance(schema, Mapping):
        held = write_json_value(tool, schema, types)
        plain = types == {"boolean"} and not {"enum", "const", "$ref"} & set(schema)
        return f"{held} | BOOLEAN" if plain else held
    return " | ".join(LITERALS[name] for name in sorted(types) if name in LITERALS) or "literal"


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
    if not isinstance(named, Mapping) or not all(
        subschema is True or isinstance(subschema, Mapping) for subschema in named.values()
    ):
        raise GrammarRefused("the properties of arguments must be an object of schemas")
    if not isinstance(needed, list) or not all(isinstance(key, str) for key in needed):
        raise GrammarRefused("the required arguments must be an array of texts")


def refuse_unknown_keywords(keywords: Collection[str]) -> None:
    if keywords:
        named = ", ".join(map(json.dumps, sorted(map(str, keywords))))
        raise GrammarRefused(f"Unimplemented keys: {named} of arguments that this model writes outside of JSON")
