"""Schemas as answers are held to them: without what only people read, and closed. Used before a grammar is built.

A JSON schema that lists properties and says nothing of others allows every other property as well. Models do not mean
that, a grammar cannot keep such keys from coming twice, and a small model writes them without end. So an object that
has `properties` has no others, unless the schema says `additionalProperties` or `patternProperties`.

An object stays open where closing it would contradict another part of the schema:
* it is a member of a combination that holds together (`allOf`, or `anyOf` beside `properties`), or such a member
  refers to it: each part would forbid what the others ask for;
* it stands beside a combination whose members have properties of their own;
* it requires a key that it does not list.

An integer without a limit gets one of 18 digits on that side: what more digits say is read by few clients, and a small
model writes them without end.
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


def closed_schema(schema: Mapping[str, Any], *, bound: bool = True) -> dict[str, Any]:
    """Return a copy that allows no properties but those that it lists. Raises RecursionError where it is too deep.

    bound: limit integers as well. Each takes some of what the lexer of a grammar may cost.
    """
    found: dict[str, Any] = closed(schema, "#", frozenset(joined_references(schema, joined=False)), joined=False)
    return bounded_integers(found) if bound else found


def bounded_integers(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict[str, Any]()
    for keyword, held in schema.items():
        made = [bounded_integers(part) for _, part in parts_of(keyword, held)]
        found[keyword] = with_parts(keyword, held, made)
    return bounded(found)


def with_parts(keyword: str, held: Any, parts: list[Any]) -> Any:
    """What a keyword holds, with other schemas in it."""
    if keyword in SCHEMAS_BY_NAME and isinstance(held, Mapping):
        return dict(zip(held, parts, strict=True))
    if keyword in SCHEMA_LISTS and isinstance(held, list):
        return parts
    return parts[0] if parts else held


def parts_of(keyword: str, held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a keyword holds, each with the steps of a JSON pointer that lead to it."""
    if keyword in SCHEMAS_BY_NAME and isinstance(held, Mapping):
        yield from ((f"/{keyword}/{pointer_step(str(name))}", part) for name, part in held.items())
    elif keyword in SCHEMA_LISTS and isinstance(held, list):
        yield from ((f"/{keyword}/{number}", part) for number, part in enumerate(held))
    elif keyword in SCHEMAS and isinstance(held, Mapping):
        yield f"/{keyword}", held


def pointer_step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def holds_together(schema: Mapping[str, Any], keyword: str, joined: bool) -> bool:
    """Must a value keep to a member of this combination and to another schema as well? One member alone is none."""
    if keyword not in COMBINED:
        return False
    members = schema[keyword]
    return joined or "properties" in schema or (keyword == "allOf" and isinstance(members, list) and len(members) > 1)


def joined_references(schema: Any, joined: bool) -> Iterator[str]:
    """Yield the references of schemas that hold together with others."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and (joined or "properties" in schema):
        yield reference
    for keyword, held in schema.items():
        for _, part in parts_of(keyword, held):
            yield from joined_references(part, holds_together(schema, keyword, joined))


def closed(schema: Any, place: str, open_places: frozenset[str], joined: bool) -> Any:
    """place: where the schema is, as references name it.  joined: does it hold together with another one?"""
    if not isinstance(schema, Mapping):
        return schema
    found = dict[str, Any]()
    for keyword, held in schema.items():
        if keyword in READ_BY_PEOPLE:
            continue
        together = holds_together(schema, keyword, joined)
        made = [closed(part, place + steps, open_places, together) for steps, part in parts_of(keyword, held)]
        found[keyword] = with_parts(keyword, held, made)
    if not joined and place not in open_places and may_close(schema):
        found["additionalProperties"] = False
    return found


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Where only integers are asked for, and no multiples: those cost much to compile over a large range."""
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


def may_close(schema: Mapping[str, Any]) -> bool:
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, Mapping) or SPEAKS_OF_OTHERS & set(schema):
        return False
    if not isinstance(required, list) or not all(isinstance(key, str) and key in listed for key in required):
        return False
    members = [part for keyword in COMBINED for _, part in parts_of(keyword, schema.get(keyword))]
    own = {"properties", *SPEAKS_OF_OTHERS, *COMBINED}
    return not any(own & set(member) for member in members if isinstance(member, Mapping))
