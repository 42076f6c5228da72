"""Tests of how a schema is closed, and of what stays open."""

from __future__ import annotations

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from adapters.text.grammars.closed_schema import close_schema

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}

# A schema, what still keeps to it, and what does not any more.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "an object": (A, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    "inside of one": ({"properties": {"x": A}}, [{"x": {"a": 1}}], [{"x": {"b": 1}}, {"y": 1}]),
    "inside of a list": ({"items": A}, [[{"a": 1}]], [[{"b": 1}]]),
    "in a list of places": ({"prefixItems": [A, B]}, [[{"a": 1}, {"b": 1}]], [[{"b": 1}]]),
    "a branch": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"c": 1}, {"a": 1, "b": 1}]),
    "by a reference": ({"$ref": "#/$defs/a", "$defs": {"a": A}}, [{"a": 1}], [{"b": 1}]),
    "values of any key": ({"additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {"b": 1}}]),
    "a property named like a keyword": ({"properties": {"title": {"type": "string"}}}, [{"title": "x"}], [{"x": 1}]),
    "no properties at all": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "alone in allOf": ({"allOf": [A]}, [{"a": 1}], [{"b": 1}]),
    "any object": ({"type": "object"}, [{"a": 1}], []),
    "one that is open": ({**A, "additionalProperties": True}, [{"a": 1, "b": 2}], []),
    "one with patterns": ({**A, "patternProperties": {"^b": {}}}, [{"a": 1, "b": 2}], []),
    "members that hold together": ({"allOf": [A, B]}, [{"a": 1, "b": 1}], []),
    "members that are referred to": (
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
        [{"a": 1, "b": 1}],
        [],
    ),
    "with branches": ({**A, "anyOf": [{**B, "required": ["b"]}, {"required": ["a"]}]}, [{"a": 1, "b": 1}], []),
    "with branches that only require": (
        {**A, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
        [{"a": 1}, {}],
        [{"a": 1, "b": 2}],
    ),
    "with a reference": ({**A, "$ref": "#/$defs/b", "$defs": {"b": B}}, [{"a": 1, "b": 1}], []),
    "a required key that is not listed": ({**A, "required": ["b"]}, [{"b": 1}], []),
    "an example that looks like a schema": ({"enum": [{"properties": {}}]}, [{"properties": {}}], []),
}


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_no_properties_but_those_that_it_lists(name: str) -> None:
    schema, good, bad = CASES[name]
    found = close_schema(schema)
    for value in good:
        jsonschema.validate(value, found)
    for value in bad:
        jsonschema.validate(value, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, found)


def test_what_only_people_read_is_left_out_and_the_original_stays_as_it_is() -> None:
    schema = {"title": "X", "properties": {"a": {"description": "d", "default": True, "type": "boolean"}}}
    assert close_schema(schema) == {"properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    assert schema["title"] == "X"
    assert "additionalProperties" not in schema


LARGEST = 10**18 - 1


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, (0, LARGEST, -LARGEST), (LARGEST + 1, -LARGEST - 1)),
        ({"type": ["integer", "null"]}, (0, None), (LARGEST + 1,)),
        ({"type": "integer", "minimum": 3}, (3, LARGEST), (2, LARGEST + 1)),
        ({"type": "integer", "exclusiveMaximum": 3}, (2, -LARGEST), (3, -LARGEST - 1)),
        ({"type": "integer", "minimum": 10**19}, (10**19,), (5,)),
        ({"type": "integer", "multipleOf": 3}, (3 * LARGEST,), (1,)),
        ({"type": "number"}, (10**19, 0.5), ("x",)),
    ],
    ids=str,
)
def test_an_integer_without_a_limit_has_at_most_eighteen_digits(
    schema: dict[str, Any], good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    found = close_schema(schema)
    for value in good:
        jsonschema.validate(value, found)
    for value in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, found)


@pytest.mark.parametrize(
    "schema", [{"properties": 5}, {"allOf": 5}, {"items": 5}, {"anyOf": [5]}, {"properties": {"a": 5}}, {"required": 5}]
)
def test_what_is_no_schema_stays_as_it_is(schema: dict[str, Any]) -> None:
    found = close_schema(schema)
    assert {key: found[key] for key in schema} == schema
