"""Finds what the compiler of grammars cannot hold of a schema, and leaves just that out. Run in the confined process
(`confined.py`), which loads it by its path, so it imports nothing of ours.

The compiler stops at its first complaint and says no place. So the schema is looked at from the inside out: a part is
compiled alone, by a reference into the whole. Where its own parts compile and it does not, one of its keywords is the
cause: the one without which it compiles. That finds every refusal, whatever the compiler's reason for it.
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
IDENTIFIERS = ("$id", "id", "$schema")  # in a part they would change what references mean
LAST = ("properties", "type", "$ref", "anyOf", "oneOf", "allOf")  # that most of what is held hangs on
MOST_LEFT_OUT = 64
SECONDS = 1.2  # of processor time for all of one request: less than what the process is ended after

Steps = tuple[Any, ...]


class Fitter:
    """Of one schema. compile: says what is wrong with a document, or nothing."""

    def __init__(self, schema: dict[str, Any], compile: Callable[[dict[str, Any]], str], until: float) -> None:  # noqa: A002 - as it is
        self.root, self.compile, self.until = schema, compile, until
        self.left_out: list[list[str]] = []
        self.entered = set[Steps]()

    def fit(self) -> dict[str, Any]:
        """The schema as it can be held, and what was left out: paths with reasons. Raises OverflowError."""
        if self.complaint(()):
            self.mend(())
        return {"schema": self.root, "left_out": self.left_out}

    def mend(self, steps: Steps) -> None:
        """Leave out of this part what keeps it from compiling."""
        if steps in self.entered or not isinstance(self.at(steps), dict):
            return
        self.entered.add(steps)
        for inner in list(self.parts(steps)):
            if self.complaint(inner):
                self.mend(inner)
        if self.complaint(steps):
            target = self.target(steps)
            if target is not None:
                self.mend(target)
        while (complaint := self.complaint(steps)) and self.at(steps):
            self.leave_one_out(steps, complaint)

    def leave_one_out(self, steps: Steps, complaint: str) -> None:
        """The keyword without which this part compiles; where there are several, the one that is complained of."""
        part = self.at(steps)
        named = set(re.findall(r"[A-Za-z$]+", complaint))
        keywords = sorted(part, key=lambda keyword: (keyword not in named, keyword in LAST, keyword))
        keywords = [keyword for keyword in keywords if keyword not in {"$defs", "definitions", *IDENTIFIERS}]
        if not keywords:
            self.replace(steps, {})
            self.note(steps, complaint)
            return
        for keyword in keywords:
            less = {name: value for name, value in part.items() if name != keyword}
            if keyword == "oneOf" and "anyOf" not in part:  # most of what it says is left
                less["anyOf"] = part["oneOf"]
            self.replace(steps, less)
            if not self.complaint(steps):
                self.note((*steps, keyword), complaint)
                return
            self.replace(steps, part)
        self.replace(steps, {name: value for name, value in part.items() if name != keywords[0]})
        self.note((*steps, keywords[0]), complaint)

    def note(self, steps: Steps, complaint: str) -> None:
        if len(self.left_out) >= MOST_LEFT_OUT:
            raise OverflowError("too much of it cannot be held")
        self.left_out.append([path_of(steps), complaint])

    def complaint(self, steps: Steps) -> str:
        """What the compiler says against this part, with all that it refers to."""
        if time.process_time() > self.until:
            raise OverflowError("it takes too long to be looked at")
        if not steps:
            return self.compile(self.root)
        pointer = "".join("/" + quote(step(name), safe="") for name in ("whole", *steps))
        return self.compile({"$ref": "#" + pointer, "whole": moved(self.root)})

    def parts(self, steps: Steps) -> Iterator[Steps]:
        part = self.at(steps)
        for keyword in (*BY_NAME, *LISTS, *SINGLE):
            held = part.get(keyword)
            if keyword in BY_NAME and isinstance(held, dict):
                yield from ((*steps, keyword, name) for name, value in held.items() if isinstance(value, dict))
            elif keyword in LISTS and isinstance(held, list):
                yield from ((*steps, keyword, place) for place, value in enumerate(held) if isinstance(value, dict))
            elif keyword in SINGLE and isinstance(held, dict):
                yield (*steps, keyword)

    def target(self, steps: Steps) -> Steps | None:
        """What this part refers to, if it is in the same schema."""
        reference = self.at(steps).get("$ref")
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

    def at(self, steps: Steps) -> Any:
        found: Any = self.root
        for name in steps:
            found = found[name]
        return found

    def replace(self, steps: Steps, part: dict[str, Any]) -> None:
        if steps:
            self.at(steps[:-1])[steps[-1]] = part
        else:
            self.root = part


def fitted(schemas: list[dict[str, Any]], compile: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:  # noqa: A002 - as it is
    """Each as it can be held; `{"error": why}` in the place of one that costs too much to be looked at."""
    until, found = time.process_time() + SECONDS, list[dict[str, Any]]()
    for schema in schemas:
        try:
            found.append(Fitter(schema, compile, until).fit())
        except (OverflowError, RecursionError) as error:
            found.append({"error": str(error)})
    return found


def moved(schema: Any) -> Any:
    """A copy whose references mean the same where it stands under `whole`."""
    if isinstance(schema, list):
        return [moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: moved(value) for key, value in schema.items() if not unread(key, value)}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = "#/whole" + reference[1:]
    return found


def unread(key: str, value: Any) -> bool:
    return key in IDENTIFIERS and isinstance(value, str)


def step(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def path_of(steps: Steps) -> str:
    """As error messages write it, behind the schema's own path."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in steps)
