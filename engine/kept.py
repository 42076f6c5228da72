"""What was measured on this machine, kept beside the user's cache for the next start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from engine.folders import user_folder

T = TypeVar("T")
LARGEST = 1 << 20  # bytes of a file: an outcome takes a few thousand


def kept(key: str, make: Callable[[], T], write: Callable[[T], str], read: Callable[[str], T]) -> T:
    """What was kept under `key`, or made now. read: raises ValueError for what it does not know."""
    path = user_folder() / "numerics" / f"{key}.json"
    with suppress(OSError, ValueError):
        if path.stat().st_size <= LARGEST:
            return read(path.read_text(encoding="utf-8"))
    found = make()
    with suppress(OSError):  # a read-only home costs a second at every start
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write(found), encoding="utf-8")
    return found
