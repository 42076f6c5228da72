"""What was measured on this machine, kept in the user's cache folder for the next start."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Literal, TypeAlias, TypeVar

from attrs import define, field

T = TypeVar("T")
What: TypeAlias = Literal["numerics", "rates"]  # folders, and labels in /metrics
KINDS: tuple[What, ...] = ("numerics", "rates")
LARGEST = 1 << 20  # bytes of a file: an outcome takes a few thousand
MOST_AGE_S = 7 * 86400  # then times are measured again
ALIKE = 2  # times: more apart, and it is not the disk, or not the machine, that was measured then
UNFIT = (OSError, ValueError, RecursionError)  # what reading a file that was never written here may raise

log = logging.getLogger("rekindle")


@define(eq=False)
class Kept:
    """One file for each outcome. damaged: files that were found to be something else, by what they should have been.
    proving: told before something is proven, since nothing was kept of it.

    In a home that cannot be written everything is measured at every start.
    """

    folder: Path
    proving: Callable[[], object] = lambda: None
    damaged: Counter[str] = field(factory=lambda: Counter(dict.fromkeys(KINDS, 0)))

    def file(self, what: What, key: str) -> Path:
        return self.folder / what / f"{key}.json"

    def proven(self, key: str) -> bool:
        """Is there an outcome? It may still be damaged."""
        return os.path.exists(self.file("numerics", key))  # noqa: PTH110 - False for what may not be looked at

    def made(self, key: str, make: Callable[[], T], write: Callable[[T], str], read: Callable[[str], T]) -> T:
        """The outcome of a proof, which may be None: what was kept, or made now.

        What is made depends on times, so that two first starts at once may choose differently. The one that is done
        first decides for both: a cache or a trace of the other would be of numerics that no later start has.
        """
        known = self._find("numerics", key, lambda text: (read(text),))
        if known is not None:
            return known[0]
        self.proving()
        file, found = self.file("numerics", key), make()

        def place(new: Path) -> None:
            nonlocal found
            try:
                file.hardlink_to(new)
            except OSError:  # another start was done first, nobody can read what is there, or there are no hard links
                with suppress(*UNFIT):
                    found = read(small(file))
                    return
                new.replace(file)

        written(file, write(found), place)
        return found

    def recalled(self, key: str, read: Callable[[str], T]) -> T | None:
        """Times, which are believed for a while, and only where what is quickly measured agrees with them."""
        found = self._find("rates", key, read)
        with suppress(OSError):
            if found is not None and 0 <= time.time() - self.file("rates", key).stat().st_mtime <= MOST_AGE_S:
                return found
        return None

    def remember(self, key: str, text: str) -> None:
        """Times."""
        file = self.file("rates", key)
        written(file, text, lambda new: new.replace(file))

    def _find(self, what: What, key: str, read: Callable[[str], T]) -> T | None:
        """What an earlier start left there. read: raises ValueError for what cannot have been; it is counted."""
        file = self.file(what, key)
        try:
            return read(small(file))
        except FileNotFoundError:
            return None
        except UNFIT as error:
            self.damaged[what] += 1
            log.warning("what was measured is damaged, so it is measured again: %s: %s", file, str(error)[:200])
            return None


def small(file: Path) -> str:
    """Raises OSError, ValueError."""
    about = file.stat()
    if not S_ISREG(about.st_mode) or about.st_size > LARGEST:
        raise ValueError("it is no file, or larger than any that is kept")
    return file.read_text(encoding="utf-8")


def written(file: Path, text: str, place: Callable[[Path], object]) -> None:
    """Whole or not at all: `place` has a new file to put there."""
    new = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        place(new)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            new.unlink()


def alike(now: int, before: int, slower: int = ALIKE) -> bool:
    """slower: so many times as long may it take now."""
    return now <= slower * before and before <= ALIKE * now
