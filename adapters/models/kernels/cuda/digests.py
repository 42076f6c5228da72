"""Triton's digests of kernels, by which they are found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Update: TypeAlias = Callable[[Any, Any], None]


def known_first(update: Update) -> Update:
    """`update(finder, function)` of a caller's digest with a function that it calls, once that one's own is known.

    Triton takes over the constants that the function has been found to use before it looks for them. So the digest of
    its first caller is without them, and of others with: it depends on which kernels the process asked for before, and
    another order of threads, or another process, would compile again what is kept.
    """

    def updated(finder: Any, function: Any) -> None:
        _ = function.cache_key
        update(finder, function)

    return updated
