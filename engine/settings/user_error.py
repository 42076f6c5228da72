"""Errors that end the program with one line and exit status 2."""

from __future__ import annotations

import sys


class UserError(Exception):
    """The user asked for something that cannot be done. The message is all that they need to know."""


def build_memory_error(subject: str, where: str, help_: str, error: Exception) -> UserError:
    """Return the error for memory that is too short. error: of torch, which says how much was wanted and how much was
    free.
    """
    said, _, _ = str(error).partition(" If reserved")
    return UserError(f"{subject} does not fit {where}: {help_} may help ({said})")


def report_error(error: Exception) -> int:
    """Print an error in one line on stderr, and return the exit status."""
    print(f"rekindle: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def find_innermost(error: BaseException) -> BaseException:
    """Return the error inside exception groups, which task groups wrap around it. A UserError comes first."""
    while isinstance(error, BaseExceptionGroup):
        refusals = error.subgroup(UserError)
        error = (refusals or error).exceptions[0]
    return error
