"""Which JSON types a tool's schema has room for. Readers of calls and the rules of their grammars both ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS: Mapping[str, Any] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
MOST_READ = 64  # schemas that are looked at for the types of one value


def property_of(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema has room for; none where it does not say."""
    found, waiting, seen = set[str](), [schema], set[int]()
    for one in waiting:  # references may lead in circles, and each way round through many more
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        if len(seen) == MOST_READ:
            return frozenset()
        seen.add(id(one))
        named = one.get("type")
        reference = one.get("$ref")
        constants = one.get("enum", [one["const"]] if "const" in one else None)
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found.update(kind for kind in named if isinstance(kind, str))
        elif isinstance(reference, str):
            waiting.append(resolved(reference, root))
        elif isinstance(constants, list):
            found.update(map(type_name, constants))
        else:
            for word in ("anyOf", "oneOf", "allOf"):
                options = one.get(word)
                waiting += options[: MOST_READ + 1] if isinstance(options, list) else ()
    return frozenset(found)


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """A reference into the same schema."""
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def type_name(value: Any) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(value, kind)), "string")


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The declared properties of an object; none where the schema is no schema."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """The declared properties that must be given."""
    found, declared = schema.get("required"), properties_of(schema)
    return [key for key in found if isinstance(key, str) and key in declared] if isinstance(found, list) else []
