"""Stores values field by field, because equal fields of many values compress well as one column."""

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
# Fields that belong to a person. They are never shown.
HIDDEN_FIELDS = {"token", "salt", "grammar"}
EXACT = 1 << 53  # larger numbers are not exact in a browser


def list_field_names(value: Any) -> tuple[str, ...]:
    """Return the names of a value's fields; none if its class is not ours."""
    kind: Any = type(value)
    return list_class_fields(kind)


@cache
def list_class_fields(kind: Any) -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(kind)) if attrs.has(kind) else ()


def list_fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and plain values of all fields.

    Of tokens, and of other lists, only the number is given: a page is passed on more easily than a trace, so it has no
    text of a user in it.
    """
    for own in list_field_names(value):
        name = prefix + own
        field_value = getattr(value, own)
        if own in HIDDEN_FIELDS:
            yield name, None if field_value in (None, "") else "not shown"
        elif isinstance(field_value, tuple | list | Mapping):
            yield f"{name} (how many)", len(field_value)
        elif list_field_names(field_value) and not isinstance(field_value, Scope):
            yield from list_fields(field_value, f"{name}.")
        else:
            yield name, make_plain(field_value)


def make_plain(value: Any) -> Any:
    """Return a value in the form that JSON and a browser can represent."""
    if value is None or isinstance(value, bool):
        return value
    # Neither infinite nor not a number.
    if isinstance(value, int | float) and -EXACT < value < EXACT:
        return value
    return str(value)[:MOST_TEXT]


@define
class Table:
    """Instances of one class as rows of a table."""

    length: int = 0
    columns: dict[str, list[Any]] = field(factory=dict[str, "list[Any]"])

    def add(self, value: Any) -> None:
        """Add a row. Some fields are not in every instance (an instance or None); where one is missing, the value is
        None.
        """
        for name, field_value in list_fields(value):
            column = self.columns.setdefault(name, [])
            column += [None] * (self.length - len(column))
            column.append(field_value)
        self.length += 1

    def pack(self) -> dict[str, Any]:
        missing = ((name, column + [None] * (self.length - len(column))) for name, column in self.columns.items())
        return {name: pack_column(column) for name, column in missing}


@define
class MixedColumns:
    """Instances of several classes, in the order in which they came."""

    order: list[int] = field(factory=list[int])  # the class of each instance
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
    """Return a list. If all values are the same, return one value in an object. Texts become numbers and a list of
    texts.
    """
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return {"all": values[0]}
    if not any(isinstance(value, str) for value in values):
        return values
    numbers: dict[tuple[type, Any], int] = {}
    chosen = [numbers.setdefault((type(value), value), len(numbers)) for value in values]
    return {"of": chosen, "texts": [value for _, value in numbers]}


def compute_steps(ascending: Sequence[int]) -> list[int]:
    """Return the differences between neighbours, which are small and compress well."""
    return [value - before for value, before in zip(ascending, [0, *ascending], strict=False)]


def compress(data: Mapping[str, Any]) -> str:
    """Compress data to characters that have no meaning in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
