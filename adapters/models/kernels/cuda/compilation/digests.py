"""Triton's digests of kernels, by which compiled kernels are found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Update: TypeAlias = Callable[[Any, Any], None]


def hash_callees_first(update: Update) -> Update:
    """Wrap `update(finder, function)` so that the digest of a called function is known before its caller's digest
    uses it.

    Triton takes over the constants that the called function has been found to use before it looks for them. So the
    digest of its first caller lacks them, and those of others have them. The digest would depend on the order of
    requests, and another order of threads, or another process, would compile again what is cached.
    """

    def update_after_callee(finder: Any, function: Any) -> None:
        _ = function.cache_key
        update(finder, function)

    return update_after_callee
