"""Strict reading of JSON objects: a field has the right type and range, or the error names its path.

Nothing is coerced: `"5"` is no number, `true` is no integer, `5.0` is no integer. `null` is as good as absent, as in
OpenAI's API. Fields that nobody asks for are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

from adapters.http.errors import ApiError, invalid


@frozen
class Fields:
    """A JSON object and where it stands in the body."""

    data: Mapping[str, Any]
    path: str = "$"

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

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if type(value) is not int or value < low or (high is not None and value > high):
            raise self.wrong(name, f"an integer from {low} to {high}" if high is not None else f"an integer >= {low}")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """In [low, high], or (low, high] with `above`."""
        value = self.data.get(name)
        if value is None:
            return None
        inside = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not inside or (above and value == low):
            raise self.wrong(name, f"a number in {'(' if above else '['}{low:g}, {high:g}]")
        return float(value)

    def text(self, name: str, most: int | None = None) -> str | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        if most is not None and len(value) > most:
            raise invalid(self.at(name), f"must have at most {most} characters, not {len(value)}")
        return value

    def choice(self, name: str, accepted: Collection[str]) -> str | None:
        value = self.data.get(name)
        if value is not None and (not isinstance(value, str) or value not in accepted):
            raise self.wrong(name, "one of " + ", ".join(map(repr, accepted)))
        return value

    def items(self, name: str, most: int) -> list[Any] | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "an array")
        if len(value) > most:
            raise invalid(self.at(name), f"must have at most {most} entries, not {len(value)}")
        return value

    def within(self, name: str) -> Fields | None:
        return Fields.of(self.data[name], self.at(name)) if self.has(name) else None

    def refuse(self, name: str, why: str) -> None:
        """Say no to a known field that asks for something we do not do."""
        if self.has(name):
            raise invalid(self.at(name), why, "unsupported_parameter")


def shown(value: Any) -> str:
    """A value as an error message may show it: JSON, and short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."
