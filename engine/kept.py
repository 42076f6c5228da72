"""What was measured on this machine, kept beside the user's cache for the next start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from engine.folders import user_folder

T = TypeVar("T")
LARGEST = 1 << 20  # bytes of a file: an outcome takes a few thousand


def kept(key: str, make: Callable[[], T], write: Callable[[T], str], read: Callable[[str], T]) -> T:
    """What was kept under `key`, or made now. read: raises ValueError for what it does not know.

    What is made depends on times, so that two first starts at once may choose differently. The one that is done first
    decides for both: a cache or a trace of the other would be of numerics that no later start has.
    """
    path = user_folder() / "numerics" / f"{key}.json"
    with suppress(OSError, ValueError):
        return found_in(path, read)
    found = make()
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(write(found), encoding="utf-8")
        try:
            path.hardlink_to(new)
        except OSError:  # another start was done first, nobody can read what is there, or there are no hard links
            with suppress(OSError, ValueError):
                return found_in(path, read)
            new.replace(path)
    except OSError:  # a read-only home costs a second at every start
        return found
    finally:
        with suppress(OSError):
            new.unlink()
    return found


def found_in(path: Path, read: Callable[[str], T]) -> T:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} is larger than anything that is kept")
    return read(path.read_text(encoding="utf-8"))
