"""Grammar rules for the arguments of Gemma's calls: bare keys, and texts between two equal marks."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping

from adapters.text.answer.forms.gemma_calls import MARK
from adapters.text.answer.rules.argument_grammar import (
    ANY_KEY,
    ANY_TEXT,
    LITERALS,
    NUMBERS,
    SAYS_NOTHING,
    GeneratedRules,
    KeyedForm,
    read_options,
    refuse_unknown_keywords,
    write_json_value,
    write_keyed_arguments,
)
from adapters.text.answer.rules.input_rules import bare_rules, bare_terminal
from adapters.text.answer.schema_types import collect_types
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused

# The rules of values, by the JSON types as which they are read.
VALUES: Mapping[str, str] = {**LITERALS, "string": "quoted"}
_AS_IN_JSON = {"integer", "number", "boolean", "null"}  # values of these types are written as in JSON
_OF_VALUES = {"type", "enum", "const", "items"}


def write_value_rules(controls: Container[str]) -> list[str]:
    """Return the rules of values. controls: the texts of control tokens, of which the mark may be one."""
    quoted = [f"mark: {MARK}", "quoted: mark MARKED mark", f"MARKED: {ANY_TEXT}"]
    if MARK not in controls:
        quoted = [f"mark: {json.dumps(MARK)}", "quoted: mark marked", f"marked[suffix={json.dumps(MARK)}]: {ANY_TEXT}"]
    return [
        *quoted,
        *NUMBERS,
        'BOOLEAN: "true" | "false"',
        'NOTHING: "null"',
        f"KEY: {ANY_KEY}",
        'listed: "[" (literal ("," literal)*)? "]"',
        'mapped: "{" (KEY ":" literal ("," KEY ":" literal)*)? "}"',
        "literal: " + " | ".join(VALUES.values()),
    ]


def write_gemma_arguments(tool: FunctionTool, rules: GeneratedRules) -> str:
    """Return the rule of `key:value` arguments, in the order of the schema, of which some are required."""
    if tool.input_grammar is not None:
        text = bare_terminal(tool.input_grammar) or bare_rules(tool.input_grammar)
        return f'"input:" mark ({text}) mark "}}"'
    return write_keyed_arguments(tool, rules, KeyedForm(":", '","', '"}"', _write_value))


def _write_value(tool: FunctionTool, schema: object) -> str:
    """Return the rule of a value: by all of the schema if the tool is strict, or else only by its types."""
    root = tool.parameters or {}
    if not isinstance(schema, Mapping):
        return "literal"
    types = sorted(collect_types(schema, root))
    if types and tool.strict and set(types) <= _AS_IN_JSON:
        return write_json_value(tool, schema, types)
    if tool.strict:
        refuse_unknown_keywords(set(schema) - SAYS_NOTHING - _OF_VALUES)
        if "enum" in schema or "const" in schema:
            values = read_options(schema, "enum") if "enum" in schema else [schema["const"]]
            return " | ".join(map(_write_constant, values))
    ways = [VALUES[name] for name in types if name in VALUES and name != "array"]
    if "array" in types:
        item = _write_value(tool, schema.get("items")) if tool.strict else "literal"
        ways.append(f'"[" (({item}) ("," ({item}))*)? "]"')
    return " | ".join(ways) or "literal"


def _write_constant(value: object) -> str:
    """Return the rule of one value. Raises GrammarRefused for a container, or a text that has the mark in it."""
    if isinstance(value, str) and MARK not in value:
        return f"mark {json.dumps(value)} mark" if value else "mark mark"
    if isinstance(value, str | list | dict):
        raise GrammarRefused(f"this model's form of calls has no room for the constant {json.dumps(value)[:80]}")
    return json.dumps(json.dumps(value))
