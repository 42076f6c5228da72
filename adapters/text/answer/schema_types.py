"""The JSON types that a tool's schema allows. Used by the parsers of calls and by the rules of their grammars."""

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
MAX_SCHEMAS_READ = 64  # for the types of one value


def find_property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found


def collect_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. Empty: the schema does not say."""
    found = set[str]()
    waiting = [schema]
    seen = set[int]()
    for subschema in waiting:  # references may be circular, and may lead to many more schemas
        if not isinstance(subschema, Mapping) or id(subschema) in seen:
            continue
        if len(seen) == MAX_SCHEMAS_READ:
            return frozenset()
        seen.add(id(subschema))
        named = subschema.get("type")
        reference = subschema.get("$ref")
        constants = subschema.get("enum", [subschema["const"]] if "const" in subschema else None)
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found.update(kind for kind in named if isinstance(kind, str))
        elif isinstance(reference, str):
            waiting.append(resolve_reference(reference, root))
        elif isinstance(constants, list):
            found.update(map(name_type, constants))
        else:
            for word in ("anyOf", "oneOf", "allOf"):
                options = subschema.get(word)
                waiting += options[: MAX_SCHEMAS_READ + 1] if isinstance(options, list) else ()
    return frozenset(found)


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the same schema to which a reference leads, or None."""
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def name_type(value: Any) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(value, kind)), "string")


def declared_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the declared properties of an object. Empty: the schema has none or is malformed."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_properties(schema: Mapping[str, Any]) -> list[str]:
    """Return the declared properties that are required."""
    found = schema.get("required")
    declared = declared_properties(schema)
    return [key for key in found if isinstance(key, str) and key in declared] if isinstance(found, list) else []
