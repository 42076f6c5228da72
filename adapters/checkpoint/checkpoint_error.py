"""What is said of a checkpoint that cannot be served. Imports nothing: who only reports it needs no torch."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be served; the message is one line that says what is wrong and what is accepted."""


def shown(value: object) -> str:
    """What was found where something else is accepted; short, and one line, whatever it is."""
    if isinstance(value, list | dict):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    return repr(value)[:40]
