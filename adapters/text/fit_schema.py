"""Finds the keywords of a JSON schema that the grammar compiler refuses, and removes only those.

`confined_process.py` loads this file by its path, so it imports nothing of ours.

The problem: the compiler stops at its first complaint and does not say where it is. The idea: look at the schema from
the inside out. Each part is compiled alone, by a reference into the whole schema. If all inner parts of a part compile
and the part does not, one of its own keywords is the cause: the one without which the part compiles. This finds every
refusal, whatever the compiler's reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

BY_NAME = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")
IDENTIFIERS = ("$id", "id", "$schema")  # inside a part they would change what references mean
LAST = ("properties", "type", "$ref", "anyOf", "oneOf", "allOf")  # removed last, since most constraints depend on them
MAX_OMISSIONS = 64  # of one schema
TIME_SHARE = 0.6  # for all schemas of one request, of the processor time after which the process itself is ended

SchemaPath = tuple[Any, ...]


class SchemaFitter:
    """Removes from one schema what cannot be compiled.

    compile: returns the compiler's complaint about a schema, or the empty text.
    until: the processor time of this process at which the work is given up.
    """

    def __init__(self, schema: dict[str, Any], compile: Callable[[dict[str, Any]], str], until: float) -> None:  # noqa: A002 - as it is
        self.root = schema
        self.compile = compile
        self.until = until
        self.left_out: list[list[str]] = []
        self.visited = set[SchemaPath]()

    def fit(self) -> dict[str, Any]:
        """Return `{"schema": schema that compiles, "left_out": [[path, reason], ...]}`. Raises OverflowError."""
        if self.find_complaint(()):
            self.repair_part(())
        return {"schema": self.root, "left_out": self.left_out}

    def repair_part(self, path: SchemaPath) -> None:
        """Remove from this part what keeps it from compiling."""
        if path in self.visited or not isinstance(self.part_at(path), dict):
            return
        self.visited.add(path)
        for inner in list(self.iterate_parts(path)):
            if self.find_complaint(inner):
                self.repair_part(inner)
        if self.find_complaint(path):
            target = self.find_reference_target(path)
            if target is not None:
                self.repair_part(target)
        while (complaint := self.find_complaint(path)) and self.part_at(path):
            self.remove_one_keyword(path, complaint)

    def remove_one_keyword(self, path: SchemaPath, complaint: str) -> None:
        """Remove the keyword without which this part compiles. A keyword that the complaint names is tried first."""
        part = self.part_at(path)
        named = set(re.findall(r"[A-Za-z$]+", complaint))
        keywords = sorted(part, key=lambda keyword: (keyword not in named, keyword in LAST, keyword))
        keywords = [keyword for keyword in keywords if keyword not in {"$defs", "definitions", *IDENTIFIERS}]
        if not keywords:
            self.replace_part(path, {})
            self.record_omission(path, complaint)
            return
        for keyword in keywords:
            less = {name: value for name, value in part.items() if name != keyword}
            if keyword == "oneOf" and "anyOf" not in part:  # `anyOf` keeps most of the meaning of `oneOf`
                less["anyOf"] = part["oneOf"]
            self.replace_part(path, less)
            if not self.find_complaint(path):
                self.record_omission((*path, keyword), complaint)
                return
            self.replace_part(path, part)
        self.replace_part(path, {name: value for name, value in part.items() if name != keywords[0]})
        self.record_omission((*path, keywords[0]), complaint)

    def record_omission(self, path: SchemaPath, complaint: str) -> None:
        """Note what was left out and why. Raises OverflowError for too many omissions."""
        if len(self.left_out) >= MAX_OMISSIONS:
            raise OverflowError("too much of it cannot be held")
        self.left_out.append([format_path(path), complaint])

    def find_complaint(self, path: SchemaPath) -> str:
        """Compile this part with all that it refers to. Return the compiler's complaint, or the empty text."""
        if time.process_time() > self.until:
            raise OverflowError("it takes too long to be looked at")
        if not path:
            return self.compile(self.root)
        pointer = "".join("/" + quote(escape_step(name), safe="") for name in ("whole", *path))
        return self.compile({"$ref": "#" + pointer, "whole": rebase_references(self.root)})

    def iterate_parts(self, path: SchemaPath) -> Iterator[SchemaPath]:
        """Yield the path of each schema directly inside this part."""
        part = self.part_at(path)
        for keyword in (*BY_NAME, *LISTS, *SINGLE):
            held = part.get(keyword)
            if keyword in BY_NAME and isinstance(held, dict):
                yield from ((*path, keyword, name) for name, value in held.items() if isinstance(value, dict))
            elif keyword in LISTS and isinstance(held, list):
                yield from ((*path, keyword, index) for index, value in enumerate(held) if isinstance(value, dict))
            elif keyword in SINGLE and isinstance(held, dict):
                yield (*path, keyword)

    def find_reference_target(self, path: SchemaPath) -> SchemaPath | None:
        """Return the path of the schema that this part's `$ref` names. None: there is none in this document."""
        reference = self.part_at(path).get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found: Any = self.root
        way = list[Any]()
        for written in unquote(reference[2:]).split("/"):
            name: Any = written.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                name = int(name)
            elif not isinstance(found, dict) or name not in found:
                return None
            way.append(name)
            found = found[name]
        return tuple(way)

    def part_at(self, path: SchemaPath) -> Any:
        found: Any = self.root
        for name in path:
            found = found[name]
        return found

    def replace_part(self, path: SchemaPath, part: dict[str, Any]) -> None:
        if path:
            self.part_at(path[:-1])[path[-1]] = part
        else:
            self.root = part


def fit_schemas(
    schemas: list[dict[str, Any]],
    compile: Callable[[dict[str, Any]], str],  # noqa: A002 - as it is
    seconds: float,
) -> list[dict[str, Any]]:
    """Fit each schema. A schema that costs too much time gives `{"error": reason}`.

    seconds: processor time after which this process is ended.
    """
    until = time.process_time() + TIME_SHARE * seconds
    found = list[dict[str, Any]]()
    for schema in schemas:
        try:
            found.append(SchemaFitter(schema, compile, until).fit())
        except (OverflowError, RecursionError) as error:
            found.append({"error": str(error)})
    return found


def rebase_references(schema: Any) -> Any:
    """Return a copy for the pointer `#/whole`: its references mean the same there, and identifiers are removed."""
    if isinstance(schema, list):
        return [rebase_references(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: rebase_references(value) for key, value in schema.items() if not is_identifier(key, value)}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = "#/whole" + reference[1:]
    return found


def is_identifier(key: str, value: Any) -> bool:
    """Is this the keyword that names a schema? A property may also be called `id`: its value is no text."""
    return key in IDENTIFIERS and isinstance(value, str)


def escape_step(name: Any) -> str:
    """Return one step of a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")


def format_path(path: SchemaPath) -> str:
    """Return the path as error messages write it after the path of the schema, for example `.properties.a[0]`."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path)
