"""Read the format that an answer must have, in the fields of every API and of other servers' clients. A request has at
most one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from adapters.http.wire.errors import invalid
from adapters.http.wire.fields import Fields, quote_value
from adapters.text.grammars.grammar import MAX_SOURCE_CHARS, GrammarRefused, build_json_grammar
from effects.grammar import Grammar

FORMATS = ("text", "json_object", "json_schema")
MOST_CHOICES = 4096
MOST_TEXT = 4 * MAX_SOURCE_CHARS  # characters of a schema that is sent as text, which may be indented
ANY_OBJECT = {"type": "object"}
# vLLM's names, of today and of before, SGLang's and llama.cpp's; what each holds
VENDOR_FIELDS: Mapping[str, str] = {
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
    "choice": f"an array of 1 to {MOST_CHOICES} texts, none of them empty",
}
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")  # the keys of vLLM's `structured_outputs`


@frozen
class ResponseFormat:
    """The format of an answer, and its path in the body.

    translate: the grammar may be written in llama.cpp's GBNF, which has to be translated to Lark. schema: the JSON
    schema that the grammar is made of, if there is one. strict: a schema that cannot be enforced as a whole is refused.
    """

    grammar: Grammar
    path: str
    translate: bool = False
    schema: Mapping[str, Any] | None = None
    strict: bool = False


def read_response_format(fields: Fields, formats: Sequence[Sequence[str]]) -> ResponseFormat | None:
    """Return the requested format, or None. formats: the paths at which this API has OpenAI's object. Raises ApiError
    if a format is wrong, or two are requested.
    """
    found = [
        form
        for form in (*(read_format(read_nested(fields, names)) for names in formats), *read_vendor_formats(fields))
        if form is not None
    ]
    if len(found) > 1:
        raise invalid(found[1].path, f"repeats {found[0].path}; accepted: one form for the answer")
    return found[0] if found else None


def read_nested(fields: Fields | None, names: Sequence[str]) -> Fields | None:
    for name in names:
        fields = None if fields is None else fields.read_object(name)
    return fields


def read_format(answer: Fields | None) -> ResponseFormat | None:
    """Read OpenAI's object. The schema may also be a sibling of the type."""
    if answer is None:
        return None
    kind = answer.choice("type", FORMATS)
    if kind is None:
        raise answer.wrong_value("type", "one of " + ", ".join(map(repr, FORMATS)))
    if kind == "text":
        return None
    holder = answer.read_object("json_schema") or answer
    schema = holder.read_object("schema")
    if schema is None and kind == "json_schema":
        raise holder.wrong_value("schema", "an object, the JSON schema")
    strict = holder.flag("strict")
    if schema is None:
        return ResponseFormat(build_json_grammar(ANY_OBJECT), answer.path)
    return make_schema_format(schema.data, schema.path, strict=strict)


def read_vendor_formats(fields: Fields) -> list[ResponseFormat]:
    found = [read_vendor_format(fields, name, kind) for name, kind in VENDOR_FIELDS.items()]
    structured = fields.read_object("structured_outputs")
    if structured is not None:
        found += [read_vendor_format(structured, name, name) for name in STRUCTURED]
    return [form for form in found if form is not None]


def read_vendor_format(fields: Fields, name: str, kind: str) -> ResponseFormat | None:
    """Read one field of another server's API. An empty value requests nothing."""
    path = fields.path_of(name)
    value = fields.data.get(name)
    if value in (None, "", False, []):
        return None
    grammar: Grammar | None = None
    match kind, value:
        case "json_object", True:
            grammar = build_json_grammar(ANY_OBJECT)
        case "json", dict():
            return make_schema_format(value, path)
        case "json", str():
            return make_schema_format(parse_schema(value, path), path)
        case "regex", str():
            grammar = Grammar("regex", value)
        case "choice", [_, *_] if len(value) <= MOST_CHOICES and all(isinstance(word, str) and word for word in value):
            grammar = Grammar("lark", "start: " + " | ".join(map(json.dumps, value)))
        case "grammar", str():
            return ResponseFormat(Grammar("lark", value), path, translate=True)
    if grammar is None:
        raise fields.wrong_value(name, ACCEPTED.get(kind, "a string"))
    return ResponseFormat(grammar, path)


def parse_schema(text: str, path: str) -> dict[str, Any]:
    """Return the schema that a body has as text. Raises ApiError."""
    if len(text) > MOST_TEXT:
        raise invalid(path, f"must have at most {MOST_TEXT} characters, not {len(text)}")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(path, f"must be a JSON schema: {error}") from None
    if not isinstance(found, dict):
        raise invalid(path, f"must be a JSON schema, an object, not {quote_value(found)}")
    return found


def make_schema_format(schema: Mapping[str, Any], path: str, *, strict: bool = False) -> ResponseFormat:
    try:
        return ResponseFormat(build_json_grammar(schema), path, schema=schema, strict=strict)
    except GrammarRefused as refused:
        raise invalid(path, str(refused)) from None
