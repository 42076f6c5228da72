"""What stops the program with one line and exit status 2."""

from __future__ import annotations

import sys


class UserError(Exception):
    """What a person asked for cannot be done; the message is all they need to know."""


def no_room(what: str, where: str, help_: str, error: Exception) -> UserError:
    """error: of whoever found no memory; of what torch says, how much it wanted and how much there was."""
    said, _, _ = str(error).partition(" If reserved")
    return UserError(f"{what} does not fit {where}: {help_} may help ({said})")


def told(error: Exception) -> int:
    """In one line on stderr. Returns the exit status."""
    print(f"rekindle: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def innermost(error: BaseException) -> BaseException:
    """Task groups wrap what happened in them; this is what happened."""
    while isinstance(error, BaseExceptionGroup):
        refusals = error.subgroup(UserError)
        error = (refusals or error).exceptions[0]
    return error
