"""Read JSON objects strictly: a field has the right type and range, or the error names its path.

No value is converted: `"5"` is not a number, `true` is not an integer, and `5.0` is not an integer either. `null`
counts as absent, as in OpenAI's API. Fields that no reader asks for are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from attrs import frozen

from adapters.http.wire.errors import ApiError, invalid


@frozen
class Fields:
    """A JSON object, and its path in the body.

    repairs: the kinds of faults that were repaired in the body (`repair_json.py`). Only the whole body has any.
    """

    data: Mapping[str, Any]
    path: str = "$"
    repairs: tuple[str, ...] = ()

    @staticmethod
    def from_value(value: Any, path: str) -> Fields:
        """Return the fields of a value. Raises ApiError if it is not an object."""
        if not isinstance(value, dict):
            raise invalid(path, f"must be an object, not {quote_value(value)}")
        return Fields(value, path)

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}"

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def first_present(self, *names: str) -> str:
        """Return the name that the client uses, out of several names for one field. If it uses none, return the
        first.
        """
        return next(filter(self.has, names), names[0])

    def wrong_value(self, name: str, accepted: str) -> ApiError:
        return invalid(self.path_of(name), f"must be {accepted}, not {quote_value(self.data.get(name))}")

    def read(self, name: str, accepts: Callable[[Any], bool], accepted: str) -> Any:
        """Return the value, or None if it is absent. Raises ApiError if `accepts` refuses it; `accepted` says what it
        may be.
        """
        value = self.data.get(name)
        if value is not None and not accepts(value):
            raise self.wrong_value(name, accepted)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool | None = self.read(name, lambda value: isinstance(value, bool), "true or false")
        return default if value is None else value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        def accepts(value: Any) -> bool:
            return type(value) is int and low <= value and (high is None or value <= high)

        return self.read(name, accepts, f"an integer >= {low}" if high is None else f"an integer from {low} to {high}")

    def number(self, name: str, low: float, high: float) -> float | None:
        def accepts(value: Any) -> bool:
            return type(value) in (int, float) and low <= value <= high

        value = self.read(name, accepts, f"a number in [{low:g}, {high:g}]")
        return None if value is None else float(value)

    def text(self, name: str, most: int | None = None) -> str | None:
        value: str | None = self.read(name, lambda value: isinstance(value, str), "a string")
        if value is not None and most is not None and len(value) > most:
            raise invalid(self.path_of(name), f"must have at most {most} characters, not {len(value)}")
        return value

    def choice(self, name: str, accepted: Collection[str]) -> str | None:
        said = "one of " + ", ".join(map(repr, accepted))
        return self.read(name, lambda value: isinstance(value, str) and value in accepted, said)

    def items(self, name: str, most: int) -> list[Any] | None:
        value: list[Any] | None = self.read(name, lambda value: isinstance(value, list), "an array")
        if value is not None and len(value) > most:
            raise invalid(self.path_of(name), f"must have at most {most} entries, not {len(value)}")
        return value

    def read_object(self, name: str, keys: Collection[str] = ()) -> Fields | None:
        """Return the object in a field. Raises ApiError for a key that is not among `keys`; without `keys`, any key is
        accepted.
        """
        found = Fields.from_value(self.data[name], self.path_of(name)) if self.has(name) else None
        for key in found.data if found is not None and keys else ():
            if key not in keys:
                accepted = ", ".join(keys)
                raise invalid(self.path_of(name), f"{quote_value(key)} is not a key of it; accepted are {accepted}")
        return found


def quote_value(value: Any) -> str:
    """Return a value as an error message may show it: as JSON, and short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."
