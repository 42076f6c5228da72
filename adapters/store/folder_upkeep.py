"""What keeps a cache folder in order: files that go or are put aside, and what went wrong, told and counted."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from attrs import define, field

from adapters.store.file_names import QUARANTINE, what
from adapters.store.files.private_folder import Folder

log = logging.getLogger("rekindle.store")

KINDS = ("run", "journal", "recent", "codec")  # of files, as they are labelled where damage is counted
MOST_QUARANTINED = 8  # files that are kept for people to look at


@define(eq=False)
class Upkeep:
    """From any thread."""

    folder: Folder
    lock: threading.RLock
    counts: Counter[str] = field(factory=Counter[str])
    damaged: Counter[str] = field(factory=lambda: Counter(dict.fromkeys(KINDS, 0)))  # files that were found so
    _aside: dict[str, None] = field(factory=dict[str, None])  # names of what is quarantined, the first to go first
    _failing: bool = False

    def found(self, names: Iterable[str]) -> None:
        """What an earlier process has put aside."""
        self._aside = dict.fromkeys(sorted(name for name in names if what(name) == "aside"))

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self.folder.remove(name)

    def read_small(self, name: str, most: int = -1) -> bytes:
        """Nothing, where reading fails. most: bytes of it."""
        try:
            descriptor = self.folder.opener(name)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
                return file.read(most)
        except OSError:
            self.counts["read_errors"] += 1
            return b""

    def rebuilt(self, kind: str, which: str) -> None:
        self.counts["rebuilt"] += 1
        self.damaged[kind] += 1
        log.warning("torn or damaged, and written anew: %s", which)

    def written(self, error: OSError | MemoryError | None) -> None:
        """Or not: one line when that starts, one when it is over."""
        if error is not None:
            self.counts["write_errors"] += 1
            if not self._failing:
                log.warning("the prefix cache cannot be written (%s); requests go on", error)
        elif self._failing:
            log.info("the prefix cache is written again")
        self._failing = error is not None

    def quarantine(self, name: str, why: str) -> None:
        """The last few are kept for a look."""
        self.counts["quarantined"] += 1
        self.damaged["run"] += 1
        log.warning("a damaged cache file is put aside: %s: %s", name, why)
        aside = QUARANTINE + name
        try:
            self.folder.rename(name, aside)
        except OSError:
            self.remove(name)
            return
        with self.lock:
            self._aside.pop(aside, None)
            self._aside[aside] = None
            gone = list(self._aside)[:-MOST_QUARANTINED]
            for one in gone:
                del self._aside[one]
        for one in gone:
            self.remove(one)
