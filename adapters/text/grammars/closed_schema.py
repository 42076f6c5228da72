"""Prepares JSON schemas for a grammar: removes what only people read, and closes objects.

A JSON schema that lists properties and does not mention others allows every other property as well. Clients do not
mean that. A grammar cannot prevent such a key from coming twice, and a small model writes such keys without end. So an
object with `properties` allows no others, unless the schema says `additionalProperties` or `patternProperties`.

An object stays open where closing it would contradict another part of the schema:
* it is a member of a joined combination (`allOf`, or `anyOf` next to `properties`), or such a member refers to it. Each
  part would forbid what the others require;
* it has a combination whose members have properties of their own;
* it requires a key that it does not list.

An integer without a limit gets a limit of 18 digits on that side. Few clients can read more digits, and a small model
writes digits without end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

READ_BY_PEOPLE = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
)
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LARGEST = 10**18 - 1  # below 2**63, and 16 digits are as many as llama.cpp writes
COMBINED = ("allOf", "anyOf", "oneOf")
SCHEMA_LISTS = (*COMBINED, "prefixItems", "items")
SCHEMAS = ("items", "additionalProperties", "additionalItems")
SPEAKS_OF_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"})


def close_schema(schema: Mapping[str, Any], *, bound: bool = True) -> dict[str, Any]:
    """Return a copy that allows no properties but those that it lists. Raises RecursionError where it is too deep.

    bound: limit integers as well. Each takes some of what the lexer of a grammar may cost.
    """
    found: dict[str, Any] = close_part(
        schema, "#", frozenset(iterate_joined_references(schema, joined=False)), joined=False
    )
    return bound_integers(found) if bound else found


def bound_integers(schema: Any) -> Any:
    """Return the schema with limits for all integers in it."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict[str, Any]()
    for keyword, held in schema.items():
        made = [bound_integers(part) for _, part in iterate_parts(keyword, held)]
        found[keyword] = rebuild_value(keyword, held, made)
    return add_integer_bounds(found)


def rebuild_value(keyword: str, held: Any, parts: list[Any]) -> Any:
    """Return the value of a keyword with its schemas replaced by `parts`."""
    if keyword in SCHEMAS_BY_NAME and isinstance(held, Mapping):
        return dict(zip(held, parts, strict=True))
    if keyword in SCHEMA_LISTS and isinstance(held, list):
        return parts
    return parts[0] if parts else held


def iterate_parts(keyword: str, held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a keyword holds, each with the steps of a JSON pointer that lead to it."""
    if keyword in SCHEMAS_BY_NAME and isinstance(held, Mapping):
        yield from ((f"/{keyword}/{escape_step(str(name))}", part) for name, part in held.items())
    elif keyword in SCHEMA_LISTS and isinstance(held, list):
        yield from ((f"/{keyword}/{number}", part) for number, part in enumerate(held))
    elif keyword in SCHEMAS and isinstance(held, Mapping):
        yield f"/{keyword}", held


def escape_step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def is_joined(schema: Mapping[str, Any], keyword: str, joined: bool) -> bool:
    """Must a value keep to a member of this combination and to another schema as well?"""
    if keyword not in COMBINED:
        return False
    members = schema[keyword]
    return joined or "properties" in schema or (keyword == "allOf" and isinstance(members, list) and len(members) > 1)


def iterate_joined_references(schema: Any, joined: bool) -> Iterator[str]:
    """Yield the references of schemas that hold together with others."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and (joined or "properties" in schema):
        yield reference
    for keyword, held in schema.items():
        for _, part in iterate_parts(keyword, held):
            yield from iterate_joined_references(part, is_joined(schema, keyword, joined))


def close_part(schema: Any, pointer: str, open_pointers: frozenset[str], joined: bool) -> Any:
    """Return a copy of a part of a schema, without keywords for people, in which objects are closed if they can be.

    pointer: of the part, as references name it. open_pointers: those that references of joined schemas lead to.
    joined: must a value keep to this part and to another schema as well?
    """
    if not isinstance(schema, Mapping):
        return schema
    found = dict[str, Any]()
    for keyword, held in schema.items():
        if keyword in READ_BY_PEOPLE:
            continue
        together = is_joined(schema, keyword, joined)
        made = [
            close_part(part, pointer + steps, open_pointers, together) for steps, part in iterate_parts(keyword, held)
        ]
        found[keyword] = rebuild_value(keyword, held, made)
    if not joined and pointer not in open_pointers and can_close(schema):
        found["additionalProperties"] = False
    return found


def add_integer_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Add missing limits to a schema of integers. Multiples stay without, since they are slow to compile in a range."""
    named = schema.get("type")
    kinds = set(named) if isinstance(named, list) and all(isinstance(kind, str) for kind in named) else {named}
    if "integer" not in kinds or "number" in kinds or {"multipleOf", "enum", "const"} & set(schema):
        return schema
    lowest = [schema[word] for word in ("minimum", "exclusiveMinimum") if word in schema]
    highest = [schema[word] for word in ("maximum", "exclusiveMaximum") if word in schema]
    if not all(type(limit) in (int, float) and abs(limit) < LARGEST for limit in (*lowest, *highest)):
        return schema
    limits = {**({} if lowest else {"minimum": -LARGEST}), **({} if highest else {"maximum": LARGEST})}
    return {**schema, **limits}


def can_close(schema: Mapping[str, Any]) -> bool:
    """Can this object be closed without contradicting another part of the same schema?"""
    listed = schema.get("properties")
    required = schema.get("required", [])
    if not isinstance(listed, Mapping) or SPEAKS_OF_OTHERS & set(schema):
        return False
    if not isinstance(required, list) or not all(isinstance(key, str) and key in listed for key in required):
        return False
    members = [part for keyword in COMBINED for _, part in iterate_parts(keyword, schema.get(keyword))]
    own = {"properties", *SPEAKS_OF_OTHERS, *COMBINED}
    return not any(own & set(member) for member in members if isinstance(member, Mapping))
