"""Keeps a cache folder in order: removes and quarantines files, and logs and counts what went wrong."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from attrs import define, field

from adapters.store.disk.file_names import QUARANTINE, classify_name
from adapters.store.files.file_format import Newer, Outdated
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.seekable import Damaged

log = logging.getLogger("rekindle.store")

KINDS = ("run", "journal", "recent", "answers", "codec")  # of files, as they are labelled where damage is counted
MOST_QUARANTINED = 8  # files that are kept for people to examine


@define(eq=False)
class FolderUpkeep:
    """Upkeep of one folder. Any thread may call it."""

    folder: PrivateFolder
    lock: threading.RLock
    counts: Counter[str] = field(factory=Counter[str])
    # Files that were found damaged, by kind.
    damaged_files: Counter[str] = field(factory=lambda: Counter(dict.fromkeys(KINDS, 0)))
    # Names of quarantined files, the first to go first.
    _quarantined: dict[str, None] = field(factory=dict[str, None])
    _is_failing: bool = False

    def register_quarantined(self, names: Iterable[str]) -> None:
        """Register the files that an earlier process has quarantined."""
        self._quarantined = dict.fromkeys(sorted(name for name in names if classify_name(name) == "quarantined"))

    def remove(self, name: str) -> None:
        """Remove a file if that is possible. A failure costs disk space only."""
        with suppress(OSError):
            self.folder.remove(name)

    def read_small(self, name: str, most: int = -1) -> bytes:
        """Return the first `most` bytes of a file, or all of it; empty if reading fails, which is counted."""
        try:
            descriptor = self.folder.open_existing(name)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
                return file.read(most)
        except OSError:
            self.counts["read_errors"] += 1
            return b""

    def report_rebuilt(self, kind: str, description: str) -> None:
        """Count and log a damaged file of this kind that is written anew. description: what it is."""
        self.counts["rebuilt"] += 1
        self.damaged_files[kind] += 1
        log.warning("torn or damaged files are replaced: %s", description)

    def report_newer(self, description: str) -> None:
        """Count and log a file of a newer version, which stays as it is. description: what it is."""
        self.counts["newer"] += 1
        log.warning("a newer version wrote %s, which is not read and not changed", description)

    def report_write(self, error: OSError | MemoryError | None) -> None:
        """Count whether writing worked. One line is logged when failures begin, and one when they end."""
        if error is not None:
            self.counts["write_errors"] += 1
            if not self._is_failing:
                log.warning("the prefix cache cannot write to disk (%s); requests are still answered", error)
        elif self._is_failing:
            log.info("the prefix cache can write to disk again")
        self._is_failing = error is not None

    def dispose_unreadable(self, name: str, error: Exception) -> None:
        """Count a file that could not be read. An outdated one is removed, and a damaged one is quarantined.

        A file of a newer format, or one that the system could not read, stays where it is.
        """
        if isinstance(error, Outdated):
            self.counts["outdated"] += 1
            self.remove(name)
        elif isinstance(error, Damaged):
            self.quarantine(name, str(error))
        else:
            self.counts["newer" if isinstance(error, Newer) else "read_errors"] += 1

    def quarantine(self, name: str, why: str) -> None:
        """Rename a damaged file, so that people can examine it. Only the last `MOST_QUARANTINED` are kept."""
        self.counts["quarantined"] += 1
        self.damaged_files["run"] += 1
        log.warning("a damaged cache file was set aside: %s: %s", name, why)
        aside = QUARANTINE + name
        try:
            self.folder.rename(name, aside)
        except OSError:
            self.remove(name)
            return
        with self.lock:
            self._quarantined.pop(aside, None)
            self._quarantined[aside] = None
            gone = list(self._quarantined)[:-MOST_QUARANTINED]
            for old_name in gone:
                del self._quarantined[old_name]
        for old_name in gone:
            self.remove(old_name)
