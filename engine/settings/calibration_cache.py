"""Keeps what was measured or proven on this machine in the user's cache folder, for the next start."""

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
# The most bytes of a file. An outcome takes a few thousand.
LARGEST = 1 << 20
MOST_AGE_S = 7 * 86400  # older times are measured again
# Times that differ by more than this factor were measured on another disk or machine.
ALIKE = 2
UNFIT = (OSError, ValueError, RecursionError)  # errors of reading a file that was not written here

log = logging.getLogger("rekindle")


@define(eq=False)
class CalibrationCache:
    """Keeps one file for each outcome.

    proving: called before something is proven because nothing was kept of it. damaged: counts files that turned out to
    hold something else, by the kind of outcome. In a home that cannot be written everything is measured at every start.
    """

    folder: Path
    proving: Callable[[], object] = lambda: None
    damaged: Counter[str] = field(factory=lambda: Counter(dict.fromkeys(KINDS, 0)))

    def locate(self, kind: What, key: str) -> Path:
        return self.folder / kind / f"{key}.json"

    def has_proof(self, key: str) -> bool:
        """Return whether an outcome is kept. Its file may still be damaged."""
        return os.path.exists(self.locate("numerics", key))  # noqa: PTH110 - False for what may not be looked at

    def load_or_make(self, key: str, make: Callable[[], T], write: Callable[[T], str], read: Callable[[str], T]) -> T:
        """Return the outcome of a proof, kept or made now. It may be None.

        A placement of experts depends on times, so two first starts at once may choose differently. The one that is
        done first decides for both: otherwise a cache or a trace of the other would have numerics that no later start
        has.
        """
        known = self._load("numerics", key, lambda text: (read(text),))
        if known is not None:
            return known[0]
        self.proving()
        file = self.locate("numerics", key)
        found = make()

        def publish(new: Path) -> None:
            nonlocal found
            try:
                file.hardlink_to(new)
            except (
                OSError
            ):  # another start was done first, the file that is there cannot be read, or there are no hard links
                with suppress(*UNFIT):
                    found = read(read_small_file(file))
                    return
                new.replace(file)

        replace_file(file, write(found), publish)
        return found

    def recall(self, key: str, read: Callable[[str], T]) -> T | None:
        """Return times that were kept. They count for a week, and only if what is measured quickly agrees with them."""
        found = self._load("rates", key, read)
        with suppress(OSError):
            if found is not None and 0 <= time.time() - self.locate("rates", key).stat().st_mtime <= MOST_AGE_S:
                return found
        return None

    def remember(self, key: str, text: str) -> None:
        """Keep times."""
        file = self.locate("rates", key)
        replace_file(file, text, lambda new: new.replace(file))

    def _load(self, kind: What, key: str, read: Callable[[str], T]) -> T | None:
        """Return what an earlier start kept. read: raises ValueError for what cannot have been kept; that is counted as
        damage.
        """
        file = self.locate(kind, key)
        try:
            return read(read_small_file(file))
        except FileNotFoundError:
            return None
        except UNFIT as error:
            self.damaged[kind] += 1
            log.warning(
                "the file with earlier measurements is damaged, so they are repeated: %s: %s", file, str(error)[:200]
            )
            return None


def read_small_file(file: Path) -> str:
    """Return the text of a file of limited size. Raises OSError or ValueError."""
    about = file.stat()
    if not S_ISREG(about.st_mode) or about.st_size > LARGEST:
        raise ValueError("it is no file, or larger than any that is kept")
    return file.read_text(encoding="utf-8")


def replace_file(file: Path, text: str, publish: Callable[[Path], object]) -> None:
    """Write a file whole or not at all. publish: puts the new file where it belongs."""
    new = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        publish(new)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            new.unlink()


def are_similar(now: int, before: int, slower: int = ALIKE) -> bool:
    """Return whether two times are alike. slower: the factor by which `now` may be longer."""
    return now <= slower * before and before <= ALIKE * now
