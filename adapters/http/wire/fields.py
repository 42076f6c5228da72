"""Strict reading of JSON objects: a field has the right type and range, or the error names its path.

Nothing is coerced: `"5"` is no number, `true` is no integer, `5.0` is no integer. `null` is as good as absent, as in
OpenAI's API. Fields that nobody asks for are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from attrs import frozen

from adapters.http.wire.errors import ApiError, invalid


@frozen
class Fields:
    """A JSON object and where it stands in the body.

    mended: kinds of faults that were repaired in the body (`mending.py`); only the whole body has any.
    """

    data: Mapping[str, Any]
    path: str = "$"
    mended: tuple[str, ...] = ()

    @staticmethod
    def of(value: Any, path: str) -> Fields:
        if not isinstance(value, dict):
            raise invalid(path, f"must be an object, not {shown(value)}")
        return Fields(value, path)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}"

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def given(self, *names: str) -> str:
        """Which of these names for one thing is in use: the first that is, or just the first."""
        return next(filter(self.has, names), names[0])

    def wrong(self, name: str, accepted: str) -> ApiError:
        return invalid(self.at(name), f"must be {accepted}, not {shown(self.data.get(name))}")

    def read(self, name: str, accepts: Callable[[Any], bool], accepted: str) -> Any:
        """The value, or None where there is none."""
        value = self.data.get(name)
        if value is not None and not accepts(value):
            raise self.wrong(name, accepted)
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
            raise invalid(self.at(name), f"must have at most {most} characters, not {len(value)}")
        return value

    def choice(self, name: str, accepted: Collection[str]) -> str | None:
        said = "one of " + ", ".join(map(repr, accepted))
        return self.read(name, lambda value: isinstance(value, str) and value in accepted, said)

    def items(self, name: str, most: int) -> list[Any] | None:
        value: list[Any] | None = self.read(name, lambda value: isinstance(value, list), "an array")
        if value is not None and len(value) > most:
            raise invalid(self.at(name), f"must have at most {most} entries, not {len(value)}")
        return value

    def within(self, name: str, keys: Collection[str] = ()) -> Fields | None:
        """keys: that the object may have; none given: any."""
        found = Fields.of(self.data[name], self.at(name)) if self.has(name) else None
        for key in found.data if found is not None and keys else ():
            if key not in keys:
                accepted = ", ".join(keys)
                raise invalid(self.at(name), f"{shown(key)} is not a key of it; accepted are {accepted}")
        return found


def shown(value: Any) -> str:
    """A value as an error message may show it: JSON, and short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."
