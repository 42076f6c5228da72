"""Grammar rules for arguments in tags: every argument that a schema allows, in the tags of a form of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from adapters.text.answer.forms.call_tags import CallTags
from adapters.text.answer.rules.argument_grammar import (
    ANY_TEXT,
    LITERALS,
    OF_TEXT,
    SAYS_NOTHING,
    GeneratedRules,
    exclude_prefix,
    iterate_arguments,
    may_be_text,
    read_options,
    refuse_unknown_keywords,
    write_json_value,
    write_string_terminal,
)
from adapters.text.answer.rules.input_rules import bare_rules, bare_terminal
from adapters.text.answer.schema_types import MAX_SCHEMAS_READ, collect_types, find_property, resolve_reference
from adapters.text.conversation import FunctionTool
from adapters.text.grammars.grammar import GrammarRefused

KEY = re.compile(r"[^<>\s]{1,128}")
ANY_KEY = "\0"
FREE_KEY = r'/[^<>\s"]{1,128}/'
BREAK = r'"\n"'
OPTIONAL_BREAK = f"{BREAK}?"


@frozen
class TaggedArguments:
    """Writes the rules of one tool's arguments, with their tags."""

    tags: CallTags
    tool: FunctionTool
    rules: GeneratedRules

    def write(self) -> str:
        """Return the rule of the arguments: parameters in the order of the schema, of which some are required."""
        grammar = self.tool.input_grammar
        if grammar is not None:
            alone = bare_terminal(grammar)
            held = f"{bare_rules(grammar)} {self._closing}" if alone is None else self._add_value(alone)
            return " ".join([*self._start, self._open("input"), held, self._next, *self._end])
        schema = self.tool.parameters or {}
        parts = list[str]()
        for key, needed in iterate_arguments(self.tool, KEY):
            part = f"{self._open(key)} {self._write_value(find_property(schema, key))} {self._next}"
            parts.append(part if needed else f"({part})?")
        if not parts and schema.get("additionalProperties") is not False:
            before, after = self.tags.write_key(ANY_KEY).split(ANY_KEY)
            key = " ".join((self.rules.write_text(before), FREE_KEY, self.rules.write_text(after), *self._value_tag))
            parts.append(f"({key} {self._write_value(schema.get('additionalProperties'))} {self._next})*")
        return " ".join([*self._start, *parts, *self._end]) or '""'

    @property
    def _start(self) -> list[str]:
        """Return what may stand between the name of the function and its first parameter."""
        return [OPTIONAL_BREAK] if self.tags.optional_breaks else []

    @property
    def _next(self) -> str:
        """Return what stands behind a parameter."""
        return OPTIONAL_BREAK if self.tags.optional_breaks else BREAK

    @property
    def _value_tag(self) -> list[str]:
        return [OPTIONAL_BREAK, self.rules.write_text(self.tags.value_tag)] if self.tags.value_tag else []

    @property
    def _end(self) -> list[str]:
        return [self.rules.write_text(self.tags.end)] if self.tags.end else []

    @property
    def _closing(self) -> str:
        return self.rules.write_text(self.tags.value_end)

    def _open(self, key: str) -> str:
        return " ".join((self.rules.write_text(self.tags.write_key(key)), *self._value_tag))

    def _add_value(self, terminal: str) -> str:
        """Return the name of a rule for a value of bare text, with its closing tag."""
        end = self.tags.value_end
        if end in self.rules.controls:  # no text contains a control token
            return self.rules.add_rule(f"{self.rules.add_terminal(terminal)} {self.rules.write_text(end)}")
        return self.rules.add_suffix_rule(exclude_prefix(terminal, self.tags.value_never), end)

    def _write_value(self, schema: object) -> str:
        """Return the rule of a value, with its closing tag. A value that may be text is parsed as text."""
        root = self.tool.parameters or {}
        types = collect_types(schema, root)
        if types and "string" not in types and (self.tool.strict or types <= set(LITERALS)):
            return f"{write_json_value(self.tool, schema, types)} {self._closing}"
        if self.tool.strict:
            return f"({' | '.join(dict.fromkeys(self._iterate_text_values(schema, root)))})"
        allowed = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(allowed, list) and allowed and all(isinstance(value, str) for value in allowed):
            return f"({' | '.join(self._write_constants(allowed))})"
        return self._add_value(ANY_TEXT)

    def _iterate_text_values(self, schema: object, root: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rules of all texts that a schema allows, `null` included. Raises GrammarRefused."""
        waiting = [schema]
        for subschema in waiting:
            if subschema is None or subschema is True:
                yield self._add_value(ANY_TEXT)
                continue
            if len(waiting) > MAX_SCHEMAS_READ or not isinstance(subschema, Mapping):
                raise GrammarRefused(
                    "a value that this model writes as bare text has a schema of too many parts, or none"
                )
            said = set(subschema) - SAYS_NOTHING
            alone = next((word for word in ("$ref", "anyOf", "oneOf", "enum", "const") if word in said), None)
            refuse_unknown_keywords(said - ({alone, "type"} if alone else OF_TEXT))
            match alone:
                case "$ref":
                    waiting.append(resolve_reference(str(subschema["$ref"]), root))
                case "anyOf" | "oneOf":
                    waiting += (
                        option for option in read_options(subschema, alone) if may_be_text(collect_types(option, root))
                    )
                case "enum" | "const":
                    yield from self._write_constants(
                        read_options(subschema, "enum") if alone == "enum" else [subschema["const"]]
                    )
                case _:
                    types = collect_types(subschema, root)
                    if "null" in types:
                        yield from self._write_constants([None])
                    if not types or "string" in types:
                        yield self._add_value(write_string_terminal(subschema))

    def _write_constants(self, values: Iterable[object]) -> list[str]:
        """Return the rules of constants. Only texts and null are possible: others would look like text."""
        words = ("null" if value is None else value for value in values if value is None or isinstance(value, str))
        return [f"{json.dumps(word)} {self._closing}" for word in words]
