"""One folder of files that are ours alone: created private, opened without following links, written all or nothing.

Every call goes through the folder's own descriptor: if the path is removed, or replaced by a link, calls fail or stay
where they were, and nothing is written elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LOCK = "LOCK"
TEMPORARY = ".new-"


class FolderUnusable(Exception):
    """The folder cannot be used by us; the message is one line that says why."""


class FolderInUse(FolderUnusable):
    """Another process owns it."""


class Folder:
    """Owned from `open` to `close`, by one process at a time. One that was opened to `look` is nobody's."""

    def __init__(self, path: Path, descriptor: int, lock: int | None) -> None:
        self.path = path
        self._descriptor, self._lock = descriptor, lock

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Raises FolderUnusable."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise FolderUnusable(f"{path}: {error.strerror}") from error
        try:
            check_private(path, os.fstat(descriptor))
            return cls(path, descriptor, lock(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def look(cls, path: Path) -> Folder:
        """To read in, and nothing else: it is not made, and whoever owns it keeps it. Raises FolderUnusable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise FolderUnusable(f"{path}: {error.strerror}") from error
        return cls(path, descriptor, None)

    def close(self) -> None:
        """Once is enough; another time does nothing."""
        open_ones = [one for one in (self._lock, self._descriptor) if one is not None and one >= 0]
        self._lock, self._descriptor = None, -1
        for descriptor in open_ones:
            os.close(descriptor)

    def names(self) -> list[tuple[str, int]]:
        """(name, bytes) of the regular files. A name may be anything."""
        return [(name, about.st_size) for name, about in self.files()]

    def files(self) -> list[tuple[str, os.stat_result]]:
        """The same, with all that is known of them."""
        with os.scandir(self._descriptor) as found:
            return [
                (entry.name, entry.stat(follow_symlinks=False))
                for entry in found
                if entry.is_file(follow_symlinks=False)
            ]

    def opener(self, name: str) -> int:
        """For reading, and never blocks. Raises OSError; FileNotFoundError also where something else has the name."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            raise FileNotFoundError(errno.ENOENT, f"{name} is not a regular file") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, f"{name} is not a regular file")
        return descriptor

    def write(self, name: str, parts: Sequence[bytes]) -> int:
        """The bytes written, when the file is under its name and will be after a power cut. Raises OSError.

        Whatever fails, there is no file under the name, or the one that was there before.
        """
        temporary = TEMPORARY + name
        file = open(temporary, "wb", opener=self.create)  # noqa: SIM115 - `shut` closes it
        try:
            try:
                self.append(file, parts)
                self.sync(file.fileno())
            finally:
                self.shut(file)
            self.rename(temporary, name)
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise
        self.sync_folder()
        return sum(map(len, parts))

    def extend(self, name: str, raw: bytes) -> None:
        """What a kill leaves of it may be torn. Raises OSError, FileNotFoundError for one that is not there."""
        file = open(name, "ab", opener=self.open_append)  # noqa: SIM115 - as above
        try:
            self.append(file, [raw])
        finally:
            self.shut(file)

    # --- one system call each, so that a test can make any of them fail ---

    def create(self, name: str, _: int = 0) -> int:
        """An opener: which flags are right is our business."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._descriptor)

    def open_append(self, name: str, _: int = 0) -> int:
        """An opener, too. A pipe that somebody put there would wait for a reader: it is an OSError."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._descriptor)

    def append(self, file: BinaryIO, parts: Sequence[bytes]) -> None:
        """All of them: a buffered file goes on where one write takes less than it is given."""
        file.writelines(parts)
        file.flush()

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def shut(self, file: BinaryIO) -> None:
        file.close()

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def sync_folder(self) -> None:
        os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._descriptor)


def check_private(path: Path, about: os.stat_result) -> None:
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise FolderUnusable(f"{path}: others may write there; accepted: a folder of yours alone (0700)")


def lock(path: Path, folder: int) -> int:
    """The kernel lets go of it however the process ends."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(LOCK, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise FolderUnusable(f"{path}/{LOCK}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise FolderInUse(f"{path}: another process is using this cache folder") from error
    return descriptor
