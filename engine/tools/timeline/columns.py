"""Values field by field: many of one class take little room when each field is a column of its own."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
from attrs import define, field

from effects.scope import Scope

MOST_TEXT = 200  # characters of a reason or an error that are shown
HIDDEN_FIELDS = {"token", "salt", "grammar"}  # somebody's own, and never shown
EXACT = 1 << 53  # what is larger is no exact number in a browser


def list_field_names(value: Any) -> tuple[str, ...]:
    """Return the names of its fields; none if its class is not ours."""
    kind: Any = type(value)
    return list_class_fields(kind)


@cache
def list_class_fields(kind: Any) -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(kind)) if attrs.has(kind) else ()


def list_fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and plain values of all its fields. Of tokens, and of anything else that is a list, only how many: a page
    is passed on more easily than a trace, and has nobody's text in it.
    """
    for own in list_field_names(value):
        name = prefix + own
        one = getattr(value, own)
        if own in HIDDEN_FIELDS:
            yield name, None if one in (None, "") else "not shown"
        elif isinstance(one, tuple | list | Mapping):
            yield f"{name} (how many)", len(one)
        elif list_field_names(one) and not isinstance(one, Scope):
            yield from list_fields(one, f"{name}.")
        else:
            yield name, make_plain(one)


def make_plain(value: Any) -> Any:
    """Return a value as JSON and a browser have it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and -EXACT < value < EXACT:  # neither infinite nor no number
        return value
    return str(value)[:MOST_TEXT]


@define
class Table:
    """Instances of one class, each a row."""

    length: int = 0
    columns: dict[str, list[Any]] = field(factory=dict[str, "list[Any]"])

    def add(self, value: Any) -> None:
        """A field that some have and others have not (one that is None, or an instance) is None where it is missing."""
        for name, one in list_fields(value):
            column = self.columns.setdefault(name, [])
            column += [None] * (self.length - len(column))
            column.append(one)
        self.length += 1

    def pack(self) -> dict[str, Any]:
        missing = ((name, column + [None] * (self.length - len(column))) for name, column in self.columns.items())
        return {name: pack_column(column) for name, column in missing}


@define
class MixedColumns:
    """Instances of several classes, in the order in which they came."""

    order: list[int] = field(factory=list[int])  # of each, which class it is of
    tables: dict[str, Table] = field(factory=dict[str, Table])

    def add(self, value: Any) -> None:
        name = type(value).__name__
        table = self.tables.get(name)
        if table is None:
            table = self.tables[name] = Table()
        table.add(value)
        self.order.append(list(self.tables).index(name))

    def pack(self) -> dict[str, Any]:
        return {"order": self.order, "kinds": [[name, table.pack()] for name, table in self.tables.items()]}


def pack_column(values: list[Any]) -> Any:
    """A list; one value in an object, if all are the same; or, of texts, numbers and what they stand for."""
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return {"all": values[0]}
    if not any(isinstance(value, str) for value in values):
        return values
    numbers: dict[tuple[type, Any], int] = {}
    chosen = [numbers.setdefault((type(value), value), len(numbers)) for value in values]
    return {"of": chosen, "texts": [value for _, value in numbers]}


def compute_steps(ascending: Sequence[int]) -> list[int]:
    """Each less the one before: small numbers, which take little room."""
    return [value - before for value, before in zip(ascending, [0, *ascending], strict=False)]


def compress(data: Mapping[str, Any]) -> str:
    """Compress data to letters that mean nothing in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
