"""The error for a checkpoint that cannot be served. Imports nothing, so that reporting it does not need torch."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be served; the message is one line that says what is wrong and what is accepted."""


def describe_value(value: object) -> str:
    """Return an unaccepted value for an error message: a short text in one line, for any value."""
    if isinstance(value, list | dict):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    return repr(value)[:40]
