"""What was measured on this machine, kept beside the user's cache for the next start."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from engine.folders import user_folder

T = TypeVar("T")
LARGEST = 1 << 20  # bytes of a file: an outcome takes a few thousand
MOST_TIMES = 1 << 12  # bytes of a file of times
MOST_AGE_S = 7 * 86400  # then times are measured again
ALIKE = 2  # times: more apart, and it is not the disk, or not the machine, that was measured then


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


# --- times, which are believed for a while, and only where what is quickly measured agrees with them ---


def recalled(file: Path, read: Callable[[str], T]) -> T | None:
    """What an earlier start left there; None for whatever is not that, too."""
    with suppress(OSError, ValueError, RecursionError):
        about = file.stat()
        if S_ISREG(about.st_mode) and about.st_size <= MOST_TIMES and 0 <= time.time() - about.st_mtime <= MOST_AGE_S:
            with file.open("rb") as opened:
                return read(opened.read(MOST_TIMES).decode())
    return None


def remember(file: Path, text: str) -> None:
    """Whole or not at all; in a home that cannot be written it is measured at every start."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError:
        with suppress(OSError):
            new.unlink()


def alike(now: int, before: int, slower: int = ALIKE) -> bool:
    """slower: so many times as long may it take now."""
    return now <= slower * before and before <= ALIKE * now
