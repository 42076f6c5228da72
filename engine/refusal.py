"""What stops the program with one line and exit status 2."""

from __future__ import annotations

import sys


class Refusal(Exception):
    """What a person asked for cannot be done; the message is all they need to know."""


def told(error: Exception) -> int:
    """In one line on stderr. Returns the exit status."""
    print(f"rekindle: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def innermost(error: BaseException) -> BaseException:
    """Task groups wrap what happened in them; this is what happened."""
    while isinstance(error, BaseExceptionGroup):
        refusals = error.subgroup(Refusal)
        error = (refusals or error).exceptions[0]
    return error
