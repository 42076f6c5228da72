"""JSON schemas made up from a seed: nesting, enums, arrays, unions, patterns. Every one bounds what keeps to it."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = (r"^[A-Z]{2}-[0-9]{3}$", r"^(red|green|blue)(,(red|green|blue)){0,2}$", r"^[a-f0-9]{1,8}$", r"^\d{4}-\d{2}$")
WORDS = ("name", "kind", "value", "items", "next", "é", "a b", 'quo"te', "x_1", "ID")
VALUES = ("red", "", "two words", 'quo"te', "é", 0, -7, 12.5, True, False, None, [1, 2], {"a": None})


def schema_of(seed: int) -> dict[str, Any]:
    """At its root an object, as most clients send."""
    draw = random.Random(seed)
    made = object_of(draw, 2)
    if draw.random() < 0.2:
        return {"$defs": {"node": made}, "$ref": "#/$defs/node"}
    return made


def any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    simple = (text_of, number_of, enum_of, constant_of, choice_of_types, pattern_of)
    nested = (object_of, array_of, tuple_of, union_of)
    if depth and draw.random() < 0.55:
        return draw.choice(nested)(draw, depth - 1)
    return draw.choice(simple)(draw)


def text_of(draw: random.Random) -> dict[str, Any]:
    least = draw.choice((0, 0, 1, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 8)}


def number_of(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    bounds = {"minimum": low, "maximum": low + draw.randint(0, 1000)}
    if draw.random() < 0.2:
        return {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": draw.randint(2, 9)}
    return {"type": "integer", **bounds}


def enum_of(draw: random.Random) -> dict[str, Any]:
    return {"enum": draw.sample(VALUES, draw.randint(1, 6))}


def constant_of(draw: random.Random) -> dict[str, Any]:
    return {"const": draw.choice(VALUES)}


def choice_of_types(draw: random.Random) -> dict[str, Any]:
    return {"type": draw.sample(["null", "boolean"], draw.randint(1, 2))}


def pattern_of(draw: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def object_of(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(1, 4))
    required = [name for name in names if draw.random() < 0.7]
    members = {name: any_of(draw, depth) for name in names}
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


def array_of(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {"type": "array", "items": any_of(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def tuple_of(draw: random.Random, depth: int) -> dict[str, Any]:
    parts = [any_of(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def union_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [any_of(draw, depth) for _ in range(draw.randint(2, 3))]}
