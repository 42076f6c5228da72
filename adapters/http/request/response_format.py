"""The form of an answer, as every API and other servers' clients ask for it: at most one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, shown
from adapters.text.grammars.grammar import MAX_SOURCE_CHARS, GrammarRefused, build_json_grammar
from effects.grammar import Grammar

FORMATS = ("text", "json_object", "json_schema")
MOST_CHOICES = 4096
MOST_TEXT = 4 * MAX_SOURCE_CHARS  # characters of a schema that is a text: it may be indented
ANY_OBJECT = {"type": "object"}
# vLLM's names, of today and of before, SGLang's and llama.cpp's; what each holds
NAMES: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
ACCEPTED = {
    "json": "a JSON schema",
    "json_object": "true or false",
    "choice": f"an array of 1 to {MOST_CHOICES} texts",
}
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")  # keys of vLLM's `structured_outputs`


@frozen
class Form:
    """The form of an answer, and where in the body it is asked for. translate: its rules may be GBNF still.

    schema: what the grammar is made of, if it is a JSON schema.  strict: nothing of it may be left to the model.
    """

    grammar: Grammar
    path: str
    translate: bool = False
    schema: Mapping[str, Any] | None = None
    strict: bool = False


def read_form(fields: Fields, formats: Sequence[Sequence[str]]) -> Form | None:
    """formats: where this API has OpenAI's object. Raises ApiError where two forms are asked for, or a wrong one."""
    found = [
        form
        for form in (*(read_format(within(fields, names)) for names in formats), *read_others(fields))
        if form is not None
    ]
    if len(found) > 1:
        raise invalid(found[1].path, f"says again what {found[0].path} says; accepted is one form of an answer")
    return found[0] if found else None


def within(fields: Fields | None, names: Sequence[str]) -> Fields | None:
    for name in names:
        fields = None if fields is None else fields.within(name)
    return fields


def read_format(answer: Fields | None) -> Form | None:
    """`{"type": "json_schema", "json_schema": {"schema": ...}}`, or the schema beside the type."""
    if answer is None:
        return None
    kind = answer.choice("type", FORMATS)
    if kind is None:
        raise answer.wrong("type", "one of " + ", ".join(map(repr, FORMATS)))
    if kind == "text":
        return None
    holder = answer.within("json_schema") or answer
    schema = holder.within("schema")
    if schema is None and kind == "json_schema":
        raise holder.wrong("schema", "an object, the JSON schema")
    strict = holder.flag("strict")
    if schema is None:
        return Form(build_json_grammar(ANY_OBJECT), answer.path)
    return schema_form(schema.data, schema.path, strict=strict)


def read_others(fields: Fields) -> list[Form]:
    found = [read_named(fields, name, kind) for name, kind in NAMES.items()]
    structured = fields.within("structured_outputs")
    if structured is not None:
        found += [read_named(structured, name, name) for name in STRUCTURED]
    return [form for form in found if form is not None]


def read_named(fields: Fields, name: str, kind: str) -> Form | None:
    """What is empty asks for nothing."""
    path, value = fields.at(name), fields.data.get(name)
    if value in (None, "", False, []):
        return None
    grammar: Grammar | None = None
    match kind, value:
        case "json_object", True:
            grammar = build_json_grammar(ANY_OBJECT)
        case "json", dict():
            return schema_form(value, path)
        case "json", str():
            return schema_form(parsed(value, path), path)
        case "regex", str():
            grammar = Grammar("regex", value)
        case "choice", [_, *_] if len(value) <= MOST_CHOICES and all(isinstance(one, str) and one for one in value):
            grammar = Grammar("lark", "start: " + " | ".join(map(json.dumps, value)))
        case "grammar", str():
            return Form(Grammar("lark", value), path, translate=True)
    if grammar is None:
        raise fields.wrong(name, ACCEPTED.get(kind, "a string"))
    return Form(grammar, path)


def parsed(text: str, path: str) -> dict[str, Any]:
    """What a body has as a text, which nobody has looked into."""
    if len(text) > MOST_TEXT:
        raise invalid(path, f"must have at most {MOST_TEXT} characters, not {len(text)}")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(path, f"must be a JSON schema: {error}") from None
    if not isinstance(found, dict):
        raise invalid(path, f"must be a JSON schema, an object, not {shown(found)}")
    return found


def schema_form(schema: Mapping[str, Any], path: str, *, strict: bool = False) -> Form:
    try:
        return Form(build_json_grammar(schema), path, schema=schema, strict=strict)
    except GrammarRefused as refused:
        raise invalid(path, str(refused)) from None
